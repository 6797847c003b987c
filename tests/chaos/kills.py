"""Row 1: servers are killed at random moments while a crowd of clients goes on with its work."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

from tests.chaos.database import copied
from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import KEYS, MINE, SCRIPTED, Scene, at_work, expectations, rehearsed
from tests.chaos.work import Outcome, Work, spoken

LIMIT_S = 5.0  # serving again
BUSY_LIMIT_S = 20.0  # the same, in the short form: other tests run beside it, on the same processors
SHORT = 0.25  # share of kills that come as soon as streams flow, when most runs have got nowhere
EARLY = 0.15  # share of the others that are followed by another kill while the server is on its way up
SOMEWHERE = 20  # events after which a run has got somewhere


async def kill_and_restart(scene: Scene, server: Server, *, early: bool) -> float:
    """Kill a server, look at what is on its disk, start it again; seconds from the start to the first answer.

    early: it is killed once more on its way up.
    """
    scene.hits()
    await server.kill()
    with copied(server.folder) as database:
        scene.look(database)
    if early:
        await server.spawn()
        await asyncio.sleep(scene.draw.uniform(0.1, 1.0))
        await server.kill()
        with copied(server.folder) as database:
            scene.look(database)
    await server.start()
    async with Client([server], History(), scene.draw, key=MINE) as client:
        await client.sure("GET", "/v1/responses?limit=1")
    return time.monotonic() - server.spawned_at


async def killing(
    form: Form, report: Report, works: Sequence[Work], expected: Mapping[str, Outcome], flags: Sequence[str],
    *, name: str, kills: int, per_folder: int, clients: int, pace: float,
) -> float:  # fmt: skip
    """Kills of a server, each up to `pace` seconds after streams flow again; seconds of the slowest restart.

    `per_folder` of them hit servers on the same folder, the next ones begin on a new one.
    """
    draw = form.draw(name)
    restarts: list[float] = []
    num_works = num_cuts = num_counted = 0
    for first in range(0, kills, per_folder):
        server = Server(form.folder / f"{name}-{first}", *flags, port=free_port(draw))
        scene = Scene([server], works, expected, report, random.Random(draw.random()))
        async with serving(server), at_work(scene, clients):
            fruitless = False
            for _ in range(min(per_folder, kills - first)):
                # A run that gets nowhere in three lives in a row is taken for poison (row 20b). One that
                # begins late in a life gets nowhere in it; so no two fruitless ones follow each other.
                short = not fruitless and scene.draw.random() < SHORT
                await scene.flowing(*((1, 0.5) if short else (SOMEWHERE, 1.0)), limit_s=60.0)
                await asyncio.sleep(scene.draw.uniform(0.0, pace / 4 if short else pace))
                early = not short and scene.draw.random() < EARLY
                fruitless = short or early
                restarts.append(await kill_and_restart(scene, server, early=early))
                num_cuts += len(scene.hit)
                await scene.intrude()
        num_works += scene.num_works
        num_counted += scene.num_counted
        report.so_far(f"{len(restarts)} kills")
    report.figure(f"{kills} kills under {clients} clients, {num_cuts} responses in flight at a kill")
    report.figure(f"{num_works} pieces of work ended as in an uninterrupted run")
    if num_counted:
        report.figure(f"{num_counted} responses, each counted once")
    report.figure(f"serving again after {spread(restarts)}")
    return max(restarts)


@row(
    "1a",
    "`kill -9` at random moments, scripted engine",
    "I1-I6; serving again in <= 5 s; every outcome equals that of an uninterrupted run",
)
async def kill_scripted(form: Form, report: Report) -> None:
    """480 kills in full, 2 in short."""
    slowest = await killing(
        form, report, *await rehearsed(form), (*SCRIPTED, "--tick-s", "0.02"),
        name="scripted", kills=form.of(2, 480), per_folder=24, clients=form.of(24, 64), pace=0.5,
    )  # fmt: skip
    report.holds(slowest <= (LIMIT_S if form.full else BUSY_LIMIT_S), f"a restart took {slowest:.1f} s")


@row(
    "1b",
    "`kill -9` at random moments, shipped model at its defaults, sampled with seeds",
    "I1-I6; serving again in <= 5 s; every text equals that of an uninterrupted run",
)
async def kill_tiny(form: Form, report: Report) -> None:
    """20 kills in full, 1 in short."""
    works, flags = spoken(form.draw("works")), ("--log-level", "error", *KEYS)
    quiet = Server(form.folder / "quiet", *flags, port=free_port(form.draw("quiet")))
    slowest = await killing(
        form, report, works, await expectations(quiet, works), flags,
        name="tiny", kills=form.of(1, 20), per_folder=10, clients=form.of(8, 48), pace=2.0,
    )  # fmt: skip
    report.holds(slowest <= (LIMIT_S if form.full else BUSY_LIMIT_S), f"a restart took {slowest:.1f} s")


@row(
    "1d",
    "`kill -9` at random moments, all responses are kept",
    "I1-I6; usage of the owner equals the sum of the usage of all its responses",
    short=False,  # tests/server/runs/execution/test_restart.py kills servers too
)
async def kill_counted(form: Form, report: Report) -> None:
    """100 kills in full, 2 in short."""
    works, expected = await rehearsed(form)
    await killing(
        form, report, [work for work in works if work.stays], expected, (*SCRIPTED, "--tick-s", "0.02"),
        name="counted", kills=form.of(2, 100), per_folder=form.of(2, 25), clients=form.of(16, 32), pace=0.5,
    )  # fmt: skip
