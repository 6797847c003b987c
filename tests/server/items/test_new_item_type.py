"""A hosted tool with items of its own, whole in this file: nothing else of the server knows of it.

Its rows and its tool are what a module of `server.items.calls` and one of `tools.builtin` would hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import server.items.calls
import tools.builtin
from engine import CallArgs, CallStart, Delta, Done, Say, ScriptedEngine, Text
from server.items import (
    ITEM_TYPES,
    Call,
    Execution,
    InputReader,
    Item,
    ItemType,
    Listing,
    Route,
    Scene,
    Stream,
    Tool,
    Transcript,
    function_of,
    unspoken,
)
from server.items.catalogue import _rows
from server.runs.events import Assembler, fold
from server.schema import events as grammar
from server.shapes import STRING, array, record
from tests.support import wire
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import Gate, loose, prompts, saying
from tests.support.wire import Json
from tools import Registry, ToolResult, ToolSpec, execute

# ------------------------------------------------------------------------------------------------------------
# The tool


async def roll(input: str) -> str:
    """Always the greatest number: 12 for 2d6."""
    count, _, sides = input.partition("d")
    return str(int(count) * int(sides))


ROLL = ToolSpec(
    name="roll",
    description="Rolls dice, such as 2d6.",
    parameters={
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    },
    offered_by="dice",
    idempotent=True,
    run=roll,
)

# ------------------------------------------------------------------------------------------------------------
# Its items

PLACE = "item_id output_index"


def _offers(_tool: Tool, registry: Registry, _path: str) -> Sequence[Tool]:
    return [function_of(spec) for spec in registry.values() if spec.offered_by == "dice"]


def _opened(_name: str, _call_id: str, arguments: str) -> Item:
    return {"dice": InputReader().feed(arguments), "total": None, "fault": None}


async def _run(item: Item, registry: Registry, _scene: Scene) -> ToolResult:
    return await execute(registry["roll"], json.dumps({"input": item["dice"]}))


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "failed"
    item["total"], item["fault"] = result.output, result.error
    return "response.dice_call.completed" if result.error is None else None


def _repeatable(_item: Item, registry: Registry) -> bool:
    return registry["roll"].idempotent


def _say(item: Item, transcript: Transcript) -> None:
    transcript.call(item["id"], "roll", json.dumps({"input": item["dice"]}))
    transcript.answer(item["id"], item["total"] or f"no dice: {item['fault']}")


def _shows(item: Item, _route: Route) -> bool:
    return bool(item["type"] == "dice_listing")


LISTING = Listing(
    "dice_listing",
    opened=lambda _route: {"cups": []},
    filled=lambda functions: {"cups": [function["name"] for function in functions]},
    events=("response.dice_listing.completed",),
    shows=_shows,
)
STREAMED = ItemType(
    "dice_call",
    "dice_",
    record({"dice": STRING}, {"total": STRING, "fault": STRING, "status": STRING}, total=None, fault=None),
    _say,
    events={
        "response.dice_call.in_progress": PLACE,
        "response.dice_call_notation.delta": f"{PLACE} delta",
        "response.dice_call_notation.done": f"{PLACE} dice",
        "response.dice_call.rolling": PLACE,
        "response.dice_call.completed": PLACE,
    },
    order=(
        "dice_call.in_progress dice_call_notation.delta* dice_call_notation.done"
        " (dice_call.rolling dice_call.completed?)?"
    ),
    tools={"dice": record({}, {"colour": STRING})},
    call=Call(
        _opened,
        Stream("dice", "response.dice_call_notation", reader=InputReader),
        opens=("response.dice_call.in_progress",),
        offers=_offers,
        execution=Execution(
            "rolling",
            _run,
            _finish,
            _repeatable,
            starts=("response.dice_call.rolling",),
            broken="failed",
            listing=LISTING,
        ),
    ),
)
assert STREAMED.call is not None
WHOLE = replace(
    STREAMED,
    call=replace(STREAMED.call, stream=None),
    order="dice_call.in_progress (dice_call.rolling dice_call.completed?)?",
)
"""The same, but that a call is shown once the model has written it."""

LISTED = ItemType(
    "dice_listing",
    "dicel_",
    record({"cups": array(STRING)}),
    unspoken,
    events={"response.dice_listing.completed": PLACE},
    order="dice_listing.completed",
)

REGISTRY: Registry = {**tools.BUILTIN, "roll": ROLL}
ASKED = 'call roll {"input": "2d6"}'
MARKUP = '<tool_call>\n{"name": "roll", "arguments": {"input": "2d6"}}\n</tool_call>'
DICE: Json = {"type": "dice", "colour": "red"}


@pytest.fixture(params=[STREAMED, WHOLE], ids=["streamed", "whole"], autouse=True)
def dice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ItemType:
    row: ItemType = request.param
    monkeypatch.setitem(ITEM_TYPES, row.type, row)
    monkeypatch.setitem(ITEM_TYPES, LISTED.type, LISTED)
    return row


def checked(raw: bytes) -> tuple[list[Json], Json]:
    """The items of a whole stream, whose events obey the rows, and its last Response."""
    stream = wire.events(raw)
    fields = grammar.fields()
    for number, event in enumerate(stream):
        assert event["sequence_number"] == number
        assert {*fields[event["type"]], "sequence_number", "type"} == event.keys()
    items = wire.check_items([event for event in stream if "response" not in event])
    assert stream[-1]["response"]["output"] == items
    return items, stream[-1]["response"]


async def streamed(client: httpx.AsyncClient, asked: Any, **body: Any) -> tuple[list[Json], Json]:
    """POST /responses with the dice."""
    body = {"input": asked, "stream": True, "tools": [DICE], **body}
    reply = await client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-antiphon-ignored") is None
    return checked(reply.content)


async def test_it_is_listed_offered_called_and_put_into_words(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine, registry=REGISTRY) as running, http_client(running) as client:
        items, response = await streamed(client, ASKED)
        listing, made, message = items
        assert (listing["type"], listing["cups"]) == ("dice_listing", ["roll"]) and "status" not in listing
        assert re.fullmatch("dice_[0-9a-f]{48}", made["id"])
        assert {key: made[key] for key in ("type", "status", "dice", "total", "fault")} == {
            "type": "dice_call", "status": "completed", "dice": "2d6", "total": "12", "fault": None,
        }  # fmt: skip
        assert (message["content"][0]["text"], response["tools"]) == ("The tool said: 12", [DICE])
        offered, answered = prompts(engine)
        assert "Rolls dice, such as 2d6." in offered and "calculator" not in offered
        assert '"input": "2d6"' in answered.split(ASKED)[1] and "12" in answered.split(ASKED)[1]

        stored = await client.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
        assert checked(stored.content) == (items, response), "the same when it is read again"

        items, _ = await streamed(client, "and now?", previous_response_id=response["id"])
        assert [item["type"] for item in items] == ["message"], "listed once in a chain"
        chained = prompts(engine)[-1]
        items, _ = await streamed(
            client,
            [{"role": "user", "content": ASKED}, made, message, {"role": "user", "content": "and now?"}],
        )
        assert [item["type"] for item in items] == ["dice_listing", "message"]
        assert prompts(engine)[-1] == chained, "an item that a client sends back says the same"


async def test_it_can_be_chosen_and_not_without_being_there(tmp_path: Path) -> None:
    async with running_app(tmp_path, registry=REGISTRY) as running, http_client(running) as client:
        items, _ = await streamed(client, "say hi", tool_choice={"type": "dice"})
        assert items[1]["type"] == "dice_call"
        body = {"input": "hi", "tool_choice": {"type": "dice"}}
        reply = await client.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")


async def test_it_is_there_on_chat_too(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine, registry=REGISTRY) as running, http_client(running) as client:
        body: Json = {"messages": [{"role": "user", "content": ASKED}], "tools": [DICE]}
        said = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        [made] = said["server_tool_calls"]
        assert (made["type"], made["total"], said["content"]) == ("dice_call", "12", "The tool said: 12")
        body["messages"] += [said, {"role": "user", "content": "and now?"}]
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.json()["choices"][0]["message"]["content"] == "You said: and now?"
    assert "x-antiphon-ignored" not in reply.headers and "12" in prompts(engine)[-1].split(ASKED)[1]


async def test_limits_and_broken_calls_are_told(tmp_path: Path) -> None:
    engine = loose(saying(f"{MARKUP}\n{MARKUP}", MARKUP.replace("}}", ""), "enough"))
    async with running_app(tmp_path, engine, registry=REGISTRY) as running, http_client(running) as client:
        items, response = await streamed(client, "hi", max_tool_calls=1)
    made = [item for item in items if item["type"] == "dice_call"]
    assert [item["status"] for item in made] == ["completed", "failed", "failed"]
    assert "no more than 1" in made[1]["fault"] and "not whole" in made[2]["fault"]
    assert (response["status"], response["output"][-1]["content"][0]["text"]) == ("completed", "enough")
    assert made[2]["fault"] in prompts(engine)[-1]


async def test_a_call_of_no_tool_is_told_by_its_items(tmp_path: Path) -> None:
    engine = loose(saying(MARKUP.replace("roll", "shuffle"), "sorry"))
    async with running_app(tmp_path, engine, registry=REGISTRY) as running, http_client(running) as client:
        items, _ = await streamed(client, "hi")
    assert (items[1]["type"], items[1]["status"]) == ("dice_call", "failed")
    assert items[1]["fault"] == "There is no tool named 'shuffle'. The tools are: roll."


@pytest.mark.parametrize("then", [[Text("hm")], [CallStart("roll")], [Done("length")], []])
def test_a_call_that_is_never_ended_is_closed_by_what_follows(then: list[Delta]) -> None:
    assembler = Assembler(b"secret", routes={"roll": Route("dice_call")})
    drafts = assembler.feed([CallStart("roll"), CallArgs('{"input": "2d'), *then])
    drafts += assembler.interrupt()
    assert fold(drafts) == (assembler.output, set())
    first = wire.check_items(drafts)[0]
    assert (first["dice"], first["status"]) == ("2d", "failed")


async def test_a_cancelled_call_is_closed(tmp_path: Path) -> None:
    gate = Gate()

    async def held(input: str) -> str:
        gate.reached.set()
        await gate.release.wait()
        return input

    registry = {**REGISTRY, "roll": replace(ROLL, run=held)}
    async with live_app(tmp_path, registry=registry) as running, http_client(running) as client:
        body = {"input": f"{ASKED}\n{ASKED}", "tools": [DICE], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        await gate.reached.wait()
        await client.post(f"/v1/responses/{begun['id']}/cancel")
        stream = await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})
    items, response = checked(stream.content)
    assert (items[1]["status"], response["status"]) == ("failed", "cancelled")
    assert items[1]["fault"] == "The response ended before the tool did.", "it may be made again"
    assert items[2]["fault"] == "The response ended before this call was made."


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_process_that_ends_in_the_middle_of_its_call(tmp_path: Path, idempotent: bool) -> None:
    gate = Gate()

    async def held(input: str) -> str:
        gate.reached.set()
        await gate.release.wait()
        raise AssertionError("not to be reached")

    spec = replace(ROLL, idempotent=idempotent)
    async with (
        live_app(tmp_path, registry={"roll": replace(spec, run=held)}) as running,
        http_client(running) as client,
    ):
        body = {"input": f"{ASKED}\n{ASKED}", "tools": [DICE], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        await gate.reached.wait()
        (record,) = (await running.context.storage.records(begun["id"], after=-1))[-1:]
        assert b"response.dice_call.rolling" in record.events, "it is known to have begun"
        await running.context.runs.drain(0)
    engine = ScriptedEngine()
    async with (
        running_app(tmp_path, engine, registry={"roll": spec}) as running,
        http_client(running) as client,
    ):
        stream = await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})
    items, response = checked(stream.content)
    assert [item["type"] for item in items] == ["dice_listing", "dice_call", "dice_call", "message"]
    made, waited = items[1:3]
    assert (waited["status"], waited["total"]) == ("completed", "12"), "it had not begun"
    assert response["status"] == "completed"
    assert (made["status"], made["total"]) == (("completed", "12") if idempotent else ("failed", None))
    assert ("is not known" in str(made["fault"])) is not idempotent
    assert (made["total"] or made["fault"]) in prompts(engine)[-1]


async def test_a_process_that_ends_while_the_call_is_written(tmp_path: Path) -> None:
    """The generation goes on at the next token, and its events come out the same."""
    gate = Gate()
    whole = 'Let me see. <tool_call>\n{"name": "roll", "arguments": {"input": "2d6"}}\n</tool_call>'
    before, after = whole[:-24], whole[-24:]
    script = _in_two(before, after, gate)
    async with (
        live_app(tmp_path, ScriptedEngine(script), registry=REGISTRY) as running,
        http_client(running) as client,
    ):
        body = {"input": "hi", "tools": [DICE], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        await gate.reached.wait()
        await running.context.runs.drain(0)
    async with (
        running_app(tmp_path, ScriptedEngine(_in_two(before, after)), registry=REGISTRY) as running,
        http_client(running) as client,
    ):
        stream = await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})
    items, response = checked(stream.content)
    assert [item["type"] for item in items] == ["dice_listing", "message", "dice_call", "message"]
    assert (items[2]["dice"], items[2]["total"], response["status"]) == ("2d6", "12", "completed")


def _in_two(before: str, after: str, gate: Gate | None = None) -> Any:
    def script(request: Any, prompt: str) -> Any:
        if request.generation:
            yield Say("done")
            return
        yield Say(before)
        if gate is not None:
            yield gate.wait()
        yield Say(after)

    return script


def test_modules_are_found_without_being_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teapots.py").write_text(
        "from server.items.item_type import ItemType\n"
        "from server.shapes import mapping\n"
        "ROWS = (ItemType('teapot_call', 'tea_', mapping),)\n"
    )
    (tmp_path / "kettles.py").write_text(
        "from tools.spec import ToolSpec\n"
        "async def boil() -> str: return 'hot'\n"
        "TOOLS = (ToolSpec('boil', 'Boils.', {'type': 'object'}, boil),)\n"
    )
    calls, builtin = server.items.calls, tools.builtin
    with monkeypatch.context() as found:
        found.setattr(calls, "__path__", [*calls.__path__, str(tmp_path)])
        assert {row.type for row in _rows("server.items")} == {*ITEM_TYPES, "teapot_call"} - {
            "dice_call",
            "dice_listing",
        }
    (tmp_path / "teapots.py").unlink()
    with monkeypatch.context() as found:
        found.setattr(builtin, "__path__", [*builtin.__path__, str(tmp_path)])
        assert set(tools.builtin._tools()) == {*tools.BUILTIN, "boil"}
