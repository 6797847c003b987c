"""Calls of custom tools, which take a text instead of JSON; the client carries them out."""

from __future__ import annotations

import json

from server.items.calls.custom_input import InputReader
from server.items.calls.function import offers, say_output
from server.items.calls.function_tools import CUSTOM, names_of, shown_name
from server.items.item_type import Call, Item, ItemType, Stream
from server.items.parts import CALLER, PLACE, TOOL_OUTPUT, call_shape, item_shape
from server.items.transcript import Transcript
from server.shapes import NAME, STRING


def _opened(name: str, call_id: str, text: str) -> Item:
    return {"call_id": call_id, "name": name, "input": text}


def _say(item: Item, transcript: Transcript) -> None:
    if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
        transcript.call(item["call_id"], shown_name(item), arguments)


ROWS = (
    ItemType(
        "custom_tool_call",
        "ctc_",
        item_shape(call_shape(name=NAME, input=STRING), {**CALLER, "namespace": STRING}),
        _say,
        events={
            "response.custom_tool_call_input.delta": f"{PLACE} delta",
            "response.custom_tool_call_input.done": f"{PLACE} input",
        },
        order="custom_tool_call_input.delta* custom_tool_call_input.done",
        tools={"custom": CUSTOM},
        call=Call(
            _opened,
            Stream("input", "response.custom_tool_call_input", reader=InputReader),
            offers=offers,
            fields=names_of,
        ),
        answered_by="custom_tool_call_output",
    ),
    ItemType(
        "custom_tool_call_output",
        "ctco_",
        item_shape(call_shape(output=TOOL_OUTPUT), CALLER),
        say_output,
        answers="custom_tool_call",
    ),
)
