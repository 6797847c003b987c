"""Reasoning: what the model thinks before it answers or calls."""

from __future__ import annotations

from typing import Any

from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, TEXT, item_shape
from server.items.transcript import Transcript, text_of
from server.shapes import STRING, array, described, one_of, schema_of, tagged

_PART = f"{PLACE} content_index"
_SUMMARY = f"{PLACE} summary_index"
_REASONING_PART = "content_part.added reasoning_text.delta* reasoning_text.done content_part.done"
_SUMMARY_PART = (
    "reasoning_summary_part.added reasoning_summary_text.delta* reasoning_summary_text.done"
    " reasoning_summary_part.done"
)


_OFFICIAL = tagged({"reasoning_text": TEXT}, aliases={"text": "reasoning_text"})


def _thought(value: Any, path: str) -> Any:
    """A part of a thought, also as the older profile of events shows it."""
    if isinstance(value, dict) and value.get("type") == "reasoning" and "reasoning" in value:
        value = {"type": "reasoning_text", "text": value["reasoning"]}
    return _OFFICIAL(value, path)


described(_thought, lambda: schema_of(_OFFICIAL))


def _say(item: Item, transcript: Transcript) -> None:
    # A client that hides the thought may send its summary; one that was sealed has been restored by now.
    if thought := text_of(item.get("content") or item.get("summary")):
        transcript.think(thought)


ROWS = (
    ItemType(
        "reasoning",
        "rs_",
        item_shape(
            {},
            {
                "summary": array(tagged({"summary_text": TEXT})),
                "content": array(_thought),
                "encrypted_content": STRING,
                "role": one_of("assistant"),
            },
            summary=[],
        ),
        _say,
        events={
            "response.reasoning_text.delta": f"{_PART} delta",
            "response.reasoning_text.done": f"{_PART} text",
            "response.reasoning_summary_part.added": f"{_SUMMARY} part",
            "response.reasoning_summary_part.done": f"{_SUMMARY} part",
            "response.reasoning_summary_text.delta": f"{_SUMMARY} delta",
            "response.reasoning_summary_text.done": f"{_SUMMARY} text",
        },
        order=f"({_REASONING_PART})* ({_SUMMARY_PART})*",
    ),
)
