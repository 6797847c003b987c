"""Frames that no client should send: each is answered, and nothing else ends by it."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.sync.client import connect as blocking_connect

from engine import ScriptedEngine
from tests.support.lines import line
from tests.support.running import Running, http_client, live_app
from tests.support.talk import Gate, gated_at, text

HEAD = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def text_frame(data: bytes, *, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x00\x01", "invalid_frame"),
        (b"{}", "invalid_frame"),
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ("nonsense " * 100_000, "invalid_json"),
        ('{"type": "response.create", "input": ' + "[" * 100_000 + "]" * 100_000 + "}", "invalid_json"),
        ("[" * 200_000, "invalid_json"),
        ('{"a":' * 400 + "1" + "}" * 400, "invalid_json"),
        (json.dumps({"type": "response.create", "input": "x" * 1_200_000}), "context_length_exceeded"),
        (json.dumps({"type": ["response.create"]}), "invalid_value"),
        (json.dumps({"type": "response.inject", "response_id": 7, "input": []}), "invalid_type"),
    ],
    ids=lambda value: repr(value[:12]),
)
async def test_it_is_an_error_and_another_lane_goes_on(tmp_path: Path, frame: Any, code: str) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running,
        line(running.base_url) as socket,
    ):
        await socket.ask("say held", stream_id="a")
        await gate.reached.wait()
        await socket.socket.send(frame)
        await socket.until("error")
        assert socket.frames[-1]["error"]["code"] == code
        gate.release.set()
        assert text(await socket.answer()) == "held"
        assert running.life.arrivals.num_bytes == 0


async def test_ten_thousand_frames_at_once(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        for _ in range(10_000):
            socket.socket.protocol.send_text(b"{")
        await socket.socket.send('{"type": "response.create", "input": "say hello", "stream_id": "b"}')
        for _ in range(10_000):
            assert json.loads(await socket.socket.recv())["error"]["code"] == "invalid_json"
        assert text(await socket.answer()) == "hello"


async def test_a_frame_that_is_too_large_ends_its_connection_alone(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, max_body_bytes=100_000) as running,
        line(running.base_url) as socket,
        line(running.base_url) as other,
    ):
        await socket.socket.send("x" * 100_001)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert text(await other.turn("say hello")) == "hello"


async def test_a_client_that_is_still_sending_too_much_hears_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reason(url: str) -> Close | None:
        address = url.replace("http", "ws", 1) + "/v1/responses"
        with blocking_connect(address, compression=None, proxy=None) as socket:
            socket.send("x" * (16 << 20))
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=10)
            return closed.value.rcvd

    async with live_app(tmp_path, max_body_bytes=100_000) as running:
        close = await asyncio.to_thread(reason, running.base_url)
    assert close is not None and close.code == CloseCode.MESSAGE_TOO_BIG
    assert "100000 bytes" in close.reason
    assert not caplog.records


async def raw(
    running: Running, head: bytes = HEAD, behind: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection and the reply to its head. behind: sent along with the head, without waiting."""
    port = int(running.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"\r\n" + behind)
    return reader, writer, await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)


async def test_frames_behind_the_head_are_not_lost(live_server: Running) -> None:
    asked = text_frame(b'{"type": "nonsense"}')
    reader, writer, reply = await raw(live_server, behind=asked)
    assert reply.startswith(b"HTTP/1.1 101 ")
    assert b'"param":"type"' in await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    writer.write(asked)  # and what comes after them is read
    assert b'"param":"type"' in await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    writer.close()
    await writer.wait_closed()


async def test_a_message_in_any_number_of_fragments(live_server: Running) -> None:
    reader, writer, _ = await raw(live_server)
    said = b'{"type": "nonsense"}'
    writer.write(text_frame(b"", fin=False))
    empty = text_frame(b"", opcode=Opcode.CONT, fin=False)
    for _ in range(200):
        writer.write(empty * 100)
        await writer.drain()
    for index in range(len(said)):
        writer.write(text_frame(said[index : index + 1], opcode=Opcode.CONT, fin=index == len(said) - 1))
    assert b'"param":"type"' in await asyncio.wait_for(reader.readuntil(b"}}"), 20)
    writer.close()


