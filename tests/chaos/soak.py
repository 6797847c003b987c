"""Row 26: hours of mixed work, after which a server holds no more than before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.level import DATABASE, DESCRIPTORS, MEMORY, THREADS, WAL, in_words, medians, sampled
from tests.chaos.report import Form, Report, row
from tests.chaos.scene import MINE, SCRIPTED, Scene, at_work, expectations
from tests.chaos.work import Outcome, Work, outcome, scripted

CLIENTS = 24
SECONDS, SECONDS_SHORT = 2 * 3600, 30
WARM_UP = 0.1  # of the time, in which caches and pools fill and the database grows to what is kept
EVERY_S = 10.0
KEPT_S = 120  # what the server keeps of anything: much less than the whole time, so that it is level soon
KEPT = (
    "--retention-s", str(KEPT_S), "--event-retention-s", str(KEPT_S), "--idempotency-ttl-s", str(KEPT_S),
    "--conversation-retention-s", str(KEPT_S),
)  # fmt: skip

# A leak grows with the work: 100 bytes of each of the million requests of two hours are 100 MiB. What is
# tolerated is the share that a line through noise may rise without one, or the least that is worth a word.
LEVEL = {
    MEMORY: (0.05, 8 << 20),
    DESCRIPTORS: (0.1, 4),
    THREADS: (0.1, 2),
    DATABASE: (0.1, 4 << 20),
}
LARGEST_WAL = 64 << 20  # to which storage cuts one back that a slow reader has made larger
SLOWER, SLOWER_S = 1.25, 0.002  # a lone request at the end, against one at the beginning

SHAPE: Json = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["word", "count"],
    "additionalProperties": False,
}


def shaped() -> Work:
    """A stream of a shape that nobody has asked for before, so that no cache of grammars has it."""

    async def do(client: Client, mark: str) -> Outcome:
        schema = {**SHAPE, "title": mark, "properties": {**SHAPE["properties"], "count": {"const": mark}}}
        form = {"type": "json_schema", "name": "shape", "schema": schema, "strict": True}
        asked = {"input": "hello", "text": {"format": form}, "metadata": {"mark": mark}}
        seen = await client.create(asked, key=mark)
        [(status, *_)] = [outcome(ack.detail) for ack in seen.acks]
        return (status,)

    return Work("a new shape", do)


def repeated() -> Work:
    """The same request thrice at once under one key: one response."""

    async def do(client: Client, mark: str) -> Outcome:
        asked = {"input": "random 20", "seed": 5, "background": True, "metadata": {"mark": mark}}
        ids = {each.id for each in await asyncio.gather(*(client.create(asked, key=mark) for _ in range(3)))}
        assert len(ids) == 1, f"{len(ids)} responses of one request"
        [seen] = [client.history.of(id) for id in ids]
        await client.resume(seen)
        return outcome(await client.get(seen.id))

    return Work("repeats", do)


def left() -> Work:
    """A client that leaves its stream and comes back to it."""

    async def do(client: Client, mark: str) -> Outcome:
        asked = {"input": "tick 5\ncount 60", "metadata": {"mark": mark}}
        reading = asyncio.create_task(client.stream(asked, key=mark))
        await asyncio.sleep(0.15)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for seen in list(client.history.seen.values()):
            await client.resume(seen)
        seen = await client.stream(asked, key=mark)
        return outcome(await client.get(seen.id))

    return Work("left and resumed", do)


def chatted() -> Work:
    """A chat completion."""

    async def do(client: Client, mark: str) -> Outcome:
        body = {"messages": [{"role": "user", "content": "count 20"}]}
        found: Any = (await client.sure("POST", "/v1/chat/completions", body)).json
        return (found["choices"][0]["message"]["content"],)

    return Work("chat", do, stays=False)


@row(
    "26",
    "two hours of streams, background, cancels, conversations, tool outputs, grammars, deletes, repeats",
    "I1-I6; no 5xx; memory, descriptors, threads, database, a lone request's time are level; WAL <= 64 MiB",
    short=False,
)
async def soak(form: Form, report: Report) -> None:
    """What is kept goes after two minutes, so that all that grows longer than that is a leak."""
    draw = form.draw("soak")
    works = [*scripted(draw), *(make() for make in (shaped, repeated, left, chatted) for _ in range(3))]
    expected = await expectations(Server(form.folder / "quiet", *SCRIPTED, port=free_port(draw)), works)
    server = Server(form.folder / "soak", *SCRIPTED, *KEPT, port=free_port(draw))
    scene = Scene([server], works, expected, report, draw)
    seconds = form.of(SECONDS_SHORT, SECONDS)
    async with serving(server), Client([server], History(), draw, key=MINE) as alone:

        async def lone() -> dict[str, float]:
            began = time.monotonic()
            await alone.sure("POST", "/v1/responses", {"input": "say hello", "store": False})
            return {"lone": time.monotonic() - began}

        async with at_work(scene, CLIENTS):
            async with sampled(server, min(EVERY_S, seconds / 30), lone) as found:
                await _keep_young(scene, seconds, report)
            errors = await _server_errors(alone)
    report.figure(f"{seconds / 60:.1f} minutes, {CLIENTS} clients, {scene.num_works} pieces of work as ever")
    report.figure(f"{errors:.0f} replies with 5xx")
    report.holds(errors == 0, f"{errors:.0f} replies with 5xx")
    units = {
        MEMORY: (2**20, "MiB"), DESCRIPTORS: (1, ""), THREADS: (1, ""), DATABASE: (2**20, "MiB"),
    }  # fmt: skip
    for name, (unit, word) in units.items():
        samples = found[name].since(WARM_UP)
        told = f"{name} {in_words(samples, unit, word)}"
        report.figure(told)
        report.holds(not form.full or samples.is_level(*LEVEL[name]), f"{told} is not level")
    largest = max(found[WAL].values)
    report.figure(f"{WAL} {largest / 2**20:.1f} MiB at most")
    report.holds(largest <= LARGEST_WAL, f"the {WAL} had {largest / 2**20:.1f} MiB")
    first, last = medians(found["lone"].since(WARM_UP).values)
    report.figure(f"a lone request beside it {first * 1000:.1f} ms at first, {last * 1000:.1f} ms at last")
    slow = last > SLOWER * first + SLOWER_S
    report.holds(not (form.full and slow), f"a lone request takes {last / first:.1f} x of before")


async def _keep_young(scene: Scene, seconds: float, report: Report) -> None:
    """Let the time pass; what the server need not keep any more is not looked for at the end."""
    until = time.monotonic() + seconds
    old: list[str] = []
    while (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, KEPT_S / 4))
        for id in old:
            scene.ended.pop(id, None)
        old = list(scene.ended)
        if left_s > KEPT_S:
            report.so_far(f"{left_s / 60:.0f} minutes to go, {scene.num_works} pieces of work")


async def _server_errors(client: Client) -> float:
    """Replies with a status of 500 or more, as the server counted them since it started."""
    metrics = (await client.sure("GET", "/metrics")).body.decode()
    lines = [line for line in metrics.splitlines() if line.startswith("antiphon_requests_total{")]
    assert lines, "there is no count of requests"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'status="5' in line)
