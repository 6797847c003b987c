"""Credentials for MCP servers: sent to the server, sealed while the run needs them, and nowhere after its
end."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import orjson
import pytest

from engine import ScriptedEngine
from server.config import ConfigError, load
from server.runs.planning import RunPlan
from server.schema.tools import normalize_tool
from tests.server.runs.execution.test_mcp_servers import DESK, LOOK_UP, settings
from tests.support.making import is_sqlite, queries, query, tables
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import Running, http_client, live_app, running_app, used_database
from tests.support.talk import Api, Gate, gated
from tests.support.wire import Json

TOKEN = "tk-0123456789abcdef"
KEY = "hk-fedcba9876543210"
SECRET = {**DESK, "authorization": TOKEN, "headers": {"X-Desk-Key": KEY}}


async def plan(server: Running, response_id: str) -> RunPlan:
    stored = await server.context.storage.get_response("local", response_id)
    return RunPlan.load(stored.plan)


def written(folder: Path) -> bytes:
    """All that lies in the database and beside it. Of one on PostgreSQL, what can be read by its tables."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    told = [file.read_bytes() for file in files]
    if is_sqlite(where := used_database(folder)):
        assert any(file.name == "antiphon.db" for file in files)
        return b"".join(told)
    found = queries(where, [f"SELECT * FROM {table}" for table in tables(where)])
    values = (value for rows in found for row in rows for value in row)
    told += [value if isinstance(value, bytes) else str(value).encode() for value in values]
    return b"\n".join(told)


async def test_credentials_are_sent_and_left_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    caplog.set_level("DEBUG")
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        stream = await Api(client).stream(LOOK_UP, tools=[SECRET])
        response_id = stream.response["id"]
        kept = await plan(server, response_id)
        found = [written(tmp_path), stream.raw, (await client.get(f"/v1/responses/{response_id}")).content]
    assert {(each["authorization"], each["x-desk-key"]) for each in seen.headers} == {
        (f"Bearer {TOKEN}", KEY)
    }
    assert stream.response["tools"] == [DESK]
    assert kept.secrets is None
    for text in (*found, written(tmp_path), caplog.text.encode()):
        assert TOKEN.encode() not in text and KEY.encode() not in text


async def test_a_response_whose_credentials_are_gone_is_not_continued_without_them(tmp_path: Path) -> None:
    seen = Seen()
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        asking = {**SECRET, "require_approval": "always"}
        first = await Api(client).create(LOOK_UP, tools=[asking])
        approval = {"type": "mcp_approval_response", "approval_request_id": first["output"][1]["id"]}
        answer = {**approval, "approve": True}
        outputs = await client.post(
            f"/v1/responses/{first['id']}/tool_outputs", json={"tool_outputs": [answer]}
        )
        assert (outputs.status_code, outputs.json()["error"]["code"]) == (400, "mcp_credentials_erased")
        assert "'desk'" in outputs.json()["error"]["message"] and not seen.called
        again = await Api(client).create([answer], tools=[asking], previous_response_id=first["id"])
    assert seen.called == ["look_up"] and again["output"][0]["output"] == "home means much"


