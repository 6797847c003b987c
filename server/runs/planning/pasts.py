"""Remembers in memory the items that `previous_response_id` or a conversation leads to, so that a next turn
need not read them, nor go through them again: what is asked of all of them is remembered beside them.

A response that has ended never changes, and neither does what led to it, so its past can be kept. A past that
began in a conversation is not kept, because items of a conversation may be deleted. Callers have looked up
the previous response itself before they ask, so the past of a deleted response is never returned.

The items of a conversation are kept as well, and only those that were added since are read: positions are
given once, so where their number is what it was, they are the same. Where items were taken out, all are read
anew.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import orjson

from server.items import ITEM_TYPES, Item, dump_private, load_item, private_of, with_private
from server.prompting import NOTHING_TOLD, Told
from server.runs.planning.calls import Calls
from server.threads import THREADED_PARTS, aside

if TYPE_CHECKING:
    from storage import HistoryItem, Storage, StoredItem, StoredResponse

Said = tuple[Item, str | None]
"""An item, which nobody may change, and how the response ended that it belongs to."""

SOURCE, CONVERSATION = "previous_response_id", "conversation"

MAX_BYTES = 64 << 20
"""What all pasts of one server may take in memory."""

IDLE_S = 3600.0
"""Seconds without a turn after which a past is forgotten."""

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

    statuses: of the response of each item, None without one. told: the items as messages. in_conversation:
    some of the items of a response are there because a conversation has them. head, epoch: of the
    conversation whose items they are, when they were read; 0 for those of a response.
    """

    items: tuple[Item, ...] = ()
    statuses: tuple[str | None, ...] = ()
    calls: Calls = field(default_factory=Calls)
    told: Told = NOTHING_TOLD
    num_bytes: int = 0
    in_conversation: bool = False
    head: int = 0
    epoch: int = 0

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

    def and_stored(self, history: Sequence[HistoryItem], source: str) -> Past:
        """The same with stored history behind it; see `and_then`."""
        return self.and_then(read_items(history), _weight(entry.item for entry in history), source)

    def and_turn(self, items: Sequence[Item], status: str) -> Past:
        """The same with a turn behind it that is not stored. items: its input and its output. status: how its
        response ended."""
        kept = [_without(item, ITEM_TYPES[item["type"]].heavy) for item in items]
        num_bytes = sum(
            ITEM_BYTES + WEIGHT * (len(orjson.dumps(item)) + len(dump_private(item) or b"")) for item in kept
        )
        return self.and_then([(item, status) for item in kept], num_bytes, SOURCE)

    @property
    def said(self) -> list[Said]:
        """The items with the statuses of their responses."""
        return list(zip(self.items, self.statuses, strict=True))


def _without(item: Item, names: Collection[str]) -> Item:
    """An item without some of its members; the item itself, where it has none of them."""
    if not any(name in item for name in names):
        return item
    return with_private({k: v for k, v in item.items() if k not in names}, private_of(item))


CHECKED = 500
"""Responses that are asked after at once."""


class Pasts:
    """The pasts that were needed last, by response, or by conversation."""

    def __init__(self, storage: Storage, max_bytes: int = MAX_BYTES) -> None:
        self._storage = storage
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._used_at: dict[str, float] = {}
        self._pasts: OrderedDict[str, Past] = OrderedDict()  # the oldest first

    async def of(self, previous: StoredResponse, as_of: int) -> Past:
        """The items up to and with a response that has ended, as they were at `as_of` (microseconds).
        Raises NotFound, and ApiError 400 for an item that no model can be shown."""
        known = self._known(previous.id)
        if known is not None:
            return known
        past = await self._behind_its_parent(previous)
        if past is None:
            history = await self._storage.history(
                previous.owner, previous_response_id=previous.id, as_of=as_of
            )
            past = await aside(len(history) > THREADED_PARTS, Past().and_stored, history, SOURCE)
            if any(entry.in_conversation for entry in history):
                return replace(past, in_conversation=True)
        self._remember(previous.id, past)
        return past

    async def of_conversation(self, owner: str, id: str, as_of: int) -> Past:
        """The items of a conversation as they were at `as_of` (microseconds). Raises NotFound, and ApiError
        400 for an item that no model can be shown."""
        known = self._known(id) or Past()
        found = await self._storage.conversation_history(owner, id, first=known.head, as_of=as_of)
        if found.num_before != len(known.items):  # some were taken out
            self.forget([id])
            known = Past()
            found = await self._storage.conversation_history(owner, id, as_of=as_of)
        if not found.items:
            return replace(known, head=found.head, epoch=found.epoch)
        much = len(found.items) > THREADED_PARTS or _num_stored(e.item for e in found.items) > THREADED_BYTES
        past = await aside(much, known.and_stored, found.items, CONVERSATION)
        past = replace(past, head=found.head, epoch=found.epoch)
        self._remember(id, past)
        return past

    def forget(self, ids: Iterable[str]) -> None:
        """Let go of the pasts of responses and conversations that are deleted, or of which items are."""
        for id in ids:
            past = self._pasts.pop(id, None)
            if past is not None:
                del self._used_at[id]
                self._num_bytes -= past.num_bytes

    async def forget_gone(self) -> None:
        """The same for all that are not in the database any more, or not whole, whoever deleted them, and for
        those that nobody has asked for lately. StorageUnavailable."""
        self.forget([id for id, used_at in self._used_at.items() if used_at < time.monotonic() - IDLE_S])
        responses = [id for id, past in self._pasts.items() if not past.head]
        for first in range(0, len(responses), CHECKED):
            self.forget(await self._storage.gone_responses(responses[first : first + CHECKED]))
        known = {id: (past.head, len(past.items)) for id, past in self._pasts.items() if past.head}
        self.forget(await self._storage.shrunk_conversations(known))

    async def _behind_its_parent(self, previous: StoredResponse) -> Past | None:
        """The past of a response whose parent's is known, which it takes the place of."""
        parent = previous.previous_response_id
        if previous.conversation_id is not None or parent is None:
            return None
        if (before := self._pasts.get(parent)) is None:
            return None
        turn = (*await self._storage.response_input(previous.id), *previous.output)

        def grown() -> Past:
            said = [(_read_item(item), previous.status) for item in turn]
            return before.and_then(said, _weight(turn), SOURCE)

        past = await aside(len(turn) > THREADED_PARTS or _num_stored(turn) > THREADED_BYTES, grown)
        self.forget([parent])
        return past

    def _known(self, id: str) -> Past | None:
        past = self._pasts.get(id)
        if past is not None:
            self._pasts.move_to_end(id)
            self._used_at[id] = time.monotonic()
        return past

    def _remember(self, id: str, past: Past) -> None:
        self.forget([id])
        if past.num_bytes > self._max_bytes // 4:
            return
        self._pasts[id], self._used_at[id] = past, time.monotonic()
        self._num_bytes += past.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget([next(iter(self._pasts))])


def _weight(items: Iterable[StoredItem]) -> int:
    return sum(ITEM_BYTES + WEIGHT * _num_bytes(item) for item in items)


def _num_stored(items: Iterable[StoredItem]) -> int:
    """Bytes of the items' JSON."""
    return sum(len(item.body) + len(item.private or b"") for item in items)


def _num_bytes(stored: StoredItem) -> int:
    """Bytes of an item's JSON, as far as it is kept in memory."""
    body = orjson.dumps(_read_item(stored)) if ITEM_TYPES[stored.kind].heavy else stored.body
    return len(body) + len(stored.private or b"")
