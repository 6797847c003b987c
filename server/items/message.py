"""Messages: of users, of the system, and of the assistant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.items.file_texts import told_of
from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, STATUSES
from server.items.pictures import shown_parts, with_urls
from server.items.transcript import Transcript
from server.shapes import STRING, Shape, anything, one_of, record

_FIELDS: Mapping[str, Shape] = {
    "role": one_of("user", "assistant", "system", "developer"),
    "status": one_of(*STATUSES),
    "phase": one_of("commentary", "final_answer"),
    "created_by": STRING,
    "id": anything,
    "content": anything,
}
_PART = f"{PLACE} content_index"
_TEXT_PART = (
    "content_part.added (output_text.delta | output_text.annotation.added)* output_text.done"
    " content_part.done"
)
_REFUSAL_PART = "content_part.added refusal.delta* refusal.done content_part.done"


def _say(item: Item, transcript: Transcript) -> None:
    """Items of chat may have `name`, who speaks, and `template_role`, a role that templates alone know."""
    if item["role"] == "assistant":
        transcript.say(told_of(item))
    else:
        numbers: list[int] = []

        def unseen() -> str:
            numbers.append(transcript.image())
            return f"[image {numbers[-1]}, which you cannot see]"

        text = told_of(item, unseen)
        parts = shown_parts(item, lambda index: f"[image {numbers[index]}, which you cannot see]")
        role: Any = "system" if item["role"] == "developer" else item["role"]
        transcript.tell(item.get("template_role", role), text, parts)
    if "name" in item:
        transcript.by(item["name"])


ROWS = (
    ItemType(
        "message",
        "msg_",
        # Its content may be a string, and its parts depend on its role: `schema.items` reads it.
        record({"role": _FIELDS["role"]}, _FIELDS, status="completed"),
        _say,
        events={
            "response.output_text.delta": f"{_PART} delta logprobs",
            "response.output_text.done": f"{_PART} text logprobs",
            "response.output_text.annotation.added": f"{_PART} annotation_index annotation",
            "response.refusal.delta": f"{_PART} delta",
            "response.refusal.done": f"{_PART} refusal",
        },
        order=f"({_TEXT_PART} | {_REFUSAL_PART})*",
        includes={"message.input_image.image_url": with_urls},
    ),
)
