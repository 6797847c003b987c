"""`antiphon import`: what an export holds comes back as it was, once, and only if the file is whole."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.cli.commands import main
from tests.server.admin.test_tenants import lines, run
from tests.support.making import rows
from tests.support.postgres import Postgres
from tests.support.running import (
    ON_POSTGRESQL,
    database,
    http_client,
    live_app,
    running_app,
)
from tests.support.talk import WEATHER, Api, answer, call, prompts


@pytest.fixture(autouse=True)
async def target(tmp_path: Path) -> None:
    """With TEST_WITH_DATABASE=postgresql, what is imported goes there, too, before a server was there."""
    if ON_POSTGRESQL:
        await database(tmp_path / "b")


def imported(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(["import", *argv]) == code
    told = capsys.readouterr()
    return (told.out if code == 0 else told.err).splitlines()


def of(exported: list[dict[str, Any]], *types: str) -> list[dict[str, Any]]:
    return [line for line in exported if line["type"] in types]


async def test_everything_comes_back_and_can_be_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, file = tmp_path / "a", tmp_path / "b", tmp_path / "local.jsonl"
    async with live_app(source, sandbox="monty") as running, http_client(running) as http:
        api = Api(http)
        conversation = await api.conversation({"role": "user", "content": "seed"})
        in_it = (await api.create("say a", conversation=conversation))["id"]
        first = (await api.create("think why then say b", metadata={"k": "v"}))["id"]
        second = (await api.create("say c", previous_response_id=first))["id"]
        called = await api.create(call(), tools=[WEATHER])
        fork = (await http.post(f"/v1/responses/{second}/fork", json={})).json()["id"]
        waiting = await api.create(call(), tools=[WEATHER], await_tool_outputs=True, background=True)
        await http.get(f"/v1/responses/{waiting['id']}?wait=20")
        sent = {"files": {"file": ("a.txt", b"the quick fox " * 99)}, "data": {"purpose": "user_data"}}
        stored = (await http.post("/v1/files", **sent)).json()
        named = {"name": "Manuals", "file_ids": [stored["id"]]}
        store = (await http.post("/v1/vector_stores", json=named)).json()["id"]
        await http.post("/v1/prompts", json={"name": "p", "template": {"instructions": "Be brief."}})
        said = {"messages": [{"role": "user", "content": "say d"}], "store": True, "metadata": {"k": "v"}}
        await http.post("/v1/chat/completions", json={"model": "antiphon-scripted", **said})
        await http.post("/v1/containers", json={"name": "box"})
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
        file.write_text(capsys.readouterr().out)
        shown = {id: await api.get(id) for id in (in_it, first, second, called["id"], fork)}
    exported = lines(file.read_text())
    argv = (str(file), "--data", str(target))

    assert await asyncio.to_thread(imported, capsys, *argv, "--check") == [
        "the file is whole: 1 conversations, 6 responses, 1 chat completions, 1 prompts, 1 files, "
        "1 vector stores, 1 containers, of the owner local"
    ]
    assert not (target / "antiphon.db").exists(), "a check makes nothing"
    told = await asyncio.to_thread(imported, capsys, *argv)
    assert "5 responses imported" in told and "1 vector stores imported" in told
    assert "a response that was being made is left out" in told
    assert "a container is left out; it would have expired" in told
    again = await asyncio.to_thread(imported, capsys, *argv)
    assert "0 responses imported, and 5 were there already" in again
    assert await asyncio.to_thread(main, ["owners", "list", "--data", str(target)]) == 0
    assert "local" in capsys.readouterr().out

    async with live_app(target) as running, http_client(running) as http:
        api = Api(http)
        for id, before in shown.items():
            assert await api.get(id) == before
        assert [one["id"] for one in await api.pages("/v1/responses", **{"metadata[k]": "v"})] == [first]
        assert await api.conversation_items(conversation) == of(exported, "conversation")[0]["items"]
        assert (await http.get(f"/v1/files/{stored['id']}/content")).content == b"the quick fox " * 99
        more = await api.create("say e", previous_response_id=fork)
        history = await api.input_items(more["id"], scope="all", order="asc", limit=100)
        texts = json.dumps(history["data"])
        assert "think why then say b" in texts and "say c" in texts
        await api.create("say f", conversation=conversation)
        assert len(await api.conversation_items(conversation)) == 5
        outputs = {"tool_outputs": [{"call_id": called["output"][0]["call_id"], "output": "sunny"}]}
        assert (
            await http.post(f"/v1/responses/{called['id']}/tool_outputs", json=outputs)
        ).status_code == 200
        gone = await http.get(f"/v1/responses/{first}?stream=true")
        assert gone.json()["error"]["code"] == "events_expired"
        forked = await http.post(f"/v1/responses/{second}/fork", json={})
        assert forked.status_code == 200
        while (await http.get(f"/v1/vector_stores/{store}")).json()["status"] != "completed":
            await asyncio.sleep(0.01)
        found = await http.post(f"/v1/vector_stores/{store}/search", json={"query": "fox"})
        assert found.json()["data"][0]["file_id"] == stored["id"]
        beside, told_beside = await run(running, "import", str(file)), capsys.readouterr()
        if ON_POSTGRESQL:  # which several processes may write
            assert beside == 0 and "5 were there already" in told_beside.out
        else:
            assert beside == 2 and "stop it" in told_beside.err

    # What comes back is exported as it was.
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["export", "--owner", "local", "--data", str(target)]) == 0
    back = lines(capsys.readouterr().out)
    for kind in ("file", "chat_completion", "prompt"):
        assert of(back, kind) == of(exported, kind)
    ids = set(shown)
    again_exported = [line for line in of(back, "response") if line["response"]["id"] in ids]
    assert again_exported == [line for line in of(exported, "response") if line["response"]["id"] in ids]


async def test_an_old_store_that_expires_begins_its_days_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, here = tmp_path / "local.jsonl", ("--data", str(tmp_path / "b"))
    async with live_app(tmp_path / "a") as running, http_client(running) as http:
        sent = {"files": {"file": ("a.txt", b"the quick fox")}, "data": {"purpose": "user_data"}}
        stored = (await http.post("/v1/files", **sent)).json()["id"]
        expiry = {"anchor": "last_active_at", "days": 7}
        made = {"name": "n", "file_ids": [stored], "expires_after": expiry}
        store = (await http.post("/v1/vector_stores", json=made)).json()
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
    with file.open("w") as written:
        for line in lines(capsys.readouterr().out):
            if line["type"] == "vector_store":
                line["vector_store"]["created_at"] -= 30 * 86400
            written.write(json.dumps(line) + "\n")
    assert "1 vector stores imported" in await asyncio.to_thread(imported, capsys, str(file), *here)
    async with live_app(tmp_path / "b") as running, http_client(running) as http:
        found = (await http.get(f"/v1/vector_stores/{store['id']}")).json()
        assert found["created_at"] == store["created_at"] - 30 * 86400
        assert found["last_active_at"] >= store["last_active_at"] and found["status"] != "expired"


async def test_a_chain_whose_beginning_was_deleted_goes_on_as_on_the_first_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, file = tmp_path / "a", tmp_path / "b", tmp_path / "local.jsonl"
    one, other = ScriptedEngine(), ScriptedEngine()
    async with live_app(source, one) as running, http_client(running) as http:
        api = Api(http)
        first = (await api.create("think twice then say apple"))["id"]
        called = await api.create(call(), previous_response_id=first, tools=[WEATHER])
        second = called["id"]
        answered = [answer(called["output"][0]["call_id"], "sunny")]
        third = (await api.create(answered, previous_response_id=second, tools=[WEATHER]))["id"]
        conversation = await api.conversation({"role": "user", "content": "say seed"})
        await api.create("say pear", conversation=conversation)
        in_it = (await api.create("say plum", conversation=conversation))["id"]
        talk = await api.conversation()
        gone = (await api.create("say fig", conversation=talk))["id"]
        for path in (f"responses/{first}", f"responses/{second}", f"responses/{gone}"):
            assert (await http.delete(f"/v1/{path}")).status_code == 200
        assert (await http.delete(f"/v1/conversations/{conversation}")).status_code == 200
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
        file.write_text(capsys.readouterr().out)
        for id in (third, in_it):
            await api.create("say on", previous_response_id=id)
        await api.create("say on", conversation=talk)
    exported = lines(file.read_text())
    told = {line["response"]["id"]: line["kept"].get("deleted") for line in of(exported, "response")}
    assert [deleted["id"] for deleted in told[third]["responses"]] == [second, first]
    assert exported[-1]["responses"] == len(told) == 3 and {first, second, gone}.isdisjoint(told)
    assert [line["conversation"]["id"] for line in of(exported, "conversation")] == [talk]
    imports = await asyncio.to_thread(imported, capsys, str(file), "--data", str(target))
    assert "3 responses imported" in imports and "1 conversations imported" in imports

    async with live_app(target, other) as running, http_client(running) as http:
        api = Api(http)
        for path in (f"responses/{first}", f"responses/{second}", f"conversations/{conversation}"):
            assert (await http.get(f"/v1/{path}")).status_code == 404
        refused = await http.post("/v1/responses", json={"input": "say x", "previous_response_id": second})
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert {one["id"] for one in (await http.get("/v1/responses")).json()["data"]} == set(told)
        for id in (third, in_it):
            await api.create("say on", previous_response_id=id)
        await api.create("say on", conversation=talk)
        shown = prompts(other)
        assert shown == prompts(one)[-3:]
        assert "say apple" in shown[0] and "sunny" in shown[0] and "say pear" in shown[1]
        # What is exported again is the same again.
        assert await run(running, "export", "--owner", "local") == 0
        again = {line["response"]["id"]: line for line in of(lines(capsys.readouterr().out), "response")}
        assert {id: again[id]["kept"].get("deleted") for id in told} == told
        for path in (f"responses/{id}" for id in again):
            await http.delete(f"/v1/{path}")
        await http.delete(f"/v1/conversations/{talk}")
        assert not {"responses", "items", "conversations"} & set(await rows(running.context.storage))


async def test_an_export_of_an_earlier_version_comes_back_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has nothing of what was deleted, and a later export of the first server adds that."""
    file, older, target = tmp_path / "local.jsonl", tmp_path / "older.jsonl", tmp_path / "b"
    async with live_app(tmp_path / "a") as running, http_client(running) as http:
        api = Api(http)
        conversation = await api.conversation()
        await api.create("say pear", conversation=conversation)
        first = (await api.create("say apple"))["id"]
        second = (await api.create("say b", previous_response_id=first))["id"]
        await http.delete(f"/v1/responses/{first}")
        whole = await api.input_items(second, scope="all", order="asc")
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
        file.write_text(capsys.readouterr().out)
    with older.open("w") as written:
        for line in lines(file.read_text()):
            if "kept" in line:
                line["kept"] = {k: v for k, v in line["kept"].items() if k not in ("deleted", "turns")}
            written.write(json.dumps(line) + "\n")
    told = await asyncio.to_thread(imported, capsys, str(older), "--data", str(target))
    assert "2 responses imported" in told
    async with live_app(target) as running, http_client(running) as http:
        history = await Api(http).input_items(second, scope="all", order="asc")
        assert "apple" not in json.dumps(history)
    told = await asyncio.to_thread(imported, capsys, str(file), "--data", str(target))
    assert "0 responses imported, and 2 were there already" in told
    async with live_app(target) as running, http_client(running) as http:
        assert await Api(http).input_items(second, scope="all", order="asc") == whole
        assert (await http.get(f"/v1/responses/{first}")).status_code == 404


