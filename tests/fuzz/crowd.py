"""What the fuzzers of requests share: a server process, many requests at once, and a stream beside them.

Owns how a reply is timed, which replies count as late, and the pauses of a neighbour's stream. Refuses to
know what the requests say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.chaos.driver import Server, free_port
from tests.fuzz.pauses import Pauses, waiting_of

LIMIT_S = 5.0  # a reply that takes longer, while nothing else is asked for, counts as a hang
HANG_S = 90.0  # whoever waits for a reply in a crowd gives up
PROGRESS_S = 60.0
RETRIES = 5  # of a request that is refused because the server is busy
ALLOWED_5XX = {503, 529}
_TRACE = re.compile(r"\((?!PanicException)[A-Z]\w+(?:Error|Exception|Interrupt)\)|Traceback|object at 0x")


class Reply(NamedTuple):
    """A whole reply. seconds: from the sending of the request to the end of the body."""

    status: int
    content_type: str
    text: str
    seconds: float


class Try(NamedTuple):
    """One request. number: its place in the sequence that a seed gives."""

    number: int
    path: str
    body: str


@dataclass(slots=True)
class Found:
    """What came of all requests: replies by status and by code, and what was wrong, each with its request.

    late: requests whose reply was not there in time while others were under way, to be asked again alone.
    """

    replies: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[Try] = field(default_factory=list)
    busy: int = 0
    shown: int = 0  # of `wrong`, which were printed
    slowest_s: float = 0.0


def fault(reply: Reply) -> str | None:
    """What is wrong with a reply; None where it is an answer, or a refusal that says why and of what.

    An answer may say that its grammar is at fault: that is not the server's failure.
    """
    if reply.status >= 500:
        return f"{reply.status} {reply.text[:200]}"
    try:
        if reply.status != 200:
            return _refusal(reply)
        if reply.content_type.startswith("text/event-stream"):
            return _stream(reply.text)
        whole = json.loads(reply.text)
    except ValueError:
        return f"no JSON: {reply.text[:200]!r}"
    return _failure(whole) if whole.get("status") == "failed" else None


def _refusal(reply: Reply) -> str | None:
    error = json.loads(reply.text).get("error")
    if (
        reply.status != 400
        or not isinstance(error, dict)
        or set(error) != {"message", "type", "param", "code"}
    ):
        return f"{reply.status} {reply.text[:200]}"
    message = error["message"]
    if not (isinstance(message, str) and 5 < len(message) < 1500 and error["code"]):
        return f"a refusal that says nothing: {reply.text[:200]}"
    if _TRACE.search(message):
        return f"a refusal that speaks of the server's own failure: {message[:200]}"
    if error["param"] is None and error["code"] != "invalid_json":
        return f"a refusal without its field: {reply.text[:200]}"
    return None


def _stream(text: str) -> str | None:
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    for event in events:
        if event.get("type") == "response.failed":
            return _failure(event["response"])
        if "error" in event or event.get("type") == "error":
            error = event.get("error") or event
            if error.get("code") != "invalid_schema":
                return f"the stream says {json.dumps(event)[:300]}"
            return None
    last = events[-1] if events else {}
    ended = text.rstrip().endswith("[DONE]") or last.get("type") in (
        *("response.completed", "response.incomplete"),
    )
    return None if ended else f"the stream has no end: {text[-200:]!r}"


def _failure(response: dict[str, Any]) -> str | None:
    error = response.get("error") or {}
    if error.get("code") == "invalid_prompt" and not _TRACE.search(error.get("message", "")):
        return None
    return f"it failed: {error}"


class Crowd:
    """Sends requests to one server over kept connections, and notes what is wrong with the replies."""

    def __init__(self, url: str, session: aiohttp.ClientSession, limit_s: float = LIMIT_S) -> None:
        self.url = url
        self.found = Found()
        self.under_way: dict[int, Try] = {}
        self.stopped = False
        self._session = session
        self._limit_s = limit_s

    async def send(self, each: Try) -> Reply | None:
        """Send one request and look at its reply; None where none came."""
        self.under_way[each.number] = each
        try:
            async with asyncio.timeout(HANG_S):
                reply = await self._reply(each)
        except (TimeoutError, aiohttp.ClientError) as error:
            self._wrong(each, repr(error))
            return None
        finally:
            del self.under_way[each.number]
        self.found.replies[reply.status] += 1
        self.found.slowest_s = max(self.found.slowest_s, reply.seconds)
        if reply.status != 200:
            with suppress(ValueError, KeyError, TypeError):
                self.found.codes[str(json.loads(reply.text)["error"]["code"])] += 1
        if (wrong := fault(reply)) is not None:
            self._wrong(each, wrong)
        elif reply.seconds > self._limit_s:
            self.found.late.append(each)
        return reply

    async def send_alone(self, each: Try, pid: int) -> None:
        """The same while nothing else is asked of the process `pid`: a late reply is wrong now."""
        async with waiting_of(pid) as waited:
            reply = await self.send(each)
        if reply is not None:
            own = reply.seconds - waited()
            print(f"{each.number} alone: {reply.seconds:.1f} s, {own:.1f} s with a processor", flush=True)
            if own > self._limit_s:
                self._wrong(each, f"no reply in {own:.1f} s")

    def _wrong(self, each: Try, why: str) -> None:
        self.found.wrong.append(f"{each.number} {why}: {each.path} {each.body}")

    async def _reply(self, each: Try) -> Reply:
        for _ in range(RETRIES):
            began = time.monotonic()
            headers = {"content-type": "application/json"}
            async with self._session.post(self.url + each.path, data=each.body, headers=headers) as said:
                text = await said.text(errors="replace")
                reply = Reply(said.status, said.content_type, text, time.monotonic() - began)
            if said.status not in ALLOWED_5XX or "retry-after" not in said.headers:
                break
            self.found.busy += 1
            await asyncio.sleep(min(5.0, float(said.headers["retry-after"])))
        return reply

    def stop(self) -> None:
        """Send no more requests."""
        self.stopped = True

    async def run(
        self, tries: Iterator[Try], at_once: int, done: Callable[[Try, Reply], Awaitable[None]] | None = None
    ) -> None:
        """Send them all, so many at once, until one is left without any reply."""

        async def some() -> None:
            for each in tries:  # one iterator for all
                reply = await self.send(each)
                if reply is None or self.stopped:
                    return
                if done is not None:
                    await done(each, reply)

        await asyncio.gather(*(some() for _ in range(at_once)))

    async def follow(self, each: Try, response_id: str) -> None:
        """Wait for the end of a background response."""
        began = time.monotonic()
        url = f"{self.url}/v1/responses/{response_id}?wait={self._limit_s}"
        async with self._session.get(url) as said:
            reply = Reply(said.status, said.content_type, await said.text(), time.monotonic() - began)
        if (wrong := fault(reply)) is not None:
            self._wrong(each, wrong)

    async def unwell(self) -> str | None:
        """What the requests have done to the server; None where it is as before."""
        try:
            async with self._session.get(f"{self.url}/health") as reply:
                if reply.status != 200:
                    return f"the server is not well: {await reply.text()}"
            return await self._left_behind()
        except aiohttp.ClientError as error:
            return f"the server is gone: {error!r}"

    async def _left_behind(self) -> str | None:
        gauges = ("running", "waiting", "waiting_tokens", "kv_blocks_used")
        names = tuple(f"antiphon_engine_{gauge}{{" for gauge in gauges)
        left: dict[str, float] = {}
        for _ in range(100):
            async with self._session.get(f"{self.url}/metrics") as reply:
                metrics = await reply.text()
            pairs = (line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(names))
            left = {name: float(value) for name, value in pairs}
            if len(left) == len(names) and not any(left.values()):
                return None
            await asyncio.sleep(0.1)
        return f"something is left behind: {left}"


class Neighbour:
    """Plain streams, one after the other, whose pauses are noted."""

    def __init__(self, crowd: Crowd, session: aiohttp.ClientSession, pid: int) -> None:
        self._crowd = crowd
        self._session = session
        self.pauses = Pauses(pid)

    async def run(self) -> None:
        """Until it is cancelled."""
        # The same letter again and again, so that every token is a text of its own.
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "max_tokens": 64,
            "ignore_eos": True,
            "num_assistant_tokens": 0,
            "logit_bias": {"70": 100},
        }
        while True:
            try:
                await self._stream(body)
            except (aiohttp.ClientError, AssertionError) as error:
                self._crowd.found.wrong.append(f"the neighbour's stream: {error!r}")
                await asyncio.sleep(1)

    async def _stream(self, body: dict[str, Any]) -> None:
        url = f"{self._crowd.url}/v1/chat/completions"
        tail = b""
        self.pauses.begin()
        async with self._session.post(url, json=body) as reply:
            assert reply.status == 200, f"{reply.status} {await reply.text()}"
            async for line in reply.content:
                tail = line.strip() or tail
                if b'"content":"' in line:
                    self.pauses.token(list(self._crowd.under_way.values()))
        assert tail == b"data: [DONE]", f"a stream that ends with {tail!r}"
        self.pauses.end()


Fuzz = Callable[[Crowd], Awaitable[None]]


@asynccontextmanager
async def crowd_at(url: str, limit_s: float = LIMIT_S) -> AsyncIterator[tuple[Crowd, aiohttp.ClientSession]]:
    """A crowd at a server that runs."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Crowd(url, session, limit_s), session


