"""Shapes of HTTP: thousands of connections that say what no client should, against a server of our own.

`python -m tests.fuzz.shapes --shapes 10000 --seed 7`. A seed fixes what is sent and where it is split.
Checked of every shape: only replies that are whole, no 5xx but 501, 503 and 505, errors in the official form,
an end within the deadlines, and no request that was read out of a body. Beside them streams go on;
afterwards the server answers, and has nothing left over.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from server.http import bounded_protocol
from tests.fuzz.pauses import Pauses
from tests.support.running import Running, http_client, live_app

TIMEOUTS = {"head_timeout_s": 3.0, "body_timeout_s": 3.0, "idle_timeout_s": 0.5}
LINGER_S = 3.0
LIMIT_S = 20.0
"""An end is due after a few seconds; the rest is for a machine with other work."""

ALLOWED_5XX = {501, 503, 505}
CANARY = "/smuggled"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent, in pieces; `pause_s` lies between them. leaves: the client closes right behind. replies:
    how many there must be at least, and what their statuses are where that is known. bodiless: some replies
    are to HEAD, so that their ends cannot be told."""

    kind: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    leaves: bool = False
    statuses: tuple[frozenset[int], ...] = ()
    bodiless: bool = False


# ------------------------------------------------------------------------------------------------------------
# Making shapes

OK = frozenset({200})
REFUSED = frozenset({400, 408, 413, 414, 417, 431, 501, 505})
ANY_ANSWER = frozenset(range(200, 500)) | ALLOWED_5XX

HEADERS = (
    b"accept: */*", b"user-agent: shapes", b"accept-encoding: gzip, deflate", b"x-empty:", b"X-CASE: Yes",
    b"connection: keep-alive", b"cookie: a=b; c=d", b"x-high: \xe4\xff", b"authorization: Bearer x",
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
    b"connection: upgrade\r\nupgrade: TLS/1.0", b"expect: 100-continue", b"te: trailers", b"range: bytes=0-1",
    b"x-client-request-id: \xe2\x80\xae", b"content-type: application/json", b"if-none-match: *",
)  # fmt: skip
JUNK = (
    b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b",", b";", b"\x0b", b"\x7f", b"\xff", b"\xc3", b"%00",
    b"%0d%0a", b"HTTP/1.1", b"chunked", b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n",
    b"host: y\r\n", b"\r\n\r\n", b"-1", b"0x", b"+", b"99999999999999999999", b"GET ", b"/../", b"*",
)  # fmt: skip
TARGETS = (
    b"/health", b"/version", b"/v1/models", b"/nothing", b"/%00", b"/%zz%f", b"//", b"/a?b=c&d",
    b"/v1/responses/x", b"http://localhost/health", b"http://localhost", b"/\x7e", b"/v1/responses/%2e%2e",
    b"/v1/responses?limit=%ff", b"/v1/organization/projects",
    b"/v1/organization/usage/completions?start_time=0", b"/v1/organization/projects/%00/limits",
    b"/admin/keys", b"/admin/tiers/%ff",
)  # fmt: skip
AMBIGUOUS = (
    b"content-length: %d\r\ntransfer-encoding: chunked", b"transfer-encoding: chunked\r\ncontent-length: %d",
    b"content-length: 0\r\ncontent-length: %d", b"content-length: %d\r\ncontent-length: 0",
    b"content-length: %d, %d", b"content-length: +%d", b"content-length: %d ;", b"content-length: 0x%x",
    b"transfer-encoding: identity\r\nx: %d", b"transfer-encoding: xchunked\r\nx: %d",
    b"transfer-encoding: chunked, identity\r\nx: %d", b"transfer-encoding:\x0bchunked\r\nx: %d",
    b"transfer-encoding : chunked\r\nx: %d", b"transfer-encoding: chunked\r\n folded\r\nx: %d",
    b"transfer-encoding: gzip, chunked\r\nx: %d",
    b"transfer-encoding: chunked\r\ntransfer-encoding: x\r\nx: %d",
    b"x: y\rcontent-length: %d", b"content-length:\r\nx: %d", b"x: \0\r\ncontent-length: %d",
)  # fmt: skip


def canary(draw: random.Random) -> bytes:
    """A body that is a request, which nobody may carry out."""
    method = draw.choice((b"GET", b"POST", b"DELETE"))
    return method + b" " + CANARY.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


def head(draw: random.Random, method: bytes, target: bytes, *more: bytes) -> bytes:
    """A head that is in order, with some headers that it need not have."""
    lines = [b"host: localhost", *draw.sample(HEADERS, draw.randrange(4)), *more]
    draw.shuffle(lines)
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *lines]) + b"\r\n\r\n"


