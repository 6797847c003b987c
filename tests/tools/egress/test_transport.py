"""The guarded client against servers that want to be somewhere else, never end, or burst."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from tests.support.certificates import make_certificate, trusting
from tools import Caps, Egress, EgressError, ToolSpec, execute, guarded_client, read_rule

Reply = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(
    reply: Reply, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[dict[str, str]]]]:
    """A server on loopback that hands each request's target to `reply`; its port, and all headers
    that it was sent."""
    seen: list[dict[str, str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                seen.append(headers)
                await reader.readexactly(int(headers.get("content-length", 0)))
                await reply(first.split()[1], reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield listening.sockets[0].getsockname()[1], seen


async def hello(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    await writer.drain()


def body(content: bytes, *headers: str) -> Reply:
    """Replies with a body that ends with the connection."""

    async def reply(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            "\r\n".join(["HTTP/1.1 200 OK", *headers, "connection: close", "", ""]).encode() + content
        )
        await writer.drain()
        writer.close()

    return reply


class Names:
    """A resolver with a list of answers for each name; the last one stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self._answers:
            raise OSError("no such name")
        answers = self._answers[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def allowing(*rules: str, mode: str = "off") -> Egress:
    return Egress(mode, tuple(map(read_rule, rules)))


async def refused(client: httpx2.AsyncClient, url: str, **options: object) -> EgressError:
    with pytest.raises(EgressError) as raised:
        await client.get(url, **options)
    return raised.value


async def test_a_name_is_looked_up_once_and_the_judged_address_is_connected_to() -> None:
    """Rebinding: the second answer is never asked for, so there is nothing to gain by it."""
    async with server(hello) as (port, seen):
        names = Names(good_example=[["127.0.0.1"], ["10.0.0.1"]])
        async with guarded_client(allowing(f"127.0.0.1:{port}"), resolver=names) as client:
            reply = await client.get(f"http://good.example:{port}/")
            assert reply.text == "hello"
            assert (await client.get(f"http://good.example:{port}/")).text == "hello"
        assert names.asked == ["good.example"], "the second request went over the connection of the first"
        assert [headers["host"] for headers in seen] == [f"good.example:{port}"] * 2


async def test_a_name_that_turns_inward_is_refused_at_its_next_connection() -> None:
    async with server(hello) as (port, seen):
        names = Names(bad_example=[["127.0.0.1"], ["127.0.0.2"]])
        async with guarded_client(allowing(f"127.0.0.1:{port}"), resolver=names) as client:
            assert (await client.get(f"http://bad.example:{port}/", headers={"connection": "close"})).text
            error = await refused(client, f"http://bad.example:{port}/")
        assert error.kind == "refused" and len(seen) == 1


async def test_certificates_go_by_the_name_also_where_two_names_share_an_address(tmp_path: Path) -> None:
    certfile, keyfile, _ = make_certificate(tmp_path, "one", hosts=("one.example",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certfile, keyfile)
    asked: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: asked.append(name)
    async with server(hello, tls) as (port, seen):
        names = Names(one_example=[["127.0.0.1"]], two_example=[["127.0.0.1"]])
        egress = allowing(f"127.0.0.1:{port}")
        async with guarded_client(egress, resolver=names, ssl_context=trusting(certfile)) as client:
            assert (await client.get(f"https://one.example:{port}/")).text == "hello"
            error = await refused(client, f"https://two.example:{port}/")
        assert str(error) == "two.example shows no certificate that this server trusts."
        assert asked == ["one.example", "two.example"] and len(seen) == 1
        async with guarded_client(egress, resolver=names) as client:
            error = await refused(client, f"https://one.example:{port}/")
        assert error.kind == "unreachable", "the system does not trust this certificate"


async def test_every_address_of_a_name_must_be_allowed() -> None:
    names = Names(mixed_example=[["8.8.8.8", "169.254.169.254"]])
    async with guarded_client(Egress("public"), resolver=names) as client:
        error = await refused(client, "http://mixed.example/")
    assert str(error) == (
        "mixed.example resolves to a link-local address, and this server connects to public addresses only."
    )


async def test_the_real_resolver_is_judged_too() -> None:
    async with server(hello) as (port, seen):
        async with guarded_client(Egress("public")) as client:
            for host in ("localhost", "localhost."):
                assert (await refused(client, f"http://{host}/")).kind == "refused"
        async with guarded_client(allowing(f"127.0.0.1:{port}", f"[::1]:{port}")) as client:
            assert (await client.get(f"http://localhost:{port}/")).text == "hello"
        assert len(seen) == 1


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async with server(hello) as (port, _):
        names = Names(two_example=[["127.0.0.9", "127.0.0.1"]])
        async with guarded_client(allowing(f"127.0.0.0/8:{port}"), resolver=names) as client:
            assert (await client.get(f"http://two.example:{port}/")).text == "hello"


async def test_what_cannot_be_reached_says_so() -> None:
    async with server(hello) as (port, _):
        pass
    async with guarded_client(allowing("127.0.0.1:*", "gone.example"), resolver=Names()) as client:
        error = await refused(client, "http://gone.example/")
        assert (str(error), error.kind) == ("gone.example has no address that could be found.", "unreachable")
    async with guarded_client(allowing("127.0.0.1:*")) as client:
        error = await refused(client, f"http://127.0.0.1:{port}/")
        expected = f"127.0.0.1 accepts no connection at port {port}."
        assert (str(error), error.kind) == (expected, "unreachable")
        for url in ("http://[", "http://a\tb/"):
            assert (await refused(client, url)).kind == "refused"


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2/",
        "http://169.254.169.254/latest/meta-data/",
        "http://inward.example/",
        "http://user:password@outward.example/",
        "file:///etc/passwd",
        "http://[::ffff:127.0.0.2]/",
        "http://2130706434/",
        "http://①.1/",
        "//127.0.0.2/",
    ],
)
async def test_a_redirect_inward_is_not_followed(location: str) -> None:
    async def redirect(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()

    async with server(redirect) as (port, seen):
        names = Names(outward_example=[["127.0.0.1"]], inward_example=[["127.0.0.2"]])
        egress = allowing(f"127.0.0.1:{port}", mode="public")
        async with guarded_client(egress, resolver=names, follow_redirects=True) as client:
            error = await refused(client, f"http://outward.example:{port}/")
        assert error.kind in ("refused", "broken")
        assert len(seen) == 1


async def test_five_redirects_are_followed_and_a_sixth_is_not() -> None:
    async def reply(target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = int(target[1:])
        if not left:
            await hello(target, reader, writer)
            return
        writer.write(f"HTTP/1.1 307 Again\r\nlocation: /{left - 1}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()

    async with server(reply) as (port, _):
        async with guarded_client(allowing(f"127.0.0.1:{port}"), follow_redirects=True) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/5")).text == "hello"
            error = await refused(client, f"http://127.0.0.1:{port}/6")
        assert str(error) == "127.0.0.1 redirects more than 5 times."


async def endless(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"data: x\n\n" * 4096)
        await writer.drain()


async def drip(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def drip_headers(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"x-more: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def silent(_target: str, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), compresslevel=9)


def empty_members(size: int) -> bytes:
    """A gzip file of nothing that is long."""
    member = gzip.compress(b"")
    return member * (size // len(member))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (endless, "too_large"),
        (body(b"", f"content-length: {1 << 40}"), "too_large"),
        (body(bomb(64 * MIB), "content-encoding: gzip"), "too_large"),
        (body(zlib.compress(bytes(64 * MIB)), "content-encoding: deflate"), "too_large"),
        (body(gzip.compress(bomb(64 * MIB)), "content-encoding: gzip, gzip"), "broken"),
        (body(b"x", "content-encoding: br"), "broken"),
        (body(b"no gzip at all", "content-encoding: gzip"), "broken"),
        (body(empty_members(2 * MIB), "content-encoding: gzip"), "too_large"),
        (drip, "too_slow"),
        (drip_headers, "too_slow"),
        (silent, "too_slow"),
        (body(b"", "x" * 200_000), "broken"),
        (body(b"x", "content-length: 5"), "broken"),
    ],
    ids=[
        *(
            "endless",
            "promised",
            "gzip bomb",
            "deflate bomb",
            "packed twice",
            "not asked for",
            "no gzip",
            "nothing",
        ),
        *("drip", "drip of headers", "silence", "long header", "cut"),
    ],
)
async def test_replies_without_end(reply: Reply, kind: str) -> None:
    async with server(reply) as (port, _):
        caps = Caps(max_bytes=MIB, total_s=0.5)
        async with guarded_client(allowing(f"127.0.0.1:{port}"), caps) as client:
            error = await refused(client, f"http://127.0.0.1:{port}/")
            assert error.kind == kind, error
            assert str(error).startswith("127.0.0.1 ") or str(error).startswith("The ")


def events(*sizes: int, text: bytes = b"x") -> Reply:
    """A stream of events of so many bytes, or of so many times another text."""

    async def reply(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for size in sizes:
            writer.write(b"data: %b\n\n" % (text * size))
            await writer.drain()
        writer.close()

    return reply


async def test_of_a_stream_that_lasts_each_event_is_limited() -> None:
    caps = Caps(max_bytes=3 * MIB, total_s=None, per_event=True)
    async with (
        server(events(*[MIB] * 12)) as (port, _),
        server(events(MIB, 8 * MIB)) as (other, _),
        guarded_client(allowing(f"127.0.0.1:{port}", f"127.0.0.1:{other}"), caps) as client,
    ):
        reply = await client.get(f"http://127.0.0.1:{port}/")
        assert len(reply.content) > 12 * MIB
        error = await refused(client, f"http://127.0.0.1:{other}/")
        assert error.kind == "too_large"


async def test_what_a_parser_would_have_to_do_is_limited() -> None:
    nested, text = b"[" + b"[]," * 600 + b"[]]", b'["' + b'\\"' * 5000 + b'"]'
    caps = Caps(max_values=1000)
    async with (
        server(body(nested)) as (port, _),
        server(body(text)) as (other, _),
        server(body(gzip.compress(nested), "content-encoding: gzip")) as (packed, _),
        guarded_client(allowing("127.0.0.1:*"), caps) as client,
    ):
        assert (await client.get(f"http://127.0.0.1:{other}/")).content == text
        for hostile in (port, packed):
            error = await refused(client, f"http://127.0.0.1:{hostile}/")
            assert error.kind == "too_large" and "more than 1000 brackets" in str(error)


async def test_of_a_stream_that_lasts_the_values_of_each_event_are_limited() -> None:
    caps = Caps(max_values=100_000, total_s=None, per_event=True)
    async with (
        server(events(*[30_000] * 8, text=b"[],")) as (port, _),
        server(events(30_000, 60_000, text=b"[],")) as (other, _),
        guarded_client(allowing("127.0.0.1:*"), caps) as client,
    ):
        assert len((await client.get(f"http://127.0.0.1:{port}/")).content) > 8 * 90_000
        error = await refused(client, f"http://127.0.0.1:{other}/")
        assert error.kind == "too_large"


@pytest.mark.parametrize(
    "reply",
    [events(*[200] * 8, text=b"[],"), events(*[0] * 30), body(bytes(100_000))],
    ids=["values", "short events", "bytes"],
)
async def test_what_comes_faster_than_it_may_be_read_waits(reply: Reply) -> None:
    clock = asyncio.get_running_loop().time
    caps = Caps(max_values=1000, total_s=None, per_event=True, values_per_s=5000)
    async with (
        server(reply) as (port, _),
        guarded_client(allowing("127.0.0.1:*"), caps) as client,
        guarded_client(allowing("127.0.0.1:*"), replace(caps, total_s=0.1)) as hasty,
    ):
        began = clock()
        assert await client.get(f"http://127.0.0.1:{port}/")
        assert clock() - began >= 0.2
        assert (await refused(hasty, f"http://127.0.0.1:{port}/")).kind == "too_slow"


async def vanishing(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def half_a_head(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
    await writer.drain()
    writer.close()


async def no_http(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (vanishing, "127.0.0.1 closed the connection before it had answered."),
        (half_a_head, "127.0.0.1 closed the connection before it had answered."),
        (body(b"x", "content-length: 5"), "127.0.0.1 closed the connection before it had answered."),
        (no_http, "127.0.0.1 does not keep to HTTP: "),
    ],
    ids=["nothing", "half a head", "half a body", "no HTTP"],
)
async def test_an_end_without_an_answer_is_told_as_one(reply: Reply, told: str) -> None:
    async with (
        server(reply) as (port, _),
        guarded_client(allowing(f"127.0.0.1:{port}"), Caps(total_s=5.0)) as client,
    ):
        error = await refused(client, f"http://127.0.0.1:{port}/")
    assert error.kind == "broken" and error.uncertain
    assert str(error).startswith(told)


async def test_redirects_share_one_time_limit() -> None:
    async def reply(_target: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    async with server(reply) as (port, seen):
        caps = Caps(total_s=0.5)
        async with guarded_client(allowing(f"127.0.0.1:{port}"), caps, follow_redirects=True) as client:
            error = await refused(client, f"http://127.0.0.1:{port}/")
        assert error.kind == "too_slow" and len(seen) <= 3


async def test_a_packed_reply_is_unpacked_for_every_reader() -> None:
    text = b"data: one\n\ndata: two\n\n"
    reply = body(gzip.compress(text), "content-encoding: gzip", "content-type: text/event-stream")
    async with server(reply) as (port, seen):
        async with guarded_client(allowing(f"127.0.0.1:{port}")) as client:
            response = await client.get(f"http://127.0.0.1:{port}/")
            assert response.content == text and "content-encoding" not in response.headers
            async with client.stream("GET", f"http://127.0.0.1:{port}/") as streamed:
                assert b"".join([part async for part in streamed.aiter_raw()]) == text
            async with client.stream("GET", f"http://127.0.0.1:{port}/") as left:
                assert left.status_code == 200, "a reply may be left unread"
        assert {headers["accept-encoding"] for headers in seen} == {"gzip, deflate"}


async def test_nothing_of_the_environment_and_nothing_of_other_replies_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server(body(b"x", "set-cookie: who=me")) as (port, seen):
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        async with guarded_client(allowing(f"127.0.0.1:{port}")) as client:
            for host in ("evil.example", "127.0.0.1"):
                reply = await client.get(f"http://127.0.0.1:{port}/", headers={"host": host})
                assert reply.text == "x"
        assert all("cookie" not in headers for headers in seen)
        assert {headers["host"] for headers in seen} == {f"127.0.0.1:{port}"}


async def test_a_request_that_is_cancelled_lets_its_connection_go() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def reply(target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await silent(target, reader, writer)
        closed.set()

    async with server(reply) as (port, _), guarded_client(allowing(f"127.0.0.1:{port}")) as client:
        task = asyncio.create_task(client.get(f"http://127.0.0.1:{port}/"))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await closed.wait()


async def test_a_tool_that_is_refused_tells_the_model() -> None:
    async def fetch(url: str) -> str:
        async with guarded_client(Egress("public")) as client:
            return (await client.get(url)).text

    spec = ToolSpec("fetch", "Fetch.", {"properties": {"url": {"type": "string"}}}, fetch)
    result = await execute(spec, '{"url": "http://127.0.0.1/"}')
    assert result.error == (
        "127.0.0.1 is a loopback address, and this server connects to public addresses only."
    )