async def test_credentials_outlive_the_process_sealed_to_their_run(tmp_path: Path) -> None:
    seen = Seen()
    async with mcp_server(seen) as url:
        known = settings(desk={"url": url})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            body = {"input": "call hold {}", "tools": [SECRET], "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(seen.held.wait(), 20)
            held = await plan(server, begun["id"])
            sealing = server.context.sealing
            opened = await sealing.opened_secrets("local", begun["id"], held.secrets)
            elsewhere = [
                await sealing.opened_secrets("other", begun["id"], held.secrets),
                await sealing.opened_secrets("local", "resp_other", held.secrets),
            ]
            assert TOKEN.encode() not in written(tmp_path)
            await server.context.runs.drain(0.0)
        assert opened == {"0": {"authorization": TOKEN, "headers": {"X-Desk-Key": KEY}}}
        assert elsewhere == [{}, {}]
        num_before = len(seen.headers)
        async with running_app(tmp_path, ScriptedEngine(), **known) as server, http_client(server) as client:
            ended = await Api(client).ended(begun["id"])
            assert (await plan(server, begun["id"])).secrets is None
            again = await Api(client).create(LOOK_UP, tools=[SECRET], previous_response_id=begun["id"])
    assert ended["status"] == "completed"
    assert again["output"][0]["output"] == "home means much"
    assert {each["authorization"] for each in seen.headers[num_before:]} == {f"Bearer {TOKEN}"}
    assert TOKEN.encode() not in written(tmp_path)


@pytest.mark.parametrize("end", ["cancelled", "cancelled in the queue", "failed", "expired", "deleted"])
async def test_credentials_go_with_every_end(tmp_path: Path, end: str) -> None:
    seen, gate = Seen(), Gate()
    queues = end == "cancelled in the queue"
    engine = ScriptedEngine(gated(gate)) if queues else ScriptedEngine()
    async with mcp_server(seen) as url:
        known = settings(desk={"url": "http://127.0.0.1:9/mcp" if end == "failed" else url})
        if queues:
            known["max_num_seqs"] = 1
        async with live_app(tmp_path, engine, **known) as server, http_client(server) as client:
            api = Api(client)
            if queues:
                await api.create("hi", background=True)
                await asyncio.wait_for(gate.reached.wait(), 20)
            body: Json = {"input": "call hold {}", "tools": [SECRET], "background": True}
            if end == "expired":
                asking = {**SECRET, "require_approval": "always"}
                body |= {"tools": [asking], "await_tool_outputs": True, "tool_timeout_s": 0.05}
            begun = (await client.post("/v1/responses", json=body)).json()["id"]
            if end in ("cancelled", "deleted"):
                await asyncio.wait_for(seen.held.wait(), 20)
                assert (await plan(server, begun)).secrets is not None
            if end == "deleted":
                await api.delete(begun)
            elif end.startswith("cancelled"):
                await api.cancel(begun)
            else:
                assert (await api.ended(begun))["status"] == "failed"
            gate.release.set()
            asked = f"SELECT status, plan FROM responses WHERE id = '{begun}'"
            rows = query(used_database(tmp_path), asked)
    assert len(rows) == (end != "deleted")
    for status, kept in rows:
        assert RunPlan.load(kept).secrets is None
        assert status == ("failed" if end in ("failed", "expired") else "cancelled")
    assert TOKEN.encode() not in written(tmp_path)


def keyed(url: str, key: str = KEY) -> Json:
    """A tool whose credential stands in its URL."""
    return {**DESK, "server_url": f"{url}?user=ann&api_key={key}#top"}


async def test_the_query_of_an_address_is_a_credential(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    caplog.set_level("DEBUG")
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, egress="any") as server,
        http_client(server) as client,
    ):
        api = Api(client)
        stream = await api.stream(LOOK_UP, tools=[keyed(url)])
        plain = await api.create(LOOK_UP, tools=[{**DESK, "server_url": url}])
        found = [written(tmp_path), stream.raw, orjson.dumps(await api.get(stream.response["id"]))]
    assert stream.response["output"][1]["output"] == "home means much"
    assert stream.response["tools"] == plain["tools"] == [{**DESK, "server_url": url}]
    assert stream.response["output"][0]["server"] == url
    assert set(seen.queries) == {f"user=ann&api_key={KEY}", ""}
    for text in (*found, written(tmp_path), caplog.text.encode()):
        assert KEY.encode() not in text


async def test_a_query_outlives_the_process_and_waits_for_approvals_in_no_clear_text(tmp_path: Path) -> None:
    seen = Seen()
    async with mcp_server(seen) as url:
        async with live_app(tmp_path, egress="any") as server, http_client(server) as client:
            body = {"input": "call hold {}", "tools": [keyed(url)], "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(seen.held.wait(), 20)
            assert KEY.encode() not in written(tmp_path)
            await server.context.runs.drain(0.0)
        num_before = len(seen.queries)
        async with (
            running_app(tmp_path, ScriptedEngine(), egress="any") as server,
            http_client(server) as client,
        ):
            api = Api(client)
            assert (await api.ended(begun["id"]))["status"] == "completed"
            asking = {**keyed(url), "server_label": "asking", "require_approval": "always"}
            asked = await api.create(LOOK_UP, tools=[asking])
            answer = {
                "type": "mcp_approval_response",
                "approval_request_id": asked["output"][-1]["id"],
                "approve": True,
            }
            done = await api.create([answer], tools=[asking], previous_response_id=asked["id"])
    assert done["output"][0]["output"] == "home means much"
    assert set(seen.queries[num_before:]) == {f"user=ann&api_key={KEY}"}
    assert KEY.encode() not in written(tmp_path)


async def test_connections_are_told_apart_by_the_query(tmp_path: Path) -> None:
    """Whoever has another key gets no connection that was made with the first."""
    seen = Seen()
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, egress="any") as server,
        http_client(server) as client,
    ):
        await Api(client).create(LOOK_UP, tools=[keyed(url)])
        num_before = len(seen.queries)
        await Api(client).create(LOOK_UP, tools=[keyed(url, TOKEN)])
    assert set(seen.queries[num_before:]) == {f"user=ann&api_key={TOKEN}"}


