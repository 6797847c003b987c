"""The journal: one place that numbers, commits before it shows, pauses with the database, and knows when it
has lost a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from engine import ScriptedEngine
from server.runs.events import journal
from server.runs.events.journal import stamp
from storage import ECHO_MARK, RunAppend, Storage, StorageUnavailable
from storage.tables import runs
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, call, gated, gated_at, text


def test_an_event_begins_with_its_type_and_its_number() -> None:
    assert stamp({"delta": "x", "type": "response.a"}, 7).startswith(
        b'{"type":"response.a","sequence_number":7,'
    )
    lifecycle = stamp({"type": "response.created", "response": {"id": "r", "output": []}}, 0)
    assert lifecycle.endswith(b'"response":{"id":"r","output":[],' + ECHO_MARK + b"}}")


# ------------------------------------------------------------------------------------------------------------
# A database that comes and goes


class Valve:
    """Storage's `append`, which a test can close, and which notes what was committed."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self._append = storage.append
        self.open = asyncio.Event()
        self.open.set()
        self.refusals = 0
        self.refused = asyncio.Event()
        self.batches: list[Sequence[RunAppend]] = []
        monkeypatch.setattr(storage, "append", self.append)

    async def append(self, batch: Sequence[RunAppend]) -> Mapping[str, Exception]:
        if not self.open.is_set():
            self.refusals += 1
            self.refused.set()
            raise StorageUnavailable("closed")
        self.batches.append(batch)
        return await self._append(batch)


@asynccontextmanager
async def valve(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Running, Api, Valve]]:
    engine = ScriptedEngine(gated(gate), **settings)
    async with live_app(folder, engine) as server, http_client(server) as client:
        yield server, Api(client), Valve(server.context.storage, monkeypatch)


