"""Rows 17, 20, 21 and 23: a clock that jumps, an engine that dies, signals, cancels that race with ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

from tests.chaos.checker import ENDED, check
from tests.chaos.disks import NO_COMPILER, TICK, on_a_disk
from tests.chaos.driver import CUT, Client, Server, can_compile, free_port, serving
from tests.chaos.history import History
from tests.chaos.kills import killing
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import KEYS, MINE, SCRIPTED, THEIRS, Scene, at_work, expectations, rehearsed
from tests.chaos.work import Work, cancelled, spoken
from tests.support.talk import WEATHER, call

# ------------------------------------------------------------------------------------------------------------
# The clock


@row(
    "17", "the wall clock jumps by an hour, both ways", "timeouts unaffected; order kept; I1-I6", short=False
)
async def clock(form: Form, report: Report) -> None:
    """The clock of the process is moved while a crowd is at work, and while a run waits for tool outputs."""
    if not can_compile():
        report.skipped = NO_COMPILER
        return
    jumps = ("3600", "-3600", "0", "-3600", "3600")
    async with on_a_disk(form, report, "clock") as (scene, faults):
        server = scene.servers[0]
        async with Client([server], History(), scene.draw, key=MINE) as client:
            waiting = await _waiting(client, timeout_s=600)
            impatient = await _waiting(client, timeout_s=6)
            since = time.monotonic()
            before: str | None = None
            order = []
            for seconds in jumps:
                faults.on("clock", seconds)
                await asyncio.sleep(
                    1.2
                )  # a deadline that is believed to have passed is noticed within a second
                asked = {"input": "say hi", **({"previous_response_id": before} if before else {})}
                before = (await client.stream(asked)).id
                order.append(before)
            kept = (await client.get(waiting))["status"] == "in_progress"
            report.holds(kept, "a tool timeout of 600 s ran out")
            while (await client.get(impatient))["status"] == "in_progress" and time.monotonic() - since < 12:
                await asyncio.sleep(0.05)
            took = time.monotonic() - since
            report.holds(5 < took < 8, f"a tool timeout of 6 s took {took:.1f} s")
            items = (
                await client.sure("GET", f"/v1/responses/{order[-1]}/input_items?scope=all&order=asc")
            ).json
            report.holds(len(items["data"]) == 2 * len(jumps) - 1, "a turn of the chain is missing")
            await client.sure("POST", f"/v1/responses/{waiting}/cancel")
    report.figure(
        f"{len(jumps)} jumps under {len(scene.clients)} clients, "
        f"{scene.num_works} pieces of work ended as ever"
    )
    report.figure(f"a timeout of 600 s {'stood' if kept else 'ran out'}, one of 6 s ended after {took:.1f} s")


async def _waiting(client: Client, timeout_s: float) -> str:
    """A run that waits for its client."""
    body = {"input": call(), "tools": [WEATHER], "await_tool_outputs": True, "tool_timeout_s": timeout_s}
    seen = await client.create({**body, "background": True})
    while "pending_tool_calls" not in await client.get(seen.id):
        await asyncio.sleep(0.01)
    return seen.id


# ------------------------------------------------------------------------------------------------------------
# The engine

# A server whose engine is sabotaged once: the first process that gets to a certain step fails there.
SABOTAGE = """
import sys, threading
from pathlib import Path
import server.process.lifecycle as life

mark, how, step = Path(sys.argv.pop()), sys.argv.pop(), int(sys.argv.pop())
build = life.build_engine

def sabotaged(config):
    engine = build(config)
    begin = engine.start

    async def start():
        info = await begin()
        runner, done = engine._loop.runner, 0
        forward = runner.forward

        def failing(*args, **kwargs):
            nonlocal done
            done += 1
            if done == step and not mark.exists():
                mark.touch()
                if how == "raise":
                    raise RuntimeError("CUDA error: the device is on fire")
                threading.Event().wait()
            return forward(*args, **kwargs)

        runner.forward = failing
        return info

    engine.start = start
    return engine