async def test_forks_of_conversations_say_again_what_they_were_forked_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "local.jsonl", tmp_path / "b"
    async with live_app(tmp_path / "a") as running, http_client(running) as http:
        api = Api(http)
        trunk, gone = [await api.conversation({"role": "user", "content": "seed"}) for _ in range(2)]
        branch = (await http.post(f"/v1/conversations/{trunk}/fork", json={})).json()
        orphan = (await http.post(f"/v1/conversations/{gone}/fork", json={})).json()
        twig = (await http.post(f"/v1/conversations/{branch['id']}/fork", json={})).json()
        await http.delete(f"/v1/conversations/{gone}")
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
        file.write_text(capsys.readouterr().out)
    await asyncio.to_thread(imported, capsys, str(file), "--data", str(target))

    async with live_app(target) as running, http_client(running) as http:
        api = Api(http)
        for fork in (branch, twig):
            assert (await http.get(f"/v1/conversations/{fork['id']}")).json() == fork
        assert "forked_from" not in (await http.get(f"/v1/conversations/{orphan['id']}")).json()
        assert await run(running, "export", "--owner", "local") == 0
        told = {
            line["conversation"]["id"]: line for line in of(lines(capsys.readouterr().out), "conversation")
        }
        assert told[twig["id"]]["conversation"]["forked_from"] == twig["forked_from"]
        # A fork has all of its items of its own: it outlives what it was forked from, and keeps no more.
        seed = (await api.conversation_items(trunk))[0]["id"]
        await http.delete(f"/v1/conversations/{trunk}/items/{seed}")
        assert [item["id"] for item in await api.conversation_items(twig["id"])] == [seed]
        await http.delete(f"/v1/conversations/{trunk}")
        await http.delete(f"/v1/conversations/{branch['id']}")
        await api.create("say on", conversation=twig["id"])
        assert len(await api.conversation_items(twig["id"])) == 3


