"""Function calls: the client carries them out and sends their outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.items.item_type import Call, Item, ItemType, Stream
from server.items.parts import CALLER, PLACE, TOOL_OUTPUT, call_shape, item_shape
from server.items.transcript import Transcript, text_of
from server.shapes import (
    NAME,
    STRING,
    Shape,
    array,
    boolean,
    described,
    mapping,
    mistyped,
    one_of,
    record,
    refuse,
    shorten,
)

_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")

CALLERS = array(one_of("direct", "programmatic"))


def function_name(value: Any, path: str) -> Any:
    """A function's name: 1 to 128 letters, digits, underscores and hyphens."""
    if not isinstance(value, str):
        mistyped(path, "a string", value)
    if not _PATTERN.match(value):
        message = (
            f"Invalid '{path}': '{shorten(value)}' does not match the pattern '^[a-zA-Z0-9_-]{{1,128}}$'."
        )
        refuse(path, message)
    return value


described(function_name, lambda: {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"})

_PARTS: Mapping[str, Shape] = {
    "description": STRING,
    "parameters": mapping,
    "output_schema": mapping,
    "strict": boolean,
    "defer_loading": boolean,
    "allowed_callers": CALLERS,
}


def _opened(name: str, call_id: str, arguments: str) -> Item:
    return {"call_id": call_id, "name": name, "arguments": arguments}


def _say(item: Item, transcript: Transcript) -> None:
    if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
        transcript.call(item["call_id"], item["name"], item["arguments"])


def say_output(item: Item, transcript: Transcript) -> None:
    """The words of an output: its text."""
    transcript.answer(item.get("call_id") or "", text_of(item["output"]))


ROWS = (
    ItemType(
        "function_call",
        "fc_",
        item_shape(call_shape(name=NAME, arguments=STRING), {**CALLER, "namespace": STRING}),
        _say,
        events={
            "response.function_call_arguments.delta": f"{PLACE} delta",
            "response.function_call_arguments.done": f"{PLACE} name arguments",
        },
        order="function_call_arguments.delta* function_call_arguments.done",
        tools={"function": record({"name": function_name}, _PARTS)},
        call=Call(_opened, Stream("arguments", "response.function_call_arguments", named=True)),
        answered_by="function_call_output",
    ),
    ItemType(
        "function_call_output",
        "fco_",
        item_shape(call_shape(output=TOOL_OUTPUT), {**CALLER, "namespace": STRING, "name": STRING}),
        say_output,
        answers="function_call",
    ),
)