async def test_a_message_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    async with live_app(tmp_path, body_timeout_s=0.3) as running:
        reader, writer, _ = await raw(running)
        writer.write(text_frame(b"x" * 1000)[:500])
        end = await asyncio.wait_for(reader.read(), 10)
        assert end[0] & 0x0F == Opcode.CLOSE and b"request_timeout" in end
        assert struct.unpack("!H", end[2:4]) == (1008,)
        assert running.life.arrivals.num_bytes == 0
        writer.close()


async def test_messages_that_arrive_count_among_all_bodies(tmp_path: Path) -> None:
    async with live_app(tmp_path, max_body_bytes=1 << 20, max_arriving_bytes=1 << 20) as running:
        _, writer, _ = await raw(running)
        writer.write(text_frame(b"x" * 900_000)[:800_000])
        await writer.drain()
        async with asyncio.timeout(10):
            while running.life.arrivals.num_bytes < 799_000:  # the parser has taken the frame's head
                await asyncio.sleep(0)
        second, other, _ = await raw(running)
        other.write(text_frame(b"x" * 900_000)[:800_000])
        end = await asyncio.wait_for(second.read(), 10)
        assert b"server_busy" in end
        writer.close()
        async with asyncio.timeout(10):
            while running.life.arrivals.num_bytes:
                await asyncio.sleep(0)
        async with http_client(running) as http:
            reply = await http.post("/v1/responses", json={"input": "say hello"})
            assert reply.status_code == 200
        other.close()


