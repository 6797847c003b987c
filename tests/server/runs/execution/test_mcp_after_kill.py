"""A `kill -9` of the server in the middle of a call of an MCP server that counts what it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.runs.execution.test_mcp_servers import DESK, LOOK_UP
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.processes import server_process
from tests.support.talk import Api
from tests.support.wire import Json

TOKEN = "tk-0123456789abcdef"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("repeated", [False, True], ids=["may not run twice", "may run twice"])
async def test_a_killed_call_is_told_or_repeated(tmp_path: Path, repeated: bool) -> None:
    seen, data = Seen(), tmp_path / "data"
    data.mkdir(mode=0o700)
    async with mcp_server(seen) as url:
        rights = 'idempotent = ["hold"]\n' if repeated else ""
        (data / "antiphon.toml").write_text(f'[mcp.servers.desk]\nurl = "{url}"\n{rights}')
        async with server_process(data) as server, server.client() as client:
            tool = {**DESK, "authorization": TOKEN}
            body: Json = {"input": "call hold {}", "tools": [tool], "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(seen.held.wait(), 30)
            server.child.kill()
            await asyncio.wait_for(seen.cancelled.wait(), 30)  # the server at the other end sees the loss
        seen.free.set()
        async with server_process(data) as server, server.client() as client:
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
    listing, made, message = done["output"]
    assert (done["status"], listing["type"]) == ("completed", "mcp_list_tools")
    assert seen.called == ["hold"] * (1 + repeated)
    assert {meta["antiphon/call"] for meta in seen.metas} == {made["id"]}
    assert {each.get("authorization") for each in seen.headers} == {f"Bearer {TOKEN}"}
    assert len(seen.listings) == 1, "after the crash the offer is made of items"
    if repeated:
        assert (made["status"], made["output"]) == ("completed", "held")
    else:
        assert made["status"] == "failed" and "not known" in made["error"]["content"][0]["text"]
        assert "not known" in message["content"][0]["text"]
    for file in data.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


async def test_an_outcome_that_was_there_outlives_a_kill_in_a_call_beside_it(tmp_path: Path) -> None:
    seen, data = Seen(), tmp_path / "data"
    data.mkdir(mode=0o700)
    async with mcp_server(seen) as url:
        (data / "antiphon.toml").write_text(f'[mcp.servers.desk]\nurl = "{url}"\n')
        async with server_process(data) as server, server.client() as client:
            asked = f"call hold {{}}\n{LOOK_UP}"
            async with Api(client).open(asked, tools=[DESK], background=True) as live:
                async with asyncio.timeout(30):
                    await live.until("mcp_call.completed")
                    await seen.held.wait()
                server.child.kill()
                shown = await live.cut()
        async with server_process(data) as server, server.client() as client:
            done = await Api(client).ended(live.id)
            again = await Api(client).replay(live.id, shown[-1]["sequence_number"])
    _, held, found, _ = done["output"]
    assert "not known" in held["error"]["content"][0]["text"]
    assert (found["status"], found["output"]) == ("completed", "home means much")
    assert sorted(seen.called) == ["hold", "look_up"]
    assert f'"sequence_number":{shown[-1]["sequence_number"] + 1},'.encode() in again.splitlines()[1]
