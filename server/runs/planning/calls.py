"""Knows of a conversation which calls it has and which are answered, without going through it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.items import Item, is_client_call, is_output


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls among some items that a client answers, by their ids.

    known: all of them. answered: what the items have outputs for. pending: those without an output, with
    their names, oldest first; a call that is not whole needs none, though it may have one. doubtful: whether
    some are of responses that did not complete, which are left out where they have no output.
    """

    known: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()
    pending: Mapping[str, str] = field(default_factory=dict)
    doubtful: bool = False

    def and_then(self, said: Sequence[tuple[Item, str | None]]) -> Calls:
        """The same with more items behind these. said: with the status of each one's response, None without
        one."""
        calls = [(item, status) for item, status in said if is_client_call(item)]
        answered = self.answered.union(
            call_id for item, _ in said if is_output(item) and (call_id := item.get("call_id")) is not None
        )
        whole = {
            item["call_id"]: item.get("name") or item["type"]
            for item, _ in calls
            if item.get("status") != "incomplete"
        }
        pending = {id: name for id, name in {**self.pending, **whole}.items() if id not in answered}
        return Calls(
            self.known.union(item["call_id"] for item, _ in calls),
            answered,
            pending,
            self.doubtful or any(status not in (None, "completed") for _, status in calls),
        )
