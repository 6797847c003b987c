"""Reads input items leniently and normalises them to the official resource form.

Clients may abbreviate items, for example leave out the type of a message, and an item without an id gets one
where its type allows that. Everything that this server returns is accepted back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import orjson

from server.ignored import ignore, unread
from server.items import (
    ASSISTANT_PART,
    FILE_PARTS,
    ITEM_TYPES,
    SEALED,
    USER_PART,
    Item,
    ItemType,
    identifier,
    is_output,
    is_trigger,
    words_of,
)
from server.schema.formats import parse_format
from server.schema.tools import parse_tools
from server.shapes import (
    STRING,
    check_length,
    mapping,
    member,
    missing,
    mistyped,
    one_of,
    record,
    refuse,
    shorten,
)

NewId = Callable[[str], str]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_REASONING = record({}, {"effort": one_of(*EFFORTS)})
_TEXT = record({"format": mapping})

_FAKE_ID = "__fake_id__"  # openai-agents' placeholder: an item that no server has named yet

MAX_ITEMS = 10_000
"""Items, or chat messages, of one request. Each has a handful of tokens at least, so that more of them fill
the longest context there is; and each costs time in every step from here to the prompt."""

# ------------------------------------------------------------------------------------------------------------
# Normalising


def normalize_input(value: Any, *, new_id: NewId, param: str = "input") -> list[Item]:
    """A request's input, a string or a list of items, as normalised items, one for one.

    new_id: prefix -> a fresh id; called once for each item that has none. `item_reference` comes back as
    `{"type", "id"}` for the caller to resolve. Raises ApiError 400 naming the path of what is wrong, also of
    an item that no prompt has words for.
    """
    if isinstance(value, str):
        return [message("user", value, new_id(ITEM_TYPES["message"].prefix))]
    if not isinstance(value, list):
        mistyped(param, "a string or an array", value)
    check_number(value, param)
    items = [normalize_item(item, f"{param}[{index}]", new_id) for index, item in enumerate(value)]
    for index, item in enumerate(items):
        if item["type"] != "item_reference":
            words_of(item, f"{param}[{index}]")
    return items


def without_trigger(value: Any, new_id: NewId) -> tuple[Any, bool]:
    """A request's input without the item that asks for a compaction, and whether there was one. Raises
    ApiError 400 for one that is not the last."""
    if not isinstance(value, list):
        return value, False
    for index, item in enumerate(value):
        if not (isinstance(item, dict) and is_trigger(item)):
            continue
        path = f"input[{index}]"
        if index != len(value) - 1:
            refuse(path, f"Invalid '{path}': a 'compaction_trigger' must be the last item of the input.")
        normalize_item(item, path, new_id)
        return value[:-1], True
    return value, False


def check_number(value: Sized, param: str) -> None:
    """Raise ApiError 400 for a list of more than MAX_ITEMS items or messages."""
    check_length(param, len(value), "array", most=MAX_ITEMS)


def num_parts(items: Iterable[Item]) -> int:
    """How much there is to go through: items, and the parts that they have."""
    number = 0
    for item in items:
        number += 1
        for field in ("content", "output"):
            parts = item.get(field)
            if isinstance(parts, list):
                number += len(parts)
    return number


def message(role: str, content: str, item_id: str) -> Item:
    """A message of one text, in resource form."""
    part: dict[str, Any] = (
        {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        if role == "assistant"
        else {"type": "input_text", "text": content}
    )
    return {"type": "message", "id": item_id, "status": "completed", "role": role, "content": [part]}


def normalize_item(value: Any, path: str, new_id: NewId) -> Item:
    """One item in the official resource form; see `normalize_input`."""
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    kind = _type_of(value, path)
    if kind == "item_reference":
        unread(value, ("type", "id"), path)
        return {"type": kind, "id": member(value, "id", identifier, path)}
    if _APART.isdisjoint(value):
        return _of_kind(kind, value, path, new_id)
    if value.get("created_at") is not None:
        ignore(f"{path}.created_at")  # a conversation says it, and it is no matter of the item
    item = _of_kind(kind, {key: value[key] for key in value if key not in _APART}, path, new_id)
    if (metadata := value.get("metadata")) is None:
        return item
    if not isinstance(metadata, dict):
        mistyped(f"{path}.metadata", "an object", metadata)
    return {**item, "metadata": metadata}


_APART = frozenset({"created_at", "metadata"})
"""What an item of any type may have besides: when it came, and what its client keeps with it."""


def _of_kind(kind: str, value: Item, path: str, new_id: NewId) -> Item:
    """One item of this type, which is no reference."""
    if kind == "message":
        return _message(value, path, new_id)
    if kind == "function" and isinstance(value.get("function"), dict):
        kind, value = "function_call", _flat_call(value, path)
    row = ITEM_TYPES.get(kind)
    if row is None:
        refuse(
            f"{path}.type", f"Invalid value: '{shorten(kind)}' is not an item type that this server knows."
        )
    # Every item may have an id, so rows need not say it.
    apart = ("id", SEALED) if row.has_private_half else ("id",)
    fields = row.shape({key: value[key] for key in value if key not in apart}, path)
    item_id = _id_of(value, path) or (_doubled_id(fields, row) if row.needs_id else new_id(row.prefix))
    if item_id is None:
        missing(f"{path}.id")
    item: Item = {
        "type": kind,
        "id": item_id,
        **{key: fields[key] for key in fields if key not in ("type", "id")},
    }
    if row.adds:
        item["tools"] = parse_tools(item["tools"], f"{path}.tools")
    if row.configures:
        item |= _configuration(item, path)
    if SEALED in apart and value.get(SEALED) is not None:
        item[SEALED] = STRING(value[SEALED], f"{path}.{SEALED}")
    if row.doubled is not None:
        name, source = row.doubled
        item.setdefault(name, item[source])
    return item


def _configuration(item: Item, path: str) -> Item:
    """The settings of an item that makes some, in their flat form."""
    if "reasoning" not in item and "text" not in item:
        message = f"Missing required parameter: '{path}' has neither 'reasoning' nor 'text'."
        refuse(path, message, "missing_required_parameter")
    found: Item = {}
    if "reasoning" in item:
        found["reasoning"] = _REASONING(item["reasoning"], f"{path}.reasoning")
    if "text" in item:
        path = f"{path}.text"
        form = _TEXT(item["text"], path)["format"]
        member(form, "type", one_of("text", "json_schema"), f"{path}.format")
        found["text"] = {"format": parse_format(form, f"{path}.format")}
    return found


def _doubled_id(fields: Mapping[str, Any], row: ItemType) -> str | None:
    """The id that only the client knows, where another key of the item says it too."""
    name, source = row.doubled or ("", "")
    return fields.get(name) if source == "id" else None


def _type_of(value: Mapping[str, Any], path: str) -> str:
    """The item's type; easy messages and references may leave it out."""
    kind = value.get("type")
    if isinstance(kind, str):
        return kind
    if kind is not None:
        mistyped(f"{path}.type", "a string", kind)
    if "role" in value:
        return "message"
    if value.keys() <= {"id", "type"} and "id" in value:
        return "item_reference"
    missing(f"{path}.{'role' if 'content' in value else 'type'}")


