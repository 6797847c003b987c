"""The HTTP edge over real sockets: whatever a client sends, it is answered clearly or closed in order, and
nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from engine import ScriptedEngine
from server.http import bounded_protocol
from server.process.log_lines import Lines
from server.process.process_ends import SWITCH_S
from server.schema.items import MAX_ITEMS
from tests.fuzz.shapes import fuzz
from tests.server.runs.test_disconnect import eventually
from tests.support.processes import server_process
from tests.support.running import Running, http_client, live_app
from tests.support.talk import Api, Gate, gated

ROOT = Path(__file__).parents[3]

Reply = tuple[int, dict[str, str], bytes]


class Raw:
    """A connection on which bytes are said as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, *parts: bytes) -> None:
        """Send each part in a packet of its own, as far as that can be had."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.01)

    async def reply(self, *, head_only: bool = False) -> Reply:
        """The next reply, its body read by its length or its chunks."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = b""
            if not head_only and headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
            elif not head_only:
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def raw(running: Running) -> AsyncIterator[Raw]:
    """A connection to a server."""
    url = urlsplit(running.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


JSON = b"content-type: application/json"


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A POST with a body of a declared length."""
    lines = [
        b"POST %s HTTP/1.1" % path.encode(),
        b"host: localhost",
        b"content-length: %d" % len(body),
        JSON,
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def error_of(reply: Reply) -> dict[str, Any]:
    """The official error of a reply."""
    assert reply[1]["content-type"] == "application/json"
    assert reply[1]["x-request-id"].startswith("req_")
    error: dict[str, Any] = orjson.loads(reply[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ------------------------------------------------------------------------------------------------------------
# Upgrades

H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")
SMUGGLED = b"DELETE /v1/responses/resp_x HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("packets", [1, 2, 0], ids=["one packet", "head and body", "byte by byte"])
async def test_an_offer_of_http2_is_ignored_and_the_body_read(live_server: Running, packets: int) -> None:
    request = post("/v1/responses", b'{"input": "say hi", "store": false}', *H2C)
    head = request.index(b"\r\n\r\n") + 4
    async with raw(live_server) as client:
        if packets == 0:
            for index in range(len(request)):
                client.writer.write(request[index : index + 1])
                await asyncio.sleep(0)
        else:
            await client.say(*([request] if packets == 1 else [request[:head], request[head:]]))
        status, _, body = await client.reply()
        assert status == 200 and orjson.loads(body)["status"] == "completed"
        await client.say(post("/v1/conversations", b"{}"))  # the connection goes on, on HTTP/1.1
        assert (await client.reply())[0] == 200


async def test_no_request_is_read_out_of_a_body(live_server: Running) -> None:
    request = post("/v1/conversations", SMUGGLED, *H2C)
    head = request.index(b"\r\n\r\n") + 4
    async with raw(live_server) as client:
        await client.say(request[:head], SMUGGLED, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert error_of(await client.reply())["code"] == "invalid_json"
        assert b"version" in (await client.reply())[2]


async def test_chunked_and_pipelined_requests_with_an_offer_of_http2(live_server: Running) -> None:
    one = b"POST /v1/conversations HTTP/1.1\r\nhost: localhost\r\n" + b"\r\n".join((*H2C, JSON)) + b"\r\n"
    one += b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with raw(live_server) as client:
        await client.say(one * 3)
        for _ in range(3):
            assert (await client.reply())[0] == 200


# ------------------------------------------------------------------------------------------------------------
# Heads

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = (
    b"POST /v1/conversations HTTP/1.1\r\nhost: localhost\r\n"
    + JSON
    + b"\r\ntransfer-encoding: chunked\r\n\r\n"
)

MALFORMED = {
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"host: y\r\n\r\n", 400),
    "host with a space": (b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
    "unknown method": (b"BREW /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "method not served": (b"PROPFIND /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "small method": (b"get /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "no version": (b"GET /health\r\n\r\n", 505),
    "http 1.2": (b"GET /health HTTP/1.2\r\nhost: localhost\r\n\r\n", 505),
    "http 2.0": (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
    "http 2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "line feeds only": (b"GET /health HTTP/1.1\nhost: localhost\n\n", 400),
    "folded header": (GET + b"a: b\r\n c\r\n\r\n", 400),
    "space before colon": (GET + b"a : b\r\n\r\n", 400),
    "nul in a header": (GET + b"a: b\0c\r\n\r\n", 400),
    "space in the target": (b"GET /a b HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "high byte in the target": (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "asterisk": (b"GET * HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "no such port": (b"GET http://x:99999/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "another host": (b"GET http://other/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "another port": (b"GET http://localhost:81/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a name and a host": (b"GET http://localhost@other/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "two lengths": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        400,
    ),
    "negative length": (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
    "endless length": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n",
        400,
    ),
    "length and chunks": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        400,
    ),
    "gzip": (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
    "identity": (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: identity\r\n\r\n", 501),
    "chunks in http 1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "size that is none": (CHUNKED + b"zz\r\n", 400),
    "size too large": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "chunk too long": (CHUNKED + b"1\r\nabc\r\n", 400),
    "chunks by line feeds": (CHUNKED + b"1\na\n0\n\n", 400),
    "an expectation": (GET + b"expect: miracles\r\n\r\n", 417),
    "many trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
    "long target": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
    "long header": (GET + b"a: " + b"b" * 70_000 + b"\r\n\r\n", 431),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests_have_clear_answers(live_server: Running, name: str) -> None:
    request, status = MALFORMED[name]
    async with raw(live_server) as client:
        client.writer.write(request)
        reply = await client.reply()
        assert reply[0] == status, reply
        assert error_of(reply)["code"]
        assert reply[1]["connection"] == "close"
        assert await client.rest() == b""


BEFORE_THE_PATH = {"unknown method", "small method"}
"""What is refused before the target has been read."""

REPLACED = (b"/v1/conversations", b"/health")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (request, _) in MALFORMED.items()
        if name not in BEFORE_THE_PATH and any(path in request for path in REPLACED)
    ],
)
async def test_on_messages_they_have_the_shape_of_that_api(live_server: Running, name: str) -> None:
    request, status = MALFORMED[name]
    for path in (b"/v1/messages", b"/v1/messages/count_tokens"):
        asked = request
        for target in REPLACED:
            asked = asked.replace(target, path, 1)
        async with raw(live_server) as client:
            client.writer.write(asked)
            reply = await client.reply()
        told = orjson.loads(reply[2])
        assert (reply[0], told["type"]) == (status, "error"), told
        assert told["error"]["details"]["error_code"]
        assert told["request_id"] == reply[1]["request-id"] == reply[1]["x-request-id"]


async def test_the_shape_is_not_that_of_the_request_before(live_server: Running) -> None:
    async with raw(live_server) as client:
        client.writer.write(b"GET /v1/messages HTTP/1.1\r\nhost: localhost\r\n\r\nnonsense\r\n\r\n")
        assert (await client.reply())[0] == 405
        assert error_of(await client.reply())["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/v1/messages?beta=true", b""),
        (b"http://localhost/v1/messages", b""),
        (b"/v1/files/x", b"anthropic-version: 2023-06-01\r\n"),
    ],
)
async def test_the_path_of_a_malformed_request_is_its_targets(
    live_server: Running, target: bytes, headers: bytes
) -> None:
    async with raw(live_server) as client:
        client.writer.write(
            b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n" + headers + b"expect: miracles\r\n\r\n"
        )
        reply = await client.reply()
        assert (reply[0], orjson.loads(reply[2])["type"]) == (417, "error")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/health", 200),
        (b"HTTP://LOCALHOST:80/health", 200),
        (b"http://localhost", 200),  # the console
        (b"/health#part", 200),
        (b"//health", 404),
        (b"/%zz", 404),
        (b"/%ff%00%0a", 404),
        (b"/v1/responses/%00", 404),
        (b"/v1/responses/%ed%a0%80", 404),
    ],
)
async def test_unusual_targets(live_server: Running, target: bytes, status: int) -> None:
    async with raw(live_server) as client:
        await client.say(b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
        reply = await client.reply()
        assert reply[0] == status
        if status != 200:
            error_of(reply)


async def test_http_1_0_needs_no_host(live_server: Running) -> None:
    async with raw(live_server) as client:
        await client.say(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await client.reply())[0] == 200
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "request_line",
    [b"HEAD /health", b"HEAD /nothing", b"HEAD /v1/responses", b"HEAD *", b"HEAD /a b", b"HEAD /%00"],
)
async def test_head_is_never_answered_with_a_body(live_server: Running, request_line: bytes) -> None:
    async with raw(live_server) as client:
        await client.say(request_line + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await client.reply(head_only=True)
        assert await client.rest() == b""


async def test_a_trailer_is_no_header(live_server: Running) -> None:
    trailer = b"2\r\n{}\r\n0\r\ncontent-encoding: gzip\r\nidempotency-key: a\r\n\r\n"
    async with raw(live_server) as client:
        await client.say(CHUNKED, trailer)
        status, headers, _ = await client.reply()
        assert status == 200 and "idempotent-replayed" not in headers


async def test_a_refusal_waits_for_the_replies_before_it(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, raw(server) as client:
        await client.say(post("/v1/responses", b'{"input": "hi", "stream": true}') + b"nonsense\r\n\r\n")
        await gate.reached.wait()
        gate.release.set()
        status, _, stream = await client.reply()
        assert status == 200 and b"event: response.completed" in stream
        assert (await client.reply())[0] == 400
        assert await client.rest() == b""


async def test_who_pipelines_without_end_is_let_go(live_server: Running) -> None:
    async with raw(live_server) as client:
        await client.say((GET + b"\r\n") * 5_000)
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 ") == bounded_protocol.MAX_PIPELINED + 1


async def test_a_client_that_leaves_takes_the_request_at_work_with_it(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server:
        async with raw(server) as client:
            unstored = post("/v1/responses", b'{"input": "hi", "store": false}')
            await client.say(unstored + GET + b"\r\n")  # another one waits behind it
            await gate.reached.wait()
        await eventually(lambda: server.context.runs.num_active == 0)


# ------------------------------------------------------------------------------------------------------------
# Time


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async with live_app(tmp_path, head_timeout_s=0.2) as server, raw(server) as client:
        assert await client.rest() == b""


async def test_a_byte_now_and_then_does_not_keep_a_head_alive(tmp_path: Path) -> None:
    async with live_app(tmp_path, head_timeout_s=0.3) as server, raw(server) as client:
        await client.say(GET + b"\r\n")
        assert (await client.reply())[0] == 200  # a second head has as long as the first

        async def drip() -> None:
            for byte in GET * 100:
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        reply = await client.reply()
        assert reply[0] == 408 and error_of(reply)["code"] == "request_timeout"
        assert await client.rest() == b""
        dripping.cancel()


async def test_empty_lines_do_not_keep_a_connection_alive(tmp_path: Path) -> None:
    async with live_app(tmp_path, head_timeout_s=0.3) as server, raw(server) as client:

        async def drip() -> None:
            while True:
                client.writer.write(b"\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await client.rest() == b""
        dripping.cancel()


async def test_a_byte_now_and_then_does_not_keep_a_body_alive(tmp_path: Path) -> None:
    async with live_app(tmp_path, body_timeout_s=0.3) as server, raw(server) as client:
        await client.say(post("/v1/responses", b"")[:-4].replace(b"length: 0", b"length: 999") + b"\r\n\r\n")

        async def drip() -> None:
            while True:
                client.writer.write(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        reply = await client.reply()
        assert reply[0] == 408 and error_of(reply)["code"] == "request_timeout"
        dripping.cancel()


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async with live_app(tmp_path, idle_timeout_s=0.1) as server, raw(server) as client:
        await client.say(GET + b"\r\n")
        assert (await client.reply())[0] == 200
        assert await client.rest() == b""


async def test_who_takes_nothing_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0

    class Counting(bounded_protocol.BoundedHttp):
        def connection_lost(self, exc: Exception | None) -> None:
            nonlocal lost
            lost += 1
            super().connection_lost(exc)

    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.2)
    monkeypatch.setattr(sys.modules["server.process.serve"], "BoundedHttp", Counting)
    async with live_app(tmp_path, send_timeout_s=0.3) as server, http_client(server) as client:
        once = {"connection": "close"}
        item = {"role": "user", "content": "x" * 9_000_000}
        made = await client.post("/v1/conversations", json={"items": [item]}, headers=once)
        await eventually(lambda: lost == 1)
        url = urlsplit(server.base_url)
        with socket.create_connection((url.hostname, url.port)) as deaf:
            request = f"GET /v1/conversations/{made.json()['id']}/items HTTP/1.1\r\nhost: localhost\r\n\r\n"
            deaf.send(request.encode() * 3)  # the second reply waits for the first to be taken
            await eventually(lambda: lost == 2)
        with socket.create_connection((url.hostname, url.port)) as deaf:
            deaf.send(request.replace("host", "connection: close\r\nhost").encode())
            await eventually(lambda: lost == 3)


# ------------------------------------------------------------------------------------------------------------
# Numbers


async def test_connections_beyond_the_limit_are_turned_away(tmp_path: Path) -> None:
    async with live_app(tmp_path, max_connections=2) as server:
        async with raw(server) as one, raw(server) as two:
            for client in (one, two):
                await client.say(GET + b"\r\n")
                assert (await client.reply())[0] == 200
            async with raw(server) as third:
                status, headers, body = await third.reply()
                assert status == 503 and headers["retry-after"] == "1"
                assert orjson.loads(body)["error"]["code"] == "too_many_connections"
                assert await third.rest() == b""
            await one.say(GET + b"\r\n")
            assert (await one.reply())[0] == 200

        async def served() -> bool:
            async with raw(server) as client:
                await client.say(GET + b"\r\n")
                return (await client.reply())[0] == 200

        async with asyncio.timeout(10):
            while not await served():  # until the two are gone
                await asyncio.sleep(0.01)


async def test_bodies_that_arrive_at_once_are_bounded(tmp_path: Path) -> None:
    async with live_app(tmp_path, max_arriving_bytes=300_000) as server:
        async with raw(server) as one, raw(server) as two:
            half = post("/v1/conversations", b" " * 250_000)[:-50_000]
            await one.say(half)
            await eventually(lambda: server.life.arrivals.num_bytes == 200_000)
            await two.say(half)
            reply = await two.reply()
            assert reply[0] == 503 and reply[1]["retry-after"] == "1"
            assert error_of(reply)["code"] == "server_busy"
            await one.say(b" " * 49_998 + b"{}")
            assert (await one.reply())[0] == 200
        assert server.life.arrivals.num_bytes == 0


@pytest.mark.parametrize("key", [b"", b"idempotency-key: a"])
async def test_a_length_above_the_limit_is_refused_before_the_body(live_server: Running, key: bytes) -> None:
    head = post("/v1/responses", b"", *([key] if key else [])).replace(b"length: 0", b"length: 99999999")
    async with raw(live_server) as client:
        await client.say(head)
        reply = await client.reply()
        assert reply[0] == 413 and error_of(reply)["code"] == "request_too_large"


async def test_the_body_of_a_get_is_not_kept(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as other:
        begun = await Api(other).create("hi", background=True)
        await gate.reached.wait()
        async with raw(server) as client:
            path = f"/v1/responses/{begun['id']}?wait=30"
            head = b"GET %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n" % path.encode()
            await client.say(head, b" " * 1_000_000)  # all of it is taken, nothing waits in buffers
            gate.release.set()
            assert (await client.reply())[0] == 200
            await client.say(GET + b"\r\n")
            assert (await client.reply())[0] == 200


# ------------------------------------------------------------------------------------------------------------
# Large bodies beside the event loop

MESSAGE = {"role": "user", "content": "hi there"}
LARGE = {
    "messages": ("/v1/chat/completions", {"messages": [MESSAGE] * 70_000}, 400),
    "items": ("/v1/responses", {"input": [MESSAGE] * 70_000}, 400),
    "most messages": ("/v1/chat/completions", {"messages": [MESSAGE] * MAX_ITEMS}, 200),
    "one message more": ("/v1/chat/completions", {"messages": [MESSAGE] * (MAX_ITEMS + 1)}, 400),
    "one item more": ("/v1/responses", {"input": [MESSAGE] * (MAX_ITEMS + 1)}, 400),
    "outputs": (
        "/v1/responses/resp_x/tool_outputs",
        {"tool_outputs": [{"call_id": str(number), "output": ""} for number in range(MAX_ITEMS)]},
        404,
    ),
    "unknown fields": (
        "/v1/responses",
        {"input": "x", **{f"k{number}": 1 for number in range(140_000)}},
        200,
    ),
    "keys": ("/v1/responses", {"input": "x", **{f"k{number}": 1 for number in range(290_000)}}, 400),
    "token ids": ("/detokenize", {"tokens": [1] * 290_000}, 200),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("keyed", [False, True], ids=["", "with a key"])
@pytest.mark.parametrize("name", LARGE)
async def test_a_large_body_does_not_hold_the_loop(live_server: Running, name: str, keyed: bool) -> None:
    path, body, status = LARGE[name]
    content = json.dumps(body).encode()
    loop = asyncio.get_running_loop()
    lags = [0.0]

    async def watch() -> None:
        while True:
            then = loop.time()
            await asyncio.sleep(0.002)
            lags.append(loop.time() - then - 0.002)

    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # as `serve` does
    gc.collect()
    gc.freeze()  # as well: what the other tests left behind is not to be walked through
    watcher = asyncio.create_task(watch())
    try:
        async with http_client(live_server) as client:
            headers = {"idempotency-key": "once"} if keyed else {}
            headers["content-type"] = "application/json"
            reply = await client.post(path, content=content, headers=headers)
    finally:
        watcher.cancel()
        gc.unfreeze()
        sys.setswitchinterval(previous)
    assert reply.status_code == status, reply.text[:300]
    assert max(lags) < 0.5  # 5 to 30 ms on an idle machine


# ------------------------------------------------------------------------------------------------------------
# Browsers and logs


async def test_a_refused_preflight_has_the_official_shape(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, cors_origin="https://good.example", cors_method="get,post") as server,
        http_client(server) as client,
    ):
        asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        reply = await client.options("/v1/responses", headers=asked)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
        asked["origin"] = "https://good.example"
        reply = await client.options("/v1/responses", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://good.example"
        asked["access-control-request-method"] = "DELETE"
        reply = await client.options("/v1/responses", headers=asked)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
        assert "cors_method" in reply.json()["error"]["message"]


FORGED = "a\n2026 INFO antiphon: b\r\0\x1b[31m\x9b1m\u202e\u2028\u200b\ud800"


def test_a_log_record_is_one_line_whatever_is_in_it() -> None:
    def line(message: str, exc: Exception | None = None) -> str:
        info = (type(exc), exc, None) if exc else None
        return Lines().format(logging.LogRecord("antiphon", 20, "", 0, "%s", (message,), info))

    shown = line(FORGED)
    assert shown.isprintable() and "\\n2026" in shown and "\\u202e" in shown and "\\x1b[31m" in shown
    assert line("zoë 火 \U0001f525").endswith("zoë 火 \U0001f525")
    first, *rest = line("it failed", ValueError(FORGED)).split("\n")
    assert first.endswith("it failed") and rest
    assert all(each.startswith("    | ") and each.isprintable() for each in rest)


async def test_the_access_log_shows_a_path_as_it_came(
    live_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "antiphon.access"):
        async with raw(live_server) as client:
            await client.say(
                b"GET /a%0a%20200%20b%1b" + b"c" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
            )
            assert (await client.reply())[0] == 404
        await eventually(lambda: bool(caplog.records))
    assert "GET /a%0a%20200%20b%1bccc" in caplog.messages[-1]
    assert len(caplog.messages[-1]) < 700


# ------------------------------------------------------------------------------------------------------------
# The process


async def test_sighup_reloads_and_harms_nothing(tmp_path: Path) -> None:
    settings = tmp_path / "antiphon.toml"
    settings.write_text('api_key = ["old-key", "kept-key"]\ntick_s = 0.05\n')
    async with server_process(tmp_path) as server, server.client() as client:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.get("/v1/models", headers=headers)).status_code

        assert await status("old-key") == 200 and await status("new-key") == 401
        kept = {"authorization": "Bearer kept-key"}
        body = {"input": "count 40", "stream": True, "store": False}
        async with client.stream("POST", "/v1/responses", json=body, headers=kept) as stream:
            chunks = stream.aiter_bytes()
            seen = await anext(chunks)
            settings.write_text(
                'api_key = ["new-key", "kept-key"]\ntick_s = 0.05\nlog_level = "debug"\n'
                f'owner_limit = ["tokens_per_day=9"]\nsealing_key = ["{"3c" * 64}"]\n'
            )
            server.signal(signal.SIGHUP)
            told = await server.logs("SIGHUP")
            async for chunk in chunks:
                seen += chunk
        assert b"event: response.completed" in seen
        assert "log_level is now debug" in told and "1 added, 1 removed" in told
        assert "-key" not in told and "3c3c" not in told
        assert "sealing keys of the settings: 1, the first of which seals" in told
        assert "owner_limit is now tokens_per_day=9" in told and "restart" not in told
        body = {"input": "count 40"}
        assert (await client.post("/v1/responses", json=body, headers=kept)).status_code == 429
        assert await status("old-key") == 401 and await status("new-key") == 200
        settings.write_text("api_key = 7\n")
        server.signal(signal.SIGHUP)
        await server.logs("nothing was reloaded")
        assert await status("new-key") == 200
        settings.write_text('api_key = ["new-key"]\nport = 9\n')
        server.signal(signal.SIGHUP)
        await server.logs("a restart is needed for")
        assert await status("kept-key") == 401


async def test_connections_never_take_the_last_descriptors(tmp_path: Path) -> None:
    def fewer() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    async with server_process(tmp_path, before=fewer) as server, server.client() as client:
        assert (await client.get("/health")).status_code == 200  # an older connection
        url = urlsplit(server.url)
        idle = []
        try:
            for _ in range(320):
                sock = socket.create_connection((url.hostname, url.port))
                idle.append(sock)
            for _ in range(5):
                reply = await client.post("/v1/responses", json={"input": "say hi"})
                assert reply.status_code == 200
            assert any("turned away" in line for line in server.log)
        finally:
            for sock in idle:
                sock.close()
        async with asyncio.timeout(10):
            while True:  # until it has seen them go
                try:
                    async with server.client() as new:
                        if (await new.get("/health")).status_code == 200:
                            break
                except httpx.TransportError:
                    pass
    assert not any("Traceback" in line for line in server.log)


IMPORTS_AFTER_START = """
import asyncio, sys, tempfile
from pathlib import Path
from server.process.serve import load_late_modules
from tests.support.running import http_client, live_app

BODIES = (
    ("POST", "/v1/responses", {"input": "think hm then say one", "include": ["reasoning.encrypted_content"]}),
    ("POST", "/v1/responses", {"input": "say hi", "stream": True, "background": True}),
    ("POST", "/v1/responses", {"input": "x" * 99_999}),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "resp_x"}),
    ("POST", "/v1/responses/input_tokens", {"input": "x"}),
    ("POST", "/v1/responses/compact", {"input": "x"}),
    ("POST", "/v1/responses/resp_x/tool_outputs", {"tool_outputs": [{"call_id": "a", "output": "b"}]}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}], "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}], "temperature": 9}),
    ("POST", "/v1/completions", {"prompt": "hi", "logprobs": 2, "seed": 7}),
    ("POST", "/v1/conversations", {"items": [{"role": "user", "content": "hi"}]}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("POST", "/v1/responses", {"input": 7}),
    ("POST", "/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}),
    ("GET", "/v1/responses", None),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("GET", "/ready", None),
    ("GET", "/nothing", None),
    ("PATCH", "/v1/models", None),
    ("OPTIONS", "/v1/models", None),
)

async def main():
    from engine import ScriptedEngine
    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder)) as running, http_client(running) as client:
            await asyncio.to_thread(load_late_modules)
            await client.get("/health")  # the client's own late imports
            before = set(sys.modules)
            for method, path, body in BODIES:
                headers = {"idempotency-key": "k" + str(len(str(body)))} if method == "POST" else {}
                reply = await client.request(method, path, json=body, headers=headers)
                assert reply.status_code < 500, (path, reply.text)
            late = set(sys.modules) - before
            assert not late, late

