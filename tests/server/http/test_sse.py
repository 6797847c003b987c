"""Streams: framing, keep-alives by the clock, and an end for every way in which a reader can go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sse_starlette.sse import AppStatus
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from server.http.departure import Eager, interruptible, while_connected
from server.http.sse import EventStream, StreamCut
from server.sse_frame import frame, frames
from storage import StorageUnavailable
from tests.support.running import Running, http_client, live_app

KEEPALIVE = b": keep-alive\n\n"


class Source:
    """Frames under a test's control: what is put is sent, and how it ended can be awaited."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.ends: list[str] = []

    async def frames(self) -> AsyncIterator[bytes]:
        self.opened.set()
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.ends.append("frames")

    def on_close(self) -> None:
        self.ends.append("on_close")
        self.closed.set()


@contextlib.asynccontextmanager
async def streaming(folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, Source]]:
    source = Source()

    async def stream(request: Request) -> EventStream:
        return EventStream(source.frames(), {"x-test": "1"}, on_close=source.on_close)

    async with live_app(folder, **settings) as running:
        running.app.add_route("/stream", stream)
        yield running, source


@contextlib.asynccontextmanager
async def raw_get(
    running: Running, limit: int = 1024
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urlsplit(running.base_url)
    # A small buffer on this side, so that a reader who stops reading is felt soon.
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=limit)
    writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 5)


def test_frames_are_lines_that_end_in_line_feeds() -> None:
    assert frame("response.created", b'{"a":1}') == b'event: response.created\ndata: {"a":1}\n\n'
    assert frame(None, b"[DONE]") == b"data: [DONE]\n\n"
    events = [b'{"type":"a","sequence_number":7}', b'{"type":"b","sequence_number":8}']
    numbered = [(7, events[0]), (8, events[1])]
    assert frames(numbered) == frame("a", events[0]) + frame("b", events[1])
    with_ids = frames(numbered, numbered=True)
    assert with_ids == b"id: 7\n" + frame("a", events[0]) + b"id: 8\n" + frame("b", events[1])
    assert b"\r" not in frame("x", b"{}") + with_ids


