"""A scene: servers, a crowd of clients that work on them, and what must hold during and after a fault.

Each client does one piece of work after the other and checks each when it has ended. After the fault the
scene looks at the dead server's disk, and ends with all checks. The rows say what happens to the servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.checker import check, check_foreign, check_gone, check_once, check_seen, check_used
from tests.chaos.database import look
from tests.chaos.driver import CUT, PATIENCE_S, TERMINAL, Client, Server, free_port, serving
from tests.chaos.history import History, Json, Seen
from tests.chaos.report import Form, Report
from tests.chaos.work import Outcome, Work, scripted

MINE, THEIRS = "sk-mine", "sk-theirs"
KEYS = ("--api-key", MINE, "--api-key", THEIRS)
SCRIPTED = ("--engine", "scripted", "--log-level", "error", *KEYS)
UNKNOWN = "resp_" + "0" * 48
RECHECKED = 60  # streams that are read once more at the end of a scene


@dataclass(slots=True)
class Scene:
    """Servers, the clients at work on them, and what came of it.

    expected: by the name of each piece of work, its outcome where nothing happens.
    """

    servers: Sequence[Server]
    works: Sequence[Work]
    expected: Mapping[str, Outcome]
    report: Report
    draw: random.Random
    clients: list[Client] = field(default_factory=list)
    ended: dict[str, bytes] = field(default_factory=dict)  # response id -> digest of its stream
    hit: dict[Seen, int] = field(default_factory=dict)  # by the last fault; the last event seen by then
    stopping: bool = False
    num_works: int = 0  # that ended as they do where nothing happens
    num_counted: int = 0  # responses whose usage was compared with the sums

    def in_flight(self) -> dict[str, Seen]:
        """What clients hold of stored responses that they have not finished with."""
        return {
            id: seen for client in self.clients for id, seen in client.history.seen.items() if seen.stored
        }

    @property
    def num_refused(self) -> int:
        """How often a client was told to come back later."""
        return sum(client.num_refused for client in self.clients)

    def hits(self) -> None:
        """A fault is about to be done."""
        self.hit = {seen: seen.last for seen in self.in_flight().values()}

    async def flowing(self, events: int, share: float, limit_s: float = 30.0) -> float:
        """Wait until the crowd is at work, and a share of what was hit last has brought events, or ended.

        Returns the seconds that it took; after `limit_s` it is not waited for.
        """
        began = time.monotonic()
        while (took := time.monotonic() - began) < limit_s:
            at_work = len(self.in_flight()) >= len(self.clients) / 2
            if at_work and self.num_going(events) >= share * len(self.hit):
                break
            await asyncio.sleep(0.02)
        return took

    def num_going(self, events: int) -> int:
        """How many of what was hit last have brought so many events since, or have ended."""
        now = self.in_flight()
        return sum(seen.id not in now or _flows(seen, last + events) for seen, last in self.hit.items())

    def look(self, database: Path | str) -> None:
        """What a database holds is at least what clients have seen."""
        in_flight = self.in_flight()
        logs, broken = look(database, in_flight)
        for id, seen in in_flight.items():
            if id in logs:
                broken += [f"{id}: {line} (in the database)" for line in check_seen(seen, logs[id])]
            else:
                broken.append(f"{id}: I1 it was acknowledged and is not in the database")
        self.report.breaks(broken)

    async def intrude(self) -> None:
        """Another tenant asks for what is in flight."""
        async with Client(self.servers, History(), self.draw, key=THEIRS) as thief:
            for id in self.draw.sample(ids := sorted(self.in_flight()), min(3, len(ids))):
                try:
                    foreign = await thief.once("GET", f"/v1/responses/{id}?stream=true")
                    unknown = await thief.once("GET", f"/v1/responses/{UNKNOWN}?stream=true")
                except CUT:
                    continue
                self.report.breaks(
                    check_foreign(
                        (unknown.status, unknown.body), (foreign.status, foreign.body), {id: UNKNOWN}
                    )
                )


@asynccontextmanager
async def at_work(scene: Scene, num_clients: int) -> AsyncIterator[None]:
    """Clients at work while the block lasts; then each ends what it has begun, and all is looked at."""
    name = scene.servers[0].folder.name
    seeds = [scene.draw.random() for _ in range(num_clients)]
    scene.clients = [
        Client(scene.servers, History(), random.Random(f"{seed} client"), key=MINE) for seed in seeds
    ]
    workers = [
        asyncio.create_task(_work(scene, client, f"{name}.{n}", random.Random(seeds[n])))
        for n, client in enumerate(scene.clients)
    ]
    try:
        yield
        scene.stopping = True
        await asyncio.gather(*workers)
        await _look_back(scene)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for client in scene.clients:
            await client.__aexit__()


async def _work(scene: Scene, client: Client, name: str, draw: random.Random) -> None:
    number = 0
    while not scene.stopping:
        work, number = draw.choice(scene.works), number + 1
        client.history.seen.clear()
        mark = f"{name}.{number}"
        try:
            async with asyncio.timeout(PATIENCE_S):
                got = await work.do(client, mark)
                scene.report.breaks(await _checked(scene, client))
        except TimeoutError:
            ids = ", ".join(client.history.seen)
            scene.report.breaks([f"I6 {work.name} ({mark}; {ids}) did not end in {PATIENCE_S:g} s"])
            continue
        except AssertionError as error:
            scene.report.breaks([f"{work.name} ({mark}): {error}"])
            continue
        want = scene.expected[work.name]
        if got == want or _may_differ(work, got):
            scene.num_works += 1
        else:
            scene.report.breaks([f"{work.name} ({mark}): {_excerpt(got)} instead of {_excerpt(want)}"])
    client.history.seen.clear()


def _flows(seen: Seen, last: int) -> bool:
    """Whether it got that far, or ended; a response that is not streamed is left out of account."""
    return not seen.reads or seen.last >= last or any(TERMINAL.search(read.data) for read in seen.reads)


def _may_differ(work: Work, got: Outcome) -> bool:
    """Work that ends with its connection; and a tool that may not run twice: the model is told so."""
    return not work.kept or ("once" in work.name and b"not known" in b"".join(got[1]))


def _excerpt(outcome: Outcome) -> str:
    text = repr(outcome)
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


async def _checked(scene: Scene, client: Client) -> list[str]:
    broken: list[str] = []
    for seen in list(client.history.seen.values()):
        if not seen.stored:
            reply = await client.sure("GET", f"/v1/responses/{seen.id}", ok=(200, 404))
            broken += check_gone(seen, reply.status)
            continue
        replay = await client.replay(seen.id)
        broken += check(seen, replay, await client.get(seen.id))
        scene.ended[seen.id] = hashlib.sha256(replay).digest()
    return broken


async def _look_back(scene: Scene) -> None:
    """Everything that had ended is still as it was, and no request with a key was carried out twice."""
    async with Client(scene.servers, History(), scene.draw, key=MINE) as client:
        for id in scene.draw.sample(ids := sorted(scene.ended), min(RECHECKED, len(ids))):
            if hashlib.sha256(await client.replay(id)).digest() != scene.ended[id]:
                scene.report.breaks([f"{id}: I2 a stream that had ended has changed"])
        stored = await _all_stored(client)
        marks = [each["metadata"]["mark"] for each in stored if "mark" in (each["metadata"] or {})]
        scene.report.breaks(check_once(marks))
        if all(work.stays for work in scene.works):
            scene.num_counted = len(stored)
            scene.report.breaks(check_used([each["usage"] for each in stored], await _used(client)))


async def _all_stored(client: Client) -> list[Json]:
    """Every stored response."""
    found: list[Json] = []
    after = ""
    while True:
        page = (await client.sure("GET", f"/v1/responses?limit=100{after}")).json
        found += page["data"]
        if not page["has_more"]:
            return found
        after = f"&after={page['last_id']}"


async def _used(client: Client) -> Json:
    """What the client's owner has used in the last days, as the server counted it."""
    since = int(time.time()) - 2 * 86400
    page = (await client.sure("GET", f"/v1/organization/usage/completions?start_time={since}")).json
    total: Counter[str] = Counter()
    for bucket in page["data"]:
        for result in bucket["results"]:
            total.update({name: value for name, value in result.items() if type(value) is int})
    return dict(total)


_rehearsed: dict[int, tuple[list[Work], dict[str, Outcome]]] = {}


async def rehearsed(form: Form) -> tuple[list[Work], dict[str, Outcome]]:
    """The scripted catalogue of a seed and its outcomes without faults, found out once for all rows."""
    if form.seed not in _rehearsed:
        draw = form.draw("rehearsal")
        works = scripted(draw)
        quiet = Server(form.folder / "quiet", *SCRIPTED, port=free_port(draw))
        _rehearsed[form.seed] = works, await expectations(quiet, works)
    return _rehearsed[form.seed]


async def expectations(quiet: Server, works: Sequence[Work], at_once: int = 32) -> dict[str, Outcome]:
    """The outcome of each piece of work where nothing happens to the server, which is started for it."""
    slots = asyncio.Semaphore(at_once)

    async def one(work: Work) -> tuple[str, Outcome]:
        async with slots, Client([quiet], History(), random.Random(0), key=MINE) as client:
            return work.name, await work.do(client, f"expected-{work.name}".replace(" ", "-"))

    async with serving(quiet):
        return dict(await asyncio.gather(*(one(work) for work in works)))