async def test_a_user_in_an_address_is_refused_and_not_repeated(client: httpx.AsyncClient) -> None:
    tool = {**DESK, "server_url": f"http://ann:{KEY}@127.0.0.1:9/mcp"}
    reply = await client.post("/v1/responses", json={"input": "say hi", "tools": [tool]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools[0].server_url")
    assert "authorization" in error["message"] and KEY not in reply.text


CROWDED: Json = {**SECRET, "server_url": f"HTTP://ann:{TOKEN}@desk.example/mcp?key={KEY}"}


def test_a_tool_of_another_version_has_no_credentials() -> None:
    kept = normalize_tool({**CROWDED, "type": "mcp_2027_01_01", "new": 1}, "tools[0]")
    bare = {**DESK, "server_url": "HTTP://desk.example/mcp"}
    assert kept == {**bare, "type": "mcp_2027_01_01", "new": 1}


async def test_a_tool_that_is_only_kept_has_no_credentials(client: httpx.AsyncClient) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [CROWDED]}
    reply = await client.post("/v1/conversations", json={"items": [item]})
    listed = await client.get(f"/v1/conversations/{reply.json()['id']}/items")
    [kept] = listed.json()["data"][0]["tools"]
    assert kept["server_url"] == "HTTP://desk.example/mcp"
    assert "items[0].tools[0].server_url" in reply.headers["x-antiphon-ignored"]
    assert KEY not in listed.text and TOKEN not in listed.text


async def test_what_the_operator_configured_holds(tmp_path: Path) -> None:
    seen = Seen()
    (tmp_path / "token").write_text("from-a-file\n")
    (tmp_path / "antiphon.toml").write_text(
        "[mcp.servers.desk]\n"
        'url = "http://127.0.0.1:9/mcp"\n'
        f'token = {{ file = "{tmp_path / "token"}" }}\n'
        'headers = { X-Desk-Key = { env = "DESK_KEY" } }\n'
    )
    loaded = load({"data": tmp_path}, {"DESK_KEY": "from-a-variable"}).config
    assert "from-a" not in repr(loaded)
    async with mcp_server(seen) as url:
        desk = loaded.mcp.servers["desk"].model_copy(update={"url": url})
        mcp = loaded.mcp.model_copy(update={"servers": {"desk": desk}})
        async with running_app(tmp_path, mcp=mcp) as server, http_client(server) as client:
            await Api(client).create(LOOK_UP, tools=[SECRET])
    assert {(each["authorization"], each["x-desk-key"]) for each in seen.headers} == {
        ("Bearer from-a-file", "from-a-variable")
    }


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("[mcp.servers.desk]\n", "mcp.servers.desk: give exactly one of url and command"),
        ('[mcp.servers.desk]\nurl = "desk"', "mcp.servers.desk.url: 'desk' is no address"),
        (
            '[mcp.servers.desk]\nurl = "https://me:pass@desk.test/mcp?key=k"',
            "mcp.servers.desk.url: 'https://***@desk.test/mcp?***' is no address: give http://HOST/PATH or "
            "https://HOST/PATH, and a user, password or token in token or headers",
        ),
        ('[mcp.servers."a b"]\nurl = "http://x"', "is no name"),
        ('[mcp.servers.desk]\nurl = "http://x"\ntoken = { env = "NONE" }', "no variable 'NONE'"),
        ('[mcp.servers.desk]\nurl = "http://x"\ntoken = { file = "/none" }', "mcp.servers.desk.token: "),
        ('[mcp.servers.desk]\ncommand = ["x"]\ntoken = "y"', "headers and token are for a url"),
        ('[mcp.servers.desk]\nurl = "http://x"\ncolour = 1', "mcp.servers.desk.colour: "),
        ('[mcp.servers.desk]\nurl = "http://x"\nconnector = "x"', "mcp.servers.desk.connector: "),
        ("mcp = 1", "mcp: "),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, table: str, told: str) -> None:
    (tmp_path / "antiphon.toml").write_text(table)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load({"data": tmp_path}, {})


async def test_credentials_for_the_builtin_tools_are_named_as_ignored(client: httpx.AsyncClient) -> None:
    tool = {**SECRET, "server_url": "builtin:"}
    reply = await client.post("/v1/responses", json={"input": "say hi", "tools": [tool]})
    assert reply.headers["x-antiphon-ignored"] == "tools[0].authorization,tools[0].headers"
    assert TOKEN.encode() not in orjson.dumps(reply.json())
