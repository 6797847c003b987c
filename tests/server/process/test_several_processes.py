"""`--api-server-count` and `--engine-process`: server processes at one port, before one engine in a process
of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import Config
from server.process import supervise
from server.settings import ModelsFile
from storage import inspect_database
from tests.support.postgres import Postgres
from tests.support.processes import ServerProcess, server_process

Json = dict[str, Any]


@pytest.fixture
async def database(postgres: Postgres) -> AsyncIterator[str]:
    url = await postgres.fresh()
    yield url
    await postgres.give_back(url)


@asynccontextmanager
async def two(
    data: Path, database: str, *flags: str, engine: str = "scripted"
) -> AsyncIterator[ServerProcess]:
    """Two server processes, ended if the test has not done it."""
    given = ("--db", database, "--api-server-count", "2", *flags)
    async with server_process(data, *given, engine=engine) as server:
        yield server
        if server.child.returncode is None:
            server.signal(signal.SIGTERM)
            await asyncio.wait_for(server.child.wait(), 60)


def children(server: ServerProcess) -> dict[str, int]:
    """The process ids below a server's, by what they are."""
    found = {}
    for pid in Path(f"/proc/{server.child.pid}/task/{server.child.pid}/children").read_text().split():
        listens = Path(f"/proc/{pid}/net/unix").read_text()
        inodes = {os.readlink(each).strip("socket:[]") for each in _descriptors(int(pid))}
        names = re.findall(r" (\d+) \S*/metrics-([a-z0-9-]+)\.sock", listens)
        for inode, name in names:
            if inode in inodes:
                found[name] = int(pid)
    return found


def _descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [str(each) for each in folder.iterdir() if os.path.islink(each) and "socket" in os.readlink(each)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)


async def post(client: httpx.AsyncClient, input: str, **fields: Any) -> Json:
    reply = await client.post("/v1/responses", json={"input": input, **fields})
    assert reply.status_code == 200, reply.text
    body: Json = reply.json()
    return body


def text_of(response: Json) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


async def ended(client: httpx.AsyncClient, response_id: str) -> Json:
    """The response, once it has ended, however often a connection is cut meanwhile."""
    async with asyncio.timeout(60):
        while True:
            try:
                body: Json = (await client.get(f"/v1/responses/{response_id}")).json()
            except httpx.TransportError:
                continue
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.1)


async def runs(client: httpx.AsyncClient, number: int) -> None:
    """Wait until the engine generates for so many requests."""
    line = re.compile(rf"^antiphon_engine_running\{{.*\}} {number}\.0$", re.MULTILINE)
    async with asyncio.timeout(30):
        while not line.search((await client.get("/metrics")).text):
            await asyncio.sleep(0.05)


def requests_by_process(page: str) -> dict[str, float]:
    """Requests for responses that each process has answered."""
    lines = re.findall(r"^antiphon_requests_total\{(.*)\} (\S+)$", page, re.MULTILINE)
    found: dict[str, float] = {}
    for labels, number in lines:
        if 'route="/v1/responses"' in labels and (process := re.search(r'process="([^"]+)"', labels)):
            found[process[1]] = found.get(process[1], 0) + float(number)
    return found


# ------------------------------------------------------------------------------------------------------------


async def test_both_serve_and_one_reads_what_the_other_streams(tmp_path: Path, database: str) -> None:
    async with two(tmp_path, database) as server, AsyncExitStack() as stack:
        assert set(children(server)) == {"engine", "server-0", "server-1"}
        # Each client keeps one connection, and connections go in turn to the server that has fewer.
        clients = [await stack.enter_async_context(server.client()) for _ in range(2)]
        bodies = [await post(client, "count 3", store=True) for client in clients for _ in range(2)]
        assert [text_of(body) for body in bodies] == ["1 2 3"] * 4
        page = (await clients[0].get("/metrics")).text
        assert requests_by_process(page) == {"server-0": 2, "server-1": 2}
        up = [f'antiphon_process_up{{process="{name}"}} 1' for name in ("engine", "server-0", "server-1")]
        assert all(line in page for line in up)
        assert len(re.findall(r"^antiphon_engine_output_tokens_total", page, re.MULTILINE)) == 1

        asked = {"input": "tick 20\ncount 40", "stream": True, "background": True}
        async with clients[0].stream("POST", "/v1/responses", json=asked) as reply:
            lines = (line async for line in reply.aiter_lines() if line.startswith("data:"))
            events = [json.loads((await anext(lines))[5:])]
            other = asyncio.create_task(_stream(clients[1], events[0]["response"]["id"]))
            events += [json.loads(line[5:]) async for line in lines if "[DONE]" not in line]
        assert await other == events
        assert events[-1]["type"] == "response.completed"


