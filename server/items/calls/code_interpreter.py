"""Code that the model writes, and that this server runs in a container.

What came of a cell is the private half of its item: the item says its outputs to clients that ask for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from server.items.calls.custom_input import InputReader
from server.items.calls.function_tools import CALLERS
from server.items.item_type import (
    Call,
    Execution,
    Item,
    ItemType,
    Scene,
    Stream,
    Tool,
    flat_function,
)
from server.items.parts import NEW_CONTAINER, PLACE, STATUSES, item_shape, why_not_run
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import (
    STRING,
    array,
    described,
    mistyped,
    record,
    schema_of,
    tagged,
)
from tools import RUN_CODE, Registry, ToolResult, execute

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

_AUTO = tagged({"auto": record({}, NEW_CONTAINER)})


def _container(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return STRING(value, path)
    if not isinstance(value, dict):
        mistyped(path, "a string or an object", value)
    return _AUTO(value, path)


described(_container, lambda: {"anyOf": [{"type": "string"}, schema_of(_AUTO)]})


def _lacks(_tool: Tool, registry: Registry) -> str | None:
    return None if RUN_CODE in registry else why_not_run("code", registry)


def _offers(_tool: Tool, registry: Registry, _path: str) -> Sequence[Tool]:
    about = (
        "Run Python. Variables are kept from call to call. What is printed, and the value of the last "
        f"expression, is shown. {registry[RUN_CODE].description} Files are in /mnt/data; in the answer, a "
        "link to sandbox:/mnt/data/NAME lets the user download one."
    )
    code = {"code": {"type": "string"}}
    shape = {"type": "object", "properties": code, "required": ["code"], "additionalProperties": False}
    return [flat_function("python", about, shape)]


def _fields(tool: Tool) -> Mapping[str, Any]:
    # A request whose tokens are only counted has no container yet; a kind that is only named never has one.
    container = tool.get("container", {})
    return {"container_id": container if isinstance(container, str) else container.get("container_id", "")}


# ------------------------------------------------------------------------------------------------------------
# Calls

LOST = (
    "The server stopped while this code ran, and the session was lost: variables are gone, and files are as "
    "of the last finished call."
)


def _opened(_name: str, _call_id: str, _arguments: str) -> Item:
    return {"code": "", "outputs": None}


async def _run(item: Item, registry: Registry, scene: Scene) -> ToolResult:
    if RUN_CODE not in registry:
        return ToolResult(error="Code cannot be run here any more.")
    id = item["container_id"]
    tools = (tool["container"] for tool in scene.tools if tool["type"] == "code_interpreter")
    container = next(tools, {"type": "id", "container_id": id})
    told = {"code": item["code"], "owner": scene.owner, "call": item["id"], "at": scene.at}
    told |= {"container": container, "key": scene.key_id or ""}
    return await execute(registry[RUN_CODE], json.dumps(told))


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "failed"
    return "response.code_interpreter_call.completed" if result.error is None else None


def _keeps(_item: Item, result: ToolResult) -> Private:
    kept = result.kept or {}
    if result.error is not None:
        told = [{"type": "logs", "logs": result.error}]
        return {"output": f"error: {result.error}", "outputs": told, **kept}
    return {"output": result.output, **kept}


def _repeatable(_item: Item, registry: Registry) -> bool:
    return RUN_CODE in registry and registry[RUN_CODE].idempotent


# ------------------------------------------------------------------------------------------------------------
# Prompts, and what `include` adds


def _say(item: Item, transcript: Transcript) -> None:
    arguments = json.dumps({"code": item.get("code") or ""}, ensure_ascii=False)
    transcript.call(item["id"], "python", arguments)
    private = private_of(item)
    transcript.answer(item["id"], _told(item) if private is None else private["output"])


def _told(item: Item) -> str:
    """What is told of code that was not run here, or of which nothing else is known."""
    outputs = item.get("outputs")
    if outputs is None:
        told = "failed" if item.get("status") == "failed" else "was run"
        return f"The code {told}; its outputs were not kept."
    return "\n".join(
        output["logs"] if output["type"] == "logs" else f"[an image that is not shown: {output['url']}]"
        for output in outputs
    )


def _with_outputs(item: Item, private: Private) -> None:
    item["outputs"] = [dict(output) for output in private.get("outputs", ())]


_OUTPUT = tagged({"logs": record({"logs": STRING}), "image": record({"url": STRING})})

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
        # There is no event for code that could not be run: the item's own end says it.
        order=(
            "code_interpreter_call.in_progress"
            " code_interpreter_call_code.delta* code_interpreter_call_code.done"
            " (code_interpreter_call.interpreting code_interpreter_call.completed?)?"
        ),
        tools={"code_interpreter": record({"container": _container}, {"allowed_callers": CALLERS})},
        call=Call(
            _opened,
            stream=Stream("code", "response.code_interpreter_call_code", reader=partial(InputReader, "code")),
            opens=("response.code_interpreter_call.in_progress",),
            offers=_offers,
            lacks=_lacks,
            fields=_fields,
            execution=Execution(
                "interpreting",
                _run,
                _finish,
                _repeatable,
                starts=("response.code_interpreter_call.interpreting",),
                keeps=_keeps,
                broken="incomplete",
                uncertain=LOST,
            ),
        ),
        includes={"code_interpreter_call.outputs": _with_outputs},
        instead="Offer a function that runs code, or an MCP server that does.",
    ),
)