def chunked(draw: random.Random, body: bytes) -> bytes:
    """A body in chunks of any size, with extensions and trailers."""
    out = b""
    while body:
        size = draw.randint(1, len(body))
        extension = draw.choice((b"", b"", b";a=b", b';a="b c"'))
        out += draw.choice((b"%x", b"%X", b"0%x")) % size + extension + b"\r\n" + body[:size] + b"\r\n"
        body = body[size:]
    return out + b"0\r\n" + draw.choice((b"", b"", b"x-trailer: y\r\n")) + b"\r\n"


def request(draw: random.Random) -> tuple[bytes, bool]:
    """One request in order, with a body that must not be read as another; and whether it is a HEAD."""
    method = draw.choice((b"GET", b"GET", b"HEAD", b"POST", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"))
    path = b"/v1/conversations" if method == b"POST" and draw.random() < 0.7 else draw.choice(TARGETS)
    if method in (b"GET", b"HEAD", b"OPTIONS", b"DELETE") and draw.random() < 0.7:
        return head(draw, method, path), method == b"HEAD"
    body = canary(draw) if draw.random() < 0.8 else b"{}"
    if draw.random() < 0.5:
        return head(draw, method, path, b"transfer-encoding: chunked") + chunked(
            draw, body
        ), method == b"HEAD"
    return head(draw, method, path, b"content-length: %d" % len(body)) + body, method == b"HEAD"


def pieces(draw: random.Random, data: bytes) -> tuple[bytes, ...]:
    """The data as packets: whole, cut anywhere, or byte by byte."""
    how = draw.random()
    if how < 0.4 or len(data) < 2:
        return (data,)
    if how < 0.9 or len(data) > 1000:
        cuts = sorted({draw.randrange(1, len(data)) for _ in range(draw.randint(1, 4))})
        return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
    return tuple(data[index : index + 1] for index in range(len(data)))


def in_order(draw: random.Random) -> Shape:
    """One to six requests that are in order."""
    made = [request(draw) for _ in range(draw.choice((1, 1, 1, 2, 3, 6)))]
    data = b"".join(each for each, _ in made)
    return Shape(
        "in order",
        pieces(draw, data),
        statuses=tuple(ANY_ANSWER - REFUSED | {400, 413} for _ in made),
        bodiless=any(is_head for _, is_head in made),
    )


def ambiguous(draw: random.Random) -> Shape:
    """A body whose length two readers could take for two."""
    body = canary(draw)
    framing = draw.choice(AMBIGUOUS)
    framing = framing % ((len(body),) * framing.count(b"%"))
    if draw.random() < 0.5:
        framing = framing.title() if b"\r" not in framing else framing
    if draw.random() < 0.5:
        body = chunked(draw, body)
    if draw.random() < 0.3:
        body = b"0\r\n\r\n" + body
    data = head(draw, b"POST", b"/v1/conversations", framing) + body
    return Shape("ambiguous", pieces(draw, data), statuses=(REFUSED,))


def mutated(draw: random.Random) -> Shape:
    """A request in which bytes were changed, left out, doubled or put in."""
    data = bytearray(
        head(draw, draw.choice((b"GET", b"POST")), draw.choice(TARGETS), b"content-length: 2") + b"{}"
    )
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 9)]
            case 2:
                data[at:at] = draw.choice(JUNK)
            case _:
                data[at:at] = data[at : at + draw.randint(1, 40)]
        if not data:
            data += b"\n"
    return Shape("mutated", pieces(draw, bytes(data)), bodiless=True)


def broken_chunks(draw: random.Random) -> Shape:
    """A chunked body in which something is wrong, most of the time."""
    body = bytearray(chunked(draw, draw.randbytes(draw.randint(1, 60))))
    at = draw.randrange(len(body))
    body[at : at + draw.randrange(3)] = draw.choice(JUNK)
    data = head(draw, b"POST", b"/v1/conversations", b"transfer-encoding: chunked") + bytes(body)
    return Shape("broken chunks", pieces(draw, data), bodiless=True)


def half(draw: random.Random) -> Shape:
    """A request of which only a part comes; its client waits, or leaves."""
    data, is_head = request(draw)
    cut = draw.randrange(len(data))
    return Shape("half", pieces(draw, data[:cut]), leaves=draw.random() < 0.5, bodiless=is_head)


