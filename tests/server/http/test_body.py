"""Hostile requests: refused before they cost anything, with the official error, and never a 5xx."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.http import bounded_protocol
from server.http.body import parse_object
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app

JSON = {"content-type": "application/json"}

MALFORMED = [
    b"{",
    b"nonsense",
    b"\xff\xfe",
    b'{"input": "\xff"}',
    b'{"input": "\\ud800"}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e400}',
    b"\xef\xbb\xbf{}",
    b"[]",
    b"null",
    b'"text"',
    b"7",
    b"[" * 10_000 + b"]" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b'{"a":' * 600 + b"1" + b"}" * 600,
    b"{} {}",
    b"{'input': 'x'}",
    b'{"input": "x",}',
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations", "/tokenize"])
@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
async def test_malformed_bodies_are_400(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    reply = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"input": "caf\xe9"}', "it is not UTF-8 at byte 14."),
        (b"[]", "must be a JSON object, not an array."),
        (b'"text"', "must be a JSON object, not a string."),
    ],
)
async def test_what_a_malformed_body_is_told(client: httpx.AsyncClient, body: bytes, told: str) -> None:
    reply = await client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(told)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_an_api_error(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw, 128, 300_000), dict)
    except ApiError as error:
        assert error.status == 400


def test_depth_is_counted_in_containers() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert parse_object(nested(128), 128, 1000)
    with pytest.raises(ApiError):
        parse_object(nested(129), 128, 1000)
    assert len(parse_object(orjson.dumps({"a": [[1]] * 1000}), 3, 9999)["a"]) == 1000  # wide is not deep
    with pytest.raises(ApiError):
        parse_object(orjson.dumps({"a": [[1]] * 1000}), 2, 9999)


def test_the_last_of_duplicate_keys_wins() -> None:
    assert parse_object(b'{"a": 1, "a": 2}', 8, 9) == {"a": 2}


@pytest.mark.parametrize("escapes", [rb"\u005b\u002c", rb"\u005B\u002C", rb"\u007b[", rb"\u007B,"])
def test_values_in_a_string_count_however_they_are_written(escapes: bytes) -> None:
    """What is written there may be JSON, such as the arguments of a call, and be parsed later."""
    raw = b'{"a": "%s"}' % (escapes * 5)
    assert len(parse_object(raw, 8, 11)["a"]) == 10
    with pytest.raises(ApiError) as refused:
        parse_object(raw, 8, 10)
    assert refused.value.message == "The request's body has more than 10 brackets and commas."
    others = b'{"a": "%s"}' % (rb"\u00e9\u005d\u007d\u002d\n\"" * 5)
    assert len(parse_object(others, 8, 1)["a"]) == 30


@pytest.mark.parametrize(
    "value",
    [b'{"type":"function"}', b"[]", b"1", b'"x"', b"[[[]]]"],
    ids=["objects", "arrays", "1", "x", "deep"],
)
async def test_a_million_values_cost_nothing(client: httpx.AsyncClient, value: bytes) -> None:
    body = b'{"input": "x", "tools": [' + b",".join([value] * 1_000_000) + b"]}"
    longest_s = 0.0  # that the loop's thread has computed between two of its turns

    async def watch() -> None:
        nonlocal longest_s
        while True:
            then = time.thread_time()
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.thread_time() - then)

    watcher = asyncio.create_task(watch())
    reply = await client.post("/v1/responses", content=body, headers=JSON)
    watcher.cancel()
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"
    assert longest_s < 0.25  # 10 ms on an idle machine; parsing it all would stop every stream for seconds


async def test_a_body_may_be_empty_only_where_nothing_is_required(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/conversations", headers=JSON)).status_code == 200
    assert (await client.post("/v1/responses", headers=JSON)).status_code == 400
    compressed = {**JSON, "content-encoding": "gzip"}
    assert (await client.post("/v1/conversations", content=b"x", headers=compressed)).status_code == 400


async def test_bodies_above_the_threshold_are_parsed_in_a_thread(client: httpx.AsyncClient) -> None:
    big = {"items": [{"role": "user", "content": "x" * 200_000}]}
    assert (await client.post("/v1/conversations", json=big)).status_code == 200


async def test_a_declared_size_is_refused_unread(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_body_bytes=1000) as running, http_client(running) as client:
        reply = await client.post("/v1/responses", content=b" " * 1001, headers=JSON)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"
        assert (
            await client.post("/v1/conversations", content=b"{}".ljust(1000), headers=JSON)
        ).status_code == 200


async def test_a_large_body_is_refused_while_it_is_being_sent(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 100_000

    async with live_app(tmp_path, max_body_bytes=100_000) as running, http_client(running) as client:
        for _ in range(2):  # the connection survives and is used again
            reply = await client.post("/v1/responses", content=chunks(), headers=JSON)
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "request_too_large"


async def test_an_endless_body_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.1)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    async with live_app(tmp_path, max_body_bytes=100_000) as running, http_client(running) as client:
        with pytest.raises(httpx.TransportError):
            await client.post("/v1/responses", content=endless(), headers=JSON)
        assert (await client.get("/health")).status_code == 200


async def exchange(running: Running, *parts: bytes) -> bytes:
    """Raw bytes to the server; what it answers until it closes."""
    url = urlsplit(running.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_huge_header_is_431(live_server: Running) -> None:
    start = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-filler: "
    for size in (100_000, 1_000_000):
        answer = await exchange(live_server, start, b"a" * size, b"\r\n\r\n")
        assert not answer or answer.startswith(b"HTTP/1.1 431 "), answer[:100]
    in_pieces = await exchange(live_server, start, *[b"a" * 1000] * 66)
    assert in_pieces.startswith(b"HTTP/1.1 431 ")
    head, _, body = in_pieces.partition(b"\r\n\r\n")
    assert b"x-request-id: req_" in head
    assert orjson.loads(body)["error"]["code"] == "headers_too_large"
    many = b"".join(b"x-h%d: v\r\n" % number for number in range(10_000))
    assert (await exchange(live_server, b"GET /health HTTP/1.1\r\n", many, b"\r\n")).startswith(
        b"HTTP/1.1 431 "
    )
    fine = await exchange(live_server, start, b"a" * 30_000, b"\r\nconnection: close\r\n\r\n")
    assert fine.startswith(b"HTTP/1.1 200 ")


async def test_a_long_url_is_414(live_server: Running) -> None:
    answer = await exchange(live_server, b"GET /", b"a" * 70_000, b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 414 ")


async def test_what_is_not_http_gets_the_official_error(live_server: Running) -> None:
    answer = await exchange(live_server, b"BLAH blah\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_many_requests_on_one_connection_are_each_counted_anew(live_server: Running) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-filler: " + b"a" * 30_000 + b"\r\n\r\n"
    last = one.replace(b"host: localhost", b"host: localhost\r\nconnection: close")
    answer = await exchange(live_server, one, one, one, last)
    assert answer.count(b"HTTP/1.1 200 ") == 4


async def test_a_stalled_body_is_408(tmp_path: Path) -> None:
    async with live_app(tmp_path, body_timeout_s=0.05) as running:
        answer = await exchange(
            running,
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 10\r\n\r\n{",
        )
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


async def test_a_websocket_that_leads_nowhere_is_refused_clearly(live_server: Running) -> None:
    answer = await exchange(
        live_server,
        b"GET /v1/ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"code":"unknown_url"' in answer


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=" + "9" * 400, "limit"),
        ("order=up", "order"),
        ("include=nothing", "include"),
        ("include[]=nothing", "include"),
    ],
)
async def test_query_parameters_that_make_no_sense_are_400(
    client: httpx.AsyncClient, query: str, param: str
) -> None:
    made = (await client.post("/v1/conversations")).json()
    reply = await client.get(f"/v1/conversations/{made['id']}/items?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)


def test_sockets_refuse_a_port_in_use() -> None:
    from server.process.serve import bind

    with bind("127.0.0.1", 0) as taken, pytest.raises(OSError):
        bind("127.0.0.1", taken.getsockname()[1]).close()


# ------------------------------------------------------------------------------------------------------------
# What a body is said to be


@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8; profile=x",
        "application/vnd.api+json",
    ],
)
async def test_json_has_several_names(client: httpx.AsyncClient, media_type: str) -> None:
    reply = await client.post("/v1/conversations", content=b"{}", headers={"content-type": media_type})
    assert reply.status_code == 200, reply.text


BODIES = {"/v1/conversations": b"{}", "/v1/responses": b'{"input": "x"}', "/tokenize": b'{"prompt": "x"}'}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "media_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonp",
        "application/json, text/plain",
        "text/plain; application/json",
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_not_said_to_be_json_is_415(
    client: httpx.AsyncClient, path: str, media_type: str | None, chunked: bool
) -> None:
    """These are what a page of another site can have a browser send without asking anybody."""

    async def chunks() -> AsyncIterator[bytes]:
        yield BODIES[path]

    for more in ({}, {"idempotency-key": "k"}):
        headers = more if media_type is None else {**more, "content-type": media_type}
        body = chunks() if chunked else BODIES[path]
        reply = await client.post(path, content=body, headers=headers)
        assert reply.status_code == 415, reply.text
        error = wire.validate_error(reply.json())
        assert (error["code"], error["param"]) == ("unsupported_media_type", "Content-Type")
        assert "application/json" in error["message"]
    assert (await client.get("/v1/responses")).json()["data"] == []


async def test_no_body_needs_no_type(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/conversations")).status_code == 200
    plain = {"content-type": "text/plain"}
    assert (await client.post("/v1/conversations", headers=plain)).status_code == 200
    assert (await client.post("/v1/responses")).json()["error"]["code"] == "invalid_json"
