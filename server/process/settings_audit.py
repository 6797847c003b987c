"""Tells the audit log what the server's own settings give: models, MCP servers, keys, keys that seal, every
owner's limits.

No request asks for these changes. They are there when a server starts, or after SIGHUP, and are written down
where they differ from what was written down last, by whichever server of the database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from server.access import SERVER, AuditType
from server.masking import masked
from storage import AuditFilter

if TYPE_CHECKING:
    from server.mcp_servers import McpSettings, ServerSettings
    from server.model_registry import Models
    from storage import Storage

SECRETS = {"headers", "token", "env"}
"""Of an MCP server; no entry says anything about them."""


async def note_settings(
    storage: Storage,
    *,
    models: Models,
    mcp: McpSettings,
    api_keys: Mapping[str, str],
    sealing_keys: Sequence[int],
    limits: Any,
) -> None:
    """Write down what has changed. api_keys: the owners of the keys that the settings give, by the ids of
    these keys. sealing_keys: the numbers of those that the settings give, first the one that seals. limits:
    those of every owner, as JSON."""
    for action, target, now in _given(models, mcp, api_keys, sealing_keys, limits):
        wanted = AuditFilter(actions=(action,), targets=(target,))
        last = (await storage.list_audit(wanted, limit=1)).data
        before = orjson.loads(last[0].entry.details).get(target) if last else {}
        if now != before:
            await storage.add_audit(SERVER.did(action, target, None, **{target: now}))


def _given(
    models: Models, mcp: McpSettings, api_keys: Mapping[str, str], sealing_keys: Sequence[int], limits: Any
) -> Iterator[tuple[AuditType, str, Any]]:
    """Each kind of setting: the type of its entries, what it is called in them, and what there is of it."""
    yield (
        "models.updated",
        "models",
        models.serves(),
    )
    servers = {name: _shown(server) for name, server in mcp.servers.items()}
    yield "mcp_servers.updated", "mcp_servers", servers
    yield "given_keys.updated", "api_keys", dict(api_keys)
    used = {str(number): "opens" if place else "seals" for place, number in enumerate(sealing_keys)}
    yield "given_sealing_keys.updated", "sealing_keys", used
    yield "rate_limit.updated", "owner_limit", limits


def _shown(server: ServerSettings) -> dict[str, Any]:
    """An MCP server without its secrets. digest: of all else, arguments of its command too."""
    told = orjson.dumps(server.model_dump(mode="json", exclude=SECRETS), option=orjson.OPT_SORT_KEYS)
    return {
        "reaches": masked(server.url) if server.url is not None else server.command[0],
        "trust": server.trust,
        "digest": hashlib.sha256(told).hexdigest()[:16],
    }