async def _stream(client: httpx.AsyncClient, id: str) -> list[Json]:
    async with client.stream("GET", f"/v1/responses/{id}?stream=true") as reply:
        lines = [line async for line in reply.aiter_lines() if line.startswith("data:")]
    return [json.loads(line[5:]) for line in lines if "[DONE]" not in line]


async def test_calls_shapes_and_the_prefix_cache_are_those_of_one_process(
    tmp_path: Path, database: str
) -> None:
    """A model, over two turns at two servers: KV is kept between them, and belongs to its owner."""
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    flags = ("--num-threads", "1", "--api-key", "one", "--api-key", "two")
    async with two(tmp_path, database, *flags, engine="local") as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client()) for _ in range(2)]
        for client in clients:
            client.headers["authorization"] = "Bearer one"
        told = "My name is Mark. " * 20
        first = await post(clients[0], told, temperature=0)
        second = await post(clients[1], "What is my name?", previous_response_id=first["id"], temperature=0)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 64
        call = await post(
            clients[1], "Hello!", tools=[tool], tool_choice={"type": "function", "name": "weather"}
        )
        assert [item["type"] for item in call["output"]] == ["function_call"]
        shaped = await post(clients[0], "Is the sky blue?", guided_choice=["purple", "green"])
        assert text_of(shaped) in ("purple", "green")
        header = (await clients[0].get(f"/v1/responses/{first['id']}")).headers
        assert "x-antiphon-exact-resume" not in header
        # The engine's process has no database, and is told whose KV it saves.
        assert (tmp_path / "kv" / "database").read_text() == (await inspect_database(database)).id


@pytest.mark.long
async def test_a_server_that_is_killed_is_outlived_by_its_runs(tmp_path: Path, database: str) -> None:
    async with two(tmp_path, database) as server, server.client() as client:
        whole = " ".join(map(str, range(1, 101)))
        began = [await post(client, "tick 30\ncount 100", background=True, stream=False) for _ in range(2)]
        before = children(server)
        await runs(client, 2)
        os.kill(before["server-0"], signal.SIGKILL)
        await server.logs("the process server-0 has ended (by SIGKILL)")
        for response in began:
            body = await ended(client, response["id"])
            assert (body["status"], text_of(body)) == ("completed", whole)
        await until(lambda: children(server).get("server-0", before["server-0"]) != before["server-0"])
        assert children(server)["server-1"] == before["server-1"]


async def test_an_engine_that_is_killed_is_waited_for(tmp_path: Path, database: str) -> None:
    async with two(tmp_path, database) as server, server.client() as client:
        before = children(server)
        whole = " ".join(map(str, range(1, 101)))
        asked = {
            "model": "antiphon-scripted",
            "messages": [{"role": "user", "content": "tick 20\ncount 100"}],
        }
        unstored = asyncio.create_task(client.post("/v1/chat/completions", json=asked))
        stored = await post(client, "tick 20\ncount 100", background=True)
        await runs(client, 2)
        os.kill(before["engine"], signal.SIGKILL)
        body = await ended(client, stored["id"])
        assert (body["status"], text_of(body)) == ("completed", whole)
        assert (await unstored).json()["choices"][0]["message"]["content"] == whole
        after = children(server)
        assert after["engine"] != before["engine"]
        assert {name: after[name] for name in ("server-0", "server-1")} == {
            name: before[name] for name in ("server-0", "server-1")
        }


