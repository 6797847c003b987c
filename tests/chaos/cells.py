"""Row 33: servers are killed while code runs in several containers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED, THEIRS
from tools.sandbox import CellLimits, Tier, find_sandbox
from tools.sandbox.processes import below

TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
CLIENTS = 4
LEFT = "the session has ended since the last cell"

# Each call reads and writes files and a variable, and takes its time between that.
CODE = """
before = globals().get('x') if {full} else x_or_none
open('log.txt', 'a').write('{turn} ')
x = {turn}
{pause}
open('f-{turn}.txt', 'w').write('{turn}' * 100)
print(open('log.txt').read().split(), before, 'sandbox:/mnt/data/f-{turn}.txt')
"""


@dataclass(slots=True)
class Author:
    """A client whose every response runs code in the container of its conversation, and knows what that has
    to come to."""

    number: int
    client: Client
    server: Server
    exact: bool
    report: Report
    stopping: asyncio.Event
    turns: int = 0
    done: list[int] = field(default_factory=list)
    variable: int | None = None
    previous: str | None = None
    container: str | None = None
    lost: Counter[str] = field(default_factory=Counter)

    async def work(self) -> None:
        """One call after the other."""
        while not self.stopping.is_set():
            turn, lives = self.turns, len(self.server.started_in)
            found = await self._respond(turn)
            killed = len(self.server.started_in) > lives or not self.server.up.is_set()
            await self._check(turn, found, killed)
            self.turns += 1

    async def _respond(self, turn: int) -> Json:
        pause = "for n in range(150000): n = n + 1" if self.exact else "import time; time.sleep(0.15)"
        first = "x_or_none = None\n" if self.previous is None else "x_or_none = x\n"
        code = (first if self.exact else "") + CODE.format(turn=turn, full=not self.exact, pause=pause)
        asked = f"call python {json.dumps({'code': code})}"
        body: Json = {"input": asked, "tools": [TOOL], "background": True}
        body |= {} if self.previous is None else {"previous_response_id": self.previous}
        mark = f"author-{self.number}-{turn}"
        begun = (await self.client.sure("POST", "/v1/responses", body, key=mark)).json
        url = f"/v1/responses/{begun['id']}?include[]=code_interpreter_call.outputs"
        while (found := (await self.client.sure("GET", url)).json)["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.03)
        self.previous = begun["id"]
        return dict(found)

    async def _check(self, turn: int, found: Json, killed: bool) -> None:
        """Files, variable, output and citation of a call are those of an uninterrupted run, or are told as
        lost; and that only where there was a kill, or a session ended for another one."""
        told = f"{found['id']}, turn {turn} of {self.number}"
        holds = self.report.holds
        holds(found["status"] == "completed", f"{told} ended as {found['status']}: {found['error']}")
        [call] = [item for item in found["output"] if item["type"] == "code_interpreter_call"]
        logs = "".join(each["logs"] for each in call["outputs"] or ())
        if call["status"] == "failed":
            holds("the session was lost" in logs, f"{told} failed: {logs!r}")
            holds(killed and not self.exact, f"{told} failed without a kill")
            self.lost["calls"] += 1
            self.variable = None
            return
        holds(self.container in (None, call["container_id"]), f"{told} has another container")
        self.container = call["container_id"]
        self.done.append(turn)
        before = self.variable
        if LEFT in logs:
            holds(not self.exact, f"{told} lost its session")
            self.lost["variables"] += 1
            before = None
        elif self.variable is None:
            holds(len(self.done) == 1 or not killed, f"{told} does not say that its session was lost")
        self.variable = turn
        said = f"{[str(each) for each in self.done]} {before} sandbox:/mnt/data/f-{turn}.txt"
        holds(logs.strip().splitlines()[-1:] == [said], f"{told} printed {logs!r}, not {said!r}")
        cited = [
            note["file_id"]
            for item in found["output"]
            for part in item.get("content") or ()
            for note in part.get("annotations") or ()
        ]
        files = f"/v1/containers/{self.container}/files"
        for id in cited:
            content = (await self.client.sure("GET", f"{files}/{id}/content")).body
            holds(content == f"{turn}".encode() * 100, f"{told} cites {content!r}")
        holds(len(cited) == 1, f"{told} cites {cited}")

    async def finish(self) -> None:
        """At the end the files are those of all calls that are said to have ended."""
        files = f"/v1/containers/{self.container}/files"
        listed = (await self.client.sure("GET", f"{files}?limit=100&order=desc")).json["data"]
        kept = {file["path"].removeprefix("/mnt/data/"): file["id"] for file in listed}
        log = (await self.client.sure("GET", f"{files}/{kept['log.txt']}/content")).body.decode()
        self.report.holds(log.split() == [str(turn) for turn in self.done], f"the log says {log!r}")
        wanted = {f"f-{turn}.txt" for turn in self.done[-50:]}
        self.report.holds(wanted <= kept.keys(), f"files are missing: {sorted(wanted - kept.keys())}")


@row(
    "33",
    "`kill -9` while code runs in several containers, under bubblewrap and by Monty",
    "output, files, variables and citations of every call are those of an uninterrupted run, or it says that "
    "they are lost (never with Monty); no process and no folder is left over",
    short=False,
)
async def kill_in_cells(form: Form, report: Report) -> None:
    """170 kills in full, 4 in short."""
    await _kills(form, report, "bubblewrap", form.of(2, 100))
    await _kills(form, report, "monty", form.of(2, 70))


async def _kills(form: Form, report: Report, tier: Tier, kills: int) -> None:
    found = await find_sandbox(tier, CellLimits())
    if found.sandbox is None:
        report.skipped = f"this machine cannot have the sandbox: {found.told}"
        return
    draw = form.draw(tier)
    temporary = form.folder / f"{tier}-tmp"
    temporary.mkdir()
    server = Server(
        form.folder / tier, *SCRIPTED, "--sandbox", tier, port=free_port(draw), env={"TMPDIR": str(temporary)}
    )
    restarts = list[float]()
    stopping = asyncio.Event()
    async with (
        serving(server),
        Client([server], History(), draw, key=MINE) as mine,
        Client([server], History(), draw, key=THEIRS) as theirs,
    ):
        authors = [
            Author(number, (mine, theirs)[number % 2], server, tier == "monty", report, stopping)
            for number in range(CLIENTS)
        ]
        tasks = [asyncio.create_task(author.work()) for author in authors]
        for _ in range(kills):
            await _progress(authors, tasks)
            await asyncio.sleep(draw.uniform(0.0, 0.4))
            started = _started(below(server.pid))
            await server.kill()
            await _gone(report, started)
            restarts.append(await server.start())
            report.so_far(f"{tier}: {len(restarts)} kills")
        stopping.set()
        await asyncio.gather(*tasks)
        for author in authors:
            await author.finish()
        started = _started(below(server.pid))
        server.send(signal.SIGTERM)
        await server.ended()
        await _gone(report, started)
        left = [path.name for path in temporary.iterdir() if re.match("antiphon-(cells|sandbox)", path.name)]
        report.holds(not left, f"folders are left over: {left}")
    lost = sum((author.lost for author in authors), Counter[str]())
    ended = sum(len(author.done) for author in authors)
    told = f"told as lost: {lost['calls']} calls, {lost['variables']} times the variables"
    report.figure(f"{tier}: {kills} kills, {ended} calls in {CLIENTS} containers as without a kill; {told}")
    report.figure(f"listening again after {spread(restarts)}")


async def _progress(authors: list[Author], tasks: list[asyncio.Task[None]]) -> None:
    """Wait until each has ended a call: so no run meets three deaths in a row (row 20b)."""
    before = [author.turns for author in authors]
    async with asyncio.timeout(300):
        while any(author.turns == then for author, then in zip(authors, before, strict=True)):
            if failed := [task for task in tasks if task.done()]:
                await failed[0]
            await asyncio.sleep(0.02)


def _started(processes: Iterable[int]) -> dict[int, str]:
    """Processes by their numbers, with when they were started, so that no other is taken for one of them."""
    found = {process: _start_of(process) for process in processes}
    return {process: start for process, start in found.items() if start}


def _start_of(process: int) -> str:
    try:
        told = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if told[0] in "ZX" else told[19]


async def _gone(report: Report, started: dict[int, str]) -> None:
    """No process of a server outlives it."""
    deadline = time.monotonic() + 20
    while alive := [process for process, start in started.items() if _start_of(process) == start]:
        if time.monotonic() > deadline:
            report.breaks([f"processes outlive their server: {alive}"])
            return
        await asyncio.sleep(0.02)