async def test_another_owner_gets_it_where_the_first_has_it_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "local.jsonl"
    async with live_app(tmp_path / "a") as running, http_client(running) as http:
        made = (await Api(http).create("say a"))["id"]
        capsys.readouterr()
        assert await run(running, "export", "--owner", "local") == 0
        file.write_text(capsys.readouterr().out)
    here = ("--data", str(tmp_path / "a"))
    told = await asyncio.to_thread(imported, capsys, str(file), *here, "--owner", "ann", code=2)
    assert told == [
        f"antiphon: the response {made} is in this database already, and belongs to another owner"
    ]
    monkeypatch.setattr("sys.stdin", type("In", (), {"buffer": io.BytesIO(file.read_bytes())})())
    there = ("--data", str(tmp_path / "b"))
    told = await asyncio.to_thread(imported, capsys, "-", *there, "--owner", "ann")
    assert told[-1].startswith("all of it belongs to the owner ann: antiphon keys create")
    assert await asyncio.to_thread(main, ["keys", "create", "--owner", "ann", *there]) == 0
    key = capsys.readouterr().out.splitlines()[0]
    keyed = {"authorization": f"Bearer {key}"}
    async with live_app(tmp_path / "b") as running, http_client(running, **keyed) as http:
        assert (await http.get(f"/v1/responses/{made}")).status_code == 200


