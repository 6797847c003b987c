"""Background responses that wait: their owners share tokens, prompts counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from engine import CACHED_TOKEN, GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from server.access import OPERATOR
from server.admin import keys
from server.limits.limiter import ENOUGH_ANSWERS
from server.runs.planning import RunPlan
from server.runs.planning.spending import spent
from server.runs.planning.steps import Progress
from tests.support.making import entry, query
from tests.support.running import Running, http_client, running_app
from tests.support.talk import Api, Gate, gated

LONG = "word " * 2000
SHORT = "hi"


async def api_of(stack: AsyncExitStack, running: Running, owner: str) -> Api:
    """A client with a key of the owner."""
    made = await keys.make(running.context.storage, OPERATOR, name="x", owner=owner)
    client = http_client(running, authorization=f"Bearer {made.key}")
    return Api(await stack.enter_async_context(client))


async def test_an_owner_of_long_prompts_gets_fewer_places(tmp_path: Path) -> None:
    """Both owners have queued before the only place becomes free; owners that took turns would be served one
    by one."""
    gate = Gate()
    served: list[str] = []

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        served.append(request.owner)
        yield gate.wait()
        yield Say("one two three")

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_app(tmp_path, ScriptedEngine(script), max_num_seqs=1)
        )
        tank, long, short = [await api_of(stack, running, owner) for owner in ("tank", "long", "short")]
        await tank.create(SHORT, background=True)
        await gate.reached.wait()
        made = [(long, await long.create(LONG, background=True)) for _ in range(3)]
        made += [(short, await short.create(SHORT, background=True)) for _ in range(6)]
        shown = [(await api.get(response["id"]))["queue_position"] for api, response in made]
        assert shown == [1, 8, 9, 2, 3, 4, 5, 6, 7]
        gate.release.set()
        for api, response in made:
            assert (await api.ended(response["id"]))["status"] == "completed"
    assert served == ["tank", "long", *["short"] * 6, "long", "long"]


async def test_what_a_response_is_expected_to_take_is_learnt_from_its_owner_s_answers(tmp_path: Path) -> None:
    """Without any limit on tokens, too."""
    gate = Gate()
    gate.release.set()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield gate.wait()
        yield Say("one two three")

    async with (
        running_app(tmp_path, ScriptedEngine(script), max_num_seqs=1) as running,
        http_client(running) as client,
    ):
        api = Api(client)
        answers = [await api.create(SHORT) for _ in range(ENOUGH_ANSWERS)]
        gate.release.clear()
        gate.reached.clear()
        first = await api.create(SHORT, background=True)
        await gate.reached.wait()
        queued = [await api.create(SHORT, background=True) for _ in range(2)]
        told = answers[-1]["usage"]
        database = str(running.life.config.db)
        costs = await asyncio.to_thread(query, database, "SELECT cost FROM runs WHERE state = 'queued'")
        assert [cost for (cost,) in costs] == [told["input_tokens"] + told["output_tokens"]] * 2
        gate.release.set()
        for response in (first, *queued):
            await api.ended(response["id"])


async def test_a_response_counts_what_it_took_by_its_owner_s_weight(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_app(tmp_path, engine, max_num_seqs=1))
        api = await api_of(stack, running, "team")
        await running.context.storage.limit_owner("team", lambda _: b'{"weight": 4}', entry=entry())
        running.life.keys.forget()
        first, second = [await api.create(SHORT, background=True) for _ in range(2)]
        gate.release.set()
        used = (await api.ended(first["id"]))["usage"]
        database = str(running.life.config.db)
        [(owner, served, plan)] = await asyncio.to_thread(
            query,
            database,
            "SELECT s.owner, s.served, r.plan FROM queue_shares s JOIN responses r ON r.owner = s.owner"
            f" WHERE r.id = '{first['id']}'",
        )
        assert (owner, served) == ("team", (used["input_tokens"] + used["output_tokens"]) / 4)
        await api.ended(second["id"])
    progress = Progress(generations=1, input_tokens=1000, cached_tokens=800, output_tokens=20)
    counted = spent(RunPlan.load(plan), progress, 0)
    assert counted is not None and counted.served == pytest.approx((200 + 800 * CACHED_TOKEN + 20) / 4)
