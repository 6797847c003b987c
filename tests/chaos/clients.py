"""Rows 7, 8 and 9: clients that hardly read, a thousand that only listen, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from engine import LocalEngine
from tests.chaos.checker import ENDED, check
from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json, Read, Seen
from tests.chaos.pace import measured
from tests.chaos.report import Form, Report, percentile, row
from tests.chaos.scene import KEYS, MINE, SCRIPTED
from tests.chaos.work import PROMPTS
from tests.support.running import http_client, live_app
from tests.support.talk import WEATHER, Api, call

CHECKPOINT = Path(__file__).parents[2] / "engine" / "tiny" / "checkpoint"


def host_of(server: Server) -> tuple[str, int]:
    """Where a server listens."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def request(path: str, body: Json | None = None) -> bytes:
    """The bytes of a request: a POST if it has a body."""
    data = b"" if body is None else orjson.dumps(body)
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {MINE}\r\n"
    return head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def body_of(raw: bytes) -> bytes:
    """What a chunked reply holds, as far as it came."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    out = bytearray()
    while rest:
        size, separator, rest = rest.partition(b"\r\n")
        if not separator or not int(size, 16):
            break
        out += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return bytes(out)


# ------------------------------------------------------------------------------------------------------------
# Slow ones


async def sip(server: Server, count: int) -> bytes:
    """A client that takes one byte a second until it is cut; all that had come to it by then."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, host_of(server))
        await loop.sock_sendall(sock, request("/v1/responses", {"input": f"count {count}", "stream": True}))
        raw = b""
        while True:
            try:
                data = await loop.sock_recv(sock, 1)
            except OSError:
                return raw
            raw += data
            await asyncio.sleep(1.0)
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    return raw


@row(
    "7",
    "slow clients (1 byte/s) beside fast ones",
    "others' ITL p99 +<= 5 %; <= 2 MiB a slow client; cut with a resumable cursor",
    short=False,
)
async def slow(form: Form, report: Report) -> None:
    """64 of 128 are slow, then none is, in turn."""
    num, pairs, count = form.of(16, 64), form.of(1, 7), form.of(150, 200)
    draw = form.draw("slow")
    # The pause between words leaves the processor half idle: [measured] at 0.02 s, the clients and the server
    # take all of two cores, and the p99 of equal rounds differs by a factor of five.
    waits = ("--tick-s", "0.05", "--send-timeout-s", "4", "--resume-grace-s", "1")
    server = Server(form.folder / "data", *SCRIPTED, *waits, port=free_port(draw))
    ratios, costs = [], []
    async with serving(server), Client([server], History(), draw, key=MINE) as client:
        await measured(server.url, MINE, num, 50)
        for _ in range(pairs):
            alone, _ = await asyncio.gather(
                measured(server.url, MINE, num, count), measured(server.url, MINE, num, count)
            )
            before = server.rss()
            slow_ones = [asyncio.create_task(sip(server, 5 * count)) for _ in range(num)]
            beside = await measured(server.url, MINE, num, count)
            costs.append((server.rss() - before) / num)
            ratios.append(beside["p99"] / alone["p99"])
            for task in slow_ones:
                task.cancel()
            await asyncio.gather(*slow_ones, return_exceptions=True)
            await _no_runs(
                client
            )  # those that were left go on for a while, and are not to slow the next pair
        await _cut_and_resumed(server, draw, report)
    change = statistics.median(ratios) - 1
    report.figure(
        f"{num} slow of {2 * num}, {pairs} pairs: others' ITL p99 {change:+.0%} (each {_each(ratios)})"
    )
    report.figure(f"{max(costs) / 2**20:.2f} MiB a slow client")
    report.holds(max(costs) <= 2 * 2**20, f"a slow client costs {max(costs) / 2**20:.1f} MiB")
    if form.full:
        report.holds(change <= 0.05, f"the others' ITL p99 grew by {change:.0%}")


async def _no_runs(client: Client) -> None:
    """Wait until no run is in flight, for at most a minute."""
    async with asyncio.timeout(60):
        while b"\nantiphon_runs_active 0.0\n" not in (await client.once("GET", "/metrics")).body:
            await asyncio.sleep(0.1)


def _each(ratios: list[float]) -> str:
    return ", ".join(f"{ratio - 1:+.0%}" for ratio in ratios)


