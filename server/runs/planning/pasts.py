"""Remembers in memory the items that `previous_response_id` leads to, so that a next turn need not read them,
nor go through them again: what is asked of all of them is remembered beside them.

A response that has ended never changes, and neither does what led to it, so its past can be kept. A past that
began in a conversation is not kept, because items of a conversation may be deleted. Callers have looked up
the previous response itself before they ask, so the past of a deleted response is never returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from server.items import ITEM_TYPES, Item, load_item
from server.prompting import NOTHING_TOLD, Told
from server.runs.planning.calls import Calls
from server.threads import THREADED_PARTS, aside

if TYPE_CHECKING:
    from storage import HistoryItem, Storage, StoredItem, StoredResponse

Said = tuple[Item, str | None]
"""An item, which nobody may change, and how the response ended that it belongs to."""

SOURCE = "previous_response_id"

MAX_BYTES = 64 << 20
"""What all pasts of one server may take in memory."""

WEIGHT = 5
"""Bytes in memory for one of an item's JSON, about."""

ITEM_BYTES = 500
"""What an item takes beside its JSON, with the message that was made of it."""

THREADED_BYTES = 64 << 10
"""Turns of more JSON are read in the thread pool."""


def read_items(history: Iterable[HistoryItem]) -> list[Said]:
    """Stored history as items, without what no prompt needs and what is too large to be kept for nothing."""
    return [(_read_item(entry.item), entry.response_status) for entry in history]


def _read_item(stored: StoredItem) -> Item:
    item = load_item(stored.body, stored.private)
    for name in ITEM_TYPES[stored.kind].heavy:
        item.pop(name, None)
    return item


@dataclass(frozen=True, slots=True)
class Past:
    """Items that a turn stands on, oldest first, and what is asked of all of them.

    statuses: of the response of each item, None without one. told: the items as messages.
    """

    items: tuple[Item, ...] = ()
    statuses: tuple[str | None, ...] = ()
    calls: Calls = field(default_factory=Calls)
    told: Told = NOTHING_TOLD
    num_bytes: int = 0

    def and_then(self, said: Sequence[Said], num_bytes: int, source: str) -> Past:
        """The same with more items behind it. source: the field that they came by. Raises ApiError 400
        `unsupported_item`."""
        items = (*self.items, *(item for item, _ in said))
        told = self.told if self.told.transcript.settled else NOTHING_TOLD
        return Past(
            items,
            (*self.statuses, *(status for _, status in said)),
            self.calls.and_then(said),
            told.and_then(items[told.num_items :], source),
            self.num_bytes + num_bytes,
        )

    @classmethod
    def of(cls, history: Sequence[HistoryItem], source: str) -> Past:
        """Stored history; see `and_then`."""
        return cls().and_then(read_items(history), _weight(entry.item for entry in history), source)

    @property
    def said(self) -> list[Said]:
        """The items with the statuses of their responses."""
        return list(zip(self.items, self.statuses, strict=True))


class Pasts:
    """The pasts that were needed last, by owner and response."""

    def __init__(self, storage: Storage, max_bytes: int = MAX_BYTES) -> None:
        self._storage = storage
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pasts: OrderedDict[tuple[str, str], Past] = OrderedDict()  # the oldest first

    async def of(self, previous: StoredResponse, as_of: int) -> Past:
        """The items up to and with a response that has ended, as they were at `as_of` (microseconds).
        Raises NotFound, and ApiError 400 for an item that no model can be shown."""
        key = (previous.owner, previous.id)
        known = self._pasts.get(key)
        if known is not None:
            self._pasts.move_to_end(key)
            return known
        past = await self._behind_its_parent(previous)
        if past is None:
            history = await self._storage.history(
                previous.owner, previous_response_id=previous.id, as_of=as_of
            )
            past = await aside(len(history) > THREADED_PARTS, Past.of, history, SOURCE)
            if any(entry.in_conversation for entry in history):
                return past
        self._remember(key, past)
        return past

    async def _behind_its_parent(self, previous: StoredResponse) -> Past | None:
        """The past of a response whose parent's is known, which it takes the place of."""
        parent = previous.previous_response_id
        if previous.conversation_id is not None or parent is None:
            return None
        if (before := self._pasts.get((previous.owner, parent))) is None:
            return None
        turn = (*await self._storage.response_input(previous.id), *previous.output)

        def grown() -> Past:
            said = [(_read_item(item), previous.status) for item in turn]
            return before.and_then(said, _weight(turn), SOURCE)

        num_bytes = sum(len(item.body) + len(item.private or b"") for item in turn)
        much = len(turn) > THREADED_PARTS or num_bytes > THREADED_BYTES
        past = await aside(much, grown)
        self._forget((previous.owner, parent))
        return past

    def _remember(self, key: tuple[str, str], past: Past) -> None:
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
    return sum(ITEM_BYTES + WEIGHT * _num_bytes(item) for item in items)


def _num_bytes(stored: StoredItem) -> int:
    """Bytes of an item's JSON, as far as it is kept in memory."""
    body = orjson.dumps(_read_item(stored)) if ITEM_TYPES[stored.kind].heavy else stored.body
    return len(body) + len(stored.private or b"")