life.build_engine = sabotaged
from server.cli import main
sys.exit(main())
"""


@row(
    "20a",
    "the engine's thread raises, or a step hangs",
    "stored streams are cut and go on, unstored ones get an error event; `/health` 503; "
    "exit non-zero within 10 s; every text equals that of an uninterrupted run",
    short=False,
)
async def engine_death(form: Form, report: Report) -> None:
    """The shipped model, at a random step."""
    draw = form.draw("engine")
    works = spoken(draw)
    flags = ("--log-level", "error", *KEYS)
    expected = await expectations(Server(form.folder / "quiet", *flags, port=free_port(draw)), works)
    deaths: list[float] = []
    told = 0
    for trial in range(form.of(2, 4)):
        how = ("raise", "hang")[trial % 2]
        folder = form.folder / str(trial)
        mark = folder / "mark"
        sabotage = (str(draw.randrange(20, 200)), how, str(mark))
        server = Server(
            folder, *flags, "--step-timeout-s", "2", *sabotage, port=free_port(draw), code=SABOTAGE
        )
        scene = Scene([server], works, expected, report, draw)
        # As another owner: usage is compared with what all stored responses of the first say.
        async with (
            serving(server),
            at_work(scene, 12),
            Client([server], History(), draw, key=THEIRS) as client,
        ):
            unstored = asyncio.create_task(
                client.stream(
                    {"input": "Hello", "store": False, "ignore_eos": True, "max_output_tokens": 900}
                )
            )
            while not mark.exists():
                await asyncio.sleep(0.01)
            began = time.monotonic() + (2 if how == "hang" else 0)
            health = await _until_unhealthy(client, server)
            code = await server.ended(30)
            deaths.append(time.monotonic() - began)
            report.holds(health == 503, f"/health said {health}")
            report.holds(code > 0, f"the exit code is {code}")
            read = (await unstored).reads[0]
            told += b"event: response.failed" in read.data
            report.holds(b"event: response.failed" in read.data, "an unstored stream was not told")
            await server.start()
    report.figure(
        f"{len(deaths)} deaths; the process had ended after {spread(deaths)}; {told} unstored streams told"
    )
    report.holds(max(deaths) <= 10, f"a death took {max(deaths):.1f} s")


async def _until_unhealthy(client: Client, server: Server) -> int:
    """What /health says once it does not say 200; 0 if the process ended without a word."""
    while server.running:
        try:
            reply = await client.once("GET", "/health")
        except CUT:
            continue
        if reply.status != 200:
            return reply.status
        await asyncio.sleep(0.01)
    return 0


# A scripted engine that dies of one word, whoever says it.
POISONED = """
import sys
import server.process.lifecycle as life
from engine import EngineDead, ScriptedEngine
from engine.backends.script import obey

def build(config):
    def script(request, prompt):
        if "poison" in prompt:
            engine.kill(EngineDead("poisoned"))
        yield from obey(request, prompt)

    engine = ScriptedEngine(script, name="antiphon-scripted", tick_s=config.tick_s)
    return engine

