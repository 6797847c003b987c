"""Checks the bodies that fork a conversation or a response: where, and under which metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.schema.responses import check_metadata
from server.shapes import label, refuse, require_members, whole

_ITEM_ID = label(1, 512)
_EVENT = whole(-1, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Fork:
    """Where something is forked: with neither field behind all of it.

    after: the id of the last item that is shared. starting_after: the number of an event; what was finished
    by then is shared. metadata: None for that of what is forked.
    """

    after: str | None = None
    starting_after: int | None = None
    metadata: dict[str, str] | None = None


def parse_fork(body: Mapping[str, Any], *, at_event: bool) -> Fork:
    """Read `{"after", "starting_after", "metadata"}`; null is absent. Raises ApiError 400, for any other
    member too: it may have been meant to say where, and without it all would be in the fork.

    at_event: it is of a response, which has events.
    """
    after, event = body.get("after"), body.get("starting_after")
    if event is not None and not at_event:
        message = "Unsupported parameter: 'starting_after' is a field of another endpoint. "
        message += "A conversation has items and no events: fork it 'after' an item, or one of its responses."
        refuse("starting_after", message, "unsupported_parameter")
    require_members(body, ("after", "starting_after", "metadata") if at_event else ("after", "metadata"))
    if after is not None and event is not None:
        message = "'starting_after' cannot be used in conjunction with 'after'."
        refuse("starting_after", message, "mutually_exclusive_parameters")
    metadata = body.get("metadata")
    return Fork(
        None if after is None else _ITEM_ID(after, "after"),
        None if event is None else _EVENT(event, "starting_after"),
        None if metadata is None else check_metadata(metadata),
    )