BROKEN = {
    "not masked": b"\x81\x05hello",
    "not UTF-8": text_frame(b"\xff\xfe"),
    "reserved bits": b"\xf1\x80\x00\x00\x00\x00",
    "no such opcode": b"\x83\x80\x00\x00\x00\x00",
    "goes on with nothing": text_frame(b"more", opcode=Opcode.CONT),
    "a ping that is too long": b"\x89\xfe\x00\x80" + os.urandom(4 + 128),
    "a length beyond all": b"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("is_early", [False, True])
async def test_what_is_no_websocket_ends_its_connection_alone(
    live_server: Running, broken: bytes, is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer, reply = await raw(live_server, behind=broken if is_early else b"")
    assert reply.startswith(b"HTTP/1.1 101 ")
    if not is_early:
        writer.write(broken)
    assert (await asyncio.wait_for(reader.read(), 10))[0] & 0x0F == Opcode.CLOSE
    writer.close()
    async with line(live_server.base_url) as socket:
        assert text(await socket.turn("say hello")) == "hello"
    assert not caplog.records


@pytest.mark.parametrize(
    ("early", "opcode"),
    [
        (text_frame(b"are you there?", opcode=Opcode.PING), Opcode.PONG),
        (text_frame(struct.pack("!H", 1000), opcode=Opcode.CLOSE), Opcode.CLOSE),
    ],
    ids=["ping", "close"],
)
async def test_a_ping_or_a_close_behind_the_head_is_answered(
    live_server: Running, early: bytes, opcode: Opcode, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer, reply = await raw(live_server, behind=early)
    assert reply.startswith(b"HTTP/1.1 101 ")
    assert (await asyncio.wait_for(reader.readexactly(2), 10))[0] & 0x0F == opcode
    writer.close()
    assert not caplog.records


async def test_frames_behind_a_head_that_is_denied_are_thrown_away(
    live_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for head in (HEAD.replace(b"version: 13", b"version: 8"), HEAD.replace(b"/v1/responses", b"/v1/none")):
        _, writer, reply = await raw(live_server, head, behind=BROKEN["not masked"])
        assert reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ")), reply
        writer.close()
    assert not caplog.records


async def test_a_client_that_leaves_in_its_handshake_is_no_mistake(
    live_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(live_server.base_url.rpartition(":")[2])
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        writer.transport.abort()
    async with line(live_server.base_url) as socket:
        assert text(await socket.turn("say hello")) == "hello"
    async with asyncio.timeout(10):
        while len(live_server.life.sockets):
            await asyncio.sleep(0.01)
    assert not caplog.records


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (HEAD.replace(b"version: 13", b"version: 8"), 400, "invalid_handshake"),
        (HEAD.replace(b"sec-websocket-key", b"x-key"), 400, "invalid_handshake"),
        (HEAD.replace(b"GET", b"POST"), 400, "invalid_handshake"),
        (HEAD + b"content-length: 3\r\n", 400, "invalid_handshake"),
        (HEAD + b"x-a: b\r\n" * 130, 400, "invalid_handshake"),
        (HEAD + b"x-a: " + b"b" * 9000 + b"\r\n", 400, "invalid_handshake"),
        (HEAD.replace(b"/v1/responses", b"/v1/nothing"), 404, "unknown_url"),
        (HEAD + b"origin: http://evil.example\r\n", 403, "origin_not_allowed"),
        (HEAD.replace(b"localhost", b"evil.example"), 421, "host_not_allowed"),
    ],
)
async def test_a_connection_that_is_denied_hears_why(
    live_server: Running, head: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer, reply = await raw(live_server, head)
    assert reply.startswith(b"HTTP/1.1 %d " % status), reply
    assert f'"code":"{code}"'.encode() in await asyncio.wait_for(reader.read(), 10)
    assert not caplog.records
    writer.close()


async def test_a_key_is_needed_where_one_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with live_app(tmp_path, api_key=("sk-one-of-several",)) as running:
        reader, writer, reply = await raw(running)
        assert reply.startswith(b"HTTP/1.1 401 ")
        assert b'"code":"invalid_api_key"' in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert not caplog.records
        async with line(
            running.base_url, additional_headers={"authorization": "Bearer sk-one-of-several"}
        ) as socket:
            assert text(await socket.turn("say hello")) == "hello"


@pytest.mark.long
async def test_a_client_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async with live_app(tmp_path, send_timeout_s=0.5) as running:
        _, writer, _ = await raw(running)
        transport: Any = writer.transport
        transport.pause_reading()
        asked = json.dumps({"type": "response.create", "input": "count 200000", "store": False}).encode()
        writer.write(text_frame(asked))
        async with asyncio.timeout(30):
            while not len(running.life.sockets):
                await asyncio.sleep(0.01)
            while len(running.life.sockets):
                await asyncio.sleep(0.01)
        writer.close()


async def test_pings_are_answered_and_sent(tmp_path: Path) -> None:
    async with live_app(tmp_path, keepalive_s=0.1) as running:
        async with line(running.base_url) as socket:
            await asyncio.wait_for(await socket.socket.ping(), 10)
        reader, writer, _ = await raw(running)
        assert (await asyncio.wait_for(reader.readexactly(6), 10))[0] & 0x0F == Opcode.PING
        writer.close()


async def test_a_client_that_answers_no_ping_is_gone(tmp_path: Path) -> None:
    async with live_app(tmp_path, keepalive_s=0.1, send_timeout_s=0.1) as running:
        reader, writer, _ = await raw(running)
        said = await asyncio.wait_for(reader.read(), 10)
        assert said[0] & 0x0F == Opcode.PING and b"keepalive ping timeout" in said
        writer.close()


async def test_what_is_open_is_measured(live_server: Running, live_client: httpx.AsyncClient) -> None:
    async with line(live_server.base_url) as socket:
        await socket.turn("say hello", store=False)
        page = (await live_client.get("/metrics")).text
    assert "antiphon_websocket_connections 1.0" in page
    assert "antiphon_websocket_frames_received_total 1.0" in page
    assert f"antiphon_websocket_frames_sent_total {len(socket.frames)}.0" in page
    kept = next(row for row in page.splitlines() if row.startswith("antiphon_websocket_kept_bytes "))
    assert float(kept.split()[1]) > 0
    assert 'antiphon_requests_total{method="WEBSOCKET",route="/v1/responses",status="200"} 1.0' in page


@pytest.mark.long
async def test_a_thousand_idle_sockets(live_server: Running) -> None:
    """They are quick to open, and each still answers."""
    address = live_server.base_url.replace("http", "ws", 1) + "/v1/responses"
    sockets = [await connect(address, compression=None, proxy=None) for _ in range(1000)]
    assert len(live_server.life.sockets) == 1000
    await sockets[-1].send("{")
    assert json.loads(await sockets[-1].recv())["error"]["code"] == "invalid_json"
    await asyncio.gather(*(socket.close() for socket in sockets))
