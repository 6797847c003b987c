"""Messages: of users, of the system, and of the assistant.

What the files of a message say is its private half: `{"files": {POSITION: TEXT}}`, by the positions of their
parts, as the model is shown it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, STATUSES
from server.items.private_half import private_of, with_private
from server.items.transcript import Transcript, text_of
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


_FILES = "files"


def input_files_of(item: Item) -> list[tuple[int, dict[str, Any]]]:
    """The parts of a message that are files and have not been read yet, with their positions."""
    content = item.get("content")
    if item["type"] != "message" or not isinstance(content, list):
        return []
    read = _texts(item)
    return [
        (position, part)
        for position, part in enumerate(content)
        if part.get("type") == "input_file" and str(position) not in read
    ]


def with_file_texts(item: Item, texts: Mapping[int, str]) -> Item:
    """A message that holds what its files say, by the positions of their parts."""
    found = {**_texts(item), **{str(position): text for position, text in texts.items()}}
    return with_private(dict(item), {_FILES: found})


def _texts(item: Item) -> Mapping[str, str]:
    texts: Mapping[str, str] = (private_of(item) or {}).get(_FILES, {})
    return texts


def _text(item: Item) -> str:
    content, texts = item["content"], _texts(item)
    if not texts:
        return text_of(content)
    return text_of(
        [{"text": texts[str(at)]} if str(at) in texts else part for at, part in enumerate(content)]
    )


def _say(item: Item, transcript: Transcript) -> None:
    text = _text(item)
    if item["role"] == "assistant":
        transcript.say(text)
    else:
        transcript.tell("system" if item["role"] == "developer" else item["role"], text)


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
    ),
)
