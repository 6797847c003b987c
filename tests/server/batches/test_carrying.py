"""Which batches a process carries on, what becomes of those that it cannot, and what others hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engine import GenerateRequest, Say, ScriptedEngine, Wait
from server.admin.exports import exporting
from server.batches import carrier, worker
from server.batches.carrier import Reply
from server.batches.objects import UsageSum, output_line
from server.clock import now_us
from server.http import Outcome
from server.webhooks import EVENT_TYPES
from storage import (
    MAX_BATCH_ATTEMPTS,
    AuditEntry,
    BatchLine,
    NewBatch,
    StorageUnavailable,
    StoredBatch,
    StoredWebhook,
)
from storage.batches import batch_rows
from storage.batches.records import RESTS_S
from tests.support.batching import Json, chats, input_file, line, lines_of, responses
from tests.support.blocking import until
from tests.support.running import Running, http_client, running_app
from tests.support.talk import BUILTIN

CHAT = "/v1/chat/completions"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_app(tmp_path) as running:
        yield running


@pytest.fixture
async def idle(running: Running) -> AsyncIterator[Running]:
    """A server that carries no batch on until `go`."""
    assert running.life._batches is not None
    running.life._batches._app = None
    yield running


def go(running: Running) -> None:
    running.life.serve_inside(running.app)


async def new_batch(running: Running, id: str, lines: list[str], owner: str = "local", **fields: Any) -> str:
    """Store a batch as the route does."""
    storage, now = running.context.storage, now_us()
    file = await storage.files.get(owner, await input_file(storage, lines, owner=owner), now)
    endpoint = CHAT if CHAT in lines[0] else "/v1/responses"
    times = {"created_at": now, "expires_at": now + 86_400_000_000} | fields
    new = NewBatch(f"batch_{id}", owner, None, endpoint, file.id, file.digest, b"{}", **times)
    await storage.batches.create(new, 100)
    return new.id


async def ended(running: Running, id: str, owner: str = "local") -> StoredBatch:
    async with asyncio.timeout(60):
        while (batch := await running.context.storage.batches.get(owner, id)).ended_at is None:
            await asyncio.sleep(0.02)
    return batch


def counting(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each request of a batch that is made from now on."""
    made = list[None]()

    async def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return await carrier.carry_out(*args, **kwargs)

    monkeypatch.setattr(worker, "carry_out", counted)
    return made


async def test_owners_take_turns(idle: Running) -> None:
    storage, one = idle.context.storage, responses(1)
    for number in range(6):
        await new_batch(idle, f"a{number}", one, "a")
    for owner in "bc":
        await new_batch(idle, f"{owner}0", one, owner)
    held: list[str] = []
    for wanted in (["a0", "b0", "c0"], ["a1", "a2"]):
        got = [batch.id for batch in await storage.batches.claim(len(wanted), held, now_us())]
        assert got == [f"batch_{id}" for id in wanted]
        held += got
    shares = {share.owner: (share.carried, share.waiting) for share in await storage.batches.shares(held, 0)}
    assert shares == {"a": (3, 3), "b": (1, 0), "c": (1, 0)}
    await storage.batches.release()
    await new_batch(idle, "d0", one, "d")
    got = [batch.id for batch in await storage.batches.claim(2, (), now_us())]
    assert got == ["batch_d0", "batch_b0"], "whose turn was longest ago, the one that had none first"


async def test_the_end_of_a_batch_holds_a_bounded_part_of_its_results(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_rows, "RESULT_BYTES", 3000, raising=False)
    pages, results = list[list[int]](), batch_rows.results

    def noted(*args: Any, **kwargs: Any) -> Any:
        page = results(*args, **kwargs)
        pages.append([len(row[1]) for row in page])
        return page

    monkeypatch.setattr(batch_rows, "results", noted)
    batches, sizes = idle.context.storage.batches, [1000, 1000, 1000, 1000, 5000, 2500, 1000, 10]
    await new_batch(idle, "large", responses(len(sizes)))
    (batch,) = await batches.claim(1, (), now_us())
    await batches.add_lines(batch, [BatchLine(n, f"l{n}", 0, 0) for n in range(len(sizes))])
    await batches.begin(batch, now_us())
    for position, size in enumerate(sizes):
        await batches.finish_line(batch, position, "completed", b"x" * size, 7)
    found = [result async for result in batches.results(batch.id, "completed")]
    assert len(found) == len(sizes)
    assert pages == [[1000] * 3, [1000], [5000], [2500], [1000, 10], []]


