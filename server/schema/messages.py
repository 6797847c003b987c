"""Converts chat messages to the items of the Responses API.

Prompts are built from items only (`server.prompting.messages`), so the same history gives the same prompt in
both APIs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from server.ignored import collecting, ignore, unread
from server.items import ITEM_TYPES, OUTPUT_PART, Item, identifier, is_left_out
from server.schema.items import UNSUPPORTED_KINDS, NewId, check_number, normalize_item
from server.shapes import (
    NAME,
    STRING,
    array,
    check_length,
    mapping,
    member,
    missing,
    mistyped,
    one_of,
    record,
    refuse,
    shorten,
    tagged,
    text,
)

_ROLES = ("developer", "system", "user", "assistant", "tool")
_OWN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}\Z")
"""A role that a client has made up, for templates that print any. It says nothing to this server."""
_OFFICIAL = (*_ROLES, "function")
ALIKE = 0.8
"""A role of letters that is as like to an official one is a mistake, by `difflib`'s measure."""
_AUTHOR = text(1, 64)
_CALLS = array(
    tagged(
        {
            "function": record({"id": identifier, "function": record({"name": NAME, "arguments": STRING})}),
            "custom": record({"id": identifier, "custom": record({"name": NAME, "input": STRING})}),
        }
    )
)
_IMAGE = record({"image_url": record({"url": STRING}, {"detail": STRING})})
_FILE_FIELDS = ("file_id", "filename", "file_data")
_FILE = record({"file": record({}, dict.fromkeys(_FILE_FIELDS, STRING))})
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "developer": ("role", "content", "name"),
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": (
        "role",
        "name",
        "content",
        "refusal",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "annotations",
        "server_tool_calls",
        "file_citations",
    ),
    "tool": ("role", "content", "tool_call_id"),
}
"""What is read of the messages of each role."""

_PARTS: Mapping[str, str] = {"image_url": "input_image", "file": "input_file"}
"""Chat's content parts that items name otherwise; `text` and `refusal` they share."""
_PARTS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("developer", "system", "user"), ("text", "image_url", "file", "input_audio")),
    "assistant": ("text", "refusal"),
    "tool": ("text", "image_url", "file"),
}
"""Chat's content parts by role."""
_PARTS_AS_ITEMS = ("input_text", "output_text", "input_image", "input_file", "computer_screenshot")
"""Content parts under the names of items, which a chat takes too."""


