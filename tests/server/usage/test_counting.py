"""What is counted of responses and completions, however they end, is what their replies say."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LocalEngine, ScriptedEngine
from server.clock import now_us
from server.telemetry import end_user
from server.usage import Meter
from storage import Account, Counts, Spent, StorageUnavailable, UsageFilter
from tests.support.blocking import until
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, calls, gated, gated_at
from tests.support.usage import told, used
from tests.support.wire import Json


async def test_stored_unstored_and_hidden_responses_count_once(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        made = [await api.create("think hm then say one")]
        assert await used(server) == told(*made)
        made.append(await api.create("say two", store=False))
        conversation = await api.conversation()
        made.append(await api.create("say three", store=False, conversation=conversation))
        made.append(await api.create("count 50", max_output_tokens=16))
        keyed = {"json": {"input": "say four", "store": False}, "headers": {"idempotency-key": "k"}}
        first, again = [await client.post("/v1/responses", **keyed) for _ in range(2)]
        assert first.json() == again.json()
        made.append(first.json())
        assert await used(server) == told(*made)
        assert [one["usage"]["output_tokens_details"]["reasoning_tokens"] > 0 for one in made] == [
            True, False, False, False, False,
        ]  # fmt: skip


async def test_cancelled_and_deleted_runs_count_what_they_generated(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with (
            api.open("hi") as cancelled,
            api.open("hi") as deleted,
            api.open("hi", store=False) as left,
        ):
            for live in (cancelled, deleted, left):
                await live.until("output_text.delta")
            ended = await api.cancel(cancelled.id)
            assert ended["usage"]["output_tokens"] > 0
            assert await used(server) == told(ended)
            await api.delete(deleted.id)
            assert (await deleted.done())["status"] == "cancelled"
            assert await used(server) == told(ended, ended), "it had generated the same"
        while (await used(server)).requests < 3:  # the client that left ends the unstored one
            await asyncio.sleep(0.01)
        assert await used(server) == told(ended, ended, ended)


async def test_a_queued_response_that_is_cancelled_has_used_nothing(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running_app(tmp_path, ScriptedEngine(gated(gate)), max_num_seqs=1) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        first = await api.create("hi", background=True)
        await gate.reached.wait()
        queued = await api.create("hi", background=True)
        assert (await api.cancel(queued["id"]))["usage"]["input_tokens"] == 0
        await api.delete((await api.create("hi", background=True))["id"])
        assert await used(server) == Counts()
        gate.release.set()
        done = await api.ended(first["id"])
        assert await used(server) == told(done)


async def test_turns_are_listed_and_survive_a_restart(tmp_path: Path) -> None:
    asked = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(call(), **asked)
        found = await api.waits(begun["id"])
        assert await used(server) == Counts(), "it has not ended"
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        [pending] = calls(found)
        await api.outputs(begun["id"], {pending["call_id"]: "sunny and warm"})
        done = await api.ended(begun["id"])
        assert await used(server) == told(done)
        usage = done["usage"]
        inputs, outputs = usage["input_tokens_per_turn"], usage["output_tokens_per_turn"]
        assert len(inputs) == len(outputs) == len(usage["cached_tokens_per_turn"]) == 2
        assert (sum(inputs), sum(outputs)) == (usage["input_tokens"], usage["output_tokens"])
        grown = inputs[1] - inputs[0] - outputs[0]
        assert grown > 0 and usage["tool_output_tokens_per_turn"] == [0, grown]
        assert usage["output_tokens_details"]["tool_output_tokens"] == grown


async def test_what_comes_into_the_prefix_cache_is_counted_once(tmp_path: Path) -> None:
    """By responses as by chat completions; what a response says of it outlives the process."""
    engine = LocalEngine(Path("engine/tiny/checkpoint"), num_threads=1, kv_cache_bytes=64 << 20)
    asked = {"instructions": "You help. " * 50, "max_output_tokens": 16}
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first, second = [await api.create("hi", **asked) for _ in range(2)]
        chat = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 4, "n": 2}
        usage = (await client.post("/v1/chat/completions", json=chat)).json()["usage"]
        written = usage["prompt_tokens_details"]["cache_write_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 < usage["prompt_tokens"] - cached - written <= 16, "the rest is no whole block"
    written = first["usage"]["input_tokens_details"]["cache_write_tokens"]
    assert 0 < first["usage"]["input_tokens"] - written <= 16
    assert second["usage"]["input_tokens_details"] == {"cached_tokens": written, "cache_write_tokens": 0}
    async with running_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).get(first["id"]))["usage"] == first["usage"]


async def test_tools_of_the_server_are_turns_too(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        asked = 'call calculator {"expression": "6*7"}'
        done = await Api(client).create(asked, tools=[BUILTIN])
        assert len(done["usage"]["output_tokens_per_turn"]) == 2
        assert done["usage"]["output_tokens_details"]["tool_output_tokens"] > 0
        assert await used(server) == told(done), "a response is one request, however many turns it has"


async def test_persons_are_counted_wherever_they_are_named(tmp_path: Path) -> None:
    """Once each, for stored responses, for unstored ones, and for what is never stored."""
    turn = {"role": "user", "content": "say one"}
    async with running_app(tmp_path) as server, http_client(server) as client:
        said = {"messages": [turn], "max_tokens": 9, "model": server.context.models.first.name}
        for path, body in (
            ("/v1/responses", {"input": "say one", "safety_identifier": "ann"}),
            ("/v1/responses", {"input": "say one", "store": False, "user": "ann"}),
            ("/v1/responses", {"input": "say one", "user": "bob"}),
            ("/v1/responses", {"input": "say one"}),
            ("/v1/chat/completions", {"messages": [turn], "safety_identifier": "ann", "user": "bob"}),
            ("/v1/chat/completions", {"messages": [turn], "user": "bob", "n": 2}),
            ("/v1/completions", {"prompt": "say one", "user": "ann"}),
            ("/v1/messages", {**said, "metadata": {"user_id": "ann"}}),
            ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
        assert await used_by_persons(server) == {"ann": 5, "bob": 2, None: 2}
        assert (await used(server)).requests == 9


async def test_a_run_that_goes_on_after_a_restart_counts_for_its_person(tmp_path: Path) -> None:
    asked = {"tools": [WEATHER], "await_tool_outputs": True, "background": True, "safety_identifier": "ann"}
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(call(), **asked)
        found = await api.waits(begun["id"])
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        await api.outputs(begun["id"], {calls(found)[0]["call_id"]: "sunny"})
        await api.ended(begun["id"])
        assert await used_by_persons(server) == {"ann": 1}


async def used_by_persons(server: Running) -> dict[str | None, int]:
    """Requests by the persons whom the tests name."""
    await server.context.meter.flush()
    names: dict[object, str | None] = {end_user("local", name): name for name in ("ann", "bob")}
    wanted = UsageFilter("completions", 0, now_us() + 3_600_000_000)
    sums = await server.context.storage.usage_sums(wanted, ("person",), 1 << 62)
    return {names.get(one.by["person"]): one.counts.requests for one in sums}


CHAT = {"messages": [{"role": "user", "content": "think hm then say one two"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/v1/completions", {"prompt": ["say one", "say two"], "n": 2}),
        ("/v1/completions", {"prompt": "say one", "max_tokens": 0, "echo": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_completions_count_what_they_say(
    server_app: Running, client: httpx.AsyncClient, path: str, body: Json, stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await client.post(path, json={**body, **options})
    assert reply.status_code == 200, reply.text
    usage: Any
    if stream:
        frames = [line for line in reply.text.split("\n\n") if line.startswith("data: {")]
        usage = httpx.Response(200, text=frames[-1].removeprefix("data: ")).json()["usage"]
    else:
        usage = reply.json()["usage"]
    assert await used(server_app) == Counts(
        1,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


async def test_a_chat_whose_client_leaves_counts_what_was_generated(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        body = {"messages": [{"role": "user", "content": "count 500"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for _ in reply.aiter_raw():
                break
        while not (await used(server)).requests:
            await asyncio.sleep(0.01)
        counted = await used(server)
        assert counted.requests == 1 and counted.input_tokens > 0 and counted.output_tokens > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say held"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say held"}], "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say held"}], "best_of": 2}),
        ("/v1/completions", {"prompt": "say held"}),
        ("/inference/v1/generate", {"token_ids": [*b"say held"]}),
    ],
)
async def test_a_client_that_leaves_before_the_first_token_has_used_its_prompt(
    tmp_path: Path, path: str, body: Json
) -> None:
    """Once the engine has begun with it; one that leaves the queue has used nothing."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"), max_running=2)
    limits = ("tokens_per_day=100000",)
    async with live_app(tmp_path, engine, owner_limit=limits) as server, http_client(server) as client:

        def at_work(number: int) -> bool:
            return engine.admission.num_places == number

        held = []
        for number in (1, 2, 3):
            held.append(asyncio.create_task(client.post(path, json=body)))
            await until(partial(at_work, number))
            await gate.reached.wait()
        for num_left in (2, 1, 0):
            held[num_left].cancel()
            await until(partial(at_work, num_left))
        num_prompt = len(engine.requests[0].prompt_ids)
        num_begun = 1 if "best_of" in body else 2
        assert await used(server) == Counts(num_begun, num_begun * num_prompt)
        meters = server.context.limiter.meters
        meter = meters._meters["owner:local:tokens_per_day"]
        left = meter.rate.limit - meter.remaining(meters.now())
        assert 0 <= num_begun * num_prompt - left <= 2, "less what has come back since"


