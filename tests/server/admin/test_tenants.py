"""`antiphon export` and `antiphon purge`: beside a running server and without one."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from engine.tiers.folders import Folder
from engine.tiers.shelf import Shelf
from server.access import OPERATOR
from server.admin import tenants
from server.admin.database_access import AdminError, Unreachable, carry_out, leave_address
from server.admin.exports import exporting
from server.admin.tenants import export, purge
from server.cli.commands import main
from server.clock import now_us
from server.config import Config
from server.progress import Progress
from storage import AuditFilter, StorageUnavailable
from tests.support import wire
from tests.support.batching import input_file
from tests.support.blocking import until
from tests.support.lines import line
from tests.support.making import rows
from tests.support.running import Running, http_client, live_app
from tests.support.sandboxes import with_sandbox
from tests.support.saved_blocks import GROUP_BYTES, IDENTITY, save
from tests.support.talk import WEATHER, Api, Gate, call, gated_at, prompts


async def make_keys(running: Running) -> dict[str, dict[str, str]]:
    """A key each for two owners: owner -> headers."""
    headers = {}
    token = {"authorization": f"Bearer {running.life.admin_token}"}
    async with http_client(running, **token) as admin:
        for owner in ("ann", "bob"):
            made = (await admin.post("/admin/keys", json={"owner": owner})).json()
            headers[owner] = {"authorization": f"Bearer {made['key']}"}
    return headers


async def run(running: Running, *argv: str) -> int:
    """A command beside the running server, whose database it does not open."""
    leave_address(running.life.config, running.base_url, running.life.admin_token)
    return await asyncio.to_thread(main, [*argv, "--data", str(running.life.config.data)])


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


async def test_an_export_holds_what_its_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path, sandbox="monty") as running:
        keys = await make_keys(running)
        async with http_client(running, **keys["ann"]) as http, http_client(running, **keys["bob"]) as other:
            api = Api(http)
            await Api(other).create("say theirs")
            seeds = [{"role": "user", "content": f"seed {n}"} for n in range(20)]
            conversation = await api.conversation(*seeds)
            for _ in range(6):  # more than a page
                page = {"items": seeds}
                await http.post(f"/v1/conversations/{conversation}/items", json=page)
            ids = [(await api.create("say a", conversation=conversation))["id"]]
            for n in range(10):
                ids += [(await api.create(f"say {n}", previous_response_id=ids[-1]))["id"]]
            waits = {"tools": [WEATHER], "background": True, "await_tool_outputs": True}
            waiting = (await api.create(call(), **waits))["id"]
            async with api.follow(waiting) as live:
                await live.until("output_item.done")
            await api.waits(waiting)
            sent = {"files": {"file": ("a.bin", bytes(range(256)) * 9000)}, "data": {"purpose": "user_data"}}
            files = [(await http.post("/v1/files", **sent)).json() for _ in range(2)]
            container = (await http.post("/v1/containers", json={"name": "box"})).json()
            put = {"file": ("b.txt", b"inside")}
            inside = (await http.post(f"/v1/containers/{container['id']}/files", files=put)).json()
            container = (await http.get(f"/v1/containers/{container['id']}")).json()
            named = {"name": "Manuals", "file_ids": [file["id"] for file in files]}
            store = (await http.post("/v1/vector_stores", json=named)).json()
            capsys.readouterr()
            assert await run(running, "export", "--owner", "ann") == 0
            exported = lines(capsys.readouterr().out)
            first, *responses, one, two, kept, box, held, end = exported
            counts = {"conversations": 1, "responses": 12, "batches": 0, "files": 2, "vector_stores": 1}
            counts |= {"containers": 1, "container_files": 1, "chat_completions": 0, "prompts": 0}
            assert end.pop("owner_created_at") < now_us()
            of = {"owner": "ann", "owner_name": "ann", "owner_archived_at": None}
            assert end == {"type": "end", **of, **counts}
            assert (kept["type"], kept["vector_store"]["id"]) == ("vector_store", store["id"])
            assert {file["id"] for file in kept["files"]} == set(named["file_ids"])
            assert box == {"type": "container", "container": container}
            assert (held["file"], b64decode(held["content"])) == (inside, b"inside")
            assert [one["file"], two["file"]] == files
            assert b64decode(one["content"]) == bytes(range(256)) * 9000
            assert first["type"] == "conversation"
            assert first["conversation"] == (await http.get(f"/v1/conversations/{conversation}")).json()
            assert first["items"] == await api.conversation_items(conversation)
            assert [line["response"]["id"] for line in responses] == [*ids, waiting]
            for line in responses:
                assert line["type"] == "response"
                wire.validate_response(line["response"])
                assert line["response"] == await api.get(line["response"]["id"])
                own = await api.input_items(line["response"]["id"], order="asc", limit=100)
                assert line["input"] == own["data"]
            assert await run(running, "export", "--owner", "nobody") == 1
            told = capsys.readouterr()
            assert not told.out and "no such owner" in told.err
    before = exported[:-7]
    assert await asyncio.to_thread(main, ["export", "--owner", "ann", "--data", str(tmp_path)]) == 0
    assert lines(capsys.readouterr().out)[: len(before)] == before


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_an_export_that_cannot_be_written_is_not_the_servers_fault(tmp_path: Path) -> None:
    def written(config: Config) -> None:
        with pytest.raises(AdminError, match="cannot be written: No space left on device"):
            export(config, "local", Full())
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as unread, pytest.raises(BrokenPipeError):
            export(config, "local", unread)

    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say a")
        leave_address(running.life.config, running.base_url, running.life.admin_token)
        await asyncio.to_thread(written, running.life.config)
    await asyncio.to_thread(written, running.life.config)


async def test_a_database_that_cannot_be_written_is_exported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be reached is told before the reply begins."""
    troubles = [StorageUnavailable("no room", full=True), StorageUnavailable("away")]

    async def refused(_: object) -> None:
        raise troubles.pop(0)

    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say a")
        monkeypatch.setattr(running.context.storage, "add_audit", refused)
        assert await run(running, "export", "--owner", "local") == 0
        told = capsys.readouterr()
        assert lines(told.out)[-1]["responses"] == 1
        assert "has no entry of it, because of this: The disk of the server is full" in told.err
        assert await run(running, "export", "--owner", "local") == 2
        told = capsys.readouterr()
        assert not told.out and "Storage cannot be reached now" in told.err


