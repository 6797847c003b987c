"""Which WebSockets are open: how many, what went over them, and their end when the process drains."""

from __future__ import annotations

import asyncio
from typing import Protocol

from server.http.websocket.memory import KeptBytes, WaitingBytes

MAX_KEPT_BYTES = 256 << 20
"""What the sockets of this process together keep of responses that are not stored."""


class OpenSocket(Protocol):
    """One open WebSocket."""

    def go_away(self) -> None:
        """Take no new work, end what is under way, and close then."""

    def forget(self, owner: str) -> None:
        """Let go of what is remembered for an owner, if it is the socket's."""


class OpenSockets:
    """The open WebSockets of one process."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._open: set[OpenSocket] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._draining = False
        self.num_received = 0
        self.num_sent = 0
        self.waiting = WaitingBytes()
        self.kept = KeptBytes(max_kept_bytes)

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, socket: OpenSocket) -> None:
        """A socket was accepted."""
        self._open.add(socket)
        self._none.clear()
        if self._draining:  # it was let in just before
            socket.go_away()

    def closed(self, socket: OpenSocket) -> None:
        """A socket is gone."""
        self._open.discard(socket)
        if not self._open:
            self._none.set()

    def drain(self) -> None:
        """Have all of them go away, also those that are yet to be opened."""
        self._draining = True
        for socket in tuple(self._open):
            socket.go_away()

    def forget(self, owner: str) -> None:
        """Have all of them let go of what they remember for an owner."""
        for socket in tuple(self._open):
            socket.forget(owner)

    async def all_closed(self) -> None:
        """Wait until none is open."""
        await self._none.wait()

    def readings(self) -> dict[str, float]:
        """For metrics."""
        return {
            "connections": len(self._open),
            "frames_received_total": self.num_received,
            "frames_sent_total": self.num_sent,
            "kept_bytes": self.kept.num_bytes,
        }