async def test_candidates_of_a_client_that_leaves_count_what_was_generated(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "best_of": 3}
        left = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        generated = 3 * len(engine.tokenizer.encode("one two"))
        await until(lambda: engine.stats().output_tokens_total == generated)
        left.cancel()
        await until(lambda: not engine.admission.num_places)
        prompt = len(engine.requests[0].prompt_ids)
        assert await used(server) == Counts(1, prompt, output_tokens=generated)


# ------------------------------------------------------------------------------------------------------------
# The meter

ACCOUNT = Account("ann", None, "m", "default")


class Written:
    """Storage, as far as a meter asks it."""

    def __init__(self) -> None:
        self.spent: list[Spent] = []
        self.away = False

    async def add_usage(self, spent: list[Spent]) -> None:
        if self.away:
            raise StorageUnavailable("away")
        self.spent += spent


async def test_what_was_counted_is_written_by_itself_and_at_the_end() -> None:
    storage = Written()
    meter = Meter(storage)  # type: ignore[arg-type]
    meter.start()
    for _ in range(3):
        meter.add(Spent(61_000_000, ACCOUNT, Counts(1, 2)))
    async with asyncio.timeout(30):
        while not storage.spent:
            await asyncio.sleep(0.01)
    assert storage.spent == [Spent(60_000_000, ACCOUNT, Counts(3, 6))]
    meter.add(Spent(1, ACCOUNT, Counts(1)))
    await meter.close()
    assert storage.spent[1:] == [Spent(0, ACCOUNT, Counts(1))]


async def test_what_the_database_does_not_take_is_kept() -> None:
    storage = Written()
    meter = Meter(storage)  # type: ignore[arg-type]
    storage.away = True
    meter.add(Spent(1, ACCOUNT, Counts(1)))
    await meter.flush()
    meter.add(Spent(2, ACCOUNT, Counts(1)))
    storage.away = False
    await meter.close()
    assert storage.spent == [Spent(0, ACCOUNT, Counts(2))]