def to_items(messages: Any, *, new_id: NewId, param: str = "messages") -> list[Item]:
    """Messages, oldest first, as normalised items; raises ApiError 400 naming the path of what is wrong.

    What an assistant message holds (reasoning, calls that a server made, content, calls) becomes an item
    each, in this order.
    """
    if not isinstance(messages, list):
        mistyped(param, "an array", messages)
    if not messages:
        check_length(param, 0, "array", least=1)
    check_number(messages, param)
    items: list[Item] = []
    for index, message in enumerate(messages):
        path = f"{param}[{index}]"
        if not isinstance(message, dict):
            mistyped(path, "an object", message)
        if message.get("role") == "function" or message.get("function_call") is not None:
            refuse(path, "Function messages are deprecated; use tool calls.", "unsupported_parameter")
        made_up = _is_own_role(message.get("role"))
        role = "user" if made_up else member(message, "role", _role, path)
        unread(message, _KNOWN[role], path)
        if role == "assistant":
            new = _assistant(message, path, new_id)
        elif role == "tool":
            new = [_tool(message, path, new_id)]
        else:
            new = [_said(role, message.get("content"), path, new_id)]
        author = {"template_role": message["role"]} if made_up else {}
        if role != "tool" and message.get("name") is not None:
            author["name"] = _AUTHOR(message["name"], f"{path}.name")
        items += [{**item, **author} if item["type"] == "message" else item for item in new]
    return items


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 400 where, in checked `messages`, a tool answers what the assistant's message before did
    not call, or where a call has no answer before the next turn."""
    calls: set[str] = set()
    unanswered: set[str] = set()
    caller = ""
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            _require_answers(unanswered, caller)
            made = message.get("tool_calls") if message["role"] == "assistant" else None
            calls = {call["id"] for call in made or ()}
            unanswered, caller = set(calls), f"messages[{index}].tool_calls"
        elif (call_id := message["tool_call_id"]) in calls:
            unanswered.discard(call_id)
        else:
            refuse(
                f"messages[{index}].tool_call_id",
                f"There is no call '{shorten(call_id)}' for this message to answer: messages of the role "
                "'tool' stand behind the assistant's message whose 'tool_calls' they answer.",
            )
    _require_answers(unanswered, caller)


def _require_answers(unanswered: Collection[str], caller: str) -> None:
    if unanswered:
        named = ", ".join(f"'{shorten(call_id)}'" for call_id in sorted(unanswered)[:8])
        message = (
            f"There is no answer to {named}: behind an assistant's message with 'tool_calls' there must be a "
            "message of the role 'tool' for each of them."
        )
        refuse(caller, message)


def _role(value: Any, path: str) -> str:
    """An official role."""
    role: str = STRING(value, path)
    if role not in _ROLES:
        message = (
            f"Invalid value: '{shorten(role)}'. Official values are: {', '.join(map(repr, _ROLES))}. Any "
            "other role of letters, digits, underscores and dashes is handed to the model's chat template, "
            "unless it is so much like an official one that it must be a mistake."
        )
        refuse(path, message)
    return role


def _is_own_role(role: Any) -> bool:
    """Whether a role is one that a client has made up, and no official one written wrongly."""
    if not isinstance(role, str) or role in _OFFICIAL or _OWN_ROLE.match(role) is None:
        return False
    return not (role.isalpha() and get_close_matches(role.lower(), _OFFICIAL, 1, ALIKE))


def authors(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[str]:
    """The paths of the names of authors in checked `messages`, in their order."""
    named = (index for index, message in enumerate(messages) if message.get("name") is not None)
    return [f"{param}[{index}].name" for index in named if messages[index]["role"] != "tool"]


def _said(role: str, content: Any, path: str, new_id: NewId) -> Item:
    if isinstance(content, list):
        content = [_part(part, f"{path}.content[{index}]", role) for index, part in enumerate(content)]
    return normalize_item({"type": "message", "role": role, "content": content}, path, new_id)


def _part(part: Any, path: str, role: str) -> Any:
    """A content part of a message of this role, under its name in items."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video_url":
        refuse(path, "No model here can read video content.", "unsupported_content")
    if isinstance(kind, str) and kind not in _PARTS_AS_ITEMS:
        one_of(*_PARTS_OF[role])(kind, f"{path}.type")
    if kind == "image_url":
        if isinstance(part.get("image_url"), str):
            part = {**part, "image_url": {"url": part["image_url"]}}
        image = _IMAGE(part, path)["image_url"]
        return {"type": _PARTS[kind], "image_url": image["url"], "detail": image.get("detail")}
    if kind == "file":
        file = _FILE(part, path)["file"]
        return {"type": _PARTS[kind], **{name: file.get(name) for name in _FILE_FIELDS}}
    return part


def _assistant(message: Mapping[str, Any], path: str, new_id: NewId) -> list[Item]:
    items: list[Item] = []
    for field in ("reasoning_content", "reasoning"):
        thought = message.get(field)
        if thought is None or not STRING(thought, f"{path}.{field}"):
            continue
        if items:  # the same under its other name, as this server writes it
            if thought != message["reasoning_content"]:
                ignore(f"{path}.{field}")
            continue
        parts = [{"type": "reasoning_text", "text": thought}]
        items.append(normalize_item({"type": "reasoning", "content": parts}, path, new_id))
    if (made := message.get("server_tool_calls")) is not None:
        items += _made(made, f"{path}.server_tool_calls", new_id)
    calls = message.get("tool_calls")
    content = message.get("content")
    if (refusal := message.get("refusal")) is not None and (
        STRING(refusal, f"{path}.refusal") or content is None
    ):
        content = _with_refusal(content, refusal)
    if content is None and not calls and not items:
        missing(f"{path}.content")
    if content not in (None, "") or not (calls or items):
        items.append(_said("assistant", content, path, new_id))
    for call in _CALLS(calls, f"{path}.tool_calls") if calls is not None else ():
        items.append(_call(call, path, new_id))
    return items


