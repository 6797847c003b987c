"""The invariants of runs, each under its name.

Those of other rooms stand with them: the fold equals the snapshot, and events of items are well-formed
(`test_assembler`); blocks add up, greedy tokens equal the oracle, text may be split anywhere, prompts grow
(`tests/engine`).
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import orjson
import pytest

from engine import ScriptedEngine
from storage import Finish, Record, RunAppend
from tests.support import wire
from tests.support.running import Running, http_client, live_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, gated
from tests.support.wire import Json

SERVER = Path(__file__).parents[3] / "server"


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


def test_sequence_number_is_made_in_one_function() -> None:
    makers = []
    clients = {SERVER / "cli" / "session.py", SERVER / "admin" / "live_runs.py"}
    # These tell the numbers of events that are in the log.
    repeats = {*(SERVER / "event_profiles").glob("*.py"), SERVER / "routes" / "websocket" / "frames.py"}
    describes = {*(SERVER / "schema" / "description").glob("*.py")}
    for path in set(SERVER.rglob("*.py")) - clients - repeats - describes:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
                makers += [function.name] * ("sequence_number" in names)
    assert makers == ["stamp"]


async def test_a_visible_event_is_in_the_log(tmp_path: Path) -> None:
    """At the very moment at which a client has it."""
    async with (
        live_app(tmp_path, ScriptedEngine(tick_s=0.001)) as server,
        http_client(server) as client,
        Api(client).open("think hm then count 9", background=True) as live,
    ):
        while (event := await live.next()) is not None:
            [*_, last] = await server.context.storage.records(live.id, after=event["sequence_number"] - 1)
            assert last.first_seq + last.num_events > event["sequence_number"]


ENDS: dict[str, Json] = {
    "completed": {"input": "say hi"},
    "incomplete": {"input": "count 99", "max_output_tokens": 16},
    "failed": {"input": "say one\nfail now"},
    "failed at once": {"input": "fail now"},
    "calls": {"input": call(), "tools": [WEATHER]},
    "server tools": {"input": 'call calculator {"expression": "1+1"}', "tools": [BUILTIN]},
    "deadline": {"input": call(), "tools": [WEATHER], "await_tool_outputs": True, "tool_timeout_s": 0.01},
}


FORMS: dict[str, Json] = {"foreground": {}, "background": {"background": True}, "unstored": {"store": False}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("end", "form"),
    [(end, form) for end in ENDS for form in FORMS if (end, form) != ("deadline", "unstored")],
)
async def test_exactly_one_terminal_event_last(api: Api, end: str, form: str) -> None:
    stream = await api.stream(**ENDS[end], **FORMS[form])
    terminal = [
        n for n, name in enumerate(stream.types) if name in ("completed", "incomplete", "failed", "cancelled")
    ]
    assert terminal == [len(stream.types) - 1]


async def test_status_changes_only_by_conditional_update(tmp_path: Path) -> None:
    """A status never leaves a terminal state, whoever writes with whatever fence."""
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api, storage = Api(client), server.context.storage
        begun = await api.create("hi", background=True)
        await gate.reached.wait()
        stale = RunAppend(begun["id"], fence=0, status="queued")
        assert begun["id"] in await storage.append([stale])
        assert (await api.get(begun["id"]))["status"] == "in_progress"
        gate.release.set()
        ended = await api.ended(begun["id"])
        event = Record(0, 1, orjson.dumps({"type": "response.failed"}))
        for fence in range(4):
            for late in (
                RunAppend(begun["id"], fence, status="in_progress", head=b"{}"),
                RunAppend(begun["id"], fence, records=(event,), finish=Finish("failed", 1, append=False)),
            ):
                assert begun["id"] in await storage.append([late])
        assert await api.get(begun["id"]) == ended


VALUES: Json = {
    "background": True,
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "include": ["message.output_text.logprobs"],
    "input": "say hi",
    "instructions": "be brief",
    "max_output_tokens": 99,
    "max_tool_calls": 3,
    "metadata": {"k": "v"},
    "model": "antiphon-scripted",
    "moderation": {"model": "m"},
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"verbosity": "low"},
    "tool_choice": "none",
    "tools": [WEATHER],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "u",
    "frobnicate": 1,
}
"""Every official field with a value that asks for something, and one that nobody knows."""

ELSEWHERE = {"conversation", "previous_response_id", "prompt"}  # which need something to refer to
NOT_ECHOED = {"input", "include", "stream", "stream_options", "prompt_cache_options", "context_management"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "field", sorted({*wire.properties(wire.schema("CreateResponse")), "frobnicate"} - ELSEWHERE)
)
async def test_no_field_is_ignored_in_silence(api: Api, field: str) -> None:
    """It is refused, or named in the header, or echoed with what it then is."""
    body = {"input": "say hi", field: VALUES[field]}
    if field == "stream_options":
        body["stream"] = True
    reply = await api.http.post("/v1/responses", json=body)
    ignored = [unquote(name) for name in reply.headers.get("x-antiphon-ignored", "").split(",")]
    if reply.status_code == 400:
        error = wire.validate_error(reply.json())
        assert (error["code"], error["param"]) == ("unsupported_parameter", field)
        assert field == "moderation"
        return
    response: Any = api.whole(reply).response if body.get("stream") else api.response(reply)
    if field == "include":
        assert response["output"][0]["content"][0]["logprobs"], "what is asked for is there"
    if field == "frobnicate":
        assert ignored == [field] and field not in response
    elif field not in NOT_ECHOED:
        wanted = VALUES[field]
        echoed = response[field]
        assert {k: echoed[k] for k in wanted} == wanted if isinstance(wanted, dict) else echoed == wanted


async def test_no_task_without_an_owner(tmp_path: Path) -> None:
    """What runs ends with the server, whatever its clients did."""
    before = asyncio.all_tasks()
    gate = Gate()

    async def used(server: Running) -> None:
        async with http_client(server) as client:
            api = Api(client)
            await api.create("hi", background=True)
            await gate.reached.wait()
            async with api.open("hi", store=False) as live:
                await live.next()
            asked: Json = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
            await api.create(call(), **asked)

    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server:
        await used(server)
    async with asyncio.timeout(10):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.001)