@with_sandbox
async def test_what_goes_while_it_is_exported_ends_no_export(
    server_app: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages go on behind what was there when they were read."""
    for name in ("FILES_AT_ONCE", "ITEMS_AT_ONCE"):
        monkeypatch.setattr(exporting, name, 1)
    made: dict[str, list[str]] = {"file": [], "vector_store": [], "container": []}
    for _ in range(3):
        sent = {"files": {"file": b"x"}, "data": {"purpose": "user_data"}}
        made["file"].append((await client.post("/v1/files", **sent)).json()["id"])
        made["vector_store"].append((await client.post("/v1/vector_stores", json={})).json()["id"])
        made["container"].append((await client.post("/v1/containers", json={"name": "c"})).json()["id"])
    seen: dict[str, list[str]] = {kind: [] for kind in made}
    async with aclosing(exporting.exported(server_app.context.storage, "local")) as pieces:
        async for line in _whole_lines(pieces):
            if (kind := line["type"]) in seen:
                seen[kind].append(line[kind]["id"])
                assert (await client.delete(f"/v1/{kind}s/{line[kind]['id']}")).status_code == 200
    assert line["type"] == "end" and seen == made


async def _whole_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    before = b""
    async for piece in pieces:
        *whole, before = (before + piece).split(b"\n")
        for each in whole:
            yield json.loads(each)


async def test_a_purge_beside_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with live_app(tmp_path) as running:
        keys = await make_keys(running)
        storage = running.context.storage
        async with http_client(running, **keys["bob"]) as bob, http_client(running, **keys["ann"]) as ann:
            kept = await Api(bob).create("say theirs")
            untouched = await rows(storage)
            api = Api(ann)
            conversation = await api.conversation({"role": "user", "content": "seed"})
            gone = await api.create("say a", conversation=conversation)
            waits = {"tools": [WEATHER], "await_tool_outputs": True}
            async with api.open(call(), **waits) as live:
                await live.until("output_item.done")
                assert await run(running, "purge", "--owner", "ann") == 2
                told = capsys.readouterr()
                assert "2 responses (1 in flight), 1 conversation, 0 files, " in told.err
                assert "--yes" in told.err and not told.out
                assert await run(running, "purge", "--owner", "ann", "--keys") == 2
                assert "1 key would be revoked" in capsys.readouterr().err
                assert (await api.get(gone["id"])) == gone
                assert await run(running, "purge", "--owner", "ann", "--keys", "--yes") == 0
                *_, last = await live.cut()
                assert (last["type"], last["code"]) == ("error", "response_interrupted")
                assert "removed" in last["message"]
                assert last["sequence_number"] == live.events[-2]["sequence_number"] + 1
            told = capsys.readouterr().out
            assert "2 responses (1 in flight), 1 conversation, 0 files, " in told and "1 key revoked" in told
            assert (await ann.get(f"/v1/responses/{gone['id']}")).status_code == 401
            assert await Api(bob).get(kept["id"]) == kept
            assert await rows(storage) == untouched


async def test_a_purge_whose_server_ends_says_that_it_can_be_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say hello")
        with monkeypatch.context() as patched:
            patched.setattr(tenants, "carry_out", _cut_off)
            assert await run(running, "purge", "--owner", "local", "--yes") != 0
        assert "run the command again" in capsys.readouterr().err
        assert await run(running, "purge", "--owner", "local", "--yes") == 0


def _cut_off(config: Config, do: Any, method: str, *rest: Any, **options: Any) -> dict[str, Any]:
    """A server that looks, and is gone when it is asked to change something."""
    if method == "POST":
        raise Unreachable("the server does not answer")
    return carry_out(config, do, method, *rest, **options)


CHAT = "/v1/chat/completions"
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "say one\nhold"}]}
STORED: dict[str, Any] = {**SAID, "store": True}
BUILTIN = {"type": "mcp", "server_label": "b", "server_url": "builtin:", "require_approval": "never"}
IN_FLIGHT: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (CHAT, SAID, {}),
    (CHAT, STORED, {}),
    (CHAT, STORED, {"idempotency-key": "k"}),
    (CHAT, {**STORED, "stream": True}, {}),
    (CHAT, {**STORED, "tools": [BUILTIN]}, {}),
    ("/v1/completions", {"prompt": "hold"}, {}),
    ("/v1/responses", {"input": "hold", "store": False}, {}),
]


async def test_a_purge_cuts_what_is_stored_nowhere(tmp_path: Path) -> None:
    """Of the owner alone: another one's completion goes on, and is stored."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as running:
        keys = await make_keys(running)
        async with http_client(running, **keys["ann"]) as ann, http_client(running, **keys["bob"]) as bob:
            theirs = asyncio.create_task(bob.post(CHAT, json=STORED))
            ours = [
                asyncio.create_task(ann.post(path, json=body, headers=headers))
                for path, body, headers in IN_FLIGHT
            ]
            await until(lambda: engine.stats().running == len(ours) + 1)
            assert await run(running, "purge", "--owner", "ann", "--yes") == 0
            gate.release.set()
            *chats, response = await asyncio.gather(*ours)
            for reply in chats:
                *_, last = reply.text.strip().split("\n\n")
                error = json.loads(last.removeprefix("data: "))["error"]
                assert error["code"] == "response_interrupted" and "cancelled" in error["message"]
            assert response.json()["status"] == "cancelled"
            assert (await ann.get(CHAT)).json()["data"] == []
            kept = (await theirs).json()["id"]
            assert [one["id"] for one in (await bob.get(CHAT)).json()["data"]] == [kept]


async def test_what_waits_for_a_response_that_is_purged_is_told_so(tmp_path: Path) -> None:
    """One that is stored for the repeats of its request alone; and a repeat."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as running, http_client(running) as http:
        keyed: dict[str, Any] = {
            "json": {"input": "hold", "store": False},
            "headers": {"idempotency-key": "k"},
        }
        first = asyncio.create_task(http.post("/v1/responses", **keyed))
        await gate.reached.wait()
        repeat = asyncio.create_task(http.post("/v1/responses", **keyed))
        await until(lambda: running.context.runs.feed.total_readers == 2)
        assert await run(running, "purge", "--owner", "local", "--yes") == 0
        for reply in (await first, await repeat):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (503, "response_interrupted")
            assert "removed" in error["message"] and reply.headers["x-should-retry"] == "false"


async def test_a_stored_response_that_is_purged_is_told_so_without_a_stream(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as running, http_client(running) as http:
        waiting = asyncio.create_task(http.post("/v1/responses", json={"input": "hold"}))
        async with line(running.base_url) as socket:
            await socket.ask("hold")
            await until(lambda: engine.stats().running == 2)
            assert await run(running, "purge", "--owner", "local", "--yes") == 0
            told = (await socket.until("error"))["error"]
            assert told["code"] == "response_interrupted" and "removed" in told["message"]
        reply = await waiting
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, "response_interrupted")
        assert "removed" in error["message"] and reply.headers["x-should-retry"] == "false"


async def test_sockets_forget_what_a_purge_removes(tmp_path: Path) -> None:
    """All that they remember of the owner alone, and a turn at work leaves nothing to go on from."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as running:
        keys = await make_keys(running)
        ann, bob = (line(running.base_url, additional_headers=keys[who]) for who in ("ann", "bob"))
        async with ann as ours, bob as theirs:
            gone = await ours.turn("say a", store=False)
            kept = await theirs.turn("say b", store=False)
            await ours.ask("hold", store=False)
            await gate.reached.wait()
            assert await run(running, "purge", "--owner", "ann", "--yes") == 0
            cut = await ours.answer()
            assert cut["status"] == "cancelled"
            for each in (gone, cut):
                await ours.refused(
                    "previous_response_not_found", input="x", store=False, previous_response_id=each["id"]
                )
            await theirs.turn("say again", store=False, previous_response_id=kept["id"])
            after = await ours.turn("say new", store=False)
            await ours.turn("say on", store=False, previous_response_id=after["id"])
            assert "say a" not in prompts(engine)[-1]


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_that_outlives_a_purge_is_not_stored(
    tmp_path: Path, stream: bool, headers: dict[str, str]
) -> None:
    """The command purges by itself where several servers share the database, which make completions then."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "hold"))
    async with live_app(tmp_path, engine) as running, http_client(running) as http:
        storage = running.context.storage
        asked = {**STORED, "stream": stream}
        making = asyncio.create_task(http.post(CHAT, json=asked, headers=headers))
        await gate.reached.wait()
        await purge(storage, "local", by=OPERATOR, before=now_us(), with_keys=False)
        gate.release.set()
        *_, last = (await making).text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "response_interrupted" and "removed" in error["message"]
        assert (await http.get(CHAT)).json()["data"] == []
        again = (await http.post(CHAT, json=STORED, headers=headers)).json()[
            "id"
        ]  # it begins behind the purge
        assert [one["id"] for one in (await http.get(CHAT)).json()["data"]] == [again]


async def test_a_purge_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say a")
    look = ["purge", "--owner", "local", "--data", str(tmp_path)]
    purge_it = [*look, "--yes"]
    assert await asyncio.to_thread(main, look) == 2
    assert "nothing was removed" in (told := capsys.readouterr().err) and "1 response (0 in flight)" in told
    assert await asyncio.to_thread(main, purge_it) == 0
    assert "1 response (0 in flight)" in capsys.readouterr().out
    async with live_app(tmp_path) as running:
        assert await rows(running.context.storage) == {"owners": 1}


async def test_what_would_go_names_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so does what went, beside a server and without one."""
    async with live_app(tmp_path) as running:
        gone = await input_file(running.context.storage, [])  # with which the batch fails at once
        async with http_client(running) as http:
            batch = {"input_file_id": gone, "endpoint": "/v1/responses", "completion_window": "24h"}
            made = [
                await http.post("/v1/batches", json=batch),
                await http.post("/v1/vector_stores", json={"name": "Manuals"}),
                await http.post("/v1/vector_stores", json={"name": "Letters"}),
                await http.post("/v1/prompts", json={"name": "p", "template": {"instructions": "Be brief."}}),
            ]
            assert [reply.status_code for reply in made] == [200] * 4
        assert await run(running, "purge", "--owner", "local") == 2
        told = capsys.readouterr().err
    kinds = "1 file, 2 vector stores, 1 batch, 1 prompt template, 0 containers, 0 webhooks, "
    assert kinds in told
    assert await asyncio.to_thread(main, ["purge", "--owner", "local", "--yes", "--data", str(tmp_path)]) == 0
    assert kinds in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["kv", "elsewhere"])
