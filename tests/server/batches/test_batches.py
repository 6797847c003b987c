"""Batches from their creation to their files, over a server's routes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import orjson
import pytest

from engine import Fail, GenerateRequest, RequestFailed, Say, ScriptedEngine
from server.batches import carrier, input_lines, objects, worker
from server.batches.input_lines import InputLines
from server.clock import now_us
from server.config import THREADED_BYTES
from server.http.body import MAX_JSON_STRINGS
from storage import BatchLost, StoredBatch
from storage.batches import batch_rows
from tests.support.batching import Json, chats, input_file, line, lines_of, responses
from tests.support.postgres import the_server
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, Gate, gated_at

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_app(tmp_path) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(running) as client:
        yield client


def worker_of(running: Running) -> worker.BatchWorker:
    """What carries batches on; without an application it waits."""
    assert running.life._batches is not None
    return running.life._batches


async def begun(client: httpx.AsyncClient, file_id: str, endpoint: str, **fields: Any) -> Json:
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
    reply = await client.post("/v1/batches", json=asked)
    assert reply.status_code == 200, reply.text
    made: Json = reply.json()
    return made


async def ended(client: httpx.AsyncClient, batch_id: str) -> Json:
    async with asyncio.timeout(60):
        while True:
            batch: Json = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(0.02)


async def tokens_of_batches(running: Running, client: httpx.AsyncClient) -> int:
    """What the usage of today says that batches took."""
    await running.context.meter.flush()
    query = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "batch": "true"}
    path = "/v1/organization/usage/completions"
    asked = await client.get(path, params=query, headers={"x-api-key": running.life.admin_token})
    results = [each for bucket in asked.json()["data"] for each in bucket["results"]]
    return sum(each["input_tokens"] + each["output_tokens"] for each in results)


async def test_responses_are_made_and_stay(running: Running, client: httpx.AsyncClient) -> None:
    storage = running.context.storage
    file_id = await input_file(
        storage,
        responses(20),
    )
    made = await begun(client, file_id, "/v1/responses", metadata={"of": "test"})
    assert (made["object"], made["status"], made["metadata"]) == ("batch", "validating", {"of": "test"})
    assert made["expires_at"] - made["created_at"] == 24 * 3600
    await storage.files.delete("local", file_id, now_us())  # the batch has what it needs of it
    batch = await ended(client, made["id"])
    assert (batch["status"], batch["error_file_id"], batch["errors"]) == ("completed", None, None)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    lines = await lines_of(storage, batch["output_file_id"])
    assert {each["custom_id"] for each in lines} == {f"r{n}" for n in range(20)} and len(lines) == 20
    for each in lines:
        response = each["response"]["body"]
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        assert response["output"][0]["content"][0]["text"] == each["custom_id"][1:]
        assert response["service_tier"] == "flex"
        stored = (await client.get(f"/v1/responses/{response['id']}")).json()
        assert stored["status"] == "completed"
    usage = [each["response"]["body"]["usage"] for each in lines]
    assert batch["usage"]["total_tokens"] == sum(each["total_tokens"] for each in usage) > 0
    assert batch["model"] == "antiphon-scripted"
    assert await tokens_of_batches(running, client) == batch["usage"]["total_tokens"]


async def test_an_input_may_begin_with_a_mark_of_its_encoding(
    running: Running, client: httpx.AsyncClient
) -> None:
    """As programs on Windows write it."""
    storage = running.context.storage
    first, *others = responses(2)
    file_id = await input_file(storage, [f"\ufeff{first}", *others])
    batch = await ended(client, (await begun(client, file_id, "/v1/responses"))["id"])
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2), batch["errors"]


async def test_a_fault_in_the_midst_computes_no_line_twice(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After whatever went wrong, a batch goes on as the database has it, not as it was when it was taken."""
    storage, calls = running.context.storage, list[str]()
    clear, finalize = storage.batches.clear, storage.batches.finalize

    async def noted(batch: StoredBatch) -> Any:
        calls.append("clear")
        return await clear(batch)

    async def fails_once(batch: StoredBatch, now: int) -> Any:
        calls.append("finalize")
        if calls.count("finalize") == 1:
            raise RuntimeError("a bug")
        return await finalize(batch, now)

    monkeypatch.setattr(storage.batches, "clear", noted)
    monkeypatch.setattr(storage.batches, "finalize", fails_once)
    made = await begun(client, await input_file(storage, responses(3)), "/v1/responses")
    batch = await ended(client, made["id"])
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert calls == ["clear", "finalize", "finalize"]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
async def test_stateless_requests_and_those_that_are_refused(
    running: Running, client: httpx.AsyncClient, endpoint: str
) -> None:
    chat = endpoint.startswith("/v1/chat")
    good = {"messages": [{"role": "user", "content": "say yes"}]} if chat else {"prompt": "say yes"}
    asked = [
        line("good", endpoint, {**good, "service_tier": "priority"}),
        "",
        line("bad", endpoint, {**good, "temperature": "hot"}),
        line("no model", endpoint, {**good, "model": "nobody"}),
    ]
    storage = running.context.storage
    file_id = await input_file(storage, asked)
    batch = await ended(client, (await begun(client, file_id, endpoint))["id"])
    assert (batch["status"], batch["request_counts"]) == (
        "completed",
        {"total": 3, "completed": 1, "failed": 2},
    )
    (output,) = await lines_of(storage, batch["output_file_id"])
    choice = output["response"]["body"]["choices"][0]
    assert "yes" in (choice["message"]["content"] if chat else choice["text"])
    errors = {each["custom_id"]: each["response"] for each in await lines_of(storage, batch["error_file_id"])}
    assert {name: each["status_code"] for name, each in errors.items()} == {"bad": 400, "no model": 404}
    assert errors["bad"]["body"]["error"]["param"] == "temperature"
    assert await tokens_of_batches(running, client) == batch["usage"]["total_tokens"]


