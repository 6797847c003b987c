"""Code that other servers ran for the model."""

from __future__ import annotations

import json

from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, STATUSES, item_shape
from server.items.transcript import Transcript
from server.shapes import STRING, anything, array, record, tagged

_OUTPUT = tagged({"logs": record({"logs": STRING}), "image": record({"url": STRING})})


def _say(item: Item, transcript: Transcript) -> None:
    arguments = json.dumps({"code": item.get("code") or ""}, ensure_ascii=False)
    transcript.call(item["id"], "code_interpreter", arguments)
    transcript.answer(item["id"], _told(item))


def _told(item: Item) -> str:
    outputs = item.get("outputs")
    if outputs is None:
        told = "failed" if item.get("status") == "failed" else "was run"
        return f"The code {told}; its outputs were not kept."
    return "\n".join(
        output["logs"] if output["type"] == "logs" else f"[an image that is not shown: {output['url']}]"
        for output in outputs
    )


ROWS = (
    ItemType(
        "code_interpreter_call",
        "ci_",
        item_shape(
            {"container_id": STRING},
            {"code": STRING, "outputs": array(_OUTPUT)},
            statuses=(*STATUSES, "interpreting", "failed"),
            code=None,
            outputs=None,
        ),
        _say,
        events={
            "response.code_interpreter_call.in_progress": PLACE,
            "response.code_interpreter_call_code.delta": f"{PLACE} delta",
            "response.code_interpreter_call_code.done": f"{PLACE} code",
            "response.code_interpreter_call.interpreting": PLACE,
            "response.code_interpreter_call.completed": PLACE,
        },
        order=(
            "code_interpreter_call.in_progress"
            " code_interpreter_call_code.delta* code_interpreter_call_code.done"
            " code_interpreter_call.interpreting code_interpreter_call.completed"
        ),
        tools={"code_interpreter": record({"container": anything})},
        instead="Offer a function that runs code, or an MCP server that does.",
    ),
)