def test_an_owner_that_is_not_there_is_made_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there, file = (str(tmp_path / name) for name in ("a", "b", "sales.jsonl"))
    assert main(["owners", "create", "Sales", "--data", here]) == 0
    id = capsys.readouterr().out.split()[0]
    assert main(["export", "--owner", "Sales", "--data", here]) == 0
    Path(file).write_text(capsys.readouterr().out)
    command = f"antiphon keys create --owner {id} --data {there}"
    for _ in range(2):
        told = imported(capsys, file, "--data", there)
        assert told[-1] == f"all of it belongs to the owner {id}: {command}"
    assert main(command.split()[1:]) == 0
    capsys.readouterr()
    assert main(["owners", "list", "--json", "--data", there]) == 0
    named = [(one["id"], one["name"]) for one in json.loads(capsys.readouterr().out)]
    assert named == [(id, "Sales")]


@pytest.mark.parametrize("older", [False, True])
def test_an_owner_that_was_archived_stays_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], older: bool
) -> None:
    """Exports of earlier versions tell nothing of it."""
    here, there, file = (str(tmp_path / name) for name in ("a", "b", "sales.jsonl"))

    def listed(data: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["owners", "list", "--json", "--data", data]) == 0
        return list(json.loads(capsys.readouterr().out))

    for argv in (["create", "Sales"], ["archive", "Sales"]):
        assert main(["owners", *argv, "--data", here]) == 0
    [owner] = listed(here)
    assert main(["export", "--owner", "Sales", "--data", here]) == 0
    [end] = lines(capsys.readouterr().out)
    assert end["owner_archived_at"] is not None
    if older:
        end = {name: value for name, value in end.items() if not name.startswith("owner_")}
    Path(file).write_text(json.dumps(end))
    for _ in range(2):
        told = imported(capsys, file, "--data", there)[-1]
        assert told.startswith(f"all of it belongs to the owner {owner['id']}")
        assert told.endswith("who is archived") is not older
    [back] = listed(there)
    assert (back == owner) is not older and back["id"] == owner["id"]


