"""Files among the parts of items, and what they say.

What the files of a message or of a tool's output say is its private half: `{"files": {POSITION: TEXT}}`, by
the positions of their parts, as the model is shown it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.items.images import is_image
from server.items.private_half import private_of, with_private
from server.items.transcript import text_of

FILE_PARTS: Mapping[str, str] = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""The types of items whose parts may be files, and the field that has the parts."""

_FILES = "files"

AnyItem = Mapping[str, Any]


def input_files_of(item: AnyItem) -> list[tuple[int, dict[str, Any]]]:
    """The parts of an item that are files and have not been read yet, with their positions."""
    parts = item.get(FILE_PARTS.get(item["type"], ""))
    if not isinstance(parts, list):
        return []
    read = file_texts(item)
    return [
        (position, part)
        for position, part in enumerate(parts)
        if part.get("type") == "input_file" and str(position) not in read
    ]


def with_file_texts(item: AnyItem, texts: Mapping[int, str]) -> dict[str, Any]:
    """An item that holds what its files say, by the positions of their parts."""
    found = {**file_texts(item), **{str(position): text for position, text in texts.items()}}
    return with_private(dict(item), {**(private_of(item) or {}), _FILES: found})


def told_of(item: AnyItem, image: Callable[[], str] | None = None) -> str:
    """The text of an item's parts, and of its files where these have been read. image: says the next image;
    without it nothing is said of one."""
    parts, texts = item[FILE_PARTS[item["type"]]], file_texts(item)
    if isinstance(parts, str):
        return parts
    told = []
    for position, part in enumerate(parts):
        if str(position) in texts:
            told.append({"text": texts[str(position)]})
        elif image is not None and is_image(part):
            told.append({"text": image()})
        else:
            told.append(part)
    return text_of(told)


def file_texts(item: AnyItem) -> Mapping[str, str]:
    """What the files of an item say, by the positions of their parts."""
    texts: Mapping[str, str] = (private_of(item) or {}).get(_FILES, {})
    return texts
