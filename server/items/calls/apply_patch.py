"""Changes of files, which clients carry out."""

from __future__ import annotations

import json

from server.items.item_type import Item, ItemType
from server.items.parts import CALLER, call_shape, item_shape
from server.items.transcript import Transcript
from server.shapes import NAME, STRING, record, tagged

_DIFF = {"path": NAME, "diff": STRING}
_OPERATION = tagged(
    {"create_file": record(_DIFF), "delete_file": record({"path": NAME}), "update_file": record(_DIFF)}
)


def _say(item: Item, transcript: Transcript) -> None:
    transcript.call(item["call_id"], "apply_patch", json.dumps(item["operation"], ensure_ascii=False))


def _say_output(item: Item, transcript: Transcript) -> None:
    told = item.get("output")
    if item["status"] == "failed":
        told = f"error: {told or 'The patch could not be applied.'}"
    transcript.answer(item["call_id"], told or "The patch was applied.")


ROWS = (
    ItemType(
        "apply_patch_call",
        "apc_",
        item_shape(call_shape(operation=_OPERATION), CALLER, statuses=("completed", "in_progress")),
        _say,
        tools={"apply_patch": record({})},
        answered_by="apply_patch_call_output",
    ),
    ItemType(
        "apply_patch_call_output",
        "apco_",
        item_shape(call_shape(), {**CALLER, "output": STRING}, statuses=("completed", "failed")),
        _say_output,
        answers="apply_patch_call",
    ),
)