async def test_a_purge_without_a_server_removes_what_was_computed(tmp_path: Path, folder: str) -> None:
    """Of the owner alone, and under names that no response has, too."""
    async with live_app(tmp_path) as running, http_client(running) as http:
        kept = (await Api(http).create("say a"))["id"]
    shelf = Shelf(Folder(tmp_path / folder, IDENTITY), GROUP_BYTES)
    ours, theirs = (
        save(shelf, name, blocks, owner=owner)
        for name, blocks, owner in ((kept, "abcd", "local"), ("resp_other", "wxyz", "bob"))
    )
    purge_it = ["purge", "--owner", "local", "--yes", "--data", str(tmp_path)]
    elsewhere = ["--kv-disk-folder", str(tmp_path / folder)] if folder != "kv" else []
    assert await asyncio.to_thread(main, [*purge_it, *elsewhere]) == 0
    assert not any(shelf.folder.files(ours)) and any(shelf.folder.files(theirs))


async def test_what_another_database_has_computed_outlives_a_purge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say a")
    shelf = Shelf(Folder(tmp_path / "kv", IDENTITY, "f" * 32), GROUP_BYTES)
    theirs = save(shelf, "resp_a", "abcd", owner="local")
    assert await asyncio.to_thread(main, ["purge", "--owner", "local", "--yes", "--data", str(tmp_path)]) == 0
    assert any(shelf.folder.files(theirs)) and not capsys.readouterr().err


