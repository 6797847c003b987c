"""A `kill -9` of a server whose run waits for an approval, and approvals that come in at another server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from server.mcp_servers import read_mcp_settings
from tests.server.runs.execution.test_mcp_approvals import ASKING, BOOK, approve, decline, requests
from tests.server.runs.execution.test_mcp_servers import kinds
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.postgres import Postgres
from tests.support.processes import server_process
from tests.support.running import http_client, live_app
from tests.support.talk import Api, text
from tests.support.wire import Json

TOKEN = "tk-0123456789abcdef"
SECRET = {**ASKING, "authorization": TOKEN}


def holds_token(data: Path) -> bool:
    """Whether any file of a data folder has the token in the clear."""
    return any(TOKEN.encode() in file.read_bytes() for file in data.rglob("*") if file.is_file())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("approved", [True, False], ids=["approved", "declined"])
async def test_an_answer_comes_after_a_kill(tmp_path: Path, approved: bool) -> None:
    """The credentials that the request gave for the MCP server are there as long as the run waits."""
    seen, data = Seen(), tmp_path / "data"
    data.mkdir(mode=0o700)
    async with mcp_server(seen) as url:
        (data / "antiphon.toml").write_text(f'[mcp.servers.desk]\nurl = "{url}"\n')
        async with server_process(data) as server, server.client() as client:
            body: Json = {"input": BOOK, "tools": [SECRET], "background": True, "await_tool_outputs": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            before = await Api(client).waits(begun["id"])
            server.child.kill()
            await server.child.wait()
        [request] = requests(before)
        assert seen.called == [] and not holds_token(data)
        async with server_process(data) as server, server.client() as client:
            assert await Api(client).waits(begun["id"]) == {**before, "attempt": 1}
            said = approve(request["id"]) if approved else decline(request["id"], reason="no")
            path = f"/v1/responses/{begun['id']}/tool_outputs"
            fed = await client.post(path, json={"tool_outputs": [said]})
            assert fed.status_code == 200, fed.text
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
            stream = await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})
            assert Api.whole(stream).response == done
    made = ["mcp_call"] * approved
    assert kinds(done) == [
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", *made, "message")
    ]
    assert seen.called == ["book"] * approved
    assert text(done).endswith("booked 3" if approved else "The reason: no")
    assert {each.get("authorization") for each in seen.headers} == {f"Bearer {TOKEN}"}
    assert len(seen.listings) == 1 and not holds_token(data)


async def test_a_kill_in_an_approved_call(tmp_path: Path) -> None:
    """A response to an approval is killed in the call, before its first generation."""
    seen, data = Seen(), tmp_path / "data"
    data.mkdir(mode=0o700)
    async with mcp_server(seen) as url:
        (data / "antiphon.toml").write_text(f'[mcp.servers.desk]\nurl = "{url}"\n')

        async def create(client: httpx.AsyncClient, **body: object) -> Json:
            reply = await client.post("/v1/responses", json={"tools": [SECRET], **body})
            assert reply.status_code == 200, reply.text
            found: Json = reply.json()
            return found

        async with server_process(data) as server, server.client() as client:
            first = await create(client, input="call hold {}")
            [request] = requests(first)
            begun = await create(
                client, input=[approve(request["id"])], previous_response_id=first["id"], background=True
            )
            await asyncio.wait_for(seen.held.wait(), 30)
            server.child.kill()
            await asyncio.wait_for(seen.cancelled.wait(), 30)
        seen.free.set()
        async with server_process(data) as server, server.client() as client:
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
    assert (done["status"], kinds(done), seen.called) == ("completed", ["mcp_call", "message"], ["hold"])
    assert done["output"][0]["approval_request_id"] == request["id"]
    assert "not known" in text(done) and not holds_token(data)


async def test_an_approval_comes_in_at_another_server(postgres: Postgres, tmp_path: Path) -> None:
    """Two servers on one database: the second one takes the answer, and makes the call."""
    seen = Seen()
    async with mcp_server(seen) as url, AsyncExitStack() as stack:
        known = read_mcp_settings({"servers": {"desk": {"url": url}}}, {})
        database = await postgres.fresh()
        apis = []
        for name in ("a", "b"):
            running = live_app(tmp_path / name, db=database, mcp=known)
            server = await stack.enter_async_context(running)
            apis.append(Api(await stack.enter_async_context(http_client(server))))
        one, other = apis
        begun = await one.create(BOOK, tools=[SECRET], await_tool_outputs=True, background=True)
        [request] = requests(await one.waits(begun["id"]))
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        fed = await other.http.post(path, json={"tool_outputs": [approve(request["id"])]})
        assert fed.status_code == 200, fed.text
        done = await other.ended(begun["id"])
        assert await one.get(begun["id"]) == done
    assert text(done) == "The tool said: booked 3" and seen.called == ["book"]
    assert {each.get("authorization") for each in seen.headers} == {f"Bearer {TOKEN}"}
