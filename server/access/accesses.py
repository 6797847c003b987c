"""What administrators read, as the audit log is told of it: who looked at what, from where, once an hour."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from server.access.actors import Actor

if TYPE_CHECKING:
    from storage import Storage

NOTED_S = 3600.0
"""What one administrator reads again and again from one address, as dashboards do, is an entry this often."""

MAX_REMEMBERED = 4096

PROJECTS = "/v1/organization/projects/"


class Accesses:
    """The reads of this process that the audit log has an entry of."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str | None, str], float] = {}  # who, from where, what: until when

    async def note(self, storage: Storage, by: Actor, path: str) -> None:
        """Write a read down, unless it was lately: its path with escapes, so that it is one word. Raises
        StorageUnavailable: what cannot be written down is not shown."""
        read, now = (by.id, by.ip, path), time.monotonic()
        if self._noted.get(read, now) > now:
            return
        project = path.removeprefix(PROJECTS).partition("/")[0] if path.startswith(PROJECTS) else None
        await storage.add_audit(by.did("admin.accessed", quote(path, safe="/:@"), project or None))
        if len(self._noted) >= MAX_REMEMBERED:
            self._noted.clear()
        self._noted[read] = now + NOTED_S