async def _cut_and_resumed(server: Server, draw: random.Random, report: Report) -> None:
    """A slow client is cut; the events that it has are those of the log, and it reads on behind them."""
    raw = await asyncio.wait_for(_stuffed(server), 60)
    read = Read(-1, bytearray(body_of(raw)))
    assert read.response_id is not None
    async with Client([server], History(), draw, key=MINE) as client:
        seen = client.history.of(read.response_id)
        seen.reads.append(read)
        await client.resume(seen)
        report.breaks(check(seen, await client.replay(seen.id), await client.get(seen.id)))
    report.figure(f"one that reads nothing is cut and resumes behind event {read.last}")


async def _stuffed(server: Server) -> bytes:
    """A client that reads nothing until it has been cut; what had come by then."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, host_of(server))
        # Several megabytes: the kernel takes the first of them in any case.
        wordy = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
        body = {"input": "tick 0\ncount 1500", **wordy, "stream": True}
        await loop.sock_sendall(sock, request("/v1/responses", body))
        await asyncio.sleep(10)
        raw = b""
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(sock, 1 << 16):
                raw += data
        return raw


# ------------------------------------------------------------------------------------------------------------
# Idle ones


@asynccontextmanager
async def listening(server: Server, ids: list[str], num: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that follow the streams of runs that say nothing."""
    writers: list[asyncio.StreamWriter] = []
    readers: list[asyncio.StreamReader] = []
    try:
        for n in range(num):
            reader, writer = await asyncio.open_connection(*host_of(server), limit=1 << 14)
            writers.append(writer)
            readers.append(reader)
            writer.write(request(f"/v1/responses/{ids[n % len(ids)]}?stream=true"))
            await reader.readuntil(b"response.output_item.done")
        yield readers
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@row("8", "1,000 idle SSE readers", "<= 64 kB each; active ITL p99 +<= 10 %", short=False)
async def idle(form: Form, report: Report) -> None:
    """Readers of runs that wait for tool outputs, beside 32 active streams; with and without, in turn."""
    num, pairs, count = form.of(200, 1000), form.of(1, 3), form.of(100, 400)
    draw = form.draw("idle")
    server = Server(form.folder / "data", *SCRIPTED, "--tick-s", "0.02", port=free_port(draw))
    ratios, costs = [], []
    async with serving(server), Client([server], History(), draw, key=MINE) as client:
        body = {"input": call(), "tools": [WEATHER], "await_tool_outputs": True, "background": True}
        ids = [(await client.create(body)).id for _ in range(20)]
        async with listening(server, ids, 100):
            pass  # what is allocated once is not counted
        await measured(server.url, MINE, 32, 50)
        for _ in range(pairs):
            alone = await measured(server.url, MINE, 32, count)
            before = server.rss()
            async with listening(server, ids, num):
                costs.append((server.rss() - before) / num)
                beside = await measured(server.url, MINE, 32, count)
            ratios.append(beside["p99"] / alone["p99"])
    change = statistics.median(ratios) - 1
    report.figure(f"{num} readers, {pairs} pairs: {max(costs) / 1000:.0f} kB each")
    report.figure(f"ITL p99 of 32 active streams {change:+.0%} (each {_each(ratios)})")
    report.holds(max(costs) <= 64_000, f"a reader costs {max(costs) / 1000:.0f} kB")
    if form.full:
        report.holds(change <= 0.10, f"the active streams' ITL p99 grew by {change:.0%}")


# ------------------------------------------------------------------------------------------------------------
# Leaving ones