async def test_nothing_is_shown_while_the_database_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not in the log is not visible; the stream pauses and recovers."""
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    gate = Gate()
    async with valve(tmp_path, gate, monkeypatch) as (server, api, append), api.open("hi") as live:
        await live.until("output_text.delta")
        await live.until("output_text.delta")
        append.open.clear()
        gate.release.set()
        await append.refused.wait()
        channel = server.context.runs.feed._channels[live.id]
        shown = channel.next_seq
        while append.refusals < 5:
            await asyncio.sleep(0.001)
        assert channel.next_seq == shown == live.events[-1]["sequence_number"] + 1
        append.open.set()
        done = await live.done()
        assert (done["status"], text(done)) == ("completed", "one two three four")
        assert await api.replay(live.id) == live.raw


async def test_writes_that_gather_during_a_commit_are_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    gate = Gate()
    async with valve(tmp_path, gate, monkeypatch) as (_, api, append):
        begun = [await api.create("hi", background=True) for _ in range(3)]
        append.open.clear()
        gate.release.set()
        while append.refusals < 3:
            await asyncio.sleep(0.001)
        append.open.set()
        before = len(append.batches)
        for response in begun:
            assert (await api.ended(response["id"]))["status"] == "completed"
        assert len(append.batches) - before <= 4
        assert max(len(batch) for batch in append.batches) == 3


async def test_a_run_waits_when_it_is_too_far_ahead_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    gate = Gate()
    monkeypatch.setattr(journal, "MAX_UNCOMMITTED", 4)
    async with valve(tmp_path, gate, monkeypatch, chunk=1) as (server, api, append):
        begun = await api.create("hi", background=True)
        await gate.reached.wait()
        run = server.context.runs._tasks.get(begun["id"])
        assert run is not None
        append.open.clear()
        gate.release.set()
        while append.refusals < 20:
            await asyncio.sleep(0.001)
        assert run.entry.num_uncommitted == 4, "eleven tokens could have come"
        append.open.set()
        done = await api.ended(begun["id"])
        assert (done["status"], text(done)) == ("completed", "one two three four")


async def test_a_new_run_is_a_503_while_the_database_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        storage = server.context.storage

        async def closed(*_: object) -> None:
            raise StorageUnavailable("closed")

        monkeypatch.setattr(storage, "start_response", closed)
        error = await Api(client).refused(503, "hi")
        assert (error["code"], error["headers"]["retry-after"]) == ("storage_unavailable", "1")
        assert (await Api(client).refused(503, "hi", stream=True))["type"] == "server_error"
        assert server.context.runs.feed._channels == {}


# ------------------------------------------------------------------------------------------------------------
# A run that is lost, a row that is refused


async def test_a_lost_fence_ends_the_stream_without_a_terminal_event(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi") as live, api.open("hi") as other:
            await live.until("output_text.delta")
            await other.until("output_text.delta")
            await gate.reached.wait()
            storage = server.context.storage
            taken = update(runs).where(runs.c.response_id == live.id).values(fence=runs.c.fence + 1)
            await storage._write(lambda conn: conn.execute(taken))
            run = (await storage.get_response("local", live.id)).run
            assert run is not None
            gate.release.set()
            await live.cut()
            assert (await other.done())["status"] == "completed", "others go on"
        records = await storage.records(live.id, after=-1)
        assert records[-1].first_seq + records[-1].num_events == run.next_seq, "it wrote nothing more"
        assert server.context.runs.num_active == 0
        assert engine.stats().running == 0, "the engine was told"
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        done = await Api(client).ended(live.id)
        assert (done["status"], text(done)) == ("completed", "one two three four"), "its next owner goes on"


@pytest.mark.parametrize("store", [True, False])
async def test_a_row_that_the_log_refuses_fails_that_run_only(tmp_path: Path, store: bool) -> None:
    """The run ends `failed` from where the log stands, and frees its conversation."""
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        conversation = await api.conversation()
        async with (
            api.open("hi", conversation=conversation, store=store) as live,
            api.open("hi") as other,
        ):
            made = (await live.until("output_item.added"))["item"]["id"]
            await other.until("output_text.delta")
            await gate.reached.wait()
            # Somebody takes the id that was shown before the item is whole.
            thief = {"items": [{"id": made, "role": "user", "content": "mine"}]}
            assert (await client.post("/v1/conversations", json=thief)).status_code == 200
            gate.release.set()
            failed = await live.done()
            assert (await other.done())["status"] == "completed"
        assert failed["status"] == "failed" and "could not be stored" in failed["error"]["message"]
        if store:
            assert (await api.get(live.id))["status"] == "failed"
            assert await api.replay(live.id) == live.raw
        gate.release.set()
        assert (await api.create("hi", conversation=conversation))["status"] == "completed"
        assert server.context.runs.num_active == 0


async def test_a_run_whose_end_cannot_be_stored_at_all_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        async with Api(client).open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()

            async def refuse(batch: Sequence[RunAppend]) -> Mapping[str, Exception]:
                return {one.response_id: ValueError("no") for one in batch}

            monkeypatch.setattr(server.context.storage, "append", refuse)
            gate.release.set()
            await live.cut()
        assert server.context.runs.num_active == 0


# ------------------------------------------------------------------------------------------------------------
# What a record holds


async def test_every_token_is_in_exactly_one_record(tmp_path: Path) -> None:
    """Token ids, generation by generation, without a gap: what recovery will replay."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"), chunk=3)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        asked = f"think hé then say 🙂 there\n{call()}"
        async with api.open(asked, tools=[WEATHER], await_tool_outputs=True) as live:
            while (event := await live.next()) is not None:
                if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
                    await api.outputs(live.id, {event["item"]["call_id"]: "wet"})
            done = wire.check_stream(live.events)
        records = await server.context.storage.records(live.id, after=-1)
        for generation in (0, 1):
            own = [record for record in records if record.generation == generation and record.token_ids]
            ends = [record.first_token + len(record.token_ids) for record in own]
            assert [record.first_token for record in own] == [0, *ends[:-1]], "no gap"
            said = engine.tokenizer.decode([token for record in own for token in record.token_ids])
            assert said.endswith("<|im_end|>")
            assert ("🙂" in said) == (generation == 0)
        logged = sum(len(record.token_ids) for record in records)
        assert done["usage"]["output_tokens"] == logged
        numbers = [record.first_seq for record in records]
        sizes = [record.num_events for record in records]
        assert numbers == [sum(sizes[:index]) for index in range(len(sizes))]
