"""Knows of a conversation which calls it has and which are answered, without going through it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.items import Item, asks_approval, is_client_call, is_output, link_of

Link = tuple[str, str | None]
"""What a call and its answer are known to each other by; see `server.items.link_of`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls among some items that a client answers.

    known: all of them. answered: what the items have answers to. pending: those without an answer, oldest
    first; a call that is not whole needs none, though it may have one. doubtful: whether some are of
    responses that did not complete, which are left out where they have no answer.
    """

    known: frozenset[Link] = frozenset()
    answered: frozenset[Link] = frozenset()
    pending: Mapping[Link, Item] = field(default_factory=dict)
    doubtful: bool = False

    def and_then(self, said: Sequence[tuple[Item, str | None]]) -> Calls:
        """The same with more items behind these. said: with the status of each one's response, None without
        one."""
        calls = [(item, status) for item, status in said if is_client_call(item)]
        answered = self.answered.union(link_of(item) for item, _ in said if is_output(item))
        whole = {link_of(item): item for item, _ in calls if item.get("status") != "incomplete"}
        pending = {link: item for link, item in {**self.pending, **whole}.items() if link not in answered}
        return Calls(
            self.known.union(link_of(item) for item, _ in calls),
            answered,
            pending,
            self.doubtful or any(status not in (None, "completed") for _, status in calls),
        )

    @property
    def demanded(self) -> list[str]:
        """The keys of the calls that no conversation goes on without an answer to."""
        return [str(key) for (_, key), item in self.pending.items() if not asks_approval(item)]