async def test_a_move_to_postgresql_tells_that_keys_do_not_come_along(
    tmp_path: Path, postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/several-servers.md has it: until there is a key, everybody is let in."""
    async with running_app(tmp_path / "a") as server, http_client(server) as client:
        made = await Api(client).create("say hello")
    here, file, db = ["--data", str(tmp_path / "a")], tmp_path / "local.jsonl", await postgres.blank()
    there = ["--data", str(tmp_path / "b"), "--db", db]
    try:
        assert await asyncio.to_thread(main, ["owners", "list", "--json", *here]) == 0
        [owner] = [one["id"] for one in json.loads(capsys.readouterr().out)]
        assert await asyncio.to_thread(main, ["export", "--owner", owner, *here]) == 0
        file.write_text(capsys.readouterr().out)
        told = await asyncio.to_thread(imported, capsys, str(file), *there)
        assert told[0] == "1 responses imported" and told[1].startswith("no stored key is live here")
        assert await asyncio.to_thread(main, ["keys", "create", *there]) == 0
        capsys.readouterr()
        told = await asyncio.to_thread(imported, capsys, str(file), *there)
        assert len(told) == 2 and told[0] == "0 responses imported, and 1 were there already"
        async with running_app(tmp_path / "b", db=db) as server:
            assert (await server.context.storage.get_response(owner, made["id"])).status == "completed"
    finally:
        await postgres.drop(db)


END = {"type": "end", "owner": "ann", "conversations": 0, "responses": 0, "chat_completions": 0, "batches": 0}
END |= {"prompts": 0, "files": 0, "vector_stores": 0, "containers": 0, "container_files": 0}


def unended() -> dict[str, Any]:
    """The line of a response that needs one that was deleted and is not over."""
    deleted = {"responses": [{"id": "resp_1", "status": "in_progress"}], "conversation": None}
    kept = {"created_at": 1, "completed_at": 1, "head": [], "plan": {"owner": "ann"}, "items": {}}
    kept |= {"previous_response_id": "resp_1", "conversation_id": None, "conversation_head": None}
    shown = {"id": "resp_2", "status": "completed", "model": "m", "background": False, "output": []}
    return {"type": "response", "response": shown, "input": [], "kept": {**kept, "deleted": deleted}}


FILE: dict[str, Any] = {"type": "file", "file": {"id": "file_1", "bytes": 1}, "kept": {"sha256": "00"}}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ([], "the file is not whole: its last line is missing"),
        ([{**END, "files": 2}], "the file is not whole: it has 0 files of 2"),
        (["{"], "line 1 is not of an export"),
        ([{"type": "song"}], "line 1 is not of an export"),
        ([{**END, "owner_created_at": []}], "line 1 is not of an export"),
        ([END, END], "line 2 is not of an export that can be imported: it comes behind the last one"),
        ([{"type": "response", "response": {}}, END], "by a version whose exports hold too little"),
        ([{**FILE, "content": "AA=="}, END], "the content of the file is not what it was"),
        ([{**FILE, "content": "?"}, END], "is no base64"),
        ([{"type": "prompt", "prompt": {"id": "p"}, "kept": {}}, END], "has no 'created_at'"),
        ([unended(), END], "the deleted response resp_1 has not ended"),
    ],
)
def test_what_is_not_whole_is_refused_before_anything_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: list[Any], told: str
) -> None:
    file = tmp_path / "x.jsonl"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in written)
    file.write_text(text)
    (line,) = imported(capsys, str(file), "--data", str(tmp_path / "data"), code=2)
    assert told in line
    assert not (tmp_path / "data").exists()


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = imported(capsys, str(tmp_path / "none"), "--data", str(tmp_path), code=2)
    assert line.endswith("none: No such file or directory")
