"""Rows 1c, 4 and 22: several servers on one PostgreSQL database.

One server dies, the database is restarted, and one server is paused until another has taken its runs.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.disks import TICK, until_served
from tests.chaos.driver import Server, free_port, serving
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import SCRIPTED, Scene, at_work, rehearsed
from tests.support.making import query
from tests.support.postgres import Postgres, postgres_server

LEASE_S = 2.0
DEATH_LEASE_S = 5.0  # half of the default, so taking over, which takes as long at any, has half of the room
SLACK_S = 3.0  # of a machine that has other things to do
BUSY_LIMIT_S = 30.0  # for a takeover in the short form: other tests run beside it, on the same processors


@asynccontextmanager
async def fleet(
    form: Form, report: Report, name: str, clients: int, lease_s: float = LEASE_S
) -> AsyncIterator[tuple[Scene, Postgres, str]]:
    """A crowd at work on replicas of one database; the database's server and URL."""
    draw = form.draw(name)
    works, expected = await rehearsed(form)
    with postgres_server() as postgres:
        url = await postgres.fresh()
        flags = (*SCRIPTED, *TICK, "--db", url, "--lease-s", str(lease_s))
        servers = [Server(form.folder / f"{name}-{n}", *flags, port=free_port(draw)) for n in range(2)]
        scene = Scene(servers, works, expected, report, draw)
        async with serving(*servers), at_work(scene, clients):
            yield scene, postgres, url


@row(
    "1c",
    "`kill -9` of one of two replicas on PostgreSQL; the survivor takes over",
    "I1-I6; every run goes on within the lease; every outcome equals that of an uninterrupted run",
    short=False,
)
async def kill_replica(form: Form, report: Report) -> None:
    """50 kills in full, 2 in short."""
    takeovers: list[float] = []
    num_hit = 0
    async with fleet(form, report, "replicas", 32, DEATH_LEASE_S) as (scene, _, url):
        for _ in range(form.of(2, 50)):
            await scene.flowing(20, 1.0)
            await asyncio.sleep(scene.draw.uniform(0, 1.0))
            victim = scene.draw.choice(scene.servers)
            scene.hits()
            num_hit += len(scene.hit)
            await victim.kill()
            scene.look(url)  # in one go: nothing arrives meanwhile
            takeovers.append(await scene.flowing(1, 1.0, 30))
            await scene.intrude()
            await victim.start()
    report.figure(
        f"{len(takeovers)} kills under 32 clients, {num_hit} responses in flight, lease {DEATH_LEASE_S:g} s"
    )
    report.figure(f"all streams went on after {spread(takeovers)}")
    report.figure(f"{scene.num_works} pieces of work ended as in an uninterrupted run")
    limit_s = DEATH_LEASE_S if form.full else BUSY_LIMIT_S
    report.holds(max(takeovers) < limit_s, f"a takeover took {max(takeovers):.1f} s")


@row(
    "4",
    "PostgreSQL restarted again and again",
    "I1-I4; taking requests again <= 2 s after it is back",
    short=False,
)
async def restarted(form: Form, report: Report) -> None:
    """Every 5 to 20 s in full; by a crash, or in order."""
    recoveries: list[float] = []
    async with fleet(form, report, "restarts", 24) as (scene, postgres, url):
        for _ in range(form.of(2, 6)):
            await asyncio.sleep(scene.draw.uniform(0.5, 2) if not form.full else scene.draw.uniform(5, 20))
            scene.hits()
            await asyncio.to_thread(postgres.control, "stop", "-m", scene.draw.choice(("immediate", "fast")))
            await asyncio.sleep(scene.draw.uniform(0, 1.5))
            await asyncio.to_thread(postgres.start)
            recoveries.append(
                max(await asyncio.gather(*(until_served(each, scene.draw) for each in scene.servers)))
            )
            scene.look(url)  # in one go: nothing arrives meanwhile
    report.figure(
        f"{len(recoveries)} restarts under 24 clients of two replicas; serving after {spread(recoveries)}"
    )
    report.figure(f"{scene.num_works} pieces of work ended as in an uninterrupted run")
    report.holds(max(recoveries) <= 2.0, f"a recovery took {max(recoveries):.1f} s")


async def _taken_over(scene: Scene, url: str) -> float:
    """Seconds until one process owns every run that has an owner."""
    began = time.monotonic()
    while time.monotonic() - began < 30:
        [(owners,)] = await asyncio.to_thread(query, url, "SELECT count(DISTINCT runner) FROM runs")
        if owners <= 1:
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@row(
    "22",
    "a paused owner comes back: SIGSTOP, take-over, SIGCONT",
    "fenced: it writes nothing; I1-I6",
)
async def paused(form: Form, report: Report) -> None:
    """One of two replicas is stopped for longer than the lease, in the middle of its work, and goes on."""
    takeovers: list[float] = []
    async with fleet(form, report, "paused", form.of(16, 32)) as (scene, _, url):
        for _ in range(form.of(1, 10)):
            await scene.flowing(20, 1.0)
            await asyncio.sleep(scene.draw.uniform(0, 1.0))
            victim = scene.draw.choice(scene.servers)
            survivors = [server for server in scene.servers if server is not victim]
            scene.hits()
            victim.send(signal.SIGSTOP)
            takeovers.append(await _taken_over(scene, url))
            await asyncio.sleep(scene.draw.uniform(0, 1.0))
            victim.send(signal.SIGCONT)
            scene.look(url)  # in one go: nothing arrives meanwhile
            report.holds(all(server.running for server in survivors), "a survivor died")
    report.figure(
        f"{len(takeovers)} pauses; runs were taken over after {spread(takeovers)} (lease {LEASE_S:g} s)"
    )
    report.figure(f"{scene.num_works} pieces of work ended as in an uninterrupted run")
    report.holds(max(takeovers) <= LEASE_S + SLACK_S, f"a takeover took {max(takeovers):.1f} s")