async def test_what_cannot_be_removed_from_the_disk_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_app(tmp_path) as running, http_client(running) as http:
        await Api(http).create("say a")
    shelf = Shelf(Folder(tmp_path / "kv", IDENTITY), GROUP_BYTES)
    save(shelf, "resp_a", "abcd", owner="local")
    monkeypatch.setattr(Folder, "remove_owner", lambda *_: None)  # as on a disk that is read-only
    assert await asyncio.to_thread(main, ["purge", "--owner", "local", "--yes", "--data", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert f"{tmp_path / 'kv'} still has what was computed" in told.err and "is removed" in told.out


async def test_a_purge_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what would go, after each short step."""
    shown: list[tuple[float, float | None]] = []

    class Seen(Progress):
        def reached(self, done: float, total: float | None = None) -> None:
            super().reached(done, total)
            shown.append((done, self.total))

    monkeypatch.setattr(tenants, "Progress", Seen)
    async with live_app(tmp_path) as running, http_client(running) as http:
        for n in range(20):
            await Api(http).create(f"say {n}")
    assert await asyncio.to_thread(main, ["purge", "--owner", "local", "--yes", "--data", str(tmp_path)]) == 0
    totals, done = {total for _, total in shown}, [done for done, _ in shown]
    assert totals == {20} and done[0] == 0 and done[-1] == 20 and done == sorted(done)
    assert any(0 < num < 20 for num in done)


async def test_an_owner_that_does_not_exist_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without a server; one that has a key, and nothing else, exists."""
    look, purge_it = ["purge", "--owner"], ["purge", "--yes", "--owner"]
    async with live_app(tmp_path) as running:
        await make_keys(running)
        for command in (look, purge_it):
            assert await run(running, *command, "nobody") == 1
            assert "no such owner" in capsys.readouterr().err
        assert await run(running, *purge_it, "bob") == 0
        assert await run(running, "export", "--owner", "bob") == 0
    capsys.readouterr()
    assert await asyncio.to_thread(main, [*look, "nobody", "--data", str(tmp_path)]) == 1
    assert "no such owner" in capsys.readouterr().err
    for command in (["export", "--owner"], purge_it):
        beside = ["--data", str(tmp_path)]
        assert await asyncio.to_thread(main, [*command, "nobody", *beside]) == 1
        told = capsys.readouterr()
        assert not told.out and "no such owner" in told.err and "'nobody'" in told.err
        for known in ("ann", "local"):
            assert await asyncio.to_thread(main, [*command, known, *beside]) == 0
        capsys.readouterr()


async def test_a_long_purge_says_how_far_it_is(server_app: Running) -> None:
    async with http_client(server_app) as http:
        for n in range(40):
            await Api(http).create(f"say {n}")
    went: list[dict[str, Any]] = []
    storage = server_app.context.storage
    while not went or not went[-1]["done"]:
        step = await purge(storage, "local", by=OPERATOR, before=10**18, with_keys=False, limit_s=0)
        went.append(step)
    assert len(went) > 3 and sum(step["responses"] for step in went) == 40
    purges = AuditFilter(actions=("project.purged",))
    [noted] = (await storage.list_audit(purges, limit=9)).data  # one purge, however many steps
    assert (noted.entry.action, noted.entry.target, noted.entry.actor) == (
        "project.purged",
        "local",
        "operator",
    )


async def test_the_admin_routes_check_what_they_are_told(server_app: Running) -> None:
    async with http_client(server_app) as anybody:
        assert (await anybody.get("/admin/export?owner=local")).status_code == 401
        assert (await anybody.post("/admin/purge", json={"owner": "local"})).status_code == 401
    token = {"authorization": f"Bearer {server_app.life.admin_token}"}
    async with http_client(server_app, **token) as admin:
        api = Api(admin)
        assert (await api.fails(400, "GET", "/admin/export"))["param"] == "owner"
        for param, body in (
            ("owner", {}),
            ("owner", {"owner": ""}),
            ("owner", {"owner": 1}),
            ("owner", {"owner": "a\0b"}),
            ("before", {"owner": "a", "before": "now"}),
            ("before", {"owner": "local", "before": True}),
            ("before", {"owner": "local", "before": 1 << 63}),
            ("keys", {"owner": "a", "keys": 1}),
        ):
            assert (await api.fails(400, "POST", "/admin/purge", json=body))["param"] == param


def test_what_a_server_of_an_older_version_tells_of_a_purge_is_enough() -> None:
    counts = {"runs": 1, "responses": 2, "conversations": 1}
    assert tenants._size(counts) == 3
    assert tenants._listed(counts) == "2 responses (1 in flight), 1 conversation"
