"""What an engine keeps on disk has a name, and goes with what it was computed of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import EngineStats, RequestFailed, ScriptedEngine, TierStats
from engine.tiers.folders import Folder
from engine.tiers.shelf import Shelf
from server.clock import now_us
from server.config import Config
from server.process.lifecycle import ServerLifecycle
from server.runs.planning.saved_names import name_of
from storage import StorageUnavailable
from tests.server.runs.test_disconnect import eventually
from tests.support.running import Running, http_client, running_app
from tests.support.saved_blocks import GROUP_BYTES, IDENTITY, save
from tests.support.talk import WEATHER, Api, call, calls


class SavingEngine(ScriptedEngine):
    """Remembers what it is to save, as an engine with a disk does."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self.names = set(names)
        self.owners: list[str] = []

    def note(self) -> list[str]:
        """Save what was asked for so far, and say under which names."""
        asked = [request.saved_as for request in self.requests if request.saved_as is not None]
        self.names |= set(asked)
        return asked

    def forget(self, names: Collection[str]) -> None:
        self.names -= set(names)

    def forget_owner(self, owner: str) -> None:
        self.owners.append(owner)
        self.names.clear()

    async def saved_names(self) -> frozenset[str]:
        return frozenset(self.names)


@asynccontextmanager
async def saving(
    folder: Path, names: Collection[str] = (), **settings: Any
) -> AsyncIterator[tuple[Running, SavingEngine, Api]]:
    engine = SavingEngine(names)
    async with running_app(folder, engine, **settings) as server, http_client(server) as http:
        yield server, engine, Api(http)


async def test_what_is_saved_has_the_name_of_its_response_or_conversation(tmp_path: Path) -> None:
    async with saving(tmp_path) as (_, engine, api):
        first = await api.create("say one")
        second = await api.create(call(), previous_response_id=first["id"], tools=[WEATHER])
        conversation = await api.conversation({"role": "user", "content": "say zero"})
        turn = await api.create("say two", conversation=conversation)
        fork = (await api.http.post(f"/v1/conversations/{conversation}/fork")).json()["id"]
        await api.create("say three", conversation=fork)
        assert len(calls(second)) == 1
        assert engine.note() == [
            first["id"],
            second["id"],
            name_of(conversation, 0),
            name_of(fork, 0),
        ]
        # What was said before may be deleted from the conversation, and no name would tell.
        await api.create("say four", previous_response_id=turn["id"])
        assert len(engine.note()) == 4


@pytest.mark.parametrize(
    "asked",
    [{"store": False}, {"prompt_cache_retention": "in_memory"}, {"prompt_cache_retention": "in-memory"}],
)
async def test_what_is_to_be_kept_nowhere_but_in_memory(tmp_path: Path, asked: dict[str, Any]) -> None:
    async with saving(tmp_path) as (_, engine, api):
        await api.create("say one", **asked)
        reply = await api.http.post(
            "/v1/responses", json={"input": "say two", **asked}, headers={"idempotency-key": "k"}
        )
        assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
        assert len(engine.requests) == 2 and engine.note() == []
        if "store" not in asked:
            assert reply.json()["prompt_cache_retention"] == "in_memory"


async def test_a_day_at_most(tmp_path: Path) -> None:
    async with saving(tmp_path) as (_, engine, api):
        made = await api.create("say one", prompt_cache_retention="24h")
        await api.create("say two")
        day, ever = (request.saved_until for request in engine.requests)
        assert day is not None and abs(day - time.time() - 86_400) < 600 and ever is None
        assert made["prompt_cache_retention"] == "24h"


async def test_deletions_reach_the_disk(tmp_path: Path) -> None:
    async with saving(tmp_path) as (_, engine, api):
        first, second = await api.create("say one"), await api.create("say two")
        parent = await api.conversation({"role": "user", "content": "say three"})
        [shared] = await api.conversation_items(parent)
        children = [(await api.http.post(f"/v1/conversations/{parent}/fork")).json()["id"] for _ in range(2)]
        for conversation in (parent, *children):
            await api.create("say four", conversation=conversation)
        engine.note()
        assert len(engine.names) == 5
        await api.delete(first["id"])
        assert first["id"] not in engine.names and second["id"] in engine.names
        assert (await api.http.delete(f"/v1/conversations/{children[0]}")).status_code == 200
        await eventually(lambda: name_of(children[0], 0) not in engine.names)
        assert {name_of(parent, 0), name_of(children[1], 0)} < engine.names
        # An item goes from all branches, and so does what was computed of it.
        deleted = await api.http.delete(f"/v1/conversations/{children[1]}/items/{shared['id']}")
        assert deleted.status_code == 200
        await eventually(lambda: engine.names == {second["id"]})
        await api.create("say five", conversation=parent)
        assert engine.note()[-1] == name_of(parent, 1)


async def test_a_server_that_was_away_catches_up(tmp_path: Path) -> None:
    async with saving(tmp_path) as (_, engine, api):
        kept, gone = await api.create("say one"), await api.create("say two")
        conversation = await api.conversation()
        await api.create("say three", conversation=conversation)
        engine.note()
        names = set(engine.names)
    async with saving(tmp_path) as (_, _, api):  # another server on the same database
        await api.delete(gone["id"])
    async with saving(tmp_path, {*names, "resp_unknown", "conv_unknown.0"}) as (server, engine, _):
        await eventually(lambda: engine.names == {kept["id"], name_of(conversation, 0)})
        storage = server.context.storage
        await storage.delete_response("local", kept["id"], now_us())  # by yet another
        await server.context.runs.forget_gone()
        await eventually(lambda: engine.names == {name_of(conversation, 0)})


