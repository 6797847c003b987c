"""Webhooks, from the end of a run to a receiver on a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from server.access import OPERATOR, owner_of_flag_key
from server.admin import webhooks as hooks
from server.admin.database_access import leave_address
from server.cli.commands import main
from server.telemetry import Telemetry
from server.webhooks import deliveries as webhooks
from server.webhooks import sender
from server.webhooks.deliveries import BACKOFF_S, MAX_AGE_S, Deliveries, notice
from storage import Finish, NewResponse, Record, RunAppend, Storage, open_storage
from tests.support.processes import server_process
from tests.support.running import Running, database_url, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, call, wrote
from tests.support.wire import Json

ROOT = Path(__file__).parents[3]
START = 1_800_000_000_000_000

# ------------------------------------------------------------------------------------------------------------
# A receiver


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Receiver:
    """An HTTP server that answers as `answers` says, each in turn, and 204 from then on.

    An answer is the head of a reply without its last blank line. held: paths that get no answer before
    `release` is set.
    """

    answers: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    inbox: asyncio.Queue[Received] = field(default_factory=asyncio.Queue)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                path = first.split()[1]
                self.inbox.put_nowait(Received(path, headers, body))
                if path in self.held:
                    await self.release.wait()
                answer = self.answers.pop(0) if self.answers else "204 No Content"
                writer.write(f"HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the sender has hung up
        finally:
            writer.close()

    async def next(self) -> Received:
        return await asyncio.wait_for(self.inbox.get(), 20)


@asynccontextmanager
async def receiving(*answers: str) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(answers))
    handlers: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.create_task(receiver.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    receiver.url = f"http://{host}:{port}"
    try:
        yield receiver
    finally:
        server.close()
        receiver.release.set()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def unwrapped(received: Received, secret: str) -> Any:
    """What the official SDK makes of a notice; it refuses a wrong signature."""
    client = OpenAI(api_key="unused", webhook_secret=secret)
    try:
        return client.webhooks.unwrap(received.body, received.headers)
    finally:
        client.close()


async def hooked(storage: Storage, url: str, *, owner: str = "local", types: tuple[str, ...] = ()) -> Json:
    return await hooks.add(storage, OPERATOR, url=url, owner=owner, event_types=types, allow_http=False)


# ------------------------------------------------------------------------------------------------------------
# From a server


async def test_every_end_of_a_background_response_is_told_and_the_sdk_believes_it(tmp_path: Path) -> None:
    async with receiving() as receiver, live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        secret = (await hooked(server.context.storage, receiver.url + "/in"))["signing_secret"]
        endings = [
            ("completed", await api.create("say hi", background=True)),
            ("failed", await api.create("fail now", background=True)),
            ("incomplete", await api.create("count 99", background=True, max_output_tokens=16)),
        ]
        cancelled = await api.create("tick 50\ncount 1000", background=True)
        await api.cancel(cancelled["id"])
        endings.append(("cancelled", cancelled))
        got = {}
        for _ in endings:
            received = await receiver.next()
            event = unwrapped(received, secret)
            got[event.data.id] = (event.type, event.id)
            assert received.path == "/in" and received.headers["content-type"] == "application/json"
            assert received.headers["webhook-id"] == event.id
            assert event.object == "event" and event.id.startswith("evt_") and "." not in event.id
            with pytest.raises(InvalidWebhookSignatureError):
                unwrapped(received, "whsec_" + "A" * 44)
        assert {id: type for id, (type, _) in got.items()} == {
            made["id"]: f"response.{status}" for status, made in endings
        }
        assert len({id for _, id in got.values()}) == len(endings)
        for status, made in endings:
            assert (await api.get(made["id"]))["status"] == status


def calls_twice(request: GenerateRequest, prompt: str) -> Iterator[Step]:
    """Asks for the weather until it was told twice."""
    yield Say(wrote("get_weather", city="Paris") if prompt.count("<tool_response>") < 2 else "sunny twice")


async def test_each_wait_for_the_client_is_told_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(calls_twice)
    async with receiving() as receiver, live_app(tmp_path, engine) as server, http_client(server) as client:
        api, storage = Api(client), server.context.storage
        secret = (await hooked(storage, receiver.url + "/all"))["signing_secret"]
        await hooked(storage, receiver.url + "/ends", types=("response.completed",))
        made = await api.create("weather?", background=True, **WAITS)
        events = []
        for _ in range(2):
            events.append(unwrapped(await receiver.next(), secret))
            [pending] = (await api.get(made["id"]))["pending_tool_calls"]
            assert receiver.inbox.empty()
            outputs = {"tool_outputs": [{"call_id": pending["call_id"], "output": "sunny"}]}
            path = f"/v1/responses/{made['id']}/tool_outputs"
            assert (await client.post(path, json=outputs)).status_code == 200
        ends = [await receiver.next() for _ in range(2)]
        assert {each.path for each in ends} == {"/all", "/ends"}
        for event in events:
            assert (event.object, event.type, event.data.id) == ("event", "response.waiting", made["id"])
            assert event.id.startswith("evt_") and "." not in event.id
        assert len({event.id for event in events}) == 2
        assert {json.loads(each.body)["type"] for each in ends} == {"response.completed"}
        assert receiver.inbox.empty()


async def test_foreground_and_unstored_responses_are_not_told_of(tmp_path: Path) -> None:
    async with receiving() as receiver, live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        await hooked(server.context.storage, receiver.url)
        await api.create("say hi")
        await api.create("say hi", store=False)
        async with api.open(call(), **WAITS) as live:
            await live.until("output_item.done")
            await api.waits(live.id)
        told = await api.create("say hi", background=True)
        assert told["id"].encode() in (await receiver.next()).body
        assert receiver.inbox.empty()


async def test_two_tenants_hear_only_of_their_own(tmp_path: Path) -> None:
    keys = {"ann": "sk-ann", "bob": "sk-bob"}
    async with (
        receiving() as receiver,
        running_app(tmp_path, api_key=tuple(keys.values())) as server,
        http_client(server) as client,
    ):
        made = {}
        for name, key in keys.items():
            await hooked(server.context.storage, f"{receiver.url}/{name}", owner=owner_of_flag_key(key))
            reply = await client.post(
                "/v1/responses",
                json={"input": "say hi", "background": True},
                headers={"authorization": f"Bearer {key}"},
            )
            made[f"/{name}"] = reply.json()["id"]
        for _ in keys:
            received = await receiver.next()
            assert made.pop(received.path).encode() in received.body
        assert receiver.inbox.empty()


async def test_metrics(tmp_path: Path) -> None:
    async with (
        receiving("500 Oh") as receiver,
        running_app(tmp_path) as server,
        http_client(server) as client,
    ):
        await hooked(server.context.storage, receiver.url)
        for _ in range(2):
            await Api(client).create("say hi", background=True)
            await receiver.next()
        wanted = {
            b"antiphon_webhooks_pending 1.0",
            b'antiphon_webhook_attempts_total{outcome="delivered"} 1.0',
            b'antiphon_webhook_attempts_total{outcome="failed"} 1.0',
        }
        async with asyncio.timeout(20):
            while not wanted <= set((await client.get("/metrics")).content.splitlines()):
                await asyncio.sleep(0.01)


WAITS: Json = {"tools": [WEATHER], "await_tool_outputs": True}

HOLDING = """
import asyncio
import sys
from server.cli import main
from server.webhooks import Deliveries

