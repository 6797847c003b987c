"""A cap on all responses that are under way: who counts, who is refused, and what other servers begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.limits import LiveRuns
from storage import StorageUnavailable
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, call, calls, gated


class Store:
    """Storage, as far as the count asks it."""

    def __init__(self) -> None:
        self.num = 0
        self.away = False
        self.meanwhile = lambda: None

    async def num_live_runs(self) -> dict[str, int]:
        if self.away:
            raise StorageUnavailable("away")
        num = {"running": self.num}
        self.meanwhile()
        return num


async def test_the_count_is_never_short_of_what_this_process_has_begun() -> None:
    store = Store()
    refused: list[str] = []
    live = LiveRuns(store, 100, refused.append)  # type: ignore[arg-type]
    live.enter(lambda: 1).begun(in_database=True)
    given_up = live.enter(lambda: 1)
    starting = live.enter(lambda: 1)
    assert live.num == 3
    given_up.leave()
    given_up.leave()
    assert live.num == 2
    store.num = 5  # the one of this process, and four of others

    def meanwhile() -> None:
        starting.begun(in_database=True)
        starting.leave()

    store.meanwhile = meanwhile
    await live.look()
    assert live.num == 6, "what began while the database was asked is not forgotten"
    store.num, store.meanwhile = 6, lambda: None
    live.ended(in_database=True)
    assert live.num == 5
    await live.look()
    assert live.num == 6
    live.enter(lambda: 1).begun(in_database=False)
    await live.look()
    assert live.num == 7
    live.ended(in_database=False)
    store.away = True
    with pytest.raises(StorageUnavailable):
        await live.look()
    assert live.num == 6 and refused == []


async def test_what_is_queued_at_work_or_waiting_counts_and_makes_room_at_its_end(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with (
        live_app(tmp_path, engine, max_live_runs=3, max_num_seqs=1) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        at_work = await api.create("hi", background=True)
        await gate.reached.wait()
        queued = await api.create("hi", background=True)
        async with api.open("hi", store=False):
            for body in ({"input": "hi", "background": True}, {"input": "hi", "store": False}):
                refused = await api.fails(429, "POST", "/v1/responses", json=body)
                assert (refused["code"], refused["type"]) == ("queue_full", "rate_limit_exceeded")
                assert int(refused["headers"]["retry-after"]) >= 1
        assert 'over_limit_total{limit="max_live_runs"} 2.0' in (await client.get("/metrics")).text
        # The client of the unstored one has left; the one that is cancelled makes room, too.
        await api.cancel(queued["id"])
        gate.release.set()
        await api.ended(at_work["id"])
        for _ in range(10):  # each as soon as the one before it has ended, far more in a second than the cap
            assert (await api.create("hi"))["status"] == "completed"


async def test_a_response_that_waits_counts_over_a_restart(tmp_path: Path) -> None:
    asked = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
    async with running_app(tmp_path, max_live_runs=1) as server, http_client(server) as client:
        api = Api(client)
        made = await api.create(call(), **asked)
        waiting = await api.waits(made["id"])
        assert (await api.refused(429, "say hi"))["code"] == "queue_full"
    async with running_app(tmp_path, max_live_runs=1) as server, http_client(server) as client:
        api = Api(client)
        assert "antiphon_runs_waiting 1.0" in (await client.get("/metrics")).text
        assert (await api.refused(429, "say hi"))["code"] == "queue_full"
        [pending] = calls(waiting)
        await api.outputs(made["id"], {pending["call_id"]: "sunny"})
        assert (await api.ended(made["id"]))["status"] == "completed"
        assert (await api.create("say hi"))["status"] == "completed"
        assert await server.context.storage.num_live_runs() == {}
