"""Who did what: the entries of the audit log, as they are written."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from server.clock import now_us
from storage import AuditEntry


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks for a change: the id of an API key, or a word for who holds none; and by which request."""

    id: str
    request_id: str | None = None
    ip: str | None = None

    def did(self, action: str, target: str, owner: str | None = None, /, **details: Any) -> AuditEntry:
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