async def against(
    folder: Path, flags: Sequence[str], options: argparse.Namespace, fuzz: Fuzz
) -> tuple[Found, Pauses]:
    """Start a server process, fuzz it with a neighbour beside until SIGTERM at the latest, and see how it is
    afterwards. What was late in the crowd is then asked again, one at a time, of a new server, which has not
    met it yet."""
    port = options.port or free_port(random.Random())
    async with _process(folder / "crowd", flags, port) as server, crowd_at(server.url, options.limit_s) as at:
        crowd, session = at
        neighbour = Neighbour(crowd, session, server.pid)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, crowd.stop)
        beside = [asyncio.create_task(each) for each in (neighbour.run(), _progress(crowd, neighbour.pauses))]
        try:
            await fuzz(crowd)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        if (unwell := await crowd.unwell()) is not None:
            crowd.found.wrong.append(unwell)
        if "Traceback" in (said := server.log()):
            crowd.found.wrong.append(f"the server's log: {said[said.index('Traceback') :][:3000]}")
    if crowd.found.late:
        async with _process(folder / "alone", flags, port) as server:
            async with crowd_at(server.url, options.limit_s) as (alone, _):
                for each in crowd.found.late:
                    await alone.send_alone(each, server.pid)
            crowd.found.wrong += alone.found.wrong
    return crowd.found, neighbour.pauses


