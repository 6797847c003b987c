"""Row 25: ten times the requests that a server can answer, and what becomes of those that it takes."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import orjson

from tests.chaos.driver import TERMINAL, Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.level import MEMORY, in_words, processor_s, sampled
from tests.chaos.report import Form, Report, percentile, row
from tests.chaos.scene import KEYS, MINE, SCRIPTED, THEIRS

LANES, WAITING = 16, 16
TIMES = 10
WORDS, TICK_S = 10, 0.08
TOKENS = 160
LIMITS = ("--max-num-seqs", str(LANES), "--max-waiting", str(WAITING))

REFUSED_S = 0.050
RECOVERED_S = 2.0
SLOWER = 1.5
GOODPUT = 0.9
SHARE = 0.1  # by which an owner's part may differ from a half
GROWTH = 0.05  # of the memory at its beginning; a tenth of a kilobyte a refusal would be more
LEAST_GROWTH = 8 << 20  # what allocators and caches take, however short the time is


@dataclass(slots=True)
class Told:
    """What came of one owner's requests. Seconds; of refusals by the client's clock and by the server's."""

    taken: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)  # monotonic
    refused: list[float] = field(default_factory=list)
    refused_within: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)


class Owner:
    """One owner's program: each request is a stream, read to its end."""

    def __init__(self, server: Server, key: str, body: Json) -> None:
        self.told = Told()
        self._url = f"{server.url}/v1/responses"
        # Not stored: SQLite's page cache grows with the database until it is full, and is no leak.
        self._body = {**body, "stream": True, "store": False}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"authorization": f"Bearer {key}"}
        )

    async def __aenter__(self) -> Owner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self) -> float | None:
        """One request; the seconds that it took, None where it was refused."""
        began = time.monotonic()
        try:
            async with self._session.post(self._url, json=self._body) as reply:
                data, status, headers = await reply.read(), reply.status, reply.headers
        except aiohttp.ClientError as error:
            self.told.wrong[repr(error)] += 1
            return None
        took = time.monotonic() - began
        if status == 200 and TERMINAL.search(data) and b"\nevent: response.failed\n" not in data:
            self.told.taken.append(took)
            self.told.ended_at.append(time.monotonic())
            return took
        if status != 429 or not headers.get("retry-after", "").isdecimal():
            self.told.wrong[f"{status}, Retry-After {headers.get('retry-after')}, {data[-200:]!r}"] += 1
            return None
        if orjson.loads(data)["error"]["code"] != "queue_full":
            self.told.wrong[f"a refusal that is not for the queue: {data!r}"] += 1
        self.told.refused.append(took)
        self.told.refused_within.append(int(headers["openai-processing-ms"]) / 1000)
        return None


async def at_capacity(owners: list[Owner], seconds: float) -> float:
    """As many requests under way as there are places, none refused; how many end a second."""
    until = time.monotonic() + seconds

    async def one(owner: Owner) -> None:
        while time.monotonic() < until:
            await owner.ask()

    await asyncio.gather(*(one(owners[n % len(owners)]) for n in range(LANES + WAITING)))
    ended = sorted(at for owner in owners for at in owner.told.ended_at)
    begin, last = until - seconds * 3 / 4, until  # the first quarter fills the queue
    return sum(begin <= at <= last for at in ended) / (last - begin)


async def flood(group: asyncio.TaskGroup, rates: dict[Owner, float], seconds: float) -> None:
    """So many requests a second of each owner, whatever becomes of them; back when the last was sent."""

    async def send(owner: Owner, rate: float) -> None:
        began = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(owner.ask())

    await asyncio.gather(*(send(owner, rate) for owner, rate in rates.items()))


async def recovery(owner: Owner, alone_s: float) -> float:
    """Seconds until a request is made that is answered as on an idle server."""
    began = time.monotonic()
    while (asked := time.monotonic()) - began < 30:
        if (took := await owner.ask()) is not None and took <= SLOWER * alone_s:
            break
        await asyncio.sleep(0.05)
    return asked - began


@row(
    "25a",
    "ten times the requests that the server can answer, of two owners, nine to one; scripted engine",
    "beside answers only 429 with Retry-After, within 50 ms; answers take <= 1.5 x of those at capacity, "
    "goodput >= 90 %, each owner half of it within 10 %; memory level; as before <= 2 s after the end",
    short=False,
)
async def scripted(form: Form, report: Report) -> None:
    """Its answers take a time that is known, so what is measured is the server."""
    flags = (*SCRIPTED, "--tick-s", str(TICK_S), *LIMITS)
    await overloaded(form, report, "scripted", flags, {"input": f"count {WORDS}"})


