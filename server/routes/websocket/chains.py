"""Remembers what the unstored responses of one WebSocket lead to, so that they can be gone on from.

Nobody else can go on from them, and nothing of them is left when the connection ends.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from server.runs.planning import Past

if TYPE_CHECKING:
    from server.http.websocket import OpenSockets

MAX_BYTES = 64 << 20
"""In memory, of one connection; a past counts whole, also where it has most of its items from another."""

MAX_RESPONSES = 256


class Chains:
    """The pasts of a connection's responses, with the lane that each was made on; the oldest go first."""

    def __init__(self, sockets: OpenSockets, owner: str) -> None:
        self._shared = sockets.kept
        self._owner = owner
        self._pasts: OrderedDict[str, tuple[Past, str | None]] = OrderedDict()
        self._num_bytes = 0
        self.num_purges = 0
        """How often the owner was purged since the connection began."""

    def find(self, response_id: str | None) -> Past | None:
        """What a response leads to; None for one that is not kept here."""
        found = None if response_id is None else self._pasts.get(response_id)
        if found is None or response_id is None:
            return None
        self._pasts.move_to_end(response_id)
        self._shared.used(self._owner, (self, response_id))
        return found[0]

    def keep(self, response_id: str, stream_id: str | None, past: Past) -> None:
        """Remember a response that has ended, unless it alone is more than may be kept. A client that chose
        its id may have had another response of this id before."""
        if response_id in self._pasts:
            self._forget(response_id)
        if past.num_bytes > MAX_BYTES:
            return
        self._pasts[response_id] = past, stream_id
        self._num_bytes += past.num_bytes
        drop = partial(self._drop, response_id)
        self._shared.keep(self._owner, (self, response_id), past.num_bytes, drop)
        while self._num_bytes > MAX_BYTES or len(self._pasts) > MAX_RESPONSES:
            self._forget(next(iter(self._pasts)))

    def evict(self, response_id: str | None, stream_id: str | None) -> None:
        """A turn on a lane that went on from a response has failed: where the response was made on the same
        lane, it is forgotten, and the client sends its history anew."""
        found = None if response_id is None else self._pasts.get(response_id)
        if found is not None and response_id is not None and found[1] == stream_id:
            self._forget(response_id)

    def purge(self) -> None:
        """Forget all, because everything of the owner is removed."""
        self.num_purges += 1
        self.close()

    def close(self) -> None:
        """Forget all."""
        for response_id in tuple(self._pasts):
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        self._shared.let_go(self._owner, (self, response_id))
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        past, _ = self._pasts.pop(response_id)
        self._num_bytes -= past.num_bytes
