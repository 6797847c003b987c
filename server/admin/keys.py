"""Making, listing and revoking keys, whether or not a server runs (`server.admin`).

Owns what can be done with keys, and how the command shows it. Refuses to know what a key opens
(`server.http.authentication`).
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from server.admin.database_access import AdminError, carry_out
from server.api_keys import LOCAL_OWNER, hash_key, new_key
from server.clock import now_us
from server.config import Config
from storage import Storage, StoredKey

# ------------------------------------------------------------------------------------------------------------
# What can be done


async def create(storage: Storage, *, name: str, owner: str | None) -> dict[str, Any]:
    """Make a key; the reply is the only place where `key` ever stands. `first`: there was no live one."""
    key = new_key()
    first = not any(other.revoked_at is None for other in await storage.list_keys())
    stored = await storage.create_key(
        f"key_{secrets.token_hex(12)}",
        owner or f"own_{secrets.token_hex(12)}",
        name,
        hash_key(key),
        key[-4:],
        now_us(),
    )
    return {**as_json(stored), "key": key, "first": first}


async def revoke(storage: Storage, id: str) -> dict[str, Any]:
    """End a key. `last`: no live one is left. AdminError where there is no live key of this id."""
    if not await storage.revoke_key(id, now_us()):
        raise AdminError(f"there is no live key with id {id!r}")
    last = all(key.revoked_at is not None for key in await storage.list_keys())
    return {"id": id, "object": "key", "revoked": True, "last": last}


def as_json(key: StoredKey) -> dict[str, Any]:
    """A stored key, as the admin routes and the command line show it; times in unix seconds."""
    return {
        "id": key.id,
        "owner": key.owner,
        "name": key.name,
        "hint": f"...{key.hint}",
        "created_at": key.created_at // 1_000_000,
        "revoked_at": key.revoked_at and key.revoked_at // 1_000_000,
    }


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon keys ...`; yields the lines to print. Raises AdminError."""
    if options.verb == "create":
        body = {"name": options.name, "owner": options.owner}
        made = carry_out(config, lambda storage: create(storage, **body), "POST", "/admin/keys", body)
        yield made["key"]
        yield f"id {made['id']}, owner {made['owner']}. The key is not stored and not shown again."
        if made["first"]:
            yield from _first(made["owner"])
    elif options.verb == "list":
        for key in carry_out(config, _listed, "GET", "/admin/keys")["data"]:
            at = datetime.fromtimestamp(key["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
            state = "revoked" if key["revoked_at"] else "live"
            columns = (key["id"], key["hint"], f"{state:7}", at, f"owner {key['owner']}", key["name"])
            yield "  ".join(columns).rstrip()
    else:
        path = f"/admin/keys/{options.id}"
        done = carry_out(config, lambda storage: revoke(storage, options.id), "DELETE", path)
        yield f"{options.id} is revoked"
        if done["last"]:
            yield (
                "No stored key is live any more. Unless keys are configured too, a server on loopback needs "
                f"none again (the owner is {LOCAL_OWNER}), and one on another address does not start."
            )


def _first(owner: str) -> Iterator[str]:
    """What the first key changes."""
    yield "From now on every request needs a key, in the header 'authorization: Bearer KEY'."
    if owner == LOCAL_OWNER:
        yield f"This one sees what was made without a key, which belongs to the owner {LOCAL_OWNER}."
    else:
        yield (
            f"What was made without a key belongs to the owner {LOCAL_OWNER}, and this key does not see it: "
            f"`antiphon keys create --owner {LOCAL_OWNER}` makes one that does."
        )


async def _listed(storage: Storage) -> dict[str, Any]:
    return {"data": [as_json(key) for key in await storage.list_keys()]}
