"""Who did what: the entries of the audit log, as they are written."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson

from server.clock import now_us
from storage import AuditEntry

AuditType = Literal[
    "api_key.created",
    "api_key.updated",
    "api_key.rotated",
    "api_key.deleted",
    "project.created",
    "project.updated",
    "project.archived",
    "project.exported",
    "project.imported",
    "project.purged",
    "webhook.created",
    "webhook.deleted",
    "webhook.disabled",
    "webhook.enabled",
    "rate_limit.updated",
    "models.updated",
    "model.loaded",
    "model.unloaded",
    "mcp_servers.updated",
    "given_keys.updated",
    "given_sealing_keys.updated",
    "admin.accessed",
    "tool_call.approved",
    "run.cancelled",
    "run.followed",
    "run.forked",
    "sealing_key.created",
    "database.copied",
]
AUDIT_TYPES: tuple[str, ...] = get_args(AuditType)
"""The types of entries that this server writes; the official API has more."""

PURGED: AuditType = "project.purged"
"""What is asked for before the time of such an entry about its owner is not stored any more."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks for a change: the id of an API key, or a word for who holds none; and by which request."""

    id: str
    request_id: str | None = None
    ip: str | None = None

    def did(self, action: AuditType, target: str, owner: str | None = None, /, **details: Any) -> AuditEntry:
        """The entry that tells of a change. owner: that the target belongs to. details: JSON values."""
        return AuditEntry(
            id=f"audit_log-{secrets.token_hex(12)}",
            at=now_us(),
            actor=self.id,
            action=action,
            target=target,
            owner=owner,
            details=orjson.dumps(details),
            request_id=self.request_id,
            ip=self.ip,
        )


OPERATOR = Actor("operator")
"""Whoever runs commands on the machine of the database."""

SERVER = Actor("server")
"""The server itself."""