@asynccontextmanager
async def _process(folder: Path, flags: Sequence[str], port: int) -> AsyncIterator[Server]:
    server = Server(folder, *flags, port=port)
    try:
        await server.start()
        yield server
    finally:
        await server.close()


async def _progress(crowd: Crowd, pauses: Pauses) -> None:
    """A line now and then, until it is cancelled."""
    while True:
        before, began = crowd.found.replies.total(), time.monotonic()
        await asyncio.sleep(PROGRESS_S)
        found = crowd.found
        rate = (found.replies.total() - before) / (time.monotonic() - began)
        print(
            f"{time.strftime('%H:%M:%S')} {found.replies.total()} replies, {rate:.1f} a second: "
            f"{len(found.wrong)} wrong, {len(found.late)} late; {pauses.told()}",
            flush=True,
        )
        for each in found.wrong[found.shown :]:
            print(f"WRONG {each[:4000]}", flush=True)
        found.shown = len(found.wrong)


def parser_of(described: str, at_once: int) -> argparse.ArgumentParser:
    """What the commands have in common."""
    parser = argparse.ArgumentParser(
        description=described, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--seconds", type=float, default=math.inf, help="no request begins after so many")
    parser.add_argument(
        "--at-once", type=int, default=at_once, help="requests under way (default %(default)d)"
    )
    parser.add_argument("--port", type=int, default=0, help="of the server (default: any that is free)")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds of a reply (default %(default)g)"
    )
    return parser


def command(
    options: argparse.Namespace,
    fuzz: Callable[[Path, argparse.Namespace], Coroutine[Any, Any, tuple[Found, Pauses]]],
) -> int:
    """Fuzz, and print what came of it; 1 where something was wrong."""
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found, pauses = asyncio.run(fuzz(Path(folder), options))
    for each in found.wrong[found.shown :]:
        print(f"WRONG {each[:4000]}")
    for pause in sorted(pauses.late, key=lambda pause: -pause.own_s)[:8]:
        asked = "; ".join(f"{each.number} {each.path} {each.body[:600]}" for each in pause.under_way)
        print(f"LATE {pause.seconds * 1000:.0f} ms, {pause.waited_s * 1000:.0f} of them waiting: {asked}")
    replies = ", ".join(f"{count} of {status}" for status, count in sorted(found.replies.items()))
    codes = ", ".join(f"{count} {code}" for code, count in found.codes.most_common())
    print(f"{replies} ({codes}); {found.busy} refused as busy and sent again")
    print(
        f"the slowest took {found.slowest_s:.2f} s in the crowd; {len(found.late)} late ones were asked alone"
    )
    print(pauses.told())
    print(f"{len(found.wrong)} were wrong")
    return 1 if found.wrong else 0
