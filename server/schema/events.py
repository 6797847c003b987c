"""Every event of a response's stream: its fields, and the grammar of their order.

Owns the vocabulary of the stream, beside which it puts that of each item type. Refuses to build events
(`server.runs.events.assembler`) and to number or send them. What emits events is checked in tests against
this vocabulary and against the OpenAPI document, of which it is the short form. One event is ours:
`response.cancelled`, after the name of the official webhook.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from server.items import ITEM_TYPES
from storage import TERMINAL_STATUSES

_PART = "item_id output_index content_index part"

_FIELDS: Mapping[str, str] = {
    # The response: a whole snapshot each time.
    **dict.fromkeys(("response.created", "response.queued", "response.in_progress"), "response"),
    **dict.fromkeys(
        ("response.completed", "response.incomplete", "response.failed", "response.cancelled"), "response"
    ),
    "error": "code message param",
    # What all items, and items with content, have.
    "response.output_item.added": "output_index item",
    "response.output_item.done": "output_index item",
    "response.content_part.added": _PART,
    "response.content_part.done": _PART,
    # Audio: older than items, and never sent here.
    "response.audio.delta": "delta",
    "response.audio.transcript.delta": "response_id delta",
    "response.audio.done": "response_id",
    "response.audio.transcript.done": "response_id",
}


def fields() -> dict[str, tuple[str, ...]]:
    """Event type -> the fields that it must have besides `type` and `sequence_number`."""
    vocabulary = dict(_FIELDS)
    for row in ITEM_TYPES.values():
        vocabulary |= row.events
    return {event: tuple(named.split()) for event, named in vocabulary.items()}


LIFECYCLE = (
    "response.created response.queued? (response.in_progress item*)?"
    "(response.completed | response.incomplete | response.failed | response.cancelled)"
)
"""The order of a whole stream, `item` standing for one event of an item: one terminal event, last, always."""

TERMINAL: Mapping[str, str] = {f"response.{status}": status for status in TERMINAL_STATUSES}
"""Terminal event -> the status that the response has in it."""


def order(item_type: str) -> str:
    """The order of an item's events between `output_item.added` and `output_item.done`, as a grammar; names
    are without their `response.`. Empty for a type that has none between."""
    return ITEM_TYPES[item_type].order


def compile_grammar(grammar: str) -> re.Pattern[str]:
    """A grammar of this module as a pattern over event names, each followed by a space.

    Names in sequence; `*`, `?`, `|` and parentheses as in regular expressions.
    """
    names = re.sub(r"[a-z_.]+", lambda name: f"(?:{re.escape(name.group())}@)", grammar)
    return re.compile(re.sub(r"\s", "", names).replace("@", " "))


def in_order(grammar: str, names: Iterable[str]) -> bool:
    """Whether these event names, in this order, are a sentence of the grammar."""
    return compile_grammar(grammar).fullmatch("".join(f"{name} " for name in names)) is not None
