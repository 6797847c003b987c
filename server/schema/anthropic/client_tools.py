"""The tools that the Messages API knows by a type and that clients carry out: the functions that they are.

The official models were trained on these tools, and a request names no schema. Others are told one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_PLACE: Json = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*required]}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool of a type: its only name, what the model is told of it, and the schema of its input.

    told: the members of the tool that the description is completed by, in their order.
    """

    name: str
    description: str
    schema: Json
    told: tuple[str, ...] = ()


def _commands(*names: str) -> Json:
    return {"type": "string", "enum": [*names]}


_BASH = ClientTool(
    "bash",
    "Runs a command in a bash session that lasts from call to call, and shows its output. 'restart' begins "
    "a new session.",
    _object((), command=_STRING, restart={"type": "boolean"}),
)
_RANGE: Json = {**_PLACE, "description": "Of 'view': the first line and the last one, from 1; -1 is the end."}
_TEXT: Mapping[str, Json] = {
    "path": {**_STRING, "description": "The absolute path of a file or a folder."},
    "view_range": _RANGE,
    "file_text": {**_STRING, "description": "Of 'create': the content of the file."},
    "old_str": {**_STRING, "description": "Of 'str_replace': a text that the file has exactly once."},
    "new_str": {**_STRING, "description": "Of 'str_replace': what stands in its place."},
    "insert_line": {**_INTEGER, "description": "Of 'insert': the line behind which; 0 is the beginning."},
    "insert_text": {**_STRING, "description": "Of 'insert': the text."},
}
_EDITS = ("view", "create", "str_replace", "insert")


def _editor(name: str, *more: str) -> ClientTool:
    told = (
        "Shows files and folders ('view'), and changes files: 'create' writes a whole file, 'str_replace' "
        "replaces a text in one, and 'insert' puts lines into one."
    )
    undo = " 'undo_edit' takes the last change of a file back." if more else ""
    schema = _object(("command", "path"), command=_commands(*_EDITS, *more), **_TEXT)
    return ClientTool(name, told + undo, schema)


_MEMORY = ClientTool(
    "memory",
    "Keeps notes in files under /memories, which later conversations can read: 'view' shows a file or a "
    "folder, 'create' writes a file, 'str_replace' replaces a text in one, 'insert' puts lines into one, "
    "'delete' removes a file or a folder, and 'rename' moves one.",
    _object(
        ("command",),
        command=_commands(*_EDITS, "delete", "rename"),
        **_TEXT,
        old_path={**_STRING, "description": "Of 'rename'."},
        new_path={**_STRING, "description": "Of 'rename'."},
    ),
)
_POINTING = ("left_click", "right_click", "middle_click", "double_click", "mouse_move", "left_click_drag")
_FIRST = ("screenshot", "key", "type", "cursor_position", *_POINTING)
_SECOND = (
    *_FIRST,
    *("triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"),
)


def _computer(*actions: str) -> ClientTool:
    properties: Json = {
        "action": _commands(*actions),
        "coordinate": {**_PLACE, "description": "x and y in pixels, from the upper left corner."},
        "text": {**_STRING, "description": "What is typed, or the keys that are pressed, as in 'ctrl+s'."},
        "start_coordinate": {**_PLACE, "description": "Where a drag begins."},
    }
    if "scroll" in actions:
        properties["scroll_direction"] = _commands("up", "down", "left", "right")
        properties["scroll_amount"] = _INTEGER
        properties["duration"] = {"type": "number", "description": "Seconds, of 'wait' and 'hold_key'."}
    if "zoom" in actions:
        corners = {**_PLACE, "minItems": 4, "maxItems": 4}
        properties["region"] = {**corners, "description": "Of 'zoom': x and y of two corners."}
    return ClientTool(
        "computer",
        "Uses a computer by its screen, mouse and keyboard. 'screenshot' shows the screen.",
        _object(("action",), **properties),
        told=("display_width_px", "display_height_px", "display_number"),
    )


CLIENT_TOOLS: Mapping[str, ClientTool] = {
    **dict.fromkeys(("bash_20241022", "bash_20250124"), _BASH),
    **dict.fromkeys(
        ("text_editor_20241022", "text_editor_20250124"), _editor("str_replace_editor", "undo_edit")
    ),
    **dict.fromkeys(("text_editor_20250429", "text_editor_20250728"), _editor("str_replace_based_edit_tool")),
    "memory_20250818": _MEMORY,
    "computer_20241022": _computer(*_FIRST),
    "computer_20250124": _computer(*_SECOND),
    "computer_20251124": _computer(*_SECOND, "zoom"),
}
"""Type -> the function that it is."""