def _with_refusal(content: Any, refusal: str) -> Any:
    """An assistant's content, and behind it what chat keeps beside it: in items both are parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [*parts, {"type": "refusal", "refusal": refusal}] if isinstance(parts, list) else content


def _made(calls: Any, path: str, new_id: NewId) -> list[Item]:
    """The calls that a server has made itself, as it showed them: items, with an index in chunks."""
    items = []
    kind = one_of(*(row.type for row in ITEM_TYPES.values() if row.execution is not None))
    for index, call in enumerate(array(mapping)(calls, path)):
        at = f"{path}[{index}]"
        member(call, "type", kind, at)
        item = normalize_item({key: call[key] for key in call if key != "index"}, at, new_id)
        if is_left_out(item):
            ignore(at)
        else:
            items.append(item)
    return items


def _call(call: Mapping[str, Any], path: str, new_id: NewId) -> Item:
    kind, field = ("function", "arguments") if call["type"] == "function" else ("custom", "input")
    item_type = "function_call" if kind == "function" else "custom_tool_call"
    called = {name: call[kind][name] for name in ("name", field)}
    return normalize_item({"type": item_type, "call_id": call["id"], **called}, path, new_id)


def _tool(message: Mapping[str, Any], path: str, new_id: NewId) -> Item:
    call_id, content = message.get("tool_call_id"), message.get("content")
    for field, value in (("tool_call_id", call_id), ("content", content)):
        if value is None:
            missing(f"{path}.{field}")
    identifier(call_id, f"{path}.tool_call_id")
    if isinstance(content, list):
        paths = [f"{path}.content[{index}]" for index in range(len(content))]
        content = [OUTPUT_PART(_part(part, at, "tool"), at) for part, at in zip(content, paths, strict=True)]
    elif not isinstance(content, str):
        mistyped(f"{path}.content", "a string or an array", content)
    with collecting():  # an item calls its content otherwise; what is ignored of it was named above
        return normalize_item(
            {"type": "function_call_output", "call_id": call_id, "output": content}, path, new_id
        )


def file_paths(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[str]:
    """The paths of the files in checked `messages`, in their order: each of the object that says which."""
    return [
        f"{path}.file" if part["type"] == "file" else path
        for path, part in _parts(messages, "input_file", param)
    ]


def image_paths(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[str]:
    """The paths of the images in checked `messages`, in their order."""
    return [path for path, _ in _parts(messages, "input_image", param)]


def _parts(
    messages: Sequence[Mapping[str, Any]], kind: str, param: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """(path, part) of every content part of checked `messages` that items call so, in their order."""
    return [
        (f"{param}[{index}].content[{position}]", part)
        for index, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for position, part in enumerate(message["content"])
        if _PARTS.get(part["type"], part["type"]) == kind
    ]


def unsupported_in(
    messages: Sequence[Mapping[str, Any]], *, modalities: frozenset[str]
) -> list[tuple[str, str]]:
    """(path, modality) of every part of checked `messages` that a model of these modalities cannot read;
    files are read for it."""
    found: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list) else ()):
            kind = part["type"]
            modality = UNSUPPORTED_KINDS.get(_PARTS.get(kind, kind))
            if modality not in (None, "file") and modality not in modalities:
                found.append((f"messages[{index}].content[{position}]", modality))
    return found