@row(
    "9a",
    "half of the clients leave at random moments",
    "stored runs go on; no block leaked; I1-I6",
    short=False,
)
async def leaving(form: Form, report: Report) -> None:
    """10,000 requests in full, 300 in short, to the shipped model."""
    draw = form.draw("leaving")
    server = Server(form.folder / "data", "--log-level", "error", *KEYS, port=free_port(draw))
    num, left, slots = form.of(300, 10_000), 0, asyncio.Semaphore(64)
    stored: list[Seen] = []

    async def one(client: Client, draw: random.Random) -> None:
        nonlocal left
        leaves, store = draw.random() < 0.5, draw.random() < 0.7
        body = {
            "input": draw.choice(PROMPTS),
            "seed": draw.randrange(1 << 31),
            "max_output_tokens": 16,
            "ignore_eos": True,
            "store": store,
        }
        async with slots:
            if not leaves:
                await client.stream(body)
                return
            left += 1
            seen = await _leave(server, body, draw)
            if seen is not None and store:
                stored.append(seen)

    async with serving(server), Client([server], History(), draw, key=MINE) as client:
        await asyncio.gather(*(one(client, random.Random(draw.random())) for _ in range(num)))
        for seen in stored:
            while (final := await client.get(seen.id))["status"] not in ENDED:
                await asyncio.sleep(0.05)
            report.holds(
                final["status"] == "incomplete", f"{seen.id}: a run that was left ended {final['status']}"
            )
            report.breaks(check(seen, await client.replay(seen.id), final))
        for seen in draw.sample(sorted(client.history.seen.values(), key=lambda seen: seen.id), 50):
            if seen.stored:
                report.breaks(check(seen, await client.replay(seen.id), await client.get(seen.id)))
        readings = await _engine_at_rest(client)
    report.figure(
        f"{num} requests, {left} clients left; {len(stored)} stored runs that were left all ended whole"
    )
    report.figure(
        f"{readings['kv_blocks_used']:.0f} blocks in use afterwards, {readings['running']:.0f} running"
    )
    report.holds(readings["kv_blocks_used"] == readings["running"] == readings["waiting"] == 0, f"{readings}")


async def _leave(server: Server, body: Json, draw: random.Random) -> Seen | None:
    """Ask, and drop the connection: before the reply, or after a random share of it."""
    reader, writer = await asyncio.open_connection(*host_of(server))
    raw = b""
    try:
        writer.write(request("/v1/responses", {**body, "stream": True}))
        enough = draw.choice((0, draw.randrange(6000)))
        while len(raw) < enough and (data := await reader.read(1024)):
            raw += data
    finally:
        writer.transport.abort()
    read = Read(-1, bytearray(body_of(raw)))
    return None if read.response_id is None else Seen(read.response_id, reads=[read])


async def _engine_at_rest(client: Client) -> dict[str, float]:
    """The engine's readings once it has nothing to do (or after ten seconds)."""
    readings: dict[str, float] = {}
    for _ in range(100):
        text = (await client.once("GET", "/metrics")).body.decode()
        readings = {
            name: float(value)
            for name, value in re.findall(r"^antiphon_engine_(\w+)\{[^}]*\} (\S+)$", text, re.M)
        }
        if not (readings["running"] or readings["waiting"] or readings["kv_blocks_used"]):
            break
        await asyncio.sleep(0.1)
    return readings


@row("9b", "a client of an unstored stream leaves", "its KV is free within 1 step + 100 ms")
async def freed(form: Form, report: Report) -> None:
    """Each of some clients leaves a server in this process, beside eight streams that stay."""
    engine = LocalEngine(CHECKPOINT, num_threads=1)
    draw, late = form.draw("freed"), []
    async with live_app(form.folder, engine) as server, http_client(server) as client:
        api = Api(client)
        asked = {"ignore_eos": True, "store": False}
        async with contextlib.AsyncExitStack() as stack:
            for n in range(8):
                live = await stack.enter_async_context(
                    api.open(PROMPTS[0], max_output_tokens=3000, seed=n, **asked)
                )
                await live.until("output_text.delta")
            for _ in range(form.of(10, 100)):
                steps = []
                async with api.open(draw.choice(PROMPTS), max_output_tokens=1000, **asked) as live:
                    await live.until("output_text.delta")
                    for _ in range(draw.randrange(1, 10)):
                        began, done = time.perf_counter(), engine.stats().steps_total
                        while engine.stats().steps_total == done:
                            await asyncio.sleep(0.0005)
                        steps.append(time.perf_counter() - began)
                    running = engine.stats().running
                    began = time.perf_counter()
                while engine.stats().running == running:
                    await asyncio.sleep(0.0005)
                late.append(time.perf_counter() - began - max(steps))
        await engine.settled()
        engine.check_integrity()
        report.holds(engine.stats().kv_blocks_used == 0, "blocks are in use when nothing runs")
    worst = max(late) * 1000
    report.figure(
        f"{len(late)} aborts: freed one step + {percentile(late, 0.5) * 1000:.0f} ms (median), {worst:.0f} ms"
    )
    report.holds(worst <= 100, f"one took a step + {worst:.0f} ms")