Deliveries.start = lambda self: asyncio.sleep(0)
sys.exit(main(sys.argv[1:]))
"""


async def test_a_kill_between_the_end_and_the_delivery_loses_nothing(tmp_path: Path) -> None:
    async with receiving() as receiver:
        storage = await open_storage(await database_url(tmp_path), runner="test")
        secret = (await hooked(storage, receiver.url))["signing_secret"]
        await storage.close()
        async with server_process(tmp_path, code=HOLDING) as server, server.client() as client:
            api = Api(client)
            made = await api.create("say hi", background=True)
            assert (await api.ended(made["id"]))["status"] == "completed"
        assert receiver.inbox.empty()
        async with running_app(tmp_path):
            assert unwrapped(await receiver.next(), secret).data.id == made["id"]


async def test_a_kill_between_the_wait_and_the_delivery_loses_nothing(tmp_path: Path) -> None:
    async with receiving() as receiver:
        storage = await open_storage(await database_url(tmp_path), runner="test")
        secret = (await hooked(storage, receiver.url))["signing_secret"]
        await storage.close()
        async with server_process(tmp_path, code=HOLDING) as server, server.client() as client:
            api = Api(client)
            made = await api.create(call(), background=True, **WAITS)
            await api.waits(made["id"])
        assert receiver.inbox.empty()
        async with running_app(tmp_path) as again, http_client(again) as client:
            told = unwrapped(await receiver.next(), secret)
            assert (told.type, told.data.id) == ("response.waiting", made["id"])
            assert (await Api(client).get(made["id"]))["pending_tool_calls"]
            assert receiver.inbox.empty()


# ------------------------------------------------------------------------------------------------------------
# Attempts, on a clock of the test's


@dataclass(slots=True)
class Clock:
    """Microseconds that stand still until the test moves them."""

    now: int = START

    def __call__(self) -> int:
        return self.now


@dataclass(frozen=True, slots=True)
class Sending:
    """Deliveries at work, without a server."""

    storage: Storage
    telemetry: Telemetry
    deliveries: Deliveries
    clock: Clock

    async def end(self, id: str, owner: str = "local") -> None:
        """A background run that ends now."""
        opening = Record(0, 1, b"{}")
        started = await self.storage.start_response(
            NewResponse(
                id, owner, START, "queued", "m", True, True, b"{}", b"", b"", None, None, (), opening, "me"
            )
        )
        finish = Finish("completed", START, False, notice=notice(id, "completed", self.clock()))
        assert not await self.storage.append([RunAppend(id, started.fence, finish=finish)])

    async def until(self, settled: Callable[[], bool]) -> None:
        """Wait for a state that attempts bring about."""
        async with asyncio.timeout(20):
            while not settled():
                await asyncio.sleep(0.005)

    async def tried(self, **outcomes: int) -> None:
        """Wait until these attempts were made, and are settled."""
        await self.until(lambda: all(self.counted(name) == num for name, num in outcomes.items()))
        await self.until(lambda: not self.deliveries._lanes)

    def counted(self, outcome: str) -> float:
        line = f'antiphon_webhook_attempts_total{{outcome="{outcome}"}} '
        page = self.telemetry.exposition().decode()
        return float(page.partition(line)[2].partition("\n")[0] or 0)

    async def pause_s(self) -> float:
        """For how long the next attempt is put off."""
        due = await self.storage.due_deliveries(self.clock())
        assert due.next_at is not None
        return (due.next_at - self.clock()) / 1e6

    def skip(self, seconds: float) -> None:
        """Move the clock, and have it looked at."""
        # Rounded: a microsecond less, and what is due then would never be.
        self.clock.now += round(seconds * 1e6)
        self.storage.announced.set()


@pytest.fixture
async def sending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sending]:
    monkeypatch.setattr(webhooks, "CLOSING_S", 0.0)
    storage = await open_storage(await database_url(tmp_path), runner="me")
    telemetry, clock = Telemetry(), Clock()
    deliveries = Deliveries(storage, telemetry, clock=clock)
    await deliveries.start()
    try:
        yield Sending(storage, telemetry, deliveries, clock)
    finally:
        await deliveries.close()
        await storage.close()


async def test_a_receiver_that_fails_is_asked_again_later(sending: Sending) -> None:
    async with receiving("500 Oh", "302 Found\r\nlocation: /elsewhere", "404 No") as receiver:
        await hooked(sending.storage, receiver.url + "/here")
        await sending.end("resp_1")
        attempts = []
        for failed in range(1, 4):
            attempts.append(await receiver.next())
            await sending.tried(failed=failed)
            pause_s = await sending.pause_s()
            assert 0.9 * BACKOFF_S[failed - 1] <= pause_s <= 1.1 * BACKOFF_S[failed - 1]
            sending.skip(pause_s)
        attempts.append(await receiver.next())
        await sending.tried(delivered=1, failed=3)
        assert (await sending.storage.due_deliveries(START)).num_pending == 0
        assert {(each.path, each.headers["webhook-id"], each.body) for each in attempts} == {
            ("/here", "evt_1", attempts[0].body)
        }
        # Signed by the wall clock, whatever the clock of the process says.
        assert all(abs(int(each.headers["webhook-timestamp"]) - time.time()) < 300 for each in attempts)
        assert receiver.inbox.empty()


async def test_after_ten_attempts_nobody_tries_any_more(
    sending: Sending, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving(*["503 No"] * 10) as receiver:
        await hooked(sending.storage, receiver.url)
        await sending.end("resp_1")
        for attempt in range(1, 11):
            await receiver.next()
            await sending.tried(failed=min(attempt, 9), given_up=attempt // 10)
            if attempt < 10:
                sending.skip(await sending.pause_s())
        assert sending.clock() - START < MAX_AGE_S * 1e6
        assert (await sending.storage.due_deliveries(START)).num_pending == 0
        [told] = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        assert "evt_1" in told and "status 503" in told and "given up" in told
        assert sum(BACKOFF_S) > 3 * 86_400


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.usefixtures("patience")
async def test_what_is_old_is_given_up_where_attempts_fail(
    sending: Sending, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A receiver that keeps attempts waiting would get no notice to its tenth. One that is well is told all,
    however long the server was away."""
    monkeypatch.setattr(webhooks, "PARALLEL", 1)
    async with receiving("204 No Content" if answers else "503 No") as receiver:
        receiver.held.add("/")
        await hooked(sending.storage, receiver.url + "/")
        for n in range(3):
            await sending.end(f"resp_{n}")
        told = [await receiver.next()]
        sending.skip(MAX_AGE_S + 1)
        await sending.end("resp_new")
        receiver.release.set()
        await sending.tried(delivered=4 if answers else 1, failed=0 if answers else 1)
        told += [receiver.inbox.get_nowait() for _ in range(receiver.inbox.qsize())]
        ids = ["evt_0", "evt_1", "evt_2", "evt_new"] if answers else ["evt_0", "evt_new"]
        assert [each.headers["webhook-id"] for each in told] == ids
        warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warned) == (not answers) and all(" 2 notices are given up" in each for each in warned)