asyncio.run(main())
"""


@pytest.mark.long
def test_nothing_is_imported_on_a_requests_way() -> None:
    import subprocess

    subprocess.run([sys.executable, "-c", IMPORTS_AFTER_START], check=True, cwd=ROOT, timeout=60)


# ------------------------------------------------------------------------------------------------------------
# What the fuzzer found


async def test_a_connection_whose_body_came_after_its_reply_is_closed_when_idle(tmp_path: Path) -> None:
    async with live_app(tmp_path, idle_timeout_s=0.2) as server, raw(server) as client:
        request = post("/nothing", b"{}")
        await client.say(request[:-2])
        assert (await client.reply())[0] == 404
        await client.say(request[-2:])
        assert await client.rest() == b""


async def test_a_body_that_breaks_before_100_continue_is_one_reply(
    live_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    request = CHUNKED.replace(b"host: localhost", b"host: localhost\r\nexpect: 100-continue")
    async with raw(live_server) as client:
        await client.say(request + b"zz\r\n")
        assert (await client.reply())[0] == 400
        assert await client.rest() == b""
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.long
async def test_some_hundred_shapes(tmp_path: Path) -> None:
    outcome = await fuzz(tmp_path, seed=20, num_shapes=250, at_once=50)
    assert not outcome.faults
    assert outcome.pauses.num_streams