async def test_headers_come_before_the_first_frame(tmp_path: Path) -> None:
    async with (
        streaming(tmp_path) as (running, source),
        http_client(running) as client,
        client.stream("GET", "/stream") as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-accel-buffering"] == "no"
        assert reply.headers["x-test"] == "1"
        assert "content-length" not in reply.headers
        assert reply.headers["x-request-id"]
        assert source.queue.empty()
        two = frame("a", b"{}") + frame("b", b"{}")
        chunks = reply.aiter_raw()
        source.queue.put_nowait(two)
        assert await anext(chunks) == two  # joined frames arrive together, and at once
        source.queue.put_nowait(None)
        assert [chunk async for chunk in chunks] == []
        await soon(source.closed)
    assert source.ends == ["frames", "on_close"]


async def test_silence_is_filled_with_comments_and_never_inside_a_frame(tmp_path: Path) -> None:
    async with (
        streaming(tmp_path, keepalive_s=0.04) as (running, source),
        http_client(running) as client,
        client.stream("GET", "/stream") as reply,
    ):
        chunks = reply.aiter_raw()
        assert await anext(chunks) == KEEPALIVE  # even before the first frame
        assert await anext(chunks) == KEEPALIVE
        source.queue.put_nowait(frame("a", b"{}"))
        assert frame("a", b"{}") in [await anext(chunks), await anext(chunks)]
        source.queue.put_nowait(None)
        assert {chunk async for chunk in chunks} <= {KEEPALIVE}


async def test_a_client_that_leaves_closes_the_frames_at_once(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (running, source):
        async with raw_get(running):
            await soon(source.opened)
            assert running.life.num_streams == 1
        await soon(source.closed)
        assert source.ends == ["frames", "on_close"]
        assert running.life.num_streams == 0


async def test_a_client_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async with streaming(tmp_path, send_timeout_s=0.2) as (running, source), raw_get(running):
        await soon(source.opened)
        for _ in range(200):
            source.queue.put_nowait(frame("a", b"x" * 100_000))
        await soon(source.closed)
        assert source.queue.qsize() > 100  # it was cut while blocked, not after everything was buffered


async def test_a_slow_client_that_makes_progress_is_not_cut(tmp_path: Path) -> None:
    async with (
        streaming(tmp_path, send_timeout_s=1.0) as (running, source),
        raw_get(running, limit=1 << 17) as (reader, _),
    ):
        await soon(source.opened)
        size = 0
        for _ in range(250):
            source.queue.put_nowait(frame("a", b"x" * 100_000))
        source.queue.put_nowait(None)
        while not source.closed.is_set():
            size += len(await reader.read(200_000))
            await asyncio.sleep(0.01)  # some 10 MB/s, so the whole takes longer than the timeout
        assert size > 5_000_000
        assert not source.queue.qsize()


@pytest.mark.parametrize("waits", [0, 1, 3])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_has_begun_goes_on_as_if_it_were_awaited(waits: int, fails: bool) -> None:
    told: list[str] = []

    async def work() -> None:
        for number in range(waits):
            try:
                await asyncio.wait_for(asyncio.sleep(0), 5.0)
            finally:
                told.append(f"waited {number}")
        if fails:
            raise ValueError("a bug")

    async def begun() -> None:
        sending = Eager(work())
        assert sending.waits is (waits > 0)
        if sending.waits:
            await sending

    if fails:
        with pytest.raises(ValueError, match="a bug"):
            await begun()
    else:
        await begun()
    assert told == [f"waited {number}" for number in range(waits)]


async def test_what_has_begun_can_be_cancelled() -> None:
    waits = asyncio.Event()

    async def begun() -> None:
        await Eager(waits.wait())

    task = asyncio.create_task(begun())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waits._waiters


@pytest.mark.parametrize(
    ("end", "logged"),
    [
        (StreamCut(), ""),  # by intention
        (ValueError("a bug"), "a bug"),
        (StorageUnavailable("away"), "GET /stream was cut: away"),
    ],
)
async def test_an_exception_in_the_frames_drops_the_connection(
    tmp_path: Path, end: Exception, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        streaming(tmp_path) as (running, source),
        http_client(running) as client,
        client.stream("GET", "/stream") as reply,
    ):
        source.queue.put_nowait(frame("a", b"{}"))
        source.queue.put_nowait(end)
        got = b""
        with pytest.raises(
            httpx.RemoteProtocolError
        ):  # the end of a chunked body is missing, and the client knows
            async for chunk in reply.aiter_raw():
                got += chunk
        assert got == frame("a", b"{}")
        await soon(source.closed)
    assert len([record for record in caplog.records if record.name == "antiphon"]) == bool(logged)
    assert logged in caplog.text


async def test_streams_outlive_the_signal_and_leave_no_task_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library ends streams at a signal of uvicorn's; here the server's lifecycle does that."""
    monkeypatch.setattr(AppStatus, "original_handler", lambda *signalled: None)
    monkeypatch.setattr(AppStatus, "should_exit", False)  # and back, for the tests behind
    async with (
        streaming(tmp_path, keepalive_s=0.04) as (running, source),
        http_client(running) as client,
    ):
        before = len(asyncio.all_tasks())
        async with client.stream("GET", "/stream") as reply:
            chunks = reply.aiter_raw()
            assert await anext(chunks) == KEEPALIVE
            AppStatus.handle_exit(signal.SIGTERM, None)
            source.queue.put_nowait(frame("a", b"{}"))
            assert frame("a", b"{}") in [await anext(chunks), await anext(chunks)]
            source.queue.put_nowait(None)
            assert {chunk async for chunk in chunks} <= {KEEPALIVE}
        await soon(source.closed)
        assert running.life.num_streams == 0
        assert len(asyncio.all_tasks()) <= before


async def test_on_close_may_be_awaitable(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def close() -> None:
        await asyncio.sleep(0)
        closed.set()

    async def nothing() -> AsyncIterator[bytes]:
        no_frames: list[bytes] = []
        for each in no_frames:
            yield each

    async with live_app(tmp_path) as running, http_client(running) as client:
        running.app.add_route("/stream", _returning(lambda: EventStream(nothing(), on_close=close)))
        assert (await client.get("/stream")).content == b""
        await soon(closed)


def _returning(make: Callable[[], EventStream]) -> Any:
    async def route(request: Request) -> EventStream:
        return make()

    return route


async def test_a_request_whose_client_left_is_aborted(live_server: Running) -> None:
    """`while_connected`, for replies that are no streams."""
    began, aborted = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()

    async def route(request: Request) -> Any:
        return await while_connected(request, work())

    live_server.app.add_route("/stream", route)
    async with raw_get(live_server):
        await soon(began)
    await soon(aborted)


async def test_what_waits_for_nothing_needs_no_task() -> None:
    async def work() -> int:
        return 3

    async def never() -> Message:
        raise AssertionError("nobody is watched")

    before = asyncio.all_tasks()
    assert await while_connected(Request({"type": "http"}, never), work()) == 3
    assert asyncio.all_tasks() == before


async def test_what_is_interrupted_says_why() -> None:
    """By the first who does it; what the work itself raises stays as it is."""
    with pytest.raises(ValueError, match="first"):
        async with interruptible() as interrupt:
            interrupt(ValueError("first"))
            interrupt(ValueError("second"))
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="its own"):
        async with interruptible():
            raise TimeoutError("its own")
    async with interruptible() as interrupt:
        pass
    interrupt(ValueError("too late"))
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_client_whose_connection_fails_is_gone() -> None:
    async def broken() -> Message:
        raise ConnectionResetError("by its client")

    with pytest.raises(ClientDisconnect):
        await while_connected(Request({"type": "http"}, broken), asyncio.Event().wait())


async def test_nothing_of_a_request_is_held_once_its_client_has_left() -> None:
    """Its body may be large, and the oldest objects are seldom looked through."""

    class Large:
        pass

    async def gone() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def work(large: Large) -> None:
        await asyncio.Event().wait()

    async def served() -> weakref.ref[Large]:
        large = Large()
        with contextlib.suppress(ClientDisconnect):
            await while_connected(Request({"type": "http"}, gone), work(large))
            raise AssertionError("nobody noticed")
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        large = await asyncio.create_task(served())
        assert large() is None
    finally:
        gc.enable()