def _id_of(fields: Mapping[str, Any], path: str) -> str | None:
    """The client's own id; None where there is none worth the name, or that no URL could name."""
    item_id = fields.get("id")
    if item_id is None or item_id in ("", _FAKE_ID):
        return None
    found: str = identifier(item_id, f"{path}.id")
    return None if "/" in found or found in (".", "..") else found


def _flat_call(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A call nested in chat's way: its id is the call's."""
    rest = {key: value[key] for key in value if key not in ("type", "id", "function")}
    called, names = value["function"], ("name", "arguments")
    unread(called, names, f"{path}.function")
    return {"call_id": value.get("id"), **rest, **{name: called.get(name) for name in names}}


def _message(value: Mapping[str, Any], path: str, new_id: NewId) -> Item:
    row = ITEM_TYPES["message"]
    fields = row.shape(value, path)
    role = fields["role"]
    content = value.get("content")
    item_id = _id_of(fields, path) or new_id(row.prefix)
    if isinstance(content, str):
        item = message(role, content, item_id)
        item["status"] = fields["status"]
    elif isinstance(content, list):
        part = ASSISTANT_PART if role == "assistant" else USER_PART
        parts = [part(element, f"{path}.content[{index}]") for index, element in enumerate(content)]
        item = {"type": "message", "id": item_id, "status": fields["status"], "role": role, "content": parts}
    elif content is None:
        missing(f"{path}.content")
    else:
        mistyped(f"{path}.content", "a string or an array", content)
    return item | {key: fields[key] for key in fields if key not in item}


def check_sizes(
    items: Iterable[Item], limit: int, *, outputs: int | None = None, param: str = "input"
) -> int:
    """The bytes of normalised items as JSON, together; raises ApiError 400 `item_too_large` for one of more
    than `limit`. outputs: the limit on those that are outputs of tools, where it is another one."""
    total = 0
    for index, item in enumerate(items):
        num_bytes = len(orjson.dumps(item))
        most = limit if outputs is None or not is_output(item) else min(limit, outputs)
        if num_bytes > most:
            path = f"{param}[{index}]"
            what = "an item" if most == limit else "the output of a tool"
            message = f"Invalid '{path}': {what} may have {most} bytes as JSON, this one has {num_bytes}."
            parts = item.get("content")
            if isinstance(parts, list) and any(part.get("file_data") for part in parts):
                message += " Upload its file to /v1/files, and send the file's id as `file_id`."
            refuse(path, message, "item_too_large")
        total += num_bytes
    return total


# ------------------------------------------------------------------------------------------------------------
# What a text model cannot read


UNSUPPORTED_KINDS: Mapping[str, str] = {
    "input_image": "image",
    "computer_screenshot": "image",
    "input_file": "file",
    "input_audio": "audio",
}
"""Parts that are not text, and the modality that a model needs to read them."""


def unsupported_parts(
    items: Iterable[Item],
    *,
    modalities: frozenset[str] = frozenset({"text"}),
    param: str = "input",
    tells_images: bool = False,
) -> list[tuple[str, str]]:
    """(path, modality) of every part of normalised `items` that a model of these modalities cannot read;
    files are read for it. tells_images: it is told of the images in messages, to have them changed."""
    found: list[tuple[str, str]] = []
    for index, item in enumerate(items):
        for field in ("content", "output"):
            parts = item.get(field)
            if isinstance(parts, dict) and (modality := UNSUPPORTED_KINDS.get(str(parts.get("type")))):
                found.append((f"{param}[{index}].{field}", modality))
            for position, part in enumerate(parts if isinstance(parts, list) else ()):
                kind = str(part.get("type")) if isinstance(part, dict) else ""
                modality = UNSUPPORTED_KINDS.get(kind)
                readable = kind == "input_file" and FILE_PARTS.get(item["type"]) == field
                readable |= tells_images and kind == "input_image" and item["type"] == "message"
                if modality is not None and not readable:
                    found.append((f"{param}[{index}].{field}[{position}]", modality))
    return [(path, modality) for path, modality in found if modality not in modalities]