async def test_retry_after_is_respected(sending: Sending) -> None:
    async with receiving("429 Slow\r\nretry-after: 3600") as receiver:
        await hooked(sending.storage, receiver.url)
        await sending.end("resp_1")
        await sending.tried(failed=1)
        assert await sending.pause_s() == 3600


async def test_a_receiver_that_is_gone_is_told_nothing_until_it_is_enabled(
    sending: Sending, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving("410 Gone", "410 Gone") as receiver:
        receiver.held.add("/")
        made = await hooked(sending.storage, receiver.url + "/")
        for n in range(2):
            await sending.end(f"resp_{n}")
        for _ in range(2):  # both attempts are under way before either is answered
            await receiver.next()
        receiver.release.set()
        await sending.tried(failed=2)
        await sending.end("resp_unheard")
        sending.skip(BACKOFF_S[0] + webhooks.LEASE_S)
        due = await sending.storage.due_deliveries(sending.clock())
        assert (due.webhook_ids, due.num_pending) == ((), 2)
        hook = await sending.storage.get_webhook(made["id"])
        assert (hook.disabled_at, hook.pending, hook.attempts) == (START, 2, 1)
        [warned] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "gone (status 410)" in warned and "2 notices are kept" in warned
        assert not await sending.storage.claim_deliveries(
            made["id"], sending.clock(), until=sending.clock(), limit=9
        )
        entry = OPERATOR.did("webhook.enabled", made["id"], "local")
        assert await sending.storage.enable_webhook(made["id"], sending.clock(), entry=entry) == 2
        told = {(await receiver.next()).headers["webhook-id"] for _ in range(2)}
        assert told == {"evt_0", "evt_1"}
        await sending.tried(delivered=2, failed=2)
        assert (await sending.storage.get_webhook(made["id"])).disabled_at is None


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that get no answer stay in flight for as long as a test takes on a busy machine."""
    monkeypatch.setattr("server.webhooks.sender.TIMEOUT_S", 600.0)


@pytest.mark.usefixtures("patience")
async def test_a_slow_receiver_holds_nobody_else_up(sending: Sending) -> None:
    async with receiving() as receiver:
        receiver.held.add("/slow")
        await hooked(sending.storage, receiver.url + "/slow")
        await hooked(sending.storage, receiver.url + "/quick", owner="bob")
        num = 2 * webhooks.PARALLEL
        for n in range(num):
            await sending.end(f"resp_{n}")
        for n in range(num):
            await sending.end(f"resp_bob{n}", owner="bob")
        await sending.until(lambda: sending.counted("delivered") == num)
        await sending.until(lambda: receiver.inbox.qsize() >= num + webhooks.PARALLEL)
        paths = [receiver.inbox.get_nowait().path for _ in range(receiver.inbox.qsize())]
        assert (paths.count("/quick"), paths.count("/slow")) == (num, webhooks.PARALLEL)
        receiver.release.set()
        await sending.until(lambda: sending.counted("delivered") == 2 * num)


@pytest.mark.usefixtures("patience")
async def test_a_slow_answer_holds_up_no_other_notice_of_its_webhook(sending: Sending) -> None:
    async with receiving() as receiver:
        receiver.held.add("/")
        await hooked(sending.storage, receiver.url + "/")
        await sending.end("resp_slow")
        await receiver.next()
        receiver.held.clear()
        num = 2 * webhooks.PARALLEL
        for n in range(num):
            await sending.end(f"resp_{n}")
        await sending.until(lambda: sending.counted("delivered") == num)
        assert not receiver.release.is_set()
        receiver.release.set()
        await sending.until(lambda: sending.counted("delivered") == num + 1)


async def test_a_receiver_that_never_answers_has_failed(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "TIMEOUT_S", 0.05)
    async with receiving() as receiver:
        receiver.held.add("/")
        await hooked(sending.storage, receiver.url + "/")
        await sending.end("resp_1")
        await sending.tried(failed=1)


async def test_a_receiver_that_is_not_there_has_failed(sending: Sending) -> None:
    await hooked(sending.storage, "http://127.0.0.1:9/")
    await sending.end("resp_1")
    await sending.tried(failed=1)


async def test_an_attempt_that_died_with_its_process_is_made_again(sending: Sending) -> None:
    async with receiving() as receiver:
        receiver.held.add("/")
        await hooked(sending.storage, receiver.url + "/")
        await sending.end("resp_1")
        await receiver.next()
        await sending.deliveries.close()
        receiver.held.clear()
        heir = Deliveries(sending.storage, sending.telemetry, clock=sending.clock)
        await heir.start()
        try:
            await sending.until(lambda: heir.num_pending == 1)
            sending.skip(webhooks.LEASE_S)
            assert (await receiver.next()).headers["webhook-id"] == "evt_1"
            await sending.until(lambda: heir.num_pending == 0)
        finally:
            await heir.close()


async def test_what_a_clock_put_off_that_was_ahead_is_due_at_the_next_start(sending: Sending) -> None:
    async with receiving("503 No") as receiver:
        await hooked(sending.storage, receiver.url)
        await sending.end("resp_1")
        await receiver.next()
        await sending.tried(failed=1)
        pause_s = await sending.pause_s()
        await sending.deliveries.close()
        heir = Deliveries(sending.storage, sending.telemetry, clock=sending.clock)
        await heir.start()
        await heir.close()
        assert await sending.pause_s() == pause_s
        sending.clock.now -= 366 * 86_400_000_000
        right = Deliveries(sending.storage, sending.telemetry, clock=sending.clock)
        await right.start()
        try:
            assert (await receiver.next()).headers["webhook-id"] == "evt_1"
            await sending.tried(delivered=1)
        finally:
            await right.close()


# ------------------------------------------------------------------------------------------------------------
# The operator's ways


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/in",
        "https://",
        "ftp://example.com/",
        "example.com/in",
        "https://user:secret@example.com/",
        "https://example.com:99999/",
        "https://exa mple.com/",
        "https://example.com/\n",
        "https://[::1/",
        "https://example.com/" + "x" * 2048,
    ],
)
async def test_urls_that_no_webhook_may_have(
    client: httpx.AsyncClient, server_app: Running, url: str
) -> None:
    with pytest.raises(ValueError):
        hooks.check_url(url, allow_http=False)
    admin = {"authorization": f"Bearer {server_app.life.admin_token}"}
    refused = await client.post("/admin/webhooks", json={"url": url}, headers=admin)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_webhook"
    assert refused.json()["error"]["param"] == "url"
    body = {"url": "https://example.com/", "event_types": ["response.nothing"]}
    refused = await client.post("/admin/webhooks", json=body, headers=admin)
    assert refused.json()["error"]["param"] == "event_types"


def test_urls_that_a_webhook_may_have() -> None:
    for url in ("https://example.com/in?x=1", "http://localhost:8080/", "http://[::1]/", "https://10.0.0.1/"):
        hooks.check_url(url, allow_http=False)
    hooks.check_url("http://example.com/in", allow_http=True)


async def test_the_admin_routes(client: httpx.AsyncClient, server_app: Running) -> None:
    body: dict[str, Any] = {"url": "https://example.com/", "event_types": ["response.failed"]}
    for headers in ({}, {"authorization": "Bearer x"}):
        assert (await client.get("/admin/webhooks", headers=headers)).status_code == 401
        assert (await client.post("/admin/webhooks", json=body, headers=headers)).status_code == 401
    admin = {"authorization": f"Bearer {server_app.life.admin_token}"}
    made = (await client.post("/admin/webhooks", json=body, headers=admin)).json()
    secret = made.pop("signing_secret")
    assert secret.startswith("whsec_") and len(secret) > 40
    assert made["object"] == "webhook_endpoint" and made["owner"] == "local"
    listed = (await client.get("/admin/webhooks", headers=admin)).json()
    assert listed == {"object": "list", "data": [made]} and made["event_types"] == ["response.failed"]
    for wrong in (
        {"url": 3},
        {**body, "owner": ""},
        {**body, "event_types": ["nope"]},
        {**body, "allow_http": 1},
    ):
        assert (await client.post("/admin/webhooks", json=wrong, headers=admin)).status_code == 400
    for expected in (200, 404):
        gone = await client.delete(f"/admin/webhooks/{made['id']}", headers=admin)
        assert gone.status_code == expected
    assert (await client.post(f"/admin/webhooks/{made['id']}/test", headers=admin)).status_code == 404


@pytest.mark.parametrize("at_a_server", [False, True])
async def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], at_a_server: bool) -> None:
    async def antiphon(*argv: str) -> tuple[int, list[str]]:
        code = await asyncio.to_thread(main, ["webhooks", *argv, "--data", str(tmp_path)])
        printed = capsys.readouterr()
        return code, (printed.out + printed.err).splitlines()

    async def story(receiver: Receiver) -> None:
        assert (await antiphon("add", "http://example.com/"))[0] == 2
        types = ("--event", "response.failed", "--event", "response.cancelled")
        made = ["owners", "create", "ann", "--data", str(tmp_path)]
        assert await asyncio.to_thread(main, made) == 0
        capsys.readouterr()
        code, (secret, told) = await antiphon("add", receiver.url + "/in", "--owner", "ann", *types)
        assert code == 0 and secret.startswith("whsec_") and "owner own_" in told
        id = told.split()[1].rstrip(",")
        code, (head, row) = await antiphon("list")
        assert head.split() == ["ID", "STATE", "CREATED", "OWNER", "PENDING", "ATTEMPTS", "EVENTS", "URL"]
        assert row.split()[0] == id and f"{receiver.url}/in" in row and "failed,cancelled" in row
        assert secret not in row
        assert await antiphon("test", id) == (0, [f"{id} answered response.failed with status 418"])
        assert unwrapped(await receiver.next(), secret).data.id == "resp_test"
        code, (line,) = await antiphon("enable", id)
        assert code == 0 and "of 0 notices that were kept" in line
        assert (await antiphon("remove", id))[0] == 0
        for verb in ("enable", "remove", "test"):
            code, (line,) = await antiphon(verb, id)
            assert code == 2 and id in line
        _, (_, told) = await antiphon("add", "http://127.0.0.1:9/")
        code, (line,) = await antiphon("test", told.split()[1].rstrip(","))
        assert code == 2 and "could not be reached" in line

    async with receiving("418 Teapot") as receiver:
        if not at_a_server:
            await story(receiver)
            return
        async with live_app(tmp_path) as server:
            leave_address(server.life.config, server.base_url, server.life.admin_token)
            await story(receiver)
