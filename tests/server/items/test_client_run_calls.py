"""Kinds of tools whose calls a client carries out: shells and patches, from the offer to the output."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import Constraint, ReaderParams, ScriptedEngine, ToolShape
from engine.dialects.spec import Dialect
from server.items import ITEM_TYPES, type_of_calls
from server.items.calls.apply_patch import CREATE, UPDATE
from server.prompting import tool_shape
from tests.engine.structured.test_call_grammar import FORCED, calls_of, names, read, walk
from tests.support import wire
from tests.support.processes import server_process
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import Api, Gate, gated, loose, prompts, saying, text
from tests.support.wire import Json


@dataclass(frozen=True)
class Kind:
    """One call of a kind of tool. written: its arguments, as the model writes them. fields: of the item that
    they become. output: that of its client, without the call's id. words: what the model is then told."""

    type: str
    written: Json
    fields: Json
    output: Json
    words: str
    events: tuple[str, ...] = ()
    other: Json | None = None  # the same fields with their keys in another order, as an SDK may send them

    @property
    def tools(self) -> list[Json]:
        return [{"type": self.type}]

    @property
    def call(self) -> str:
        """The type of its calls."""
        return f"{self.type}_call"

    @property
    def asked(self) -> str:
        """What makes the scripted engine call it."""
        return f"call {self.type} {json.dumps(self.written)}"


EXIT = {"type": "exit", "exit_code": 0}
SHELL = Kind(
    "shell",
    {"commands": ["ls -l", 'cat "a b" | wc'], "timeout_ms": 1000},
    {
        "action": {
            "commands": ["ls -l", 'cat "a b" | wc'],
            "timeout_ms": 1000,
            "max_output_length": None,
        },
        "environment": {"type": "local"},
    },
    {
        "type": "shell_call_output",
        "max_output_length": None,
        "output": [
            {"stdout": "total 0\n", "stderr": "", "outcome": EXIT},
            {"stdout": "", "stderr": "cat: a b", "outcome": {"type": "timeout"}},
        ],
    },
    "total 0\n[exit code 0]\n\ncat: a b\n[timed out]",
    ("shell_call_command.added", "shell_call_command.delta", "shell_call_command.done") * 2,
    {
        "action": {
            "max_output_length": None,
            "timeout_ms": 1000,
            "commands": ["ls -l", 'cat "a b" | wc'],
        }
    },
)
DIFF = "@@ def f():\n x = 1\n-y = 2\n+y = 3\n"
PATCH = Kind(
    "apply_patch",
    {"type": "update_file", "path": "a.py", "diff": DIFF},
    {"operation": {"type": "update_file", "path": "a.py", "diff": DIFF}},
    {"type": "apply_patch_call_output", "status": "failed", "output": "no such file"},
    "error: no such file",
    other={"operation": {"diff": DIFF, "path": "a.py", "type": "update_file"}},
)
DELETE = replace(
    PATCH,
    written={"type": "delete_file", "path": "a.py"},
    fields={"operation": {"type": "delete_file", "path": "a.py"}},
    output={"type": "apply_patch_call_output", "status": "completed"},
    words="The patch was applied.",
    other={"operation": {"path": "a.py", "type": "delete_file"}},
)
LOCAL = Kind(
    "local_shell",
    {"command": ["ls", "-l"], "env": {"A": "b"}},
    {"action": {"type": "exec", "command": ["ls", "-l"], "env": {"A": "b"}}},
    {"type": "local_shell_call_output", "output": "total 0"},
    "total 0",
    other={"action": {"env": {"A": "b"}, "command": ["ls", "-l"], "type": "exec"}},
)
KINDS = [SHELL, PATCH, DELETE, LOCAL]


