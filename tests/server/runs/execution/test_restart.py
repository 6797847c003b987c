"""Restarts: what was stored is there; stops, kills and drains."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from server.clock import now_us
from server.runs.planning import RunPlan, spent_so_far
from tests.chaos.checker import check_used
from tests.support.making import is_sqlite, query
from tests.support.running import http_client, live_app, running_app, used_database
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, gated, prompts, text
from tools import BUILTIN as REGISTRY

# ------------------------------------------------------------------------------------------------------------
# A stop


async def test_everything_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        conversation = await api.conversation()
        streams = [
            await api.stream("think hm then say one", metadata={"k": "v"}, instructions="be brief"),
            await api.stream(call(), tools=[WEATHER, BUILTIN]),
            await api.stream("count 50", max_output_tokens=16),
            await api.stream("say hi", conversation=conversation),
        ]
        items = await api.conversation_items(conversation)
        listed = await api.page("/v1/responses")
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        for stream in streams:
            assert await api.get(stream.response["id"]) == stream.response
            assert await api.replay(stream.response["id"]) == stream.raw
        assert await api.conversation_items(conversation) == items
        assert await api.page("/v1/responses") == listed


async def test_a_run_whose_tools_are_gone_after_a_restart_ends(tmp_path: Path) -> None:
    """An operator who takes a tool away, or adds one of the same name, leaves no run in flight for ever."""
    gate = Gate()
    chosen = {**BUILTIN, "allowed_tools": ["calculator"]}
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = await Api(client).create("hi", tools=[chosen], background=True)
        await asyncio.wait_for(gate.reached.wait(), 20)
        await server.context.runs.drain(0.0)
    left = {name: spec for name, spec in REGISTRY.items() if name != "calculator"}
    async with running_app(tmp_path, registry=left) as server, http_client(server) as client:
        ended = await Api(client).ended(begun["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "invalid_prompt")
    assert "There is no tool 'calculator'" in ended["error"]["message"]


async def test_a_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        first = await Api(client).create("My name is Mark.")
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        await Api(client).create("What is my name?", previous_response_id=first["id"])
        shown = prompts(engine)[-1]
        assert shown.index("My name is Mark.") < shown.index(text(first)) < shown.index("What is my name?")


async def test_a_cancel_that_a_stop_overtook_is_carried_out(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = await Api(client).create("hi", background=True)
        await gate.reached.wait()
        await server.context.storage.request_cancel("local", begun["id"])
    async with running_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).ended(begun["id"]))["status"] == "cancelled"


async def test_a_run_that_cannot_be_read_does_not_keep_the_server_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        broken = await Api(client).create("hi", background=True)
        sound = await Api(client).create("hi", background=True)
        await gate.reached.wait()
    load = RunPlan.load

    def loading(data: bytes) -> RunPlan:
        if broken["id"].encode() in data:
            raise TypeError("written by another version")
        return load(data)

    monkeypatch.setattr(RunPlan, "load", loading)
    async with running_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).ended(sound["id"]))["status"] == "completed"
        assert (await Api(client).create("say hi"))["status"] == "completed"
    monkeypatch.undo()
    async with running_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).ended(broken["id"]))["status"] == "completed"


def broken(_data: bytes) -> RunPlan:
    raise TypeError("written by another version")


async def test_a_run_that_can_never_be_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        conversation = await api.conversation()
        begun = await api.create("hi", background=True, conversation=conversation)
        await gate.reached.wait()
    monkeypatch.setattr(RunPlan, "load", broken)
    monkeypatch.setattr("server.runs.takeover.UNREAD_S", 0.0)
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        async with asyncio.timeout(30):
            ended = await api.ended(begun["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
        assert text(ended) == "one two" and ended["output"][0]["status"] == "incomplete"
        assert (await api.create("say hi", conversation=conversation))["status"] == "completed"
        assert (await api.get(begun["id"])) == ended
        await api.delete(begun["id"])


async def test_a_run_that_cannot_be_read_can_be_cancelled_deleted_and_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        begun = [(await api.create("hi", background=True))["id"] for _ in range(3)]
        await gate.reached.wait()
    monkeypatch.setattr(RunPlan, "load", broken)
    async with live_app(tmp_path) as server, http_client(server) as client:
        api, storage = Api(client), server.context.storage
        assert (await api.cancel(begun[0]))["status"] == "cancelled"
        assert (await api.ended(begun[0]))["status"] == "cancelled"
        await api.delete(begun[1])
        assert (await api.get(begun[2]))["status"] in ("queued", "in_progress")
        async with aclosing(storage.purge("local", now_us(), entry=None, spending=spent_so_far)) as steps:
            went = [step async for step in steps]
        assert sum(len(step.runs) for step in went) == 1
        assert await storage.num_live_runs() == {}


async def test_a_run_of_a_newer_version_ends_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says in its plan what this version knows nothing of: it must not go on as if that was not there."""
    monkeypatch.setattr("server.runs.takeover.UNSERVED_S", 0.0)  # a database of several leaves it to others
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = await Api(client).create("hi", background=True)
        await gate.reached.wait()
    where = used_database(tmp_path)
    newer = "CAST(json_set(CAST(plan AS TEXT), '$.curfew', 1) AS BLOB)"
    if not is_sqlite(where):
        newer = "convert_to((convert_from(plan, 'UTF8')::jsonb || '{\"curfew\": 1}')::text, 'UTF8')"
    query(where, f"UPDATE responses SET plan = {newer}")
    async with live_app(tmp_path) as server, http_client(server) as client:
        ended = await Api(client).ended(begun["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
        assert "newer version" in ended["error"]["message"]
        assert text(ended) == "one two"


async def test_a_response_tells_how_many_restarts_it_went_on_after(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = await Api(client).create("hi", background=True)
        await gate.reached.wait()
        assert "restarts" not in await Api(client).get(begun["id"])
    for number in (1, 2):
        gate = Gate()
        async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
            await gate.reached.wait()
            assert (await Api(client).get(begun["id"]))["restarts"] == number
    async with running_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(begun["id"])
        assert (done["status"], done["restarts"]) == ("completed", 3)
        forked = await client.post(f"/v1/responses/{begun['id']}/fork", json={})
        assert forked.status_code == 200 and "restarts" not in forked.json()


async def test_a_drain_lets_runs_finish(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate))) as server,
        http_client(server) as client,
        Api(client).open("hi") as live,
    ):
        await live.until("output_text.delta")
        await gate.reached.wait()
        draining = asyncio.create_task(server.life.drain(10))
        await asyncio.sleep(0)
        assert (await Api(client).refused(503, "hi"))["code"] == "draining"
        gate.release.set()
        assert (await live.done())["status"] == "completed"
        await draining


