"""store=false: a run that leaves nothing behind, in the database or in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from tests.support import wire
from tests.support.running import Running, http_client, live_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, calls, gated, text


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


def rows(folder: Path) -> int:
    """How many rows a database has; migrations, the owners and the sums of what they used aside."""
    with sqlite3.connect(folder / "antiphon.db") as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return sum(
            database.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
            for table in tables
            if table not in ("alembic_version", "owners", "usage") and not table.startswith("sqlite_")
        )


@pytest.mark.parametrize("form", [{}, {"stream": True}])
async def test_nothing_is_written(
    server_app: Running, api: Api, tmp_path: Path, form: dict[str, bool]
) -> None:
    before = rows(tmp_path)
    asked = {"input": "think hm then say hi", "store": False, **form}
    reply = await api.http.post("/v1/responses", json=asked)
    response = api.whole(reply).response if form else api.response(reply)
    assert (text(response), response["store"]) == ("hi", False)
    assert rows(tmp_path) == before
    for method, tail in (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("GET", "/input_items")):
        await api.fails(404, method, f"/v1/responses/{response['id']}{tail}")
    error = await api.refused(400, "hi", previous_response_id=response["id"])
    assert error["code"] == "previous_response_not_found"
    await api.refused(404, [{"type": "item_reference", "id": response["output"][0]["id"]}])
    assert (await api.page("/v1/responses"))["data"] == []
    feed = server_app.context.runs.feed
    assert (server_app.context.runs.num_active, feed._channels) == (0, {})


async def test_the_client_keeps_the_history(api: Api) -> None:
    first = await api.create(call(), tools=[WEATHER], store=False)
    output = {"type": "function_call_output", "call_id": calls(first)[0]["call_id"], "output": "wet"}
    second = await api.create(
        [{"role": "user", "content": call()}, *first["output"], output], tools=[WEATHER], store=False
    )
    assert text(second) == "The tool said: wet"


async def test_server_tools_need_no_store(api: Api) -> None:
    response = await api.create('call calculator {"expression": "2+3"}', tools=[BUILTIN], store=False)
    assert text(response) == "The tool said: 5"


async def test_a_failed_run_says_so(api: Api) -> None:
    stream = await api.stream("say one\nfail now", store=False)
    assert (stream.response["status"], text(stream.response)) == ("failed", "one")


async def test_a_client_may_wait_for_its_own_outputs_only_when_stored(api: Api) -> None:
    """A run that waits is durable; without a store there is nothing that could wait."""
    error = await api.refused(400, call(), tools=[WEATHER], await_tool_outputs=True, stream=True, store=False)
    assert error["param"] == "await_tool_outputs"


async def test_an_unstored_stream_has_the_same_events(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        gate.release.set()
        kept = await api.stream("hi")
        unkept = await api.stream("hi", store=False)
        assert kept.types == unkept.types
        assert (
            wire.check_items([e for e in unkept.events if "response" not in e]) == unkept.response["output"]
        )
