"""Calls that operate a screen: the client carries them out, and shows the model what is on the screen then.

They are offered to models that see; a text has no words for a screen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.items.item_type import Call, Item, ItemType, Tool, Whole, flat_function, with_call_id
from server.items.parts import call_shape, item_shape, read_arguments
from server.items.pictures import SEES, pictures_of, with_urls
from server.items.transcript import Transcript
from server.shapes import STRING, array, one_of, record, refuse, tagged, whole
from tools import Registry

_SAFETY = array(record({"id": STRING}, {"code": STRING, "message": STRING}))
_POINT = {"x": whole(), "y": whole()}
_KEYS = {"keys": array(STRING)}
_BUTTONS = ("left", "right", "wheel", "back", "forward")
_ACTION = tagged(
    {
        "click": record({**_POINT, "button": one_of(*_BUTTONS)}, _KEYS),
        "double_click": record(_POINT, _KEYS, keys=None),
        "drag": record({"path": array(record(_POINT))}, _KEYS),
        "keypress": record(_KEYS),
        "move": record(_POINT, _KEYS),
        "screenshot": record({}),
        "scroll": record({**_POINT, "scroll_x": whole(), "scroll_y": whole()}, _KEYS),
        "type": record({"text": STRING}),
        "wait": record({}),
    }
)
_SCREENSHOT = tagged({"computer_screenshot": record({}, {"image_url": STRING, "file_id": STRING})})
_MOST_ACTIONS = 32

# ------------------------------------------------------------------------------------------------------------
# The functions that the model is offered

_NUMBERS = {name: {"type": "integer", "minimum": 0, "maximum": 100_000} for name in ("x", "y")}
_KEY = {"type": "string", "minLength": 1, "maxLength": 32}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "click": {"button": {"type": "string", "enum": list(_BUTTONS)}, **_NUMBERS},
    "double_click": _NUMBERS,
    "drag": {
        "path": {
            "type": "array",
            "minItems": 2,
            "maxItems": 64,
            "items": {
                "type": "object",
                "properties": _NUMBERS,
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        }
    },
    "keypress": {"keys": {"type": "array", "minItems": 1, "maxItems": 8, "items": _KEY}},
    "move": _NUMBERS,
    "screenshot": {},
    "scroll": {
        **_NUMBERS,
        **{
            name: {"type": "integer", "minimum": -100_000, "maximum": 100_000}
            for name in ("scroll_x", "scroll_y")
        },
    },
    "type": {"text": {"type": "string"}},
    "wait": {},
}
"""What each action says, in the order in which a model writes it."""
_ANY_ACTION: Mapping[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, **fields},
            "required": ["type", *fields],
            "additionalProperties": False,
        }
        for kind, fields in _FIELDS.items()
    ]
}
_ACTIONS: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": _MOST_ACTIONS,
    "items": _ANY_ACTION,
}
_DESCRIPTION = (
    "Operates {what}: clicks, types, scrolls and the like. Points are pixels of the latest screenshot, from "
    "its top left. The output is a screenshot of how it looks afterwards; the action 'screenshot' asks for "
    "nothing else."
)


def _offers(tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    if tool["type"] == "computer":
        name, field, schema, what = "computer", "actions", _ACTIONS, "the user's computer"
    else:
        size = f"{tool['display_width']} x {tool['display_height']} pixels"
        what = f"the user's computer ({tool['environment']}, a screen of {size})"
        name, field, schema = "computer_use_preview", "action", _ANY_ACTION
    parameters = {
        "type": "object",
        "properties": {field: schema},
        "required": [field],
        "additionalProperties": False,
    }
    return [flat_function(name, _DESCRIPTION.format(what=what), parameters)]


def _lacks(_tool: Tool, registry: Registry) -> str | None:
    return (
        None if SEES in registry else "it takes a model that sees screenshots, and this one reads text only"
    )


def _read(arguments: str) -> Item | None:
    found = read_arguments(arguments, _CALLED, ("action", "actions"))
    if found is None or len(found) != 1:
        return None
    return {**found, "pending_safety_checks": []}


_CALLED = record({}, {"action": _ACTION, "actions": array(_ACTION)})

# ------------------------------------------------------------------------------------------------------------
# Items


def _written(action: Mapping[str, Any]) -> dict[str, Any]:
    """An action with its fields in one order, whatever a client's: the same call is the same prompt."""
    names = ("type", *_FIELDS[action["type"]], "keys")
    return {name: action[name] for name in dict.fromkeys(names) if action.get(name) is not None}


def _say(item: Item, transcript: Transcript) -> None:
    said: dict[str, Any]
    if item.get("actions") is not None:
        said = {"actions": list(map(_written, item["actions"]))}
        name = "computer"
    else:
        action = item.get("action") or {"type": "screenshot"}
        name, said = "computer_use_preview", {"action": _written(action)}
    transcript.call(item["call_id"], name, json.dumps(said, ensure_ascii=False))


def _say_output(item: Item, transcript: Transcript) -> None:
    pictures = [{"type": "image", "image": picture} for picture in pictures_of(item).values()]
    said = "[a screenshot, shown below]" if pictures else "[a screenshot, which you cannot see]"
    transcript.answer(item["call_id"], said, pictures)


def _of_text(_text: str) -> Item:
    refuse("tool_outputs", "A call of the computer is answered by a screenshot: 'computer_call_output'.")


MAX_SIDE = 32_768
"""Pixels along a side of a screen."""

ROWS = (
    ItemType(
        "computer_call",
        "cu_",
        item_shape(
            call_shape(),
            {"action": _ACTION, "actions": array(_ACTION), "pending_safety_checks": _SAFETY},
            pending_safety_checks=[],
        ),
        _say,
        tools={
            "computer": record({}),
            "computer_use_preview": record(
                {
                    "environment": one_of("windows", "mac", "linux", "ubuntu", "browser"),
                    "display_width": whole(1, MAX_SIDE),
                    "display_height": whole(1, MAX_SIDE),
                }
            ),
        },
        call=Call(with_call_id, whole=Whole(_read), offers=_offers, lacks=_lacks),
        answered_by="computer_call_output",
        instead="Offer functions that tell in words what is on the screen.",
    ),
    ItemType(
        "computer_call_output",
        "cuo_",
        item_shape(
            call_shape(output=_SCREENSHOT),
            {"acknowledged_safety_checks": _SAFETY},
            statuses=("completed", "incomplete", "failed", "in_progress"),
        ),
        _say_output,
        answers="computer_call",
        of_text=_of_text,
        includes={"computer_call_output.output.image_url": with_urls},
    ),
)