async def test_the_end_of_a_batch_reads_no_answer_again() -> None:
    """What each used was noted when it came; only an earlier version left that to be found in the line."""
    line = BatchLine(1, "a", 0, 0)
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    body = orjson.dumps({"model": "m", "usage": usage, "choices": ["x" * 1000]})
    result, used = output_line("batch_1", line, Reply(200, {}, body, Outcome("m", usage)))
    assert len(used) < 200

    async def results() -> AsyncGenerator[tuple[bytes, bytes | None]]:
        yield b"never parsed", used
        yield result, None

    counted = UsageSum()
    assert [each async for each in counted.counting(results())] == [b"never parsed", result]
    assert (counted.model, counted.json()["total_tokens"]) == ("m", 10)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (None, (False, False, False)),
        ({"code": "invalid_prompt"}, (True, False, False)),
        ({"code": "server_error"}, (True, True, False)),
        ({"code": "rate_limit_exceeded", "retry_after": 2}, (True, False, True)),
    ],
)
async def test_a_reply_goes_into_its_line_as_it_is(failure: Json | None, told: tuple[bool, ...]) -> None:
    """One with log probabilities may be so large that to parse it would hold every stream for a second."""
    body = b'{"output":[' + b"[" * 10_000  # nothing that could be parsed
    reply = Reply(200, {"x-request-id": "req_1"}, body, Outcome("m", {"input_tokens": 1}, failure))
    assert (reply.failed, reply.by_server, reply.again) == told
    result, used = output_line("batch_1", BatchLine(1, "a", 0, 0), reply)
    start, end = result.split(body)
    assert orjson.loads(start + b"null" + end)["response"]["request_id"] == "req_1"
    assert orjson.loads(used) == {"model": "m", "usage": {"input_tokens": 1}}


async def test_a_claim_of_which_no_news_came_is_found_again(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection broke at the commit, and the answer with it."""
    monkeypatch.setattr(batch_rows, "RESTS_S", (0,) * 5)
    storage = idle.context.storage
    id = await new_batch(idle, "lost", responses(2))
    (lost,) = await storage.batches.claim(1, (), now_us())
    assert await storage.batches.claim(1, [id], now_us()) == (), "it is in hand"
    (found,) = await storage.batches.claim(1, (), now_us())
    assert (found.id, found.fence) == (id, lost.fence + 1)
    go(idle)  # its worker does not know of the claims above
    assert (await ended(idle, id)).completed == 2


async def test_places_are_given_up_for_other_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four long batches of one owner have all places; another owner's lone request comes to its end, and what
    was begun of the batch that made room is not done twice."""
    monkeypatch.setattr(worker, "LOOK_S", 0.05)
    asked = counting(monkeypatch)
    async with running_app(tmp_path, ScriptedEngine(tick_s=0.02)) as running:
        storage = running.context.storage
        long = [await new_batch(running, f"a{n}", chats(60, "say a b c {}")) for n in range(4)]
        running.life.batches_stirred()
        async with asyncio.timeout(30):
            while min([(await storage.batches.get("local", id)).completed for id in long]) < 8:
                await asyncio.sleep(0.02)
        quiet = await new_batch(running, "quiet", chats(1), "keyless")
        batch = await ended(running, quiet, "keyless")
        assert batch.completed + batch.failed == 1
        going = [await storage.batches.get("local", id) for id in long]
        assert all(batch.ended_at is None for batch in going), "it did not wait for an end"
        for id in long:
            assert (await ended(running, id)).completed == 60
        assert len(asked) <= 4 * 60 + 1


async def test_a_drain_cuts_the_requests_that_are_under_way(tmp_path: Path) -> None:
    """They have no client who would want to be told; the batch is another process's at once."""
    asked = asyncio.Event()

    def endless(request: GenerateRequest, prompt: str) -> Iterator[Wait]:
        yield Wait(asyncio.Event(), reached=asked)

    async with running_app(tmp_path, ScriptedEngine(script=endless)) as running:
        id = await new_batch(running, "long", chats(2))
        running.life.batches_stirred()
        await asked.wait()
        async with asyncio.timeout(10):
            await running.life.drain(0)
        (batch,) = await running.context.storage.batches.claim(1, (), now_us())
        assert (batch.id, batch.completed, batch.failed) == (id, 0, 0)


async def test_a_drain_leaves_batches_to_others_while_it_waits(tmp_path: Path) -> None:
    """What is under way of them comes to its end, and nothing is begun."""
    answered, client_left, asked = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(0)
    num_asked = 0

    def held(request: GenerateRequest, prompt: str) -> Iterator[Wait | Say]:
        nonlocal num_asked
        num_asked += "batch" in prompt
        asked.release()
        yield Wait(answered if "batch" in prompt else client_left)
        yield Say("done")

    async with (
        running_app(tmp_path, ScriptedEngine(script=held)) as running,
        http_client(running) as client,
        asyncio.TaskGroup() as tasks,
    ):
        batches, carrying = running.context.storage.batches, running.life._batches
        assert carrying is not None
        tasks.create_task(client.post("/v1/completions", json={"prompt": "hold"}))
        ids = [await new_batch(running, "begun", chats(12, "batch {}"))]
        running.life.batches_stirred()
        for _ in range(worker.LINES_AT_ONCE + 1):
            await asked.acquire()
        drain = tasks.create_task(running.life.drain(60))
        await until(lambda: running.life.phase == "draining")
        ids.append(await new_batch(running, "waiting", chats(1, "batch {}")))
        answered.set()
        await until(lambda: not carrying._going)
        carrying.stir()
        await until(lambda: not carrying._stirred.is_set())
        assert not carrying._going and not drain.done()
        [share] = await batches.shares(ids, now_us())
        assert (share.carried, share.waiting) == (0, 2)
        begun = await batches.get("local", ids[0])
        assert (begun.completed, begun.failed, num_asked) == (worker.LINES_AT_ONCE, 0, worker.LINES_AT_ONCE)
        client_left.set()


@pytest.mark.parametrize("endpoint", ["/v1/responses", CHAT])
async def test_a_request_that_runs_past_its_deadline_is_made_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """Each time is computed, and paid for; the next may find a server that has less to do."""
    monkeypatch.setattr(carrier, "LONGEST_WAIT_S", 0.01)
    asked = counting(monkeypatch)

    def endless(request: GenerateRequest, prompt: str) -> Iterator[Wait]:
        yield Wait(asyncio.Event())

    async with running_app(tmp_path, ScriptedEngine(script=endless), request_timeout_s=0.05) as running:
        id = await new_batch(running, "slow", chats(1) if endpoint == CHAT else responses(1))
        running.life.batches_stirred()
        batch = await ended(running, id)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 0, 1)
        assert len(asked) == worker.TRIES
        [error] = await lines_of(running.context.storage, batch.error_file_id)
        told = error["response"]["body"]["error"]
        assert told["code"] == ("deadline_exceeded" if endpoint == CHAT else "server_error")