@row(
    "25b",
    "the same with the shipped model, which needs the same processors",
    "as in 25a",
    short=False,
)
async def spoken(form: Form, report: Report) -> None:
    """So many tokens each, whatever they say."""
    flags = ("--log-level", "error", *KEYS, *LIMITS)
    body = {"input": "Tell me a short story about a river.", "max_output_tokens": TOKENS, "ignore_eos": True}
    await overloaded(form, report, "spoken", flags, body)


async def overloaded(form: Form, report: Report, name: str, flags: tuple[str, ...], body: Json) -> None:
    """At capacity, then ten times as much, then nothing: ten minutes of it in full, 20 s in short."""
    server = Server(form.folder / name, *flags, port=free_port(form.draw(name)))
    seconds, before_s = form.of(20, 600), form.of(6, 60)
    async with serving(server), Owner(server, MINE, body) as mine, Owner(server, THEIRS, body) as theirs:
        owners = [mine, theirs]
        await mine.ask()  # what is slow once
        alone_s = statistics.median([await mine.ask() or 0.0 for _ in range(5)])
        _forget(owners)
        peak = await at_capacity(owners, before_s)
        usual = [took for owner in owners for took in owner.told.taken]
        report.holds(not any(owner.told.refused for owner in owners), "a request was refused at capacity")
        _forget(owners)
        async with sampled(server, 1.0) as found, asyncio.TaskGroup() as group:
            began, (ran, waited) = time.monotonic(), processor_s(server)
            await flood(group, {mine: 0.9 * TIMES * peak, theirs: 0.1 * TIMES * peak}, seconds)
            ended = time.monotonic()
            ran, waited = (now - then for now, then in zip(processor_s(server), (ran, waited), strict=True))
            refused = [took for owner in owners for took in owner.told.refused_within]
            clients = [took for owner in owners for took in owner.told.refused]
            recovered_s = await recovery(theirs, alone_s)
        taken = [took for owner in owners for took in owner.told.taken]
        parts = [sum(began + seconds / 4 <= at <= ended for at in owner.told.ended_at) for owner in owners]
        goodput = sum(parts) / (ended - began - seconds / 4)
        wrong = sum((owner.told.wrong for owner in owners), Counter())
        await _still_well(server, report)
    memory = found[MEMORY].since(0.25)
    slower = statistics.median(taken) / statistics.median(usual)
    report.figure(
        f"{peak:.0f} answers a second at capacity; {TIMES * peak:.0f} requests a second for {seconds} s: "
        f"{len(taken)} answered, {len(refused)} refused, {wrong.total()} anything else"
    )
    report.figure(
        f"refusals in {_ms(refused)} by the server's clock, {_ms(clients)} by the client's, "
        "whose process sends all of it"
    )
    report.figure(
        f"answers took {slower:.2f} x of those at capacity (median; p99 "
        f"{percentile(taken, 0.99) / percentile(usual, 0.99):.2f} x), goodput {goodput / peak:.0%}, "
        f"of which the owner with a tenth of the requests got {parts[1] / sum(parts):.0%}"
    )
    report.figure(f"memory {in_words(memory, 2**20, 'MiB')} behind the first quarter")
    report.figure(f"as before {recovered_s:.2f} s after the end")
    report.figure(
        f"the server's loop ran {ran / (ended - began):.0%} of the time and waited for a processor "
        f"{waited / (ended - began):.0%}"
    )
    report.breaks(f"{count} times {what[:400]}" for what, count in wrong.items())
    report.holds(len(refused) > len(taken), "it was no overload")
    report.holds(percentile(refused, 0.99) <= REFUSED_S, f"refusals took {_ms(refused)}")
    if form.full:  # where nothing else runs on the machine
        part = parts[1] / sum(parts)
        report.holds(slower <= SLOWER, f"answers took {slower:.2f} x of those at capacity")
        report.holds(goodput >= GOODPUT * peak, f"goodput fell to {goodput / peak:.0%}")
        report.holds(abs(2 * part - 1) <= SHARE, f"an owner that offers a half was given {part:.0%}")
        is_level = memory.is_level(GROWTH, LEAST_GROWTH)
        report.holds(is_level, f"memory: {in_words(memory, 2**20, 'MiB')}")
        report.holds(recovered_s <= RECOVERED_S, f"as before only {recovered_s:.1f} s after the end")


def _forget(owners: list[Owner]) -> None:
    for owner in owners:
        owner.told = Told()


async def _still_well(server: Server, report: Report) -> None:
    async with Client([server], History(), random.Random(0), key=MINE) as client:
        report.holds((await client.once("GET", "/ready")).status == 200, "it is not ready any more")


def _ms(seconds: list[float]) -> str:
    p50, p99, p100 = (1000 * percentile(seconds, share) for share in (0.5, 0.99, 1.0))
    return f"{p50:.0f} ms (median), {p99:.0f} ms (p99), {p100:.0f} ms (largest)"