@pytest.fixture(params=KINDS, ids=["shell", "patch", "deletion", "local shell"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def api(tmp_path: Path, engine: ScriptedEngine) -> Any:
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        yield Api(client)


def answered(kind: Kind, call: Json) -> Json:
    """The output of a call."""
    return {**kind.output, "call_id": call["call_id"]}


def check_call(kind: Kind, call: Json) -> None:
    """An item is the call of this kind."""
    assert {name: call[name] for name in kind.fields} == kind.fields
    assert (call["type"], call["status"]) == (kind.call, "completed")
    assert re.fullmatch(ITEM_TYPES[kind.call].prefix + "[0-9a-f]{48}", call["id"])


# ------------------------------------------------------------------------------------------------------------
# Calls and their outputs


async def test_a_call_is_streamed_and_its_output_goes_on(
    api: Api, engine: ScriptedEngine, kind: Kind
) -> None:
    stream = await api.stream(kind.asked, tools=kind.tools)
    [call] = stream.response["output"]
    check_call(kind, call)
    assert stream.types[2:-1] == ["output_item.added", *kind.events, "output_item.done"]
    assert await api.replay(stream.response["id"]) == stream.raw
    first = {"previous_response_id": stream.response["id"], "tools": kind.tools}
    assert text(await api.create([answered(kind, call)], **first)) == f"The tool said: {kind.words}"
    chained = prompts(engine)[-1]
    assert f'"name": "{kind.type}"' in chained
    assert json.dumps(kind.written, ensure_ascii=False) in chained.split("</tools>")[1].split(kind.asked)[1]
    # A client that resends everything, and one whose SDK writes the keys in another order.
    for same in (call, {**call, **(kind.other or {}), "id": "__fake_id__"}):
        items = [{"role": "user", "content": kind.asked}, same, answered(kind, call)]
        await api.create(items, tools=kind.tools, store=False)
        assert prompts(engine)[-1] == chained


async def test_a_background_call_and_a_conversation(api: Api, engine: ScriptedEngine, kind: Kind) -> None:
    conversation = await api.conversation()
    state = {"conversation": conversation, "tools": kind.tools}
    begun = await api.create(kind.asked, background=True, **state)
    [call] = (await api.ended(begun["id"]))["output"]
    check_call(kind, call)
    assert text(await api.create([answered(kind, call)], **state)) == f"The tool said: {kind.words}"
    kinds = [item["type"] for item in await api.conversation_items(conversation)]
    assert kinds == ["message", kind.call, f"{kind.call}_output", "message"]


async def test_a_call_that_has_no_output_is_asked_for(api: Api, kind: Kind) -> None:
    first = await api.create(kind.asked, tools=kind.tools)
    error = await api.refused(400, "and now?", previous_response_id=first["id"])
    assert first["output"][0]["call_id"] in error["message"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("whole", [False, True], ids=["as a text", "as an item"])
async def test_a_waiting_response_is_fed_and_may_be_fed_again(api: Api, kind: Kind, whole: bool) -> None:
    async with api.open(kind.asked, tools=kind.tools, await_tool_outputs=True) as live:
        call = (await live.until("output_item.done"))["item"]
        now = await api.waits(live.id)
        assert now["pending_tool_calls"] == [
            {"call_id": call["call_id"], "type": kind.call, "name": kind.call}
        ]
        entry = answered(kind, call) if whole else {"call_id": call["call_id"], "output": "free"}
        path = f"/v1/responses/{live.id}/tool_outputs"
        for _ in range(2):
            api.response(await api.http.post(path, json={"tool_outputs": [entry]}))
        done = await live.done()
        other = {**entry, "status": "completed", "output": "other"} if kind.type != "shell" else entry
        if kind.type != "shell":
            await api.fails(409, "POST", path, json={"tool_outputs": [other]})
    assert [item["type"] for item in done["output"]] == [kind.call, f"{kind.call}_output", "message"]
    wire.validate_item(done["output"][1], "ItemResource")
    assert kind.words in text(done) if whole else "free" in text(done)


async def test_outputs_posted_to_a_completed_response_continue_it(api: Api, kind: Kind) -> None:
    first = await api.create(kind.asked, tools=kind.tools)
    [call] = first["output"]
    path = f"/v1/responses/{first['id']}/tool_outputs"
    wrong = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "x"}
    error = await api.fails(400, "POST", path, json={"tool_outputs": [wrong]})
    assert error["param"] == "tool_outputs[0].type" and f"'{kind.call}_output'" in error["message"]
    second = api.response(await api.http.post(path, json=answered(kind, call)))
    assert text(second) == f"The tool said: {kind.words}"


# ------------------------------------------------------------------------------------------------------------
# Stops and kills


async def test_a_call_that_a_stop_cut_is_made_once(tmp_path: Path, kind: Kind) -> None:
    markup = f'<tool_call>\n{{"name": "{kind.type}", "arguments": {json.dumps(kind.written)}}}\n</tool_call>'
    whole = ScriptedEngine(saying(markup))
    async with live_app(tmp_path / "whole", whole) as server, http_client(server) as client:
        [expected] = (await Api(client).create("hi", tools=kind.tools))["output"]
    gate, half = Gate(), len(markup) * 2 // 3
    engine = ScriptedEngine(gated(gate, markup[:half], markup[half:]))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        begun = await Api(client).create("hi", tools=kind.tools, background=True)
        await gate.reached.wait()
    gate.release.set()
    engine = ScriptedEngine(gated(gate, markup[:half], markup[half:]))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        [call] = (await api.ended(begun["id"]))["output"]
        assert {name: call[name] for name in kind.fields} == {name: expected[name] for name in kind.fields}


async def test_a_response_waits_over_a_restart(tmp_path: Path, kind: Kind) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(kind.asked, tools=kind.tools, background=True, await_tool_outputs=True)
        now = await api.waits(begun["id"])
        [call] = now["output"]
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        api.response(await client.post(path, json={"tool_outputs": [answered(kind, call)]}))
        assert text(await api.ended(begun["id"])) == f"The tool said: {kind.words}"
        restored = prompts(engine)[-1]
        await api.create(
            [{"role": "user", "content": kind.asked}, call, answered(kind, call)], tools=kind.tools
        )
        assert prompts(engine)[-1] == restored


async def test_a_killed_server_goes_on_in_the_call_and_in_the_wait_for_its_output(tmp_path: Path) -> None:
    """Two kills: one while the model writes the second call, one while the client carries both out."""
    body: Json = {
        "input": f"{SHELL.asked}\ntick 20\n{PATCH.asked}",
        "tools": [*SHELL.tools, *PATCH.tools],
        "background": True,
        "await_tool_outputs": True,
    }

    async def until(client: httpx.AsyncClient, member: str) -> Json:
        """The response, once it has this member, or something in it."""
        async with asyncio.timeout(60):
            while not (now := (await client.get(path)).json()).get(member):
                await asyncio.sleep(0.01)
        return dict(now)

    async with server_process(tmp_path) as server, server.client() as client:
        begun = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{begun['id']}"
        [shell] = (await until(client, "output"))["output"]
        server.child.kill()
    async with server_process(tmp_path) as server, server.client() as client:
        first, patch = (await until(client, "pending_tool_calls"))["output"]
        assert first == shell
        check_call(SHELL, shell)
        check_call(PATCH, patch)
        server.child.kill()
    async with server_process(tmp_path) as server, server.client() as client:
        outputs = {"tool_outputs": [answered(SHELL, shell), answered(PATCH, patch)]}
        reply = await client.post(f"{path}/tool_outputs", json=outputs)
        assert reply.status_code == 200, reply.text
        done = (await client.get(path, params={"wait": "30"})).json()
        assert text(done) == f"The tool said: {SHELL.words}; {PATCH.words}"
        events = wire.events((await client.get(path, params={"stream": "true"})).content)
        wire.check_stream(events)
        again = {"input": "and now?", "tools": body["tools"]}
        resent = [{"role": "user", "content": body["input"]}, *done["output"]]
        counted = [
            (await client.post("/v1/responses/input_tokens", json={**again, **asking})).json()
            for asking in (
                {"previous_response_id": begun["id"]},
                {"input": [*resent, {"role": "user", "content": "and now?"}]},
            )
        ]
        assert counted[0] == counted[1]


# ------------------------------------------------------------------------------------------------------------
# Choices


async def test_a_kind_can_be_chosen_and_only_where_it_is_offered(api: Api, kind: Kind) -> None:
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    tools = [weather, *kind.tools]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": kind.tools}
    for choice in ({"type": kind.type}, allowed):
        body = {"input": "say hi", "tools": tools, "tool_choice": choice}
        reply = await api.http.post("/v1/responses", json=body)  # the schema has no choice of a local_shell
        assert {item["type"] for item in reply.json()["output"]} == {kind.call}
        error = await api.refused(400, "hi", tools=[weather], tool_choice=choice)
        assert error["param"] == "tool_choice"
    narrow = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    [message] = (await api.create(kind.asked, tools=tools, tool_choice=narrow))["output"]
    assert message["type"] != kind.call


async def test_two_calls_in_a_turn_unless_only_one_is_wanted(api: Api) -> None:
    tools, asked = [*SHELL.tools, *PATCH.tools], f"{SHELL.asked}\n{PATCH.asked}"
    both = await api.create(asked, tools=tools)
    assert [item["type"] for item in both["output"]] == [SHELL.call, PATCH.call]
    one = await api.create(asked, tools=tools, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]] == [SHELL.call]


async def test_a_function_of_the_same_name_is_a_clash(api: Api) -> None:
    function = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    error = await api.refused(400, "hi", tools=[*SHELL.tools, function])
    assert error["param"] == "tools" and "'shell'" in error["message"]


@pytest.mark.parametrize("environment", [None, {"type": "local"}])
async def test_a_local_shell_tells_of_its_skills(
    api: Api, engine: ScriptedEngine, environment: Json | None
) -> None:
    skill = {"name": "csv", "path": "/skills/csv", "description": "Reads tables."}
    tool: Json = {"type": "shell", "environment": environment}
    if environment is not None:
        tool["environment"] = {**environment, "skills": [skill]}
    await api.create("hi", tools=[tool])
    assert ("- csv (/skills/csv): Reads tables." in prompts(engine)[-1]) == (environment is not None)


@pytest.mark.parametrize(
    "environment, code, param",
    [
        ({"type": "container_auto"}, "unsupported_tool", "tools[0]"),
        ({"type": "container_auto", "skills": [{}]}, "unsupported_parameter", "tools[0].environment.skills"),
        ({"type": "containers"}, "invalid_value", "tools[0].environment.type"),
        ({}, "missing_required_parameter", "tools[0].environment.type"),
    ],
)
async def test_a_shell_that_nobody_can_run_is_refused(
    tmp_path: Path, environment: Json, code: str, param: str
) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        error = await Api(client).refused(400, "hi", tools=[{"type": "shell", "environment": environment}])
    assert (error["code"], error["param"][: len(param)]) == (code, param), error
    assert code != "unsupported_tool" or "--sandbox" in error["message"]


# ------------------------------------------------------------------------------------------------------------
# What the model writes

BROKEN: list[tuple[Kind, str]] = [
    (SHELL, '{"commands": ["ls"'),
    (SHELL, '["ls"]'),
    (SHELL, '{"commands": []}'),
    (SHELL, '{"commands": ["ls", 5]}'),
    (SHELL, '{"commands": "ls"}'),
    (SHELL, '{"commands": ["ls"], "timeout_ms": -1}'),
    (SHELL, '{"commands": ["ls"], "timeout_ms": 99999999999999999999}'),
    (SHELL, '{"commands": ["\\ud800"]}'),
    (PATCH, '{"type": "rename_file", "path": "a"}'),
    (PATCH, '{"type": "create_file", "path": "a"}'),
    (PATCH, '{"type": "create_file", "path": "", "diff": "+"}'),
    (LOCAL, "{}"),
    (LOCAL, '{"command": ["ls"], "env": {"A": 1}}'),
]


@pytest.mark.parametrize(("kind", "arguments"), BROKEN)
async def test_a_call_that_is_not_whole_stays_the_function_call_that_it_was_written_as(
    tmp_path: Path, kind: Kind, arguments: str
) -> None:
    """No client carries it out; one may tell the model so, by its id."""
    markup = f'<tool_call>\n{{"name": "{kind.type}", "arguments": {arguments}}}\n</tool_call>'
    engine = loose(saying(markup))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        stream = await api.stream("hi", tools=kind.tools)
        [call] = stream.response["output"]
        assert (stream.response["status"], call["type"], call["status"]) == (
            "completed",
            "function_call",
            "incomplete",
        )
        assert call["name"] == kind.type
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Try again."}
        await api.create([output], previous_response_id=stream.response["id"], tools=kind.tools)
        assert "Try again." in prompts(engine)[-1]


async def test_a_call_that_the_limit_cuts_is_not_carried_out(api: Api, kind: Kind) -> None:
    stream = await api.stream(kind.asked, tools=kind.tools, max_output_tokens=40)
    [call] = stream.response["output"]
    assert (stream.response["status"], call["type"], call["status"]) == (
        "incomplete",
        "function_call",
        "incomplete",
    )


async def test_arguments_that_nobody_asked_for_are_left_out(tmp_path: Path) -> None:
    arguments = '{"path": "a", "more": 1, "type": "delete_file", "diff": "+"}'
    markup = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    async with running_app(tmp_path, loose(saying(markup))) as server, http_client(server) as client:
        reply = await client.post("/v1/responses", json={"input": "hi", "tools": PATCH.tools})
    [call] = reply.json()["output"]
    assert call["operation"] == {"type": "delete_file", "path": "a"}
    assert "x-antiphon-ignored" not in reply.headers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", FORCED, ids=names)
@pytest.mark.parametrize("tool", ["shell", "apply_patch", "local_shell"])
def test_every_dialect_holds_the_model_to_calls_that_can_be_read(tool: str, row: Dialect) -> None:
    """Whatever is drawn under the mask is a call of the kind, and its diff is one of V4A."""
    item_type = type_of_calls(tool)
    assert item_type is not None and item_type.call is not None and item_type.call.whole is not None
    [function] = item_type.call.offers({"type": tool}, {}, "tools[0]")
    constraint = Constraint((tool_shape(function),), 1)
    shown = ToolShape(tool, json.dumps(function["parameters"]))
    reader = ReaderParams(calls=True, tools=(shown,), max_calls=1)
    found = 0
    for seed in range(8):
        ids = walk(row, "bytes", constraint, reader, random.Random(seed))
        if ids is None:
            continue
        [(_, arguments)], _ = calls_of(read(row, "bytes", ids, reader))
        fields = item_type.call.whole.read(json.dumps(arguments))
        assert fields is not None, arguments
        found += 1
        if tool == "apply_patch" and (diff := fields["operation"].get("diff")) is not None:
            made = CREATE if fields["operation"]["type"] == "create_file" else UPDATE
            assert re.fullmatch(made, diff), diff
    assert found


@pytest.mark.parametrize(
    ("pattern", "diff", "fits"),
    [
        (CREATE, "", False),
        (CREATE, "+a\n+\n+b\n", True),
        (CREATE, "+a\nb", False),
        (CREATE, "@@\n+a", False),
        (UPDATE, " a\n-b\n+c", True),
        (UPDATE, "@@ class A\n@@ def f\n a\n-b\n+c\n@@\n d\n+e\n*** End of File\n", True),
        (UPDATE, "", False),
        (UPDATE, "@@ def f\n", False),
        (UPDATE, "a\n-b", False),
        (UPDATE, " a\n\n-b", False),
        (UPDATE, "*** Begin Patch\n a", False),
    ],
)
def test_diffs(pattern: str, diff: str, fits: bool) -> None:
    assert (re.search(pattern, diff) is not None) == fits


# ------------------------------------------------------------------------------------------------------------
# Items of clients


async def test_the_output_of_a_local_shell_is_named_by_its_call(api: Api, engine: ScriptedEngine) -> None:
    """The official schema says that its `id` is the call's; SDKs send `call_id` alone."""
    [call] = (first := await api.create(LOCAL.asked, tools=LOCAL.tools))["output"]
    state = {"previous_response_id": first["id"], "tools": LOCAL.tools}
    for named in ("call_id", "id"):
        output = {"type": "local_shell_call_output", named: call["call_id"], "output": "total 0"}
        assert text(await api.create([output], **state)) == "The tool said: total 0"


@pytest.mark.sampled(2)
async def test_chat_is_offered_none_of_them(client: httpx.AsyncClient, kind: Kind) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": kind.tools}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_tool", "tools[0].type")
    assert "/v1/responses" in error["message"]
