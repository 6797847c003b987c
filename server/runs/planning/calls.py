"""Knows of a conversation which calls it has and which are answered, without going through it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.items import (
    ITEM_TYPES,
    Item,
    answer_field,
    approval_of,
    approves,
    asks_approval,
    is_answered,
    is_client_call,
    is_output,
    link_of,
    source_of,
)

Link = tuple[str, str | None]
"""What a call and its answer are known to each other by; see `server.items.link_of`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls among some items that have their answers in items of their own.

    known: of all of them the types of items that answer them, one for each call: some clients use an id again
    for a later call. answered: how many answers to them the items have; an approval is one once its call was
    made, and not where it was only put into a conversation. pending: those of a client without an
    answer, oldest first; a call that is not whole needs none, though it may have one. doubtful: whether some
    are of responses that did not complete, which are left out where they have no answer.
    """

    known: Mapping[Link, tuple[str, ...]] = field(default_factory=dict)
    answered: Mapping[Link, int] = field(default_factory=dict)
    pending: Mapping[Link, Item] = field(default_factory=dict)
    doubtful: bool = False

    def and_then(self, said: Sequence[tuple[Item, str | None]]) -> Calls:
        """The same with more items behind these. said: with the status of each one's response, None without
        one."""
        calls = [(item, status) for item, status in said if is_answered(item)]
        known, answered = dict(self.known), dict(self.answered)
        for item, _ in calls:
            kind = ITEM_TYPES[item["type"]].answered_by
            assert kind is not None, "such calls are answered"
            known[link_of(item)] = (*known.get(link_of(item), ()), kind)
        for item, _ in said:
            link = _made_for(item)
            if is_output(item) and not approves(item):
                link = link_of(item)
            if link is not None:
                answered[link] = answered.get(link, 0) + 1
        clients = [item for item, _ in calls if is_client_call(item)]
        whole = {link_of(item): item for item in clients if item.get("status") != "incomplete"}
        pending = {link: item for link, item in {**self.pending, **whole}.items() if link not in answered}
        return Calls(
            known,
            answered,
            pending,
            self.doubtful or any(status not in (None, "completed") for _, status in calls),
        )

    @property
    def demanded(self) -> list[str]:
        """The keys of the calls that no conversation goes on without an answer to."""
        return [str(key) for (_, key), item in self.pending.items() if not asks_approval(item)]


def _made_for(call: Item) -> Link | None:
    """What the request for an approval is known by that a call was made for."""
    source = source_of(call)
    approval = None if source is None else approval_of(ITEM_TYPES[call["type"]])
    return None if approval is None else (answer_field(approval.request), source)
