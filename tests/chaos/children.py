"""Row 20c: the process of one of several models is killed while a crowd asks it and another one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

from tests.chaos.disks import TICK
from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json, Seen
from tests.chaos.kills import SOMEWHERE
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED, Scene, at_work, rehearsed
from tests.chaos.work import Work, streamed

MODEL = "outside"
OTHER = "antiphon-scripted"
"""The model in the server's own process."""

FILE = f"""
[[models]]
name = "{MODEL}"
engine = "scripted"
child = true
default = true
max_num_seqs = 64
"""

SETTLED_S = 10.0
"""A process that lives for less, five times in a row, is not started again."""

EVENTS = 5
"""After so many a stream of the other model counts as one that goes on."""


@row(
    "20c",
    "`kill -9` of a model's process under load, beside another model",
    "its runs go on at the next token when it is back, over the connections that they have, and the other "
    "model's meanwhile; every outcome equals that of an uninterrupted run; I1-I6",
)
async def child_death(form: Form, report: Report) -> None:
    """20 kills in full, 1 in short."""
    draw, clients = form.draw("child"), form.of(8, 48)
    works, expected = await rehearsed(form)
    folder = form.folder / "child"
    folder.mkdir()
    (folder / "models.toml").write_text(FILE)
    server = Server(folder, *SCRIPTED, *TICK, port=free_port(draw))
    beside = [
        Work(f"beside {n}", streamed({"model": OTHER, "input": f"count {draw.randrange(60, 90)}"}))
        for n in range(8)
    ]
    back: list[float] = []
    others: list[float] = []
    num_hit = num_beside = 0
    async with serving(server):
        async with Client([server], History(), draw, key=MINE) as client:
            done = await asyncio.gather(*(work.do(client, work.name.replace(" ", "-")) for work in beside))
            alone = dict(zip((work.name for work in beside), done, strict=True))
            pid = (await _child(server, client))["pid"]
        # Enough of the work is the other model's for some of it to be under way at every kill.
        scene = Scene([server], [*works, *beside * 3], {**expected, **alone}, report, draw)
        async with at_work(scene, clients), Client([server], History(), draw, key=MINE) as client:
            for _ in range(form.of(1, 20)):
                await scene.flowing(SOMEWHERE, 1.0)
                await asyncio.sleep(draw.uniform(0, 0.5) + (SETTLED_S if form.full else 0))
                while not any(map(_is_others, scene.in_flight().values())):
                    await asyncio.sleep(0.01)
                scene.hits()
                connections = {seen: len(seen.reads) for seen in scene.hit}
                scene.hit = {seen: last for seen, last in scene.hit.items() if _is_others(seen)}
                num_hit, num_beside = num_hit + len(connections), num_beside + len(scene.hit)
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
                await _going(scene, EVENTS)
                others.append(time.monotonic() - killed)
                pid = (await _child(server, client, not_as=pid))["pid"]
                away = time.monotonic() - killed
                report.holds(others[-1] < away / 2, f"the other model stood still, for {others[-1]:.2f} s")
                scene.hits()
                await _going(scene, 1)
                back.append(time.monotonic() - killed)
                cut = [seen.id for seen, number in connections.items() if len(seen.reads) > number]
                report.holds(not cut, f"streams were cut: {cut}")
                report.so_far(f"{len(back)} kills")
            crashes = (await _child(server, client))["crashes"]
    report.holds(crashes == len(back), f"the server counts {crashes} ends of the process")
    report.figure(
        f"{len(back)} kills under {clients} clients, {num_hit} responses in flight at a kill, "
        f"{num_beside} of them of the other model"
    )
    report.figure(f"{scene.num_works} pieces of work ended as in an uninterrupted run")
    report.figure(
        f"all streams went on after {spread(back)}; those of the other model after {spread(others)}"
    )


async def _going(scene: Scene, events: int) -> None:
    """Wait until all that was hit goes on."""
    async with asyncio.timeout(60):
        while scene.num_going(events) < len(scene.hit):
            await asyncio.sleep(0.005)


def _is_others(seen: Seen) -> bool:
    return bool(seen.reads) and f'"model":"{OTHER}"'.encode() in seen.reads[0].data


async def _child(server: Server, client: Client, not_as: int | None = None) -> Json:
    """What the server tells its operator of the model, once it is loaded, in another process than this."""
    token = json.loads(next(server.folder.glob("server-*.json")).read_text())["token"]
    while True:
        reply = await client.once("GET", "/admin/models", headers={"authorization": f"Bearer {token}"})
        state: Json = reply.json["data"][0]
        if state["state"] == "loaded" and state["pid"] != not_as:
            return state
        await asyncio.sleep(0.05)
