"""Rows 2, 3, 5 and 6: a power loss, a database that another process locks, a full disk, a failed fsync."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.checker import check_seen, check_stream
from tests.chaos.database import FILES, copied, look
from tests.chaos.driver import Client, Faults, Server, can_compile, free_port, serving
from tests.chaos.history import History, Seen, frames
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED, Scene, at_work, rehearsed
from tests.chaos.work import Work, scripted, streamed
from tests.support.schema import lay_schema

TICK = ("--tick-s", "0.02")
LOST_S = 0.050  # deltas that a power loss may take
BUSY_LOST_S = 0.25  # where the server shares its processors with other tests; the folder's copies wait too
NO_COMPILER = "needs Linux and a C compiler"

# ------------------------------------------------------------------------------------------------------------
# Power


@row(
    "2",
    "power loss: what was not synced is gone, or there in part",
    "promises complete; deltas lose <= 50 ms of tail; never corrupt",
)
async def power(form: Form, report: Report) -> None:
    """A server is killed, and the next one finds what had been synced, and random blocks of what had not."""
    if not can_compile():
        report.skipped = NO_COMPILER
        return
    lost: list[float] = []
    num_promises = num_cut = 0
    for trial in range(form.of(2, 16)):
        draw = form.draw(f"power {trial}")
        before, after = form.folder / f"{trial}-before", form.folder / f"{trial}-after"
        faults = Faults(form.folder / f"{trial}-faults", before)
        disk = faults.shadow
        await lay_schema(before)
        shutil.copy(before / FILES[0], disk)  # its tables were there long before; a server syncs them rarely
        server = Server(before, *SCRIPTED, "--tick-s", "0.01", port=free_port(draw), env=faults.env)
        # Every promise is synced, and what came before it too: where there are few, more is left to lose.
        long = [Work("long", streamed({"input": "count 400"}))]
        scene = Scene([server], long if trial % 2 else scripted(draw), {}, Report(), draw)
        async with serving(server):
            working = asyncio.create_task(_forever(scene, form.of(16, 32)))
            await asyncio.sleep(draw.uniform(0.5, 2.0))
            died_at = time.monotonic()
            await server.kill()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        after.mkdir()
        for name in FILES:
            _revive(disk / name, before / name, after / name, draw, torn=trial % 4 > 1)
        in_flight = scene.in_flight()
        with copied(after) as database:
            logs, broken = look(database, in_flight)
        report.breaks(broken)
        for id, seen in in_flight.items():
            kept = len(frames(logs.get(id, b""))) - 1
            lost += [died_at - at for at in _lost(seen, kept)][:1]
            num_cut += seen.last > kept
            num_promises += 1
            report.holds(id in logs, f"{id}: I1 it was acknowledged, and the power took it")
            ended = any(b"\nevent: response.completed\n" in read.data for read in seen.reads)
            report.holds(not ended or seen.last <= kept, f"{id}: I1 its end was seen, and the power took it")
            report.breaks(f"{id}: {line}" for line in check_seen(_up_to(seen, kept), logs.get(id, b"")))
        await _goes_on(after, draw, in_flight, logs, report)
    report.figure(
        f"{num_promises} acknowledged responses, none lost; {num_cut} lost the tail of their deltas"
    )
    report.figure(f"oldest lost delta {max(lost, default=0) * 1000:.0f} ms before the loss")
    report.holds(
        max(lost, default=0) <= (LOST_S if form.full else BUSY_LOST_S),
        f"a delta was lost {max(lost, default=0) * 1000:.0f} ms after it was seen",
    )


async def _forever(scene: Scene, clients: int) -> None:
    async with at_work(scene, clients):
        await asyncio.Event().wait()


def _revive(synced: Path, written: Path, to: Path, draw: random.Random, *, torn: bool) -> None:
    """What a disk holds after the power came back: `synced`, and (torn) some blocks of what was written
    later.
    """
    if not synced.exists():
        return
    data = bytearray(synced.read_bytes())
    if torn:
        late = written.read_bytes()
        for start in range(0, len(late), 512):
            if draw.random() < 0.5:
                if start > len(data):
                    data += bytes(start - len(data))
                data[start : start + 512] = late[start : start + 512]
    to.write_bytes(data)


def _lost(seen: Seen, kept: int) -> list[float]:
    """When events above `kept` had come, earliest first."""
    return sorted(at for read in seen.reads for number, at, _ in read.timed_frames() if number > kept)


def _up_to(seen: Seen, kept: int) -> Seen:
    """What was seen, without events above `kept`."""
    cut = Seen(seen.id)
    for read in seen.reads:
        whole = b"".join(frame for number, _, frame in read.timed_frames() if number <= kept)
        cut.reads.append(type(read)(read.after, bytearray(whole)))
    return cut


async def _goes_on(
    folder: Path,
    draw: random.Random,
    in_flight: Mapping[str, Seen],
    logs: Mapping[str, bytes],
    report: Report,
) -> None:
    """The next server ends every run, behind what the disk held, and tells readers who are ahead of it."""
    server = Server(folder, *SCRIPTED, port=free_port(draw))
    async with serving(server), Client([server], History(), draw, key=MINE) as client:
        for id in in_flight:
            ahead = await client.once("GET", f"/v1/responses/{id}?stream=true&starting_after=1000000")
            code = ahead.json["error"]["code"]
            report.holds(code == "cursor_beyond_log", f"{id}: a reader that is ahead of the log gets {code}")
            again = client.history.of(id)
            waiting = (await client.get(id)).get("pending_tool_calls")
            if waiting:
                await client.outputs(id, {call["call_id"]: "late" for call in waiting})
            async with asyncio.timeout(60):
                await client.resume(again)
            replay = await client.replay(id)
            report.breaks(f"{id}: {line}" for line in check_stream(replay))
            report.holds(replay.startswith(logs.get(id, b"")), f"{id}: I2 the log that survived has changed")


# ------------------------------------------------------------------------------------------------------------
# A scene on a disk with faults


@asynccontextmanager
async def on_a_disk(form: Form, report: Report, name: str) -> AsyncIterator[tuple[Scene, Faults]]:
    """A crowd at work on a server whose disk can be made to fail."""
    draw = form.draw(name)
    works, expected = await rehearsed(form)
    faults = Faults(form.folder / "faults", form.folder / "data")
    server = Server(form.folder / "data", *SCRIPTED, *TICK, port=free_port(draw), env=faults.env)
    scene = Scene([server], works, expected, report, draw)
    async with serving(server), at_work(scene, form.of(16, 32)):
        yield scene, faults


async def knock(server: Server, draw: random.Random) -> tuple[int, float, bool]:
    """A new request: its status, the seconds until it was answered, whether it says when to come back."""
    began = time.monotonic()
    async with Client([server], History(), draw, key=MINE) as client:
        reply = await client.once("POST", "/v1/responses", {"input": "say hi", "background": True})
    return reply.status, time.monotonic() - began, "retry-after" in reply.headers


async def until_served(server: Server, draw: random.Random) -> float:
    """Seconds until a new request is taken."""
    began = time.monotonic()
    while (await knock(server, draw))[0] != 200:
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def num_arrived(scene: Scene, since: float) -> int:
    """Events that streams under way have brought since a moment (monotonic seconds)."""
    reads = [read for seen in scene.in_flight().values() for read in seen.reads]
    return sum(at > since for read in reads for _, at, _ in read.timed_frames())


# ------------------------------------------------------------------------------------------------------------
# Locked


@asynccontextmanager
async def locked(folder: Path) -> AsyncIterator[None]:
    """Another process at work on the database: nobody else can write."""
    other = sqlite3.connect(folder / FILES[0], isolation_level=None)
    other.execute("PRAGMA wal_autocheckpoint=0")
    other.execute("PRAGMA busy_timeout=5000")
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@row("3a", "database locked by another process for 1 s", "no error; I1-I6", short=False)
async def locked_shortly(form: Form, report: Report) -> None:
    """Writes wait."""
    async with on_a_disk(form, report, "locked shortly") as (scene, _):
        for _ in range(form.of(2, 8)):
            await asyncio.sleep(0.5)
            async with locked(scene.servers[0].folder):
                await asyncio.sleep(1.0)
    report.figure(f"{scene.num_refused} errors in {scene.num_works} pieces of work")
    report.holds(scene.num_refused == 0, f"{scene.num_refused} requests were refused")


@row(
    "3b",
    "database locked by another process for 30 s",
    "new requests 503 with Retry-After within 5 s; streams pause; nothing is sent before it is logged; "
    "full recovery <= 1 s after; I1-I6",
    short=False,
)
async def locked_long(form: Form, report: Report) -> None:
    """30 s in full, 6 s in short."""
    answers: list[tuple[int, float, bool]] = []
    async with on_a_disk(form, report, "locked long") as (scene, _):
        server = scene.servers[0]
        await asyncio.sleep(1.0)
        async with locked(server.folder):
            until = time.monotonic() + form.of(6, 30)
            await asyncio.sleep(0.3)  # what was committed before the lock is on its way
            since = time.monotonic()
            while time.monotonic() < until:
                answers.append(await knock(server, scene.draw))
            arrived = num_arrived(scene, since)
            with copied(server.folder) as database:  # of a live server, but nobody writes
                scene.look(database)
        since = time.monotonic()
        recovery = await until_served(server, scene.draw)
        while not num_arrived(scene, since):
            await asyncio.sleep(0.01)
        recovery = max(recovery, time.monotonic() - since)
    slowest = max(seconds for _, seconds, _ in answers)
    report.figure(f"{len(answers)} requests answered 503 with Retry-After, the slowest after {slowest:.1f} s")
    report.figure(f"{arrived} events came during the lock; recovered in {recovery:.2f} s")
    report.holds(all(status == 503 and told for status, _, told in answers), f"answers were {answers}")
    report.holds(slowest <= 5.0, f"an answer took {slowest:.1f} s")
    report.holds(arrived == 0, f"streams brought {arrived} events")
    report.holds(recovery <= 1.0, f"recovery took {recovery:.2f} s")


# ------------------------------------------------------------------------------------------------------------
# Full, broken


@row(
    "5",
    "disk full at a random write",
    "nothing acknowledged is lost; new requests 503; reads work; recovery without a restart",
)
async def full(form: Form, report: Report) -> None:
    """Every write to the folder fails for a while, again and again."""
    if not can_compile():
        report.skipped = NO_COMPILER
        return
    recoveries: list[float] = []
    answers: list[tuple[int, float, bool]] = []
    async with on_a_disk(form, report, "full") as (scene, faults):
        server = scene.servers[0]
        async with Client([server], History(), scene.draw, key=MINE) as client:
            ended = await client.stream({"input": "count 20"})
            for _ in range(form.of(2, 20)):
                await asyncio.sleep(scene.draw.uniform(0.1, 1.0))
                faults.on("full")
                await asyncio.sleep(scene.draw.uniform(0.2, 1.5))
                answers.append(await knock(server, scene.draw))
                replay = await client.once("GET", f"/v1/responses/{ended.id}?stream=true")
                report.holds(
                    replay.body == bytes(ended.reads[0].data), "a read failed while the disk was full"
                )
                faults.off("full")
                recoveries.append(await until_served(server, scene.draw))
        pid = server.pid
    async with serving(server), Client([server], History(), scene.draw, key=MINE) as client:
        again = await client.replay(ended.id)  # from the disk
        report.holds(again == bytes(ended.reads[0].data), "I1 it is gone after a restart")
    report.holds(server.pid != pid, "the server was not restarted")
    report.figure(
        f"{len(answers)} times full under {len(scene.clients)} clients, "
        f"{scene.num_works} pieces of work ended as ever"
    )
    report.figure(f"taking requests again after {spread(recoveries)}")
    report.holds(all(status == 503 for status, _, _ in answers), f"answers were {answers}")


@row("6", "a failed fsync", "stop acknowledging, exit non-zero; nothing acknowledged is lost", short=False)
async def failed_sync(form: Form, report: Report) -> None:
    """fsync and fdatasync answer EIO from a random moment on."""
    if not can_compile():
        report.skipped = NO_COMPILER
        return
    deaths: list[float] = []
    codes: set[int] = set()
    for trial in range(form.of(1, 4)):
        there = Form(form.folder / str(trial), form.seed, form.full)
        async with on_a_disk(there, report, f"sync {trial}") as (scene, faults):
            server = scene.servers[0]
            await asyncio.sleep(scene.draw.uniform(0.2, 1.5))
            began = time.monotonic()
            faults.on("eio")
            code = await server.ended()
            deaths.append(time.monotonic() - began)
            codes.add(code)
            report.holds(code > 0, f"the exit code is {code}")
            with copied(server.folder) as database:
                scene.look(database)
            faults.off("eio")
            await server.start()
    report.figure(f"{len(deaths)} times; the process had ended after {spread(deaths)}, exit code {codes}")
    report.figure("every stream went on after the restart, nothing seen was missing")
