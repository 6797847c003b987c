"""Remembers in memory the items that `previous_response_id` leads to, so that a next turn need not read them.

A response that has ended never changes, and neither does what led to it, so its past can be kept. A past that
began in a conversation is not kept, because items of a conversation may be deleted. Callers have looked up
the previous response itself before they ask, so the past of a deleted response is never returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.items import Item, load_item
from server.threads import THREADED_PARTS, aside

if TYPE_CHECKING:
    from storage import HistoryItem, Storage, StoredItem, StoredResponse

Said = tuple[Item, str | None]
"""An item, which nobody may change, and how the response ended that it belongs to."""

MAX_BYTES = 64 << 20
"""What all pasts of one server may take in memory."""

WEIGHT = 5
"""Bytes in memory for one of an item's JSON, about."""


def read_items(history: Iterable[HistoryItem]) -> list[Said]:
    """Stored history as items."""
    return [(load_item(entry.item.body, entry.item.private), entry.response_status) for entry in history]


@dataclass(frozen=True, slots=True)
class _Past:
    items: tuple[Said, ...]
    num_bytes: int


class Pasts:
    """The pasts that were needed last, by owner and response."""

    def __init__(self, storage: Storage, max_bytes: int = MAX_BYTES) -> None:
        self._storage = storage
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pasts: OrderedDict[tuple[str, str], _Past] = OrderedDict()  # the oldest first

    async def of(self, previous: StoredResponse, as_of: int) -> Sequence[Said]:
        """The items up to and with a response that has ended, as they were at `as_of` (microseconds).
        Raises NotFound."""
        key = (previous.owner, previous.id)
        known = self._pasts.get(key)
        if known is not None:
            self._pasts.move_to_end(key)
            return known.items
        past = await self._behind_its_parent(previous)
        if past is None:
            history = await self._storage.history(
                previous.owner, previous_response_id=previous.id, as_of=as_of
            )
            items = await aside(len(history) > THREADED_PARTS, read_items, history)
            past = _Past(tuple(items), _weight(entry.item for entry in history))
            if any(entry.in_conversation for entry in history):
                return past.items
        self._remember(key, past)
        return past.items

    async def _behind_its_parent(self, previous: StoredResponse) -> _Past | None:
        """The past of a response whose parent's is known, which it takes the place of."""
        parent = previous.previous_response_id
        if previous.conversation_id is not None or parent is None:
            return None
        if (before := self._pasts.get((previous.owner, parent))) is None:
            return None
        turn = (*await self._storage.response_input(previous.id), *previous.output)
        said = tuple((load_item(item.body, item.private), previous.status) for item in turn)
        self._forget((previous.owner, parent))
        return _Past((*before.items, *said), before.num_bytes + _weight(turn))

    def _remember(self, key: tuple[str, str], past: _Past) -> None:
        if past.num_bytes > self._max_bytes // 4:
            return
        self._forget(key)
        self._pasts[key] = past
        self._num_bytes += past.num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._pasts)))

    def _forget(self, key: tuple[str, str]) -> None:
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_bytes -= past.num_bytes


def _weight(items: Iterable[StoredItem]) -> int:
    return sum(200 + WEIGHT * (len(item.body) + len(item.private or b"")) for item in items)