async def test_one_server_on_sqlite_outlives_its_engine(tmp_path: Path) -> None:
    async with server_process(tmp_path, "--engine-process") as server, server.client() as client:
        processes = children(server)
        assert set(processes) == {"engine", "server-0"}
        async with client.stream(
            "POST", "/v1/responses", json={"input": "tick 20\ncount 60", "stream": True}
        ) as reply:
            lines = reply.aiter_lines()
            while not (await anext(lines)).startswith("event: response.output_text.delta"):
                pass
            os.kill(processes["engine"], signal.SIGKILL)
            told = [line async for line in lines if line.startswith("data: ")]
        last = json.loads(told[-1].removeprefix("data: "))
        assert last["type"] == "response.completed"
        text = last["response"]["output"][0]["content"][0]["text"]
        assert text == " ".join(map(str, range(1, 61)))
        assert children(server)["engine"] != processes["engine"]
        assert (await client.get("/ready")).status_code == 200
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0
    for pid in processes.values():
        await until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
    state = await inspect_database(f"sqlite+aiosqlite:///{tmp_path / 'antiphon.db'}")
    assert state.holder is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_all(tmp_path: Path, database: str, number: signal.Signals) -> None:
    async with two(tmp_path, database) as server, server.client() as client:
        pids = children(server).values()
        asked = asyncio.create_task(post(client, "tick 20\ncount 50"))
        async with server.client() as other:
            await runs(other, 1)
        server.signal(number)
        assert text_of(await asked) == " ".join(map(str, range(1, 51)))
        assert await asyncio.wait_for(server.child.wait(), 60) == 0
        assert not any(map(is_alive, pids))


HUNG_UP_AT_EACH_START = """
import asyncio, os, signal, sys

start = asyncio.create_subprocess_exec

async def and_hang_up(*args, **kwargs):
    child = await start(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGHUP)
    return child

asyncio.create_subprocess_exec = and_hang_up
from server.cli import main

sys.exit(main(sys.argv[1:]))
"""


async def test_a_hangup_while_the_processes_start_ends_none_of_them(tmp_path: Path, database: str) -> None:
    given = ("--db", database, "--api-server-count", "2")
    async with server_process(tmp_path, *given, code=HUNG_UP_AT_EACH_START) as server:
        for name in ("server-0", "server-1"):
            await server.logs(f"[{name}]: SIGHUP: nothing has changed")


async def test_nothing_outlives_the_parent(tmp_path: Path, database: str) -> None:
    async with two(tmp_path, database) as server:
        pids = list(children(server).values())
        assert len(pids) == 3
        server.child.kill()
        await server.child.wait()
        await until(lambda: not any(map(is_alive, pids)))


def test_a_database_that_cannot_be_shared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(data=tmp_path, api_server_count=2)
    assert supervise(config, {}, began=0.0, reread=lambda: config) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "PostgreSQL" not in told and "postgresql+asyncpg" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            {"engine": "local", "path": "/m", "child": False},
            "in would be computed in each of them: give child",
        ),
        ({"engine": "scripted"}, "in would be computed in each of them: give child = true"),
        (
            {"engine": "local", "path": "/m", "memory_bytes": 10},
            "takes about 0.0 GiB, and models_memory_bytes",
        ),
    ],
    ids=["child = false", "scripted", "too large"],
)
def test_models_that_several_processes_cannot_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: Json, told: str
) -> None:
    entries = ModelsFile.model_validate({"models": [{"name": "in", **entry}]})
    db = "postgresql+asyncpg://nobody@127.0.0.1:1/none"
    config = Config(data=tmp_path, api_server_count=2, db=db, entries=entries, models_memory_bytes=5)
    assert supervise(config, {}, began=0.0, reread=lambda: config) == 2
    assert told in (line := capsys.readouterr().err) and line.count("\n") == 1


async def test_what_keeps_one_from_starting_ends_all(tmp_path: Path, database: str) -> None:
    """One line says why, and nothing is left."""
    with pytest.raises(AssertionError) as failed:
        async with two(tmp_path, database, "--model", str(tmp_path / "none"), engine="local"):
            pass
    log = str(failed.value)
    assert log.count("is not a folder") == 1
