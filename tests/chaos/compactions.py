"""Row 1e: servers are killed while conversations are being summarised."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence

from tests.chaos.database import copied
from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json, Seen, frames
from tests.chaos.kills import SOMEWHERE
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED, Scene, at_work, expectations
from tests.chaos.work import Outcome, Work, outcome

TRIGGER: Json = {"input": [{"type": "compaction_trigger"}]}
THRESHOLD: Json = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
WRITES = b"event: response.compaction.compacting"
"""The events while a summary is written."""


def compacting(said: Sequence[str], asked: Json) -> Callable[[Client, str], Awaitable[Outcome]]:
    """Turns, a response that compacts them, and one that stands on that. The outcome has the summary in the
    place of its sealed form, which belongs to one server's keys."""

    async def do(client: Client, mark: str) -> Outcome:
        before: Json = {}
        for turn, each in enumerate(said):
            seen = await _turn(client, {"input": each, **before}, f"{mark}.{turn}")
            before = {"previous_response_id": seen.id}
        seen = await _turn(client, {**asked, **before}, f"{mark}.compacted")
        shown = (await client.sure("GET", f"/v1/responses/{seen.id}?include=compaction.summary")).json
        for item in shown["output"]:
            item.pop("encrypted_content", None)
        after = {"input": "count 9", "previous_response_id": seen.id}
        behind = await _turn(client, after, f"{mark}.behind")
        return outcome(shown), outcome(await client.get(behind.id))

    return do


async def _turn(client: Client, body: Json, mark: str) -> Seen:
    return await client.stream({**body, "metadata": {"mark": mark}}, key=mark)


def compactions(draw: random.Random, number: int) -> list[Work]:
    """So many of each kind: by the trigger, by the threshold in front of an answer, and in the background."""

    def said(number: int) -> list[str]:
        return [f"say {n} " + "word " * draw.randrange(60, 70) for n in range(number)]

    kinds: list[tuple[str, Callable[[], Callable[[Client, str], Awaitable[Outcome]]]]] = [
        ("trigger", lambda: compacting(said(1), TRIGGER)),
        ("threshold", lambda: compacting(said(2), {**THRESHOLD, "input": f"count {draw.randrange(5, 40)}"})),
        ("background", lambda: compacting(said(1), {**TRIGGER, "background": True})),
    ]
    return [Work(f"{name} {n}", make()) for n, (name, make) in enumerate(kinds * number)]


@row(
    "1e",
    "`kill -9` while summaries of conversations are written",
    "I1-I6; every summary, and what is said behind it, equals that of an uninterrupted run; the item has the "
    "same bytes on two servers that go on from one disk",
)
async def kill_compacting(form: Form, report: Report) -> None:
    """40 kills in full, each followed by a second server on a copy of the disk; 1 in short, without."""
    draw, clients = form.draw("compactions"), form.of(6, 24)
    works = compactions(draw, form.of(1, 3))
    quiet = Server(form.folder / "quiet", *SCRIPTED, "--tick-s", "0", port=free_port(draw))
    expected = await expectations(quiet, works)
    server = Server(form.folder / "data", *SCRIPTED, "--tick-s", "0.005", port=free_port(draw))
    scene = Scene([server], works, expected, report, draw)
    restarts: list[float] = []
    num_inside = num_compared = 0
    async with serving(server), at_work(scene, clients):
        for _ in range(form.of(1, 40)):
            await scene.flowing(SOMEWHERE, 1.0)
            await asyncio.sleep(restarts[-1] if restarts else 0)  # on a slow machine, too, some of it ends
            async with asyncio.timeout(60):
                while not any(map(_is_inside, scene.in_flight().values())):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(draw.uniform(0, 0.2))
            scene.hits()
            await server.kill()
            inside = [seen.id for seen in scene.hit if _is_inside(seen)]
            num_inside += len(inside)
            with copied(server.folder) as database:
                scene.look(database)
            twin = shutil.copytree(server.folder, form.folder / "twin") if form.full else None
            restarts.append(await server.start())
            if twin is not None:
                num_compared += await _compare(
                    server, Server(twin, *SCRIPTED, port=free_port(draw)), inside, report
                )
                shutil.rmtree(twin)
            report.so_far(f"{len(restarts)} kills")
    report.figure(f"{len(restarts)} kills under {clients} clients, {num_inside} summaries under way at them")
    report.figure(f"{scene.num_works} compacted conversations as in an uninterrupted run")
    if form.full:
        report.figure(f"{num_compared} items byte-equal on two servers")
    report.figure(f"listening again after {spread(restarts)}")
    report.holds(num_inside, "no summary was under way at a kill")


def _is_inside(seen: Seen) -> bool:
    """Whether a summary is being written as far as its client has seen."""
    return bool(
        seen.reads and (seen_frames := frames(seen.reads[-1].data)) and seen_frames[-1].startswith(WRITES)
    )


async def _compare(server: Server, twin: Server, ids: Sequence[str], report: Report) -> int:
    """What two servers make of the same responses, which both go on with; how many there were."""
    async with serving(twin):
        for id in ids:
            made = [await _ended(each, id) for each in (server, twin)]
            report.holds(made[0] == made[1], f"{id}: two servers went on differently")
    return len(ids)


async def _ended(server: Server, id: str) -> tuple[Json, Json]:
    """Output and usage of a response, once it has ended."""
    async with Client([server], History(), random.Random(0), key=MINE) as client:
        found = (await client.sure("GET", f"/v1/responses/{id}?wait=60")).json
        assert found["status"] == "completed", found["status"]
        return found["output"], found["usage"]