async def test_outputs_that_come_after_the_drain_wait_for_the_next_start(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
        now = await api.waits(begun["id"])
        await server.context.runs.drain(0)
        await api.outputs(begun["id"], {now["pending_tool_calls"][0]["call_id"]: "rainy"})
        assert server.context.runs.num_active == 0
    async with running_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(begun["id"])
        assert (done["status"], text(done)) == ("completed", "The tool said: rainy")


# ------------------------------------------------------------------------------------------------------------
# A kill


@dataclass(slots=True)
class Seen:
    """What one client saw of one stream."""

    raw: bytes = b""
    id: str | None = None


@dataclass(slots=True)
class History:
    """What all clients saw, and what was promised to them."""

    streams: list[Seen] = field(default_factory=list)
    promised: list[str] = field(default_factory=list)
    num_bytes: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    limit: int = 0

    def more(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes >= self.limit:
            self.enough.set()


@asynccontextmanager
async def child(folder: Path, port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "server.cli", "serve", "--engine", "scripted", "--port", str(port),
        "--data", str(folder), "--tick-s", "0.004", "--log-level", "error",
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[4], env={**os.environ, "PYTHONWARNINGS":
        ""},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            banner = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", banner)
        assert found is not None, banner
        yield process, found.group()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _read(url: str, body: dict[str, object], history: History) -> None:
    seen = Seen()
    history.streams.append(seen)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        try:
            async with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
                async for data in reply.aiter_raw():
                    seen.raw += data
                    history.more(data)
        except httpx.TransportError:
            pass
    found = re.search(rb'"id":"(resp_[0-9a-f]+)"', seen.raw)
    seen.id = found.group(1).decode() if found else None


async def _promise(url: str, history: History) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        try:
            reply = await client.post("/v1/responses", json={"input": "count 200", "background": True})
        except httpx.TransportError:
            return
        history.promised.append(reply.json()["id"])
        history.more(b"")


async def _check(url: str, history: History) -> None:
    """I1 to I4 of what was seen before the kill, against what is read after it."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        api = Api(client)
        begun = [seen for seen in history.streams if seen.id is not None]
        for response_id in {*history.promised, *(seen.id for seen in begun if seen.id)}:
            done = await api.ended(response_id)  # I1; I3, I4: one terminal event; deltas make the text
            assert done["status"] == "completed"
        for seen in begun:
            assert seen.id is not None
            assert (await api.replay(seen.id)).startswith(seen.raw), "I2: not what was seen"
        assert (await api.create("say still here"))["status"] == "completed"
        await _check_usage(api)


async def _check_usage(api: Api) -> None:
    """Every response is counted once, whatever happened to those that carried it on."""
    stored = [await api.ended(each["id"]) for each in await api.pages("/v1/responses", limit=100)]
    since = {"start_time": int(time.time()) - 86400}
    page = (await api.http.get("/v1/organization/usage/completions", params=since)).json()
    used: Counter[str] = Counter()
    for bucket in page["data"]:
        for result in bucket["results"]:
            used.update({name: value for name, value in result.items() if type(value) is int})
    assert check_used([each["usage"] for each in stored], used) == []


@pytest.mark.long
async def test_a_kill_at_a_random_moment_loses_nothing_that_was_seen(tmp_path: Path) -> None:
    seed = int(os.environ.get("ANTIPHON_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"seed {seed}")
    draw = random.Random(seed)
    history = History()
    for _ in range(3):
        async with child(tmp_path) as (process, url):
            await _check(url, history)
            history = History(limit=draw.randrange(2_000, 200_000))
            asked = [f"count {draw.randrange(1, 150)}" for _ in range(10)]
            clients = [
                asyncio.create_task(_read(url, {"input": each, "background": draw.random() < 0.5}, history))
                for each in asked
            ]
            clients += [asyncio.create_task(_promise(url, history)) for _ in range(2)]
            finished = asyncio.ensure_future(asyncio.wait(clients))
            enough = asyncio.ensure_future(history.enough.wait())
            await asyncio.wait((finished, enough), return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.gather(*clients)
            assert history.num_bytes, "killed before anything was seen"
    async with child(tmp_path) as (_, url):
        await _check(url, history)