async def test_a_response_that_fails_is_made_again_and_then_told_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed response is a reply with the status 200; the request has failed all the same. Who takes the
    batch over after a fault comes by the attempts that were made, and makes no more than were promised."""
    asked, faults = Counter[str](), list[str]()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Fail | Say]:
        name = "never" if "never" in prompt else "second"
        asked[name] += 1
        if name == "never" or asked[name] == 1:
            yield Fail(RequestFailed("a fault"))
        else:
            yield Say("done")

    monkeypatch.setattr(carrier, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(batch_rows, "RESTS_S", (0,) * 5)
    async with (
        running_app(tmp_path, ScriptedEngine(script=script)) as running,
        http_client(running) as client,
    ):
        storage = running.context.storage
        finish = storage.batches.finish_line

        async def fails_once(batch: StoredBatch, position: int, *rest: Any) -> bool:
            if position == 2 and not faults:
                faults.append("a bug")
                raise RuntimeError(*faults)
            return await finish(batch, position, *rest)

        monkeypatch.setattr(storage.batches, "finish_line", fails_once)
        lines = [line(name, "/v1/responses", {"input": name}) for name in ("second", "never")]
        made = await begun(client, await input_file(storage, lines), "/v1/responses")
        batch = await ended(client, made["id"])
        assert (batch["status"], batch["request_counts"]) == (
            "completed",
            {"total": 2, "completed": 1, "failed": 1},
        )
        assert faults and asked == {"second": 2, "never": worker.TRIES}
        (output,) = await lines_of(storage, batch["output_file_id"])
        assert (output["custom_id"], output["response"]["body"]["status"]) == ("second", "completed")
        (error,) = await lines_of(storage, batch["error_file_id"])
        assert error["custom_id"] == "never"
        assert error["response"]["body"]["status"] == "failed"
        assert error["response"]["body"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        ("/v1/responses", {"input": "say yes"}),
        ("/v1/responses", {"input": "say yes", "enable_response_messages": True}),
        ("/v1/responses", {"input": "fail now"}),
        (CHAT, {"messages": [{"role": "user", "content": "say yes"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "say yes"}], "tools": [BUILTIN]}),
        ("/v1/completions", {"prompt": "say yes"}),
    ],
)
async def test_no_reply_is_parsed_for_its_batch(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, endpoint: str, asked: Json
) -> None:
    """The routes tell what came of each: whether it failed, its model, and its usage."""
    parsed: list[bytes] = []

    def loads(data: bytes) -> Any:
        parsed.append(data)
        return orjson.loads(data)

    for module in (carrier, objects):
        monkeypatch.setattr(module, "orjson", SimpleNamespace(**{**vars(orjson), "loads": loads}))
    monkeypatch.setattr(carrier, "LONGEST_WAIT_S", 0.01)
    file_id = await input_file(running.context.storage, [line("one", endpoint, asked)])
    batch = await ended(client, (await begun(client, file_id, endpoint))["id"])
    assert parsed and not any(b'"object":' in each for each in parsed)
    completed = "fail now" not in asked.values()
    assert batch["request_counts"]["completed"] == completed
    [one] = await lines_of(running.context.storage, batch[("output" if completed else "error") + "_file_id"])
    body = one["response"]["body"]
    assert batch["model"] == body["model"]
    assert batch["usage"]["total_tokens"] == body["usage"]["total_tokens"]


async def nothing() -> None:
    """In the place of a verb that is not to have any effect."""


GOOD = {"input": "say yes"}
FAULTS = [
    ("no JSON", "{", "invalid_json_line", None),
    ("no object", "[]", "invalid_json_line", None),
    ("no id", line("", "/v1/responses", GOOD), "invalid_custom_id", "custom_id"),
    ("number", line(1, "/v1/responses", GOOD), "invalid_custom_id", "custom_id"),  # type: ignore[arg-type]
    ("twice", line("first", "/v1/responses", GOOD), "duplicate_custom_id", "custom_id"),
    ("method", line("x", "/v1/responses", GOOD, method="GET"), "invalid_method", "method"),
    ("url", line("x", "/v1/chat/completions", GOOD), "mismatched_url", "url"),
    ("body", line("x", "/v1/responses", []), "missing_required_parameter", "body"),  # type: ignore[arg-type]
    ("stream", line("x", "/v1/responses", GOOD | {"stream": True}), "unsupported_parameter", "body.stream"),
]


async def test_an_input_that_cannot_be_carried_out_names_its_lines(
    running: Running, client: httpx.AsyncClient
) -> None:
    asked = [line("first", "/v1/responses", GOOD), *(each[1] for each in FAULTS)]
    storage = running.context.storage
    batch = await ended(
        client, (await begun(client, await input_file(storage, asked), "/v1/responses"))["id"]
    )
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    told = [(each["code"], each["param"], each["line"]) for each in batch["errors"]["data"]]
    assert told == [(code, param, number) for number, (_, _, code, param) in enumerate(FAULTS, 2)]
    assert "'method' must be 'POST'." in [each["message"] for each in batch["errors"]["data"]]
    empty = await begun(client, await input_file(storage, ["", ""]), "/v1/responses")
    (error,) = (await ended(client, empty["id"]))["errors"]["data"]
    assert (error["code"], error["line"]) == ("empty_file", None)
    assert (await client.get("/v1/responses")).json()["data"] == [], "nothing of them was carried out"


async def test_a_line_without_an_end_is_not_read_to_its_end() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    checked = InputLines("/v1/responses", 1000)
    await checked.read(endless())
    assert [(fault["code"], fault["line"]) for fault in checked.faults] == [("line_too_long", 1)]


@pytest.mark.parametrize("blank", [True, False])
async def test_an_input_of_too_many_lines_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, blank: bool
) -> None:
    """A file has room for 200 million blank ones, and each batch of it would look at all of them."""
    looked_at, read = list[int](), 0
    monkeypatch.setattr(input_lines, "CHUNK", 1000)
    monkeypatch.setattr(input_lines, "MAX_REQUESTS", 10)
    monkeypatch.setattr(input_lines, "MAX_LINES", 20)
    monkeypatch.setattr(input_lines, "require_parsable", lambda *_: looked_at.append(1))

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        for part in range(100):
            read += 1
            lines = [line(f"{part}.{n}", "/v1/responses", GOOD) for n in range(30)]
            yield b"\n" * 1000 if blank else "".join(f"{each}\n" for each in lines).encode()

    checked = InputLines("/v1/responses", 1000)
    await checked.read(content())
    assert [(each["code"], each["line"]) for each in checked.faults] == [
        ("too_many_requests", 21 if blank else 11)
    ]
    assert read == 1 and len(looked_at) == (0 if blank else 10)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([[]] * 150_000, "more than 300000 brackets and commas"),
        ([""] * MAX_JSON_STRINGS, "more than 150000 strings"),
    ],
)
async def test_a_line_that_would_take_long_to_parse_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, value: list[Any], told: str
) -> None:
    """The parser holds the interpreter, and every stream with it."""
    parsed: list[bytes] = []

    def loads(data: bytes) -> Any:
        parsed.append(data)
        return orjson.loads(data)

    monkeypatch.setattr(input_lines, "orjson", SimpleNamespace(loads=loads, JSONDecodeError=ValueError))
    long = line("long", "/v1/responses", GOOD | {"input": value}).encode()
    good = line("good", "/v1/responses", GOOD).encode()

    async def content() -> AsyncIterator[bytes]:
        yield good + b"\n" + long

    checked = InputLines("/v1/responses", 300_000)
    await checked.read(content())
    [fault] = checked.faults
    assert (fault["code"], fault["line"]) == ("invalid_json_line", 2) and told in fault["message"]
    assert parsed == [good]


async def test_a_large_line_does_not_hold_the_event_loop(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[bool, int] = {}

    def noted(asked: bytes, *args: Any) -> bytes:
        threads[len(asked) > THREADED_BYTES] = threading.get_ident()
        return carrier.request_body(asked, *args)

    monkeypatch.setattr(worker, "request_body", noted)
    large = line("large", "/v1/responses", {"input": "say fine", "instructions": "x" * THREADED_BYTES})
    file_id = await input_file(running.context.storage, [*responses(1), large])
    assert (await ended(client, (await begun(client, file_id, "/v1/responses"))["id"]))[
        "status"
    ] == "completed"
    assert threads[False] == threading.get_ident() != threads[True]


async def test_requests_for_a_batch_that_are_refused(running: Running, client: httpx.AsyncClient) -> None:
    file_id = await input_file(running.context.storage, responses(1))
    other = await input_file(running.context.storage, responses(1), purpose="user_data")
    strange = await input_file(running.context.storage, responses(1), owner="somebody")
    good: Json = {"input_file_id": file_id, "endpoint": "/v1/responses", "completion_window": "24h"}
    for changed, status, param in (
        ({"input_file_id": "file-unknown"}, 404, "input_file_id"),
        ({"input_file_id": strange}, 404, "input_file_id"),
        ({"input_file_id": other}, 400, "input_file_id"),
        ({"input_file_id": 7}, 400, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"endpoint": ["/v1/responses"]}, 400, "endpoint"),
        ({"endpoint": "/v1/embeddings"}, 400, "model"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "now"}}, 400, "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
    ):
        reply = await client.post("/v1/batches", json=good | changed)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), changed
    assert (await client.get("/v1/batches/batch_unknown")).status_code == 404
    assert (await client.post("/v1/batches/batch_unknown/cancel", json={})).status_code == 404


async def test_cancel_keeps_what_is_done(tmp_path: Path) -> None:
    async with running_app(tmp_path, ScriptedEngine(tick_s=0.05)) as running, http_client(running) as client:
        storage = running.context.storage
        file_id = await input_file(storage, chats(400, "say a b c d {}"))
        made = await begun(client, file_id, "/v1/chat/completions")
        async with asyncio.timeout(30):
            while (await client.get(f"/v1/batches/{made['id']}")).json()["request_counts"]["completed"] < 5:
                await asyncio.sleep(0.02)
        cancelled = (await client.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling" and cancelled["cancelling_at"]
        batch = await ended(client, made["id"])
        counts = batch["request_counts"]
        assert batch["status"] == "cancelled"
        assert 5 <= counts["completed"] < 400 == counts["total"]
        assert len(await lines_of(storage, batch["output_file_id"])) == counts["completed"]
        again = await client.post(f"/v1/batches/{made['id']}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (400, "batch_not_cancellable")


async def test_lines_that_nobody_came_to_in_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.routes.batches.WINDOW_S", 1.5)
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    async with running_app(tmp_path, ScriptedEngine(tick_s=0.1)) as running, http_client(running) as client:
        storage = running.context.storage
        file_id = await input_file(storage, chats(400, "say a b c d {}"))
        life = {"anchor": "created_at", "seconds": 3600}
        made = await begun(client, file_id, "/v1/chat/completions", output_expires_after=life)
        batch = await ended(client, made["id"])
        assert batch["status"] == "expired" and batch["expired_at"]
        output = await lines_of(storage, batch["output_file_id"])
        errors = await lines_of(storage, batch["error_file_id"])
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert {each["response"] for each in errors} == {None}
        ids = [each["custom_id"] for each in (*output, *errors)]
        assert sorted(ids) == sorted(f"r{n}" for n in range(400))
        file = await storage.files.get("local", batch["error_file_id"], 0)
        assert file.expires_at == file.created_at + 3600 * 1_000_000


async def test_pages_and_limits(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.routes.batches.MAX_GOING", 3)
    worker_of(running)._app = None  # nothing is carried on
    file_id = await input_file(running.context.storage, responses(1))
    made = [(await begun(client, file_id, "/v1/responses"))["id"] for _ in range(3)]
    asked = {"input_file_id": file_id, "endpoint": "/v1/responses", "completion_window": "24h"}
    refused = await client.post("/v1/batches", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
    page = (await client.get("/v1/batches", params={"limit": 2})).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (made[:0:-1], True)
    rest = (await client.get("/v1/batches", params={"after": page["last_id"]})).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (made[:1], False)


async def test_a_limit_of_a_day_holds_a_batch_up_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "LONGEST_WAIT_S", 0.05)
    async with (
        running_app(tmp_path, owner_limit=("requests_per_day=2",)) as running,
        http_client(running) as client,
    ):
        file_id = await input_file(running.context.storage, responses(4))
        made = await begun(client, file_id, "/v1/responses")
        async with asyncio.timeout(30):
            while 'over_limit_total{limit="requests_per_day"}' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.02)
        held = (await client.get(f"/v1/batches/{made['id']}")).json()
        assert (held["status"], held["request_counts"]["failed"]) == ("in_progress", 0)
        running.life.limit_owners(("requests_per_day=1000000",))
        batch = await ended(client, made["id"])
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


async def test_a_key_that_is_revoked_fails_what_is_left(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, api_key=["first-key-of-a-team"]) as running,
        http_client(running, authorization="Bearer first-key-of-a-team") as client,
    ):
        who = await running.life.keys.principal("first-key-of-a-team")
        storage = running.context.storage
        app, worker_of(running)._app = worker_of(running)._app, None
        file_id = await input_file(storage, responses(3), owner=who.owner)
        made = await begun(client, file_id, "/v1/responses")
        running.life.keys.give(["another-key-of-a-team"])
        assert app is not None
        worker_of(running).serve(app)
        client.headers["authorization"] = "Bearer another-key-of-a-team"
        assert (await client.get(f"/v1/batches/{made['id']}")).status_code == 404, "another owner's"
        async with asyncio.timeout(30):
            while (batch := await storage.batches.get(who.owner, made["id"])).ended_at is None:
                await asyncio.sleep(0.02)
        assert (batch.completed, batch.failed) == (0, 3)
        errors = await lines_of(storage, batch.error_file_id, owner=who.owner)
        assert {each["response"]["status_code"] for each in errors} == {401}


async def test_what_was_at_work_when_a_key_ended_keeps_its_answer(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running_app(
            tmp_path, ScriptedEngine(gated_at(gate, "say")), api_key=["first-key-of-a-team"]
        ) as running,
        http_client(running, authorization="Bearer first-key-of-a-team") as client,
    ):
        who = await running.life.keys.principal("first-key-of-a-team")
        storage = running.context.storage
        made = await begun(client, await input_file(storage, chats(1), owner=who.owner), CHAT)
        async with asyncio.timeout(30):
            await gate.reached.wait()
        running.life.keys.give(["another-key-of-a-team"])
        gate.release.set()
        async with asyncio.timeout(30):
            while (batch := await storage.batches.get(who.owner, made["id"])).ended_at is None:
                await asyncio.sleep(0.02)
        assert (batch.completed, batch.failed) == (1, 0)
        [line] = await lines_of(storage, batch.output_file_id, owner=who.owner)
        assert line["response"]["status_code"] == 200
        assert batch.usage is not None and orjson.loads(batch.usage)["output_tokens"] > 0


async def test_the_official_sdk(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path) as running,
        openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused") as client,
    ):
        file_id = await input_file(running.context.storage, responses(3))
        made = await client.batches.create(
            input_file_id=file_id, endpoint="/v1/responses", completion_window="24h", metadata={"a": "b"}
        )
        async with asyncio.timeout(30):
            while (batch := await client.batches.retrieve(made.id)).status != "completed":
                await asyncio.sleep(0.02)
        assert batch.request_counts is not None and batch.request_counts.completed == 3
        assert [each.id async for each in client.batches.list()] == [made.id]
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(made.id)


async def test_two_servers_share_batches(tmp_path: Path) -> None:
    """The one that has a batch is gone without a word; the other one goes on with it."""
    settings = {"db": await the_server().fresh(), "lease_s": 2.0}
    async with running_app(tmp_path / "b", **settings) as other:
        async with running_app(tmp_path / "a", tick_s=0.05, **settings) as first:
            worker_of(other)._app, app = None, worker_of(other)._app
            storage = first.context.storage
            async with http_client(first) as client:
                made = await begun(client, await input_file(storage, chats(60, "say a b {}")), CHAT)
                async with asyncio.timeout(60):
                    while not (await storage.batches.get("local", made["id"])).completed:
                        await asyncio.sleep(0.02)
            # It does nothing any more, and holds on to what it had.
            worker_of(first)._storage.batches.release = nothing
            await worker_of(first).close()
        assert app is not None
        worker_of(other).serve(app)
        async with http_client(other) as client:
            batch = await ended(client, made["id"])
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        lines = await lines_of(other.context.storage, batch["output_file_id"])
        assert sorted(each["custom_id"] for each in lines) == sorted(f"r{n}" for n in range(60))


async def test_an_owners_batches_are_purged(running: Running, client: httpx.AsyncClient) -> None:
    storage = running.context.storage
    made = await begun(client, await input_file(storage, responses(3)), "/v1/responses")
    await ended(client, made["id"])
    worker_of(running)._app = None
    await begun(client, await input_file(storage, responses(3)), "/v1/responses")
    async for _ in storage.purge("local", now_us(), entry=None):
        pass
    assert (await client.get("/v1/batches")).json()["data"] == []
    assert (await client.get(f"/v1/batches/{made['id']}")).status_code == 404


async def test_what_a_claim_writes_is_refused_under_a_newer_one(running: Running) -> None:
    """As on two servers, of which one was taken for dead."""
    worker_of(running)._app = None
    storage = running.context.storage
    async with http_client(running) as client:
        made = await begun(client, await input_file(storage, responses(1)), "/v1/responses")
    (old,) = await storage.batches.claim(1, (), now_us())
    assert not await storage.batches.claim(1, [old.id], now_us())
    await storage.batches.free_all()
    (new,) = await storage.batches.claim(1, (), now_us() + 2_000_000)
    assert (old.id, new.fence) == (made["id"], old.fence + 1)
    with pytest.raises(BatchLost):
        await storage.batches.begin(old, 1)
    with pytest.raises(BatchLost):
        await storage.batches.finish_line(replace(new, fence=old.fence), 1, "completed", b"", 1)
    await storage.batches.begin(new, 1)
