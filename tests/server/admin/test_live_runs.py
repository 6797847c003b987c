"""`antiphon runs`: which responses are being made, beside a server and without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.admin import live_runs
from server.admin.database_access import leave_address
from server.cli.commands import main
from storage import open_storage
from tests.support.making import message, new
from tests.support.running import database_url, http_client, live_app
from tests.support.talk import WEATHER, Api, Gate, gated_at
from tests.support.upstreams import until

CALL = 'call get_weather {"city": "Paris"}'


async def test_what_runs_is_listed_beside_a_server_and_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        done = await api.create("say hello")
        waiting = await api.create(CALL, tools=[WEATHER], await_tool_outputs=True, background=True)
        await client.get(f"/v1/responses/{waiting['id']}?wait=20")
        held = await api.create("hold\nsay one two", background=True)
        await gate.reached.wait()
        kept_nowhere = asyncio.create_task(
            client.post("/v1/responses", json={"input": "hold", "store": False})
        )
        await until(lambda: engine.stats().running == 2)
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        listed = (await client.get("/admin/runs", headers=admin)).json()["data"]
        assert (await client.get("/admin/runs")).status_code == 401
        assert done["id"] not in {run["id"] for run in listed}
        by_id = {run["id"]: run for run in listed}
        assert by_id[waiting["id"]]["state"] == "waiting"
        assert by_id[waiting["id"]]["output_tokens"] > 0
        assert (by_id[held["id"]]["state"], by_id[held["id"]]["background"]) == ("running", True)
        assert by_id[held["id"]]["node"] == server.context.storage.runner
        (unstored,) = set(by_id) - {waiting["id"], held["id"]}
        assert (by_id[unstored]["owner"], by_id[unstored]["model"]) == ("local", "antiphon-scripted")
        assert "hold" not in json.dumps(listed)  # nothing of what is said
        kept_nowhere.cancel()
        await until(lambda: engine.stats().running == 1)
        await server.life.drain(0)
    assert await asyncio.to_thread(main, ["runs", "--data", str(tmp_path)]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["ID", "OWNER", "MODEL", "STATE", "AGE", "TOKENS", "NODE"]
    assert [(row[0], row[3]) for row in rows] == [(waiting["id"], "waiting"), (held["id"], "unowned")]


async def test_a_run_of_a_server_that_was_killed_is_nobodys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = await open_storage(await database_url(tmp_path), runner="killed")
    await storage.start_response(new("r1", message("m1")))
    await storage.close()
    assert await asyncio.to_thread(main, ["runs", "--state", "unowned", "--data", str(tmp_path)]) == 0
    _, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (row[0], row[3], row[-1]) == ("r1", "unowned", "-")


async def test_an_administrator_cancels_runs_of_any_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        api = Api(client)
        waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
        waiting = (await api.create(CALL, **waits))["id"]
        await client.get(f"/v1/responses/{waiting}?wait=20")
        held = (await api.create("hold", background=True))["id"]
        await gate.reached.wait()
        kept_nowhere = asyncio.create_task(
            client.post("/v1/responses", json={"input": "hold", "store": False})
        )
        await until(lambda: engine.stats().running == 2)

        operator = {"authorization": f"Bearer {server.life.admin_token}"}
        made = (await client.post("/admin/keys", json={"scopes": ["admin"]}, headers=operator)).json()
        key = {"authorization": f"Bearer {made['key']}"}
        runs = (await client.get("/v1/organization/runs", headers=key)).json()["data"]
        (unstored,) = {run["id"] for run in runs} - {waiting, held}
        for id in (held, unstored):
            reply = await client.post(f"/v1/organization/runs/{id}/cancel", headers=key)
            assert (reply.status_code, reply.json()["cancelled"]) == (200, True)
        assert (await kept_nowhere).json()["status"] == "cancelled"
        command = ["runs", "cancel", waiting, "--data", str(tmp_path)]
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out == f"{waiting} is cancelled\n"
        assert await asyncio.to_thread(main, command) == 2
        assert capsys.readouterr().err == f"antiphon: Run '{waiting}' is cancelled already.\n"
        assert await asyncio.to_thread(main, ["runs", "cancel", "resp_no", "--data", str(tmp_path)]) == 2
        assert "resp_no" in (told := capsys.readouterr().err) and "already" not in told
        assert (await client.get("/v1/organization/runs", headers=key)).json()["data"] == []
        gone = await client.post(f"/v1/organization/runs/{held}/cancel", headers=key)
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "run_ended")
        logs = "/v1/organization/audit_logs?event_types[]=run.cancelled"
        told = (await client.get(logs, headers=key)).json()["data"]
        assert [log["run.cancelled"]["id"] for log in told] == [waiting, unstored, held]
        assert {log["project"]["id"] for log in told} == {"local"}


async def test_completions_are_listed_and_cancelled_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    said = {"messages": [{"role": "user", "content": "say one two\nhold\nsay three"}], "n": 2}
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        operator = {"authorization": f"Bearer {server.life.admin_token}"}
        streamed = asyncio.create_task(client.post("/v1/chat/completions", json={**said, "stream": True}))
        await until(lambda: engine.stats().running == 2)
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hold"}))
        await until(lambda: engine.stats().running == 3)
        runs = (await client.get("/v1/organization/runs", headers=operator)).json()["data"]
        chat, text = [run["id"] for run in runs]
        assert (chat.partition("-")[0], text.partition("-")[0]) == ("chatcmpl", "cmpl")
        assert runs[0]["model"] == "antiphon-scripted" and runs[0]["owner"] == "local"
        assert runs[0]["node"] == server.context.storage.runner and not runs[0]["background"]
        assert (await client.get(f"/v1/responses/{chat}")).status_code == 404

        data = ["--data", str(tmp_path)]
        assert await asyncio.to_thread(main, ["runs", *data]) == 0
        assert chat in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["runs", "cancel", text, *data]) == 0
        assert capsys.readouterr().out == f"{text} is cancelled\n"
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_interrupted")
        assert refused.headers["x-should-retry"] == "false"
        reply = await client.post(f"/v1/organization/runs/{chat}/cancel", headers=operator)
        assert (reply.status_code, reply.json()["cancelled"]) == (200, True)
        last = (await streamed).text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "response_interrupted"
        assert engine.stats().running == 0
        assert (await client.get("/v1/organization/runs", headers=operator)).json()["data"] == []
        gone = await client.post(f"/v1/organization/runs/{chat}/cancel", headers=operator)
        assert gone.status_code == 404
        logs = "/v1/organization/audit_logs?event_types[]=run.cancelled"
        told = (await client.get(logs, headers=operator)).json()["data"]
        assert [log["run.cancelled"]["id"] for log in told] == [chat, text]


async def test_a_run_that_no_server_carries_on_is_cancelled_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
        id = (await api.create(CALL, **waits))["id"]
        await client.get(f"/v1/responses/{id}?wait=20")
    assert await asyncio.to_thread(main, ["runs", "cancel", id, "--data", str(tmp_path)]) == 0
    assert f"{id} will be cancelled by the server" in capsys.readouterr().out
    async with live_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).ended(id))["status"] == "cancelled"


async def test_a_run_of_any_owner_is_followed_to_its_end_and_forked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as server:
        leave_address(server.context.config, server.base_url, server.life.admin_token)
        data = ["--data", str(tmp_path)]
        async with http_client(server) as client:
            api = Api(client)
            held = (await api.create("hold\nsay one two", background=True))["id"]
            await gate.reached.wait()
            following = asyncio.create_task(asyncio.to_thread(main, ["runs", "tail", held, *data]))
            waiting = await api.create(CALL, tools=[WEATHER], await_tool_outputs=True, background=True)
            await client.get(f"/v1/responses/{waiting['id']}?wait=20")
            gate.release.set()
            assert await following == 0
            lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
            assert [int(line[0]) for line in lines] == [*range(len(lines))]
            assert lines[0][1] == "created"
            assert lines[-1][1:] == ["completed", "completed"]
            said = "".join(json.loads(line[2]) for line in lines if line[1] == "output_text.delta")
            whole = (await api.get(held))["output"][0]["content"][0]["text"]
            assert said == whole and whole

            assert await asyncio.to_thread(main, ["runs", "--state", "waiting", "--json", *data]) == 0
            assert [run["id"] for run in json.loads(capsys.readouterr().out)] == [waiting["id"]]

            assert await asyncio.to_thread(main, ["runs", "fork", held, *data]) == 0
            fork = capsys.readouterr().out.strip()
            shown = (await client.get(f"/v1/responses/{fork}")).json()
            assert shown["forked_from"]["response_id"] == held and shown["output"]
            for argv, told in (
                (["tail", fork], "is a fork: it was not run"),
                (["tail", "resp_nobody"], "resp_nobody"),
                (["fork", held, "--after", "99999"], "has no event 99999"),
            ):
                assert await asyncio.to_thread(main, ["runs", *argv, *data]) == 2
                assert told in capsys.readouterr().err
    # Without a server, the events that are stored are read from the database.
    assert (
        await asyncio.to_thread(main, ["runs", "tail", held, "--after", str(len(lines) - 2), "--json", *data])
        == 0
    )
    (last,) = capsys.readouterr().out.splitlines()
    assert json.loads(last)["response"]["status"] == "completed"
    assert await asyncio.to_thread(main, ["audit", "list", "--json", *data]) == 0
    types = {entry["type"] for entry in json.loads(capsys.readouterr().out)}
    assert {"run.followed", "run.forked"} <= types
    assert await asyncio.to_thread(main, ["runs", "fork", held, *data]) == 0


async def test_a_follower_waits_for_the_next_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_runs, "POLL_S", 0.02)
    data = ["--data", str(tmp_path)]
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as server:
        async with http_client(server) as client:
            held = (await Api(client).create("hold\nsay one", background=True))["id"]
            await gate.reached.wait()
        await server.life.drain(0)
    following = asyncio.create_task(asyncio.to_thread(main, ["runs", "tail", held, *data]))
    told = ""
    while "waiting for one" not in told:
        assert not following.done()
        told += capsys.readouterr().err
        await asyncio.sleep(0.01)
    async with live_app(tmp_path, ScriptedEngine()) as server:
        leave_address(server.context.config, server.base_url, server.life.admin_token)
        assert await following == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1] == "completed"


async def test_of_several_owners_the_named_one_is_cancelled(tmp_path: Path) -> None:
    """Clients choose the ids of chat completions, so two owners may choose the same."""
    keys = tmp_path / "keys"
    keys.write_text("ann:key-of-ann\nbob:key-of-bob\n")
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    (tmp_path / "data").mkdir()
    async with (
        live_app(tmp_path / "data", engine, api_key_file=keys) as server,
        http_client(server) as client,
    ):
        asked = {"messages": [{"role": "user", "content": "hold\nsay hi"}], "request_id": "same"}
        hers, his = (
            asyncio.create_task(
                client.post("/v1/chat/completions", json=asked, headers={"authorization": f"Bearer {key}"})
            )
            for key in ("key-of-ann", "key-of-bob")
        )
        await until(lambda: engine.stats().running == 2)
        operator = {"authorization": f"Bearer {server.life.admin_token}"}
        path = "/v1/organization/runs/chatcmpl-same/cancel"
        which = await client.post(path, headers=operator)
        assert (which.status_code, which.json()["error"]["code"]) == (409, "ambiguous_run")
        nobody = await client.post(path, headers=operator, json={"owner": "cyd"})
        assert nobody.status_code == 404
        assert (await client.post(path, headers=operator, json={"owner": 1})).status_code == 400
        done = await client.post(path, headers=operator, json={"owner": "bob"})
        assert done.json()["cancelled"]
        assert (await his).status_code == 503
        assert not hers.done()
        gate.release.set()
        assert (await hers).json()["id"] == "chatcmpl-same"