def slow(draw: random.Random) -> Shape:
    """A request that takes longer than it may, a few bytes at a time."""
    data, _ = request(draw)
    step = max(len(data) // 12, 1)
    parts = tuple(data[at : at + step] for at in range(0, len(data), step))
    return Shape("slow", parts, pause_s=0.35, bodiless=True)


def long(draw: random.Random) -> Shape:
    """A target, a header, headers or chunk extensions without an end."""
    size = draw.choice((1_000, 60_000, 70_000, 300_000))
    match draw.randrange(5):
        case 0:
            data = head(draw, b"GET", b"/" + b"a" * size)
        case 1:
            data = head(draw, b"GET", b"/health", b"x: " + b"a" * size)
        case 2:
            data = head(draw, b"GET", b"/health", *[b"x%d: y" % number for number in range(size // 8)])
        case 3:
            data = head(draw, b"POST", b"/v1/conversations", b"transfer-encoding: chunked")
            data += b"2;" + b"a" * size + b"\r\n{}\r\n0\r\n\r\n"
        case _:
            data = head(draw, b"POST", b"/v1/conversations", b"transfer-encoding: chunked")
            data += b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * (size // 6) + b"\r\n"
    return Shape("long", pieces(draw, data))


def garbage(draw: random.Random) -> Shape:
    """Bytes."""
    kinds = (draw.randbytes(draw.randint(1, 300)), b"".join(draw.choices(JUNK, k=draw.randint(1, 30))))
    return Shape("garbage", pieces(draw, draw.choice(kinds)), bodiless=True)


KINDS: tuple[Callable[[random.Random], Shape], ...] = (
    in_order, in_order, in_order, ambiguous, ambiguous, mutated, mutated, mutated, broken_chunks,
    broken_chunks, half, half, slow, long, garbage,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Saying them


@dataclass(slots=True)
class Outcome:
    """What became of all shapes: how many of each kind, the statuses that they got, and what was wrong."""

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    pauses: Pauses = field(default_factory=lambda: Pauses(os.getpid()))
    slowest: tuple[float, str, int] = (0.0, "", 0)
    """Seconds from the last byte that was said to the last that was answered, with the shape's kind and
    number."""


async def _read(reader: asyncio.StreamReader, answer: bytearray) -> float:
    """Read until the end; when the last of it came, on the monotonic clock."""
    last = 0.0
    with suppress(ConnectionError):  # what came before a reset counts
        while data := await reader.read(1 << 16):
            answer += data
            last = time.monotonic()
    return last


async def say(address: tuple[str, int], shape: Shape) -> tuple[bytes, float] | None:
    """What a server answers until it closes, and for how many seconds behind the last byte that was said;
    None where the client left first."""
    reader, writer = await asyncio.open_connection(*address)
    answer = bytearray()
    try:
        reading = asyncio.create_task(_read(reader, answer))
        try:
            for piece in shape.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(shape.pause_s)
        except (ConnectionError, RuntimeError):
            pass  # it was refused half-way; uvloop calls that a RuntimeError
        if shape.leaves:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return None
        said = time.monotonic()
        answered = await reading
        return bytes(answer), max(0.0, answered - said)
    finally:
        writer.close()


def replies(answer: bytes) -> list[int]:
    """The statuses of replies, each of which must be whole; AssertionError where one is not."""
    statuses = []
    while answer:
        found = re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n", answer)
        assert found, f"no reply: {answer[:120]!r}"
        status, answer = int(found[1]), answer[found.end() :]
        headers = dict(line.lower().split(b": ", 1) for line in found[2].split(b"\r\n") if line)
        if status == 100:
            continue
        statuses.append(status)
        if headers.get(b"transfer-encoding") == b"chunked":
            body = re.match(rb"(?:[0-9a-f]+\r\n(?s:.)*?\r\n)*?0\r\n\r\n", answer)
            assert body, "a chunked reply that does not end"
            answer = answer[body.end() :]
            continue
        size = int(headers.get(b"content-length", b"0"))
        body_bytes, answer = answer[:size], answer[size:]
        assert len(body_bytes) == size, "a reply that is not whole"
        if status >= 400:
            assert headers[b"content-type"] == b"application/json", headers
            assert set(json.loads(body_bytes)["error"]) == {"message", "type", "param", "code"}
    return statuses


def judge(shape: Shape, answer: bytes, took_s: float) -> list[int]:
    """The statuses of an answer; AssertionError where it is none that the shape may have. What took longer to
    say than it may is no shape any more."""
    found = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", answer)]
    statuses = [each for each in found if each != 100] if shape.bodiless else replies(answer)
    for status in statuses:
        assert status < 500 or status in ALLOWED_5XX, f"status {status}"
    in_time = took_s < min(TIMEOUTS["head_timeout_s"], TIMEOUTS["body_timeout_s"])
    for position, allowed in enumerate(shape.statuses if in_time else ()):
        assert position < len(statuses), f"{len(statuses)} replies to {len(shape.statuses)} requests"
        assert statuses[position] in allowed, f"reply {position} has status {statuses[position]}"
    return statuses


class _Watch(logging.Handler):
    """Notes what the server logs that it should not."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.INFO)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if CANARY in text:
            self._faults.append(f"a request was read out of a body: {text}")
        elif record.levelno >= logging.ERROR:
            self._faults.append(f"logged: {text} {record.exc_info and record.exc_info[1]!r}")


async def _neighbour(client: httpx.AsyncClient, outcome: Outcome) -> None:
    """Streams, one after the other, each of which must be whole."""
    body = {"input": "count 60", "stream": True, "store": False}
    while True:
        try:
            headers = {"connection": "close"}
            async with client.stream("POST", "/v1/responses", json=body, headers=headers) as reply:
                lines = []
                outcome.pauses.begin()
                async for line in reply.aiter_lines():
                    lines.append(line)
                    if line == "event: response.output_text.delta":
                        outcome.pauses.token([])
                text = "".join(lines)
        except httpx.HTTPError as error:
            outcome.faults.append(f"a neighbour's stream: {error!r}")
            continue
        whole = " ".join(str(number) for number in range(1, 61))
        if reply.status_code != 200 or "response.completed" not in text or whole not in text:
            outcome.faults.append(f"a neighbour's stream: status {reply.status_code}, {text[-200:]!r}")
        outcome.pauses.end()


async def run(running: Running, seed: int, num_shapes: int, at_once: int) -> Outcome:
    """Say `num_shapes` shapes to a server, so many of them side by side."""
    url = urlsplit(running.base_url)
    assert url.hostname is not None and url.port is not None
    address = (url.hostname, url.port)
    outcome = Outcome()
    watch = _Watch(outcome.faults)
    loggers = [logging.getLogger(name) for name in ("antiphon", "asyncio", "uvicorn")]
    levels = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(watch)
    loggers[0].setLevel(logging.INFO)
    numbers = iter(range(num_shapes))

    async def one(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        shape = draw.choice(KINDS)(draw)
        began = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT_S):
                said = await say(address, shape)
            statuses = [] if said is None else judge(shape, said[0], time.monotonic() - began)
        except TimeoutError:
            outcome.faults.append(
                f"shape {number} ({shape.kind}) had no end: {b''.join(shape.pieces)[:300]!r}"
            )
            return
        except (AssertionError, ValueError, KeyError) as fault:
            data = b"".join(shape.pieces)
            outcome.faults.append(f"shape {number} ({shape.kind}): {fault!r}; said {data[:600]!r}")
            return
        outcome.kinds[shape.kind] += 1
        outcome.statuses.update(statuses)
        if said is not None:
            outcome.slowest = max(outcome.slowest, (said[1], shape.kind, number))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    async with http_client(running) as client:
        neighbour = asyncio.create_task(_neighbour(client, outcome))
        try:
            await asyncio.gather(*(worker() for _ in range(at_once)))
            if (await client.get("/ready")).status_code != 200:
                outcome.faults.append("the server is not ready any more")
        finally:
            neighbour.cancel()
            await asyncio.gather(neighbour, return_exceptions=True)
            for logger, level in levels:
                logger.removeHandler(watch)
                logger.setLevel(level)
    if running.life.arrivals.num_bytes:
        outcome.faults.append(f"{running.life.arrivals.num_bytes} bytes of bodies are still counted")
    return outcome


async def fuzz(folder: Path, seed: int, num_shapes: int, at_once: int) -> Outcome:
    """The same against a server that is started for it, whose deadlines are short."""
    linger, bounded_protocol.LINGER_S = bounded_protocol.LINGER_S, LINGER_S
    try:
        settings: dict[str, Any] = dict(TIMEOUTS)
        async with live_app(folder, **settings) as running:
            return await run(running, seed, num_shapes, at_once)
    finally:
        bounded_protocol.LINGER_S = linger


def main(argv: Iterable[str] | None = None) -> int:
    """The command; returns 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", "--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--at-once", type=int, default=48)
    options = parser.parse_args(None if argv is None else list(argv))
    print(f"seed {options.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        outcome = runner.run(fuzz(Path(folder), options.seed, options.shapes, options.at_once))
    for fault in outcome.faults[:40]:
        print(f"FAULT {fault}")
    kinds = ", ".join(f"{number} {kind}" for kind, number in outcome.kinds.most_common())
    statuses = ", ".join(f"{number} x {status}" for status, number in outcome.statuses.most_common())
    print(f"shapes: {kinds}\nreplies: {statuses}")
    seconds, kind, number = outcome.slowest
    print(f"the slowest answer came {seconds:.1f} s behind what was said: shape {number} ({kind})")
    print(outcome.pauses.told())
    print(f"{len(outcome.faults)} faults")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