async def test_a_disk_that_hangs_holds_up_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saving(tmp_path) as (server, engine, _):
        asked = asyncio.Event()

        async def hangs(owner: str | None = None) -> frozenset[str]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(engine, "saved_names", hangs)
        async with asyncio.timeout(10):
            await server.context.runs.forget_gone()
            await asked.wait()


async def test_an_engine_that_fails_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with saving(tmp_path) as (server, engine, _):

        async def fails(owner: str | None = None) -> frozenset[str]:
            raise RequestFailed("its disk is broken")

        monkeypatch.setattr(engine, "saved_names", fails)
        other = SavingEngine({"resp_unknown"})
        await other.start()
        server.context.models.add(other, ["other"])
        assert await server.context.runs.saved.compare() == 1 and not other.names
        assert "its disk is broken" in caplog.text
        await other.close()


async def test_deletions_reach_what_models_have_left_that_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saving(tmp_path) as (server, engine, api):
        gone, kept = await api.create("say one"), await api.create("say two")
        conversation = await api.conversation()
        await api.create("say three", conversation=conversation)
        names = [kept["id"], name_of(conversation, 0)]
        shelf = Shelf(Folder(tmp_path / "kv", IDENTITY), GROUP_BYTES)
        for name, blocks in zip((gone["id"], *names), ("abcd", "wxyz", "abef"), strict=True):
            save(shelf, name, blocks)

        def left() -> tuple[set[str], int]:
            """Names and how many blocks are on disk."""
            found = Shelf(shelf.folder, GROUP_BYTES)
            found.refresh()
            return set(found.index.names), len(found.index)

        await api.delete(gone["id"])
        await eventually(lambda: left() == ({*names}, 8))
        with monkeypatch.context() as patched:  # an engine looks after it
            patched.setattr(engine, "stats", lambda: EngineStats(tier=TierStats("on", disk_bytes_limit=1)))
            assert (await api.http.delete(f"/v1/conversations/{conversation}")).status_code == 200
            await server.context.runs.saved.compare()
            assert left() == ({*names}, 8)
        headers = {"authorization": f"Bearer {server.life.admin_token}"}
        purged = await api.http.post("/admin/purge", json={"owner": "local"}, headers=headers)
        assert purged.status_code == 200, purged.text
        await eventually(lambda: left() == (set(), 0))


async def test_what_another_database_has_saved_is_not_taken_for_deleted(tmp_path: Path) -> None:
    kv, db = tmp_path / "kv", f"sqlite+aiosqlite:///{tmp_path}/{{}}.db".format
    async with saving(tmp_path / "one", kv_disk_folder=kv, db=db("one")) as (server, _, api):
        kept = await api.create("say one")
        shelf = Shelf(Folder(kv, IDENTITY), GROUP_BYTES)
        save(shelf, kept["id"], "abcd")
        save(shelf, "resp_gone", "wxyz")
        assert await server.context.runs.saved.compare() == 1, "it is nobody's yet"
        files = sorted(kv.rglob("*"))
    async with saving(tmp_path / "two", kv_disk_folder=kv, db=db("two")) as (server, _, _):
        assert await server.context.runs.saved.compare() == 0
        headers = {"authorization": f"Bearer {server.life.admin_token}"}
        async with http_client(server, **headers) as http:
            assert (await http.post("/admin/purge", json={"owner": "local"})).status_code == 200
        assert await server.context.runs.saved.compare() == 0
    assert sorted(kv.rglob("*")) == files


async def test_an_engine_saves_for_the_database_of_its_server(tmp_path: Path) -> None:
    for data, state in (("one", "on"), ("one", "on"), ("two", "foreign")):
        config = Config(data=tmp_path / data, kv_disk_folder=tmp_path / "kv", embedding_model=())
        life = ServerLifecycle(config)
        try:
            await life.start()
            assert life.context is not None
            assert life.context.models.first.engine.stats().tier.state == state
        finally:
            await life.close()


async def test_an_owner_who_is_purged(tmp_path: Path) -> None:
    async with saving(tmp_path) as (server, engine, api):
        await api.create("say one")
        engine.note()
        headers = {"authorization": f"Bearer {server.life.admin_token}"}
        purged = await api.http.post("/admin/purge", json={"owner": "local"}, headers=headers)
        assert purged.status_code == 200, purged.text
        assert engine.owners == ["local"] and not engine.names


async def test_a_database_that_cannot_be_asked_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saving(tmp_path) as (server, engine, api):
        made = await api.create("say one")
        engine.note()
        saved, storage = server.context.runs.saved, server.context.storage

        async def broken(ids: Collection[str]) -> frozenset[str]:
            raise StorageUnavailable("away")

        with monkeypatch.context() as patched:
            patched.setattr(storage, "gone_responses", broken)
            with pytest.raises(StorageUnavailable):
                await saved.compare()
            saved.stir()
            await eventually(lambda: not saved._stirred.is_set())
        assert engine.names == {made["id"]}
        await storage.delete_response("local", made["id"], now_us())
        saved.stir()
        await eventually(lambda: not engine.names)


async def test_metrics_tell_where_tokens_were_found(client: httpx.AsyncClient) -> None:
    found = (await client.get("/metrics")).text
    for tier in ("pool", "disk"):
        assert f'antiphon_kv_hit_tokens_total{{model="antiphon-scripted",tier="{tier}"}} 0.0' in found