@pytest.mark.parametrize("tools", [[], [BUILTIN]])
async def test_a_completion_that_an_administrator_cancels_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: list[Json]
) -> None:
    monkeypatch.setattr(carrier, "LONGEST_WAIT_S", 0.01)
    begun = asyncio.Queue[None]()

    def endless(request: GenerateRequest, prompt: str) -> Iterator[Wait]:
        begun.put_nowait(None)
        yield Wait(asyncio.Event())

    async with (
        running_app(tmp_path, ScriptedEngine(script=endless)) as running,
        http_client(running, **{"x-api-key": running.life.admin_token}) as operator,
    ):
        body = {"messages": [{"role": "user", "content": "say 0"}], "tools": tools}
        id = await new_batch(running, "unwanted", [line("r0", CHAT, body)])
        running.life.batches_stirred()
        await begun.get()
        [run] = (await operator.get("/v1/organization/runs")).json()["data"]
        await operator.post(f"/v1/organization/runs/{run['id']}/cancel")
        batch = await ended(running, id)
        assert (batch.completed, batch.failed, begun.qsize()) == (0, 1, 0)
        [error] = await lines_of(running.context.storage, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "response_interrupted"


@pytest.mark.parametrize("expired", [False, True])
async def test_what_always_fails_comes_to_an_end(
    idle: Running, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    monkeypatch.setattr(batch_rows, "RESTS_S", (0,) * 5)
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    storage, calls = idle.context.storage, list[str]()

    async def fails(batch: StoredBatch, now: int) -> None:
        calls.append(batch.id)
        raise RuntimeError("a bug")

    monkeypatch.setattr(storage.batches, "finalize", fails)
    over = {"expires_at": now_us() + 3_000_000} if expired else {}
    if expired:
        monkeypatch.setattr(batch_rows, "RESTS_S", (3600,) * 5)  # its end does not wait for that
    id = await new_batch(idle, "fails", responses(2), **over)
    go(idle)
    batch = await ended(idle, id)
    assert batch.status == ("expired" if expired else "failed")
    assert batch.errors is not None and b"server_error" in batch.errors
    assert 1 <= len(calls) <= MAX_BATCH_ATTEMPTS + 1
    assert {each["custom_id"] for each in await lines_of(storage, batch.output_file_id)} == {"r0", "r1"}


async def test_what_ends_its_process_again_and_again_is_not_carried_on(idle: Running) -> None:
    storage, now = idle.context.storage, now_us()
    id = await new_batch(idle, "deadly", responses(2))
    for rest_s in (0, *RESTS_S):
        await storage.batches.free_all()  # as a process does that was killed before
        now += rest_s * 1_000_000
        assert not rest_s or await storage.batches.claim(1, (), now - 1) == []
        assert len(await storage.batches.claim(1, (), now)) == 1
    await storage.batches.free_all()
    (last,) = await storage.batches.claim(1, (), now + 10**10)
    await storage.batches.free_all()
    assert last.attempts == MAX_BATCH_ATTEMPTS + 1
    assert idle.life._batches is not None
    idle.life._batches._app = idle.app
    (last,) = await storage.batches.claim(1, (), now + 10**11)
    await idle.life._batches._carry(worker._Going(last, 0.0))
    batch = await storage.batches.get("local", id)
    assert (batch.status, batch.completed) == ("failed", 0)
    assert (await storage.list_responses("local", limit=1)).data == ()


async def test_a_database_that_is_away_costs_no_attempt(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    storage = idle.context.storage
    finalize, times = storage.batches.finalize, 0

    async def away(batch: StoredBatch, now: int) -> None:
        nonlocal times
        times += 1
        if times <= 10:
            raise StorageUnavailable("away")
        await finalize(batch, now)

    monkeypatch.setattr(storage.batches, "finalize", away)
    id = await new_batch(idle, "patient", responses(1))
    go(idle)
    assert (await ended(idle, id)).status == "completed" and times == 11


async def test_results_count_among_what_an_owner_may_store(tmp_path: Path) -> None:
    lines = chats(40, "count 200 {}")
    async with running_app(tmp_path, owner_limit=("stored_bytes=12000",)) as running:
        id = await new_batch(running, "large", lines)
        running.life.batches_stirred()
        batch = await ended(running, id)
        assert batch.status == "completed" and 0 < batch.completed < 40 == batch.completed + batch.failed
        errors = await lines_of(running.context.storage, batch.error_file_id)
        told = {(e["response"]["status_code"], e["response"]["body"]["error"]["code"]) for e in errors}
        assert told == {(429, "insufficient_quota")}


async def test_an_answer_that_finds_no_room_is_counted_among_what_its_batch_used(tmp_path: Path) -> None:
    async with running_app(tmp_path, owner_limit=("stored_bytes=2000",)) as running:
        id = await new_batch(running, "larger", chats(1, "count 800"))
        running.life.batches_stirred()
        batch = await ended(running, id)
        [error] = await lines_of(running.context.storage, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "insufficient_quota"
        assert batch.usage is not None and orjson.loads(batch.usage)["output_tokens"] > 500


async def test_webhooks_and_metrics_tell_of_ends(idle: Running) -> None:
    storage = idle.context.storage
    hook = StoredWebhook("hook_a", "local", "https://a.test/", b"s" * 32, EVENT_TYPES, now_us())
    entry = AuditEntry("evt", 1, "operator", "webhook.created", "hook_a", "local")
    await storage.add_webhook(hook, entry=entry)
    good = await new_batch(idle, "good", chats(3))
    bad = await new_batch(idle, "bad", ["{" + CHAT])
    late = await new_batch(idle, "late", chats(2), expires_at=now_us())
    gone = await new_batch(idle, "gone", chats(2))
    await storage.batches.cancel("local", gone, now_us())
    go(idle)
    for id in (good, bad, late, gone):
        await ended(idle, id)
    assert storage.announced.is_set() or idle.life._deliveries is not None
    told = await storage.claim_deliveries("hook_a", now_us() + 10**9, until=2**60, limit=10)
    events = {(each.event_id, event_of(each.body)) for each in told}
    assert events == {
        ("evt_good", ("batch.completed", good)),
        ("evt_bad", ("batch.failed", bad)),
        ("evt_late", ("batch.expired", late)),
        ("evt_gone", ("batch.cancelled", gone)),
    }
    async with http_client(idle) as client:
        page = await metrics(client)
        shown = (await client.get("/v1/batches", params={"order": "asc"})).json()["data"]
    exported = await lines_in(exporting.exported(storage, "local"))
    assert [line["batch"] for line in exported if line["type"] == "batch"] == shown and len(shown) == 4
    assert exported[-1]["batches"] == 4
    assert page['antiphon_batches_lines_total{status="completed"}'] == 3
    for status in ("completed", "failed", "expired", "cancelled"):
        assert page[f'antiphon_batches_ended_total{{status="{status}"}}'] == 1
    assert {"antiphon_batches_lines_waiting", 'antiphon_batches_open{status="validating"}'} <= page.keys()


async def lines_in(pieces: AsyncIterator[bytes]) -> list[Json]:
    return [orjson.loads(line) for line in b"".join([piece async for piece in pieces]).splitlines()]


def event_of(body: bytes) -> tuple[str, str]:
    told: Json = orjson.loads(body)
    return told["type"], told["data"]["id"]


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