life.build_engine = build
from server.cli import main
sys.exit(main())
"""


@row(
    "20b",
    "a request that kills the engine whenever it runs",
    "it ends `failed` at its fourth attempt; everything else goes on; I1-I4",
    short=False,
)
async def poison(form: Form, report: Report) -> None:
    """The server is started again whenever it has died."""
    draw = form.draw("poison")
    server = Server(form.folder / "data", *SCRIPTED, *TICK, port=free_port(draw), code=POISONED)
    async with serving(server), Client([server], History(), draw, key=MINE) as client:
        others = [(await client.create({"input": "count 100", "background": True})).id for _ in range(8)]
        bad = await client.create({"input": "poison", "background": True})
        deaths = 0
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        found = await client.get(bad.id)
                    if found["status"] in ENDED:
                        break
                with contextlib.suppress(TimeoutError):
                    await server.ended(0.2)
                    deaths += 1
                    await server.start()
        report.holds(found["status"] == "failed", f"it ended {found['status']}")
        report.holds(deaths == 3, f"it stopped the engine {deaths} times")
        report.breaks(check(bad, await client.replay(bad.id), await client.get(bad.id)))
        for id in others:
            while (other := await client.get(id))["status"] not in ENDED:
                await asyncio.sleep(0.05)
            said = [part["text"] for item in other["output"] for part in item["content"]]
            report.holds(
                said == [" ".join(str(n) for n in range(1, 101))],
                f"a neighbour ended {other['status']} {said}",
            )
            report.breaks(check(client.history.of(id), await client.replay(id), other))
    why = (found["error"] or {}).get("message")
    report.figure(f"failed after {deaths} deaths ({why}); 8 neighbours completed")


# ------------------------------------------------------------------------------------------------------------
# Signals


@row(
    "21a",
    "SIGTERM under load",
    "no new work; what is in flight ends within the grace or is parked and goes on after the restart; "
    "exit 0; I1-I6",
)
async def terminated(form: Form, report: Report) -> None:
    """Again and again, with a grace that is shorter than most runs."""
    draw = form.draw("sigterm")
    works, expected = await rehearsed(form)
    server = Server(form.folder / "data", *SCRIPTED, *TICK, "--drain-grace-s", "0.5", port=free_port(draw))
    scene = Scene([server], works, expected, report, draw)
    stops: list[float] = []
    async with serving(server), at_work(scene, form.of(16, 32)):
        for _ in range(form.of(1, 12)):
            await asyncio.sleep(draw.uniform(0.3, 1.5))
            began = time.monotonic()
            server.send(signal.SIGTERM)
            code = await server.ended()
            stops.append(time.monotonic() - began)
            report.holds(code == 0, f"the exit code is {code}")
            await server.start()
    report.figure(
        f"{len(stops)} times under {len(scene.clients)} clients, grace 0.5 s: "
        f"gone after {spread(stops)}, exit code 0"
    )
    report.figure(f"{scene.num_works} pieces of work ended as without a stop")
    most_s = form.of(20, 5)  # the short form shares its processors with other tests, as a stop with its load
    report.holds(max(stops) < most_s, f"a stop took {max(stops):.1f} s")


@row("21b", "a second SIGTERM", "the process ends within 2 s", short=False)
async def terminated_twice(form: Form, report: Report) -> None:
    """More than a second after the first, with work that would last for a minute."""
    draw = form.draw("sigterm twice")
    took: list[float] = []
    for trial in range(form.of(1, 5)):
        server = Server(form.folder / str(trial), *SCRIPTED, "--tick-s", "0.1", port=free_port(draw))
        async with serving(server), Client([server], History(), draw, key=MINE) as client:
            for _ in range(16):
                await client.create({"input": "count 600", "background": True})
            server.send(signal.SIGTERM)
            await asyncio.sleep(draw.uniform(1.1, 2.0))
            report.holds(server.running, "it did not wait for the work")
            server.send(signal.SIGTERM)
            began = time.monotonic()
            await server.ended()
            took.append(time.monotonic() - began)
    report.figure(f"gone after {spread(took)}")
    report.holds(max(took) <= 2, f"it took {max(took):.1f} s")


# ------------------------------------------------------------------------------------------------------------
# Races


@row("23", "cancels race ends race kills", "one terminal event; a status never leaves its end; I1-I6")
async def races(form: Form, report: Report) -> None:
    """Runs of a known length, cancelled at about their ends, on a server that is killed."""
    draw = form.draw("races")
    length = 0.02 * 24
    works = [
        Work(f"race {n}", cancelled({"input": "count 22"}, draw.uniform(0.9 * length, 1.3 * length)))
        for n in range(40)
    ]
    await killing(
        form, report, works, {work.name: () for work in works}, (*SCRIPTED, *TICK),
        name="races", kills=form.of(2, 24), per_folder=24, clients=form.of(24, 64), pace=0.6,
    )  # fmt: skip
