"""Calls that operate a screen; text has no words for what they show."""

from __future__ import annotations

from server.items.item_type import ItemType
from server.items.parts import call_shape, item_shape
from server.shapes import STRING, array, one_of, record, tagged, whole

_SAFETY = array(record({"id": STRING}, {"code": STRING, "message": STRING}))
_POINT = {"x": whole(), "y": whole()}
_KEYS = {"keys": array(STRING)}
_ACTION = tagged(
    {
        "click": record({**_POINT, "button": one_of("left", "right", "wheel", "back", "forward")}, _KEYS),
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

ROWS = (
    ItemType(
        "computer_call",
        "cu_",
        item_shape(
            call_shape(),
            {"action": _ACTION, "actions": array(_ACTION), "pending_safety_checks": _SAFETY},
            pending_safety_checks=[],
        ),
        tools={
            "computer": record({}),
            "computer_use_preview": record(
                {"environment": STRING, "display_width": whole(), "display_height": whole()}
            ),
        },
        instead=(
            "It takes a model that sees screenshots, and the models of this server read text only; offer "
            "functions that tell in words what is on the screen."
        ),
    ),
    ItemType(
        "computer_call_output",
        "cuo_",
        item_shape(
            call_shape(output=_SCREENSHOT),
            {"acknowledged_safety_checks": _SAFETY},
            statuses=("completed", "incomplete", "failed", "in_progress"),
        ),
    ),
)
