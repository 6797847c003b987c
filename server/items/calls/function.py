"""Function calls: the client carries them out and sends their outputs."""

from __future__ import annotations

from collections.abc import Sequence

from server.items.calls.function_tools import FUNCTION, NAMESPACE, names_of, shown, shown_name
from server.items.file_texts import told_of
from server.items.item_type import Call, Item, ItemType, Stream, Tool
from server.items.parts import CALLER, PLACE, TOOL_OUTPUT, call_shape, item_shape
from server.items.pictures import images_in, pictures_of
from server.items.transcript import Transcript
from server.shapes import NAME, STRING
from tools import Registry


def offers(tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    """The tool itself, under the name by which the model is shown it."""
    return [shown(tool)]


def _opened(name: str, call_id: str, arguments: str) -> Item:
    return {"call_id": call_id, "name": name, "arguments": arguments}


def _say(item: Item, transcript: Transcript) -> None:
    if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
        transcript.call(item["call_id"], shown_name(item), item["arguments"])


def say_output(item: Item, transcript: Transcript) -> None:
    """The words of an output: its text, that of its files, and its images."""
    pictures = pictures_of(item)
    if not images_in(item):
        transcript.answer(item.get("call_id") or "", told_of(item))
        return
    said = "[an image, shown below]" if pictures else "[an image, which you cannot see]"
    shown = [{"type": "image", "image": picture} for _, picture in sorted(pictures.items())]
    transcript.answer(item.get("call_id") or "", told_of(item, lambda: said), shown)


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
        tools={"function": FUNCTION, "namespace": NAMESPACE},
        call=Call(
            _opened,
            Stream("arguments", "response.function_call_arguments", named=True),
            offers=offers,
            fields=names_of,
        ),
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
