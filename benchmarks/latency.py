"""How long an event takes from the engine to its client, stored and not: `python -m benchmarks.latency`.

64 streams at 50 events a second each, paced by a thread as an engine's would be; `store=true` and
`store=false` in short rounds by turns. In one half of the rounds the streams' events come one after the
other, spread over the 20 ms, as they do from an engine elsewhere; in the other half all at once, as they do
from the step of a batch, where the last of them waits for the loop's work on the others, stored or not.
Counted is from the moment at which the thread calls the event loop to the one at which the event's bytes were
written to the client's socket. Prints percentiles, and what storing adds to each.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.crowd import EVENT, read, run, serving
from engine import Chunk, GenerateRequest, Place, ScriptedEngine

STREAMS = 64
EVENTS = 100
PAIRS = 3
PERIOD_S = 0.020
WARM = 25
"""Events of each stream that are not counted: the crowd is still coming."""

PERCENTS = (50, 95, 99)

RESPONSE_ID = re.compile(rb'"id":"(resp_\w+)"')

Made = dict[str, list[float]]
"""By response id: when each of its deltas came, in seconds of `perf_counter`."""


class Paced(ScriptedEngine):
    """A scripted engine whose chunks come when a thread says so: one a stream in each PERIOD_S.

    spread: the streams take their turns one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spread = False
        self.made: Made = {}
        self._boxes: dict[int, asyncio.Queue[float]] = {}  # by place in the period
        self._places = itertools.count()
        self._over = threading.Event()

    def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """As the scripted engine's, each chunk in its turn."""
        return self._generate_paced(request, place)

    async def _generate_paced(self, request: GenerateRequest, place: Place | None) -> AsyncGenerator[Chunk]:
        turn = next(self._places) % STREAMS
        box = self._boxes[turn] = asyncio.Queue()
        made = self.made[request.id.partition("/")[0]] = []
        try:
            async with aclosing(super().generate(request, place)) as chunks:
                async for chunk in chunks:
                    if chunk.deltas:
                        made.append(await box.get())
                    yield chunk
        finally:
            del self._boxes[turn]

    def pace(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's work, until `stop`."""
        due = time.perf_counter()
        for step in itertools.count():
            due += PERIOD_S / STREAMS if self.spread else PERIOD_S
            time.sleep(max(0.0, due - time.perf_counter()))
            if self._over.is_set():
                return
            places = [step % STREAMS] if self.spread else range(STREAMS)
            loop.call_soon_threadsafe(self._deliver, places, time.perf_counter())

    def _deliver(self, places: list[int] | range, now: float) -> None:
        for place in places:
            if (box := self._boxes.get(place)) is not None:
                box.put_nowait(now)

    def stop(self) -> None:
        """End the thread's work."""
        self._over.set()


class Stopwatch:
    """ASGI, outermost: when the bytes of each text delta had been written."""

    def __init__(self, app: ASGIApp, sent: Made) -> None:
        self._app = app
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        times: list[float] = []

        async def timed(message: Message) -> None:
            await send(message)
            if body := message.get("body"):
                times.extend([time.perf_counter()] * body.count(EVENT))
                if found := RESPONSE_ID.search(body):
                    self._sent[found[1].decode()] = times

        await self._app(scope, receive, timed)


def percentiles(values: list[float]) -> list[float]:
    """Those of PERCENTS."""
    cuts = statistics.quantiles(values, n=100)
    return [cuts[percent - 1] for percent in PERCENTS]


async def measure(engine: Paced, sent: Made, url: str, *, store: bool) -> list[float]:
    """One round: the milliseconds of each event."""
    engine.made, before = {}, set(sent)
    crowd = await read(url, STREAMS, f"count {EVENTS}", store=store)
    assert crowd.events == STREAMS * EVENTS, f"{crowd.events} events came"
    assert engine.made.keys() == sent.keys() - before
    return [
        (out - made) * 1000
        for id in engine.made
        for made, out in list(zip(engine.made[id], sent[id], strict=False))[WARM:]
    ]


async def compare(engine: Paced, sent: Made, url: str) -> None:
    """Pairs of rounds, of which the one to go first changes from pair to pair."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        for store in (pair % 2 == 0, pair % 2 == 1):
            found[store] += await measure(engine, sent, url, store=store)
    stored, unstored = percentiles(found[True]), percentiles(found[False])
    for name, figures in (("store=true", stored), ("store=false", unstored)):
        print(
            f"  {name:12}", *(f"p{n} {figure:5.2f} ms" for n, figure in zip(PERCENTS, figures, strict=True))
        )
    added = (a - b for a, b in zip(stored, unstored, strict=True))
    print("  added       ", *(f"p{n} {figure:5.2f} ms" for n, figure in zip(PERCENTS, added, strict=True)))


async def main() -> None:
    """One after the other, then all at once."""
    engine, sent = Paced(), Made()
    async with serving(engine) as running:
        running.app.add_middleware(Stopwatch, sent=sent)  # type: ignore[arg-type]
        thread = threading.Thread(target=engine.pace, args=(asyncio.get_running_loop(),))
        thread.start()
        try:
            await measure(engine, sent, running.base_url, store=True)  # for warming up
            for engine.spread in (True, False):
                print("one after the other" if engine.spread else "all at once")
                await compare(engine, sent, running.base_url)
        finally:
            engine.stop()
            await asyncio.to_thread(thread.join)


if __name__ == "__main__":
    run(main())
