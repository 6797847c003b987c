"""Row 30: servers are killed while they run tools that have effects, and the effects are counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED
from tests.support.mcp_servers import serving as serving_app

CLIENTS = 4  # of each kind
PAUSE_S = 0.12  # of a tool, before its effect and behind it

PROGRAM = """
arguments=$(cat)
sleep 0.12
echo "$arguments" >> "$1"
sleep 0.12
echo done
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of tool. tool: its name. url: what lets it in. repeatable: a call may run twice."""

    name: str
    tool: str
    url: str
    repeatable: bool


KINDS = (
    Kind("MCP", "act", "builtin:plain", repeatable=False),
    Kind("trusted MCP", "act", "builtin:trusted", repeatable=True),
    Kind("program", "act_once", "builtin:", repeatable=False),
    Kind("repeatable program", "act_again", "builtin:", repeatable=True),
)


@dataclass(slots=True)
class Effects:
    """What tools have done. marks: what calls bring, how often. ids: by mark, those of the calls."""

    file: Path
    marks: Counter[str] = field(default_factory=Counter)
    ids: dict[str, set[str]] = field(default_factory=dict)

    def of(self, mark: str) -> int:
        """How often a call has had its effect."""
        return self.marks[mark] + self._written()[mark]

    def _written(self) -> Counter[str]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return Counter(json.loads(line)["mark"] for line in lines)


@asynccontextmanager
async def mcp_server(effects: Effects) -> AsyncIterator[str]:
    """An MCP server with a tool that acts; yields its URL."""
    server = MCPServer("effects", log_level="ERROR")

    @server.tool(annotations=ToolAnnotations(idempotent_hint=True))
    async def act(mark: str, ctx: Context[Any, Any]) -> str:
        """Act."""
        await asyncio.sleep(PAUSE_S)
        effects.marks[mark] += 1
        meta: Any = ctx.request_context.meta
        effects.ids.setdefault(mark, set()).add(meta["antiphon/call"])
        await asyncio.sleep(PAUSE_S)
        return "done"

    async with serving_app(server.streamable_http_app()) as url:
        yield f"{url}/mcp"


def configure(folder: Path, url: str, effects: Effects) -> None:
    """The files of a data folder whose server has all kinds of tools."""
    folder.mkdir(parents=True)
    (folder / "antiphon.toml").write_text(
        f'[mcp.servers.plain]\nurl = "{url}"\n\n[mcp.servers.trusted]\nurl = "{url}"\ntrust = true\n'
    )
    (folder / "act.sh").write_text(PROGRAM)
    parameters = 'type = "object", required = ["mark"], properties = {mark = {type = "string"}}'
    (folder / "tools.toml").write_text(
        "\n".join(
            f'[tools.{kind.tool}]\ndescription = "Act."\ncommand = ["sh", "act.sh", "{effects.file}"]\n'
            f"idempotent = {str(kind.repeatable).lower()}\nparameters = {{{parameters}}}\n"
            for kind in KINDS
            if kind.url == "builtin:"
        )
    )


@dataclass(slots=True)
class Actors:
    """Clients whose every response is a call, and what came of their calls."""

    client: Client
    effects: Effects
    report: Report
    running: dict[str, Kind] = field(default_factory=dict)  # by mark
    done: dict[str, Kind] = field(default_factory=dict)
    turns: Counter[tuple[str, int]] = field(default_factory=Counter)  # by kind and number: calls that ended
    unknown: Counter[str] = field(default_factory=Counter)  # by kind: calls of which nobody knows whether
    stopping: bool = False

    async def act(self, kind: Kind, number: int) -> None:
        """One call after the other."""
        while not self.stopping:
            mark = f"{kind.tool}-{kind.repeatable}-{number}-{self.turns[kind.name, number]}"
            self.running[mark] = kind
            tool = {"type": "mcp", "server_label": "t", "server_url": kind.url, "require_approval": "never"}
            asked = f"call {kind.tool} {json.dumps({'mark': mark})}"
            body: Json = {"input": asked, "tools": [tool], "background": True}
            begun = (await self.client.sure("POST", "/v1/responses", body, key=mark)).json
            while (found := await self.client.get(begun["id"]))["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
            self._check(kind, mark, found)
            self.done[mark] = self.running.pop(mark)
            self.turns[kind.name, number] += 1

    def _check(self, kind: Kind, mark: str, found: Json) -> None:
        told = f"{kind.name} {found['id']}"
        self.report.holds(
            found["status"] == "completed", f"{told} ended as {found['status']}: {found['error']}"
        )
        calls = [item for item in found["output"] if item["type"] == "mcp_call"]
        self.report.holds(len(calls) == 1, f"{told} has {len(calls)} calls")
        for call in calls:
            times = self.effects.of(mark)
            if call["status"] == "completed":
                self.report.holds(call["output"].strip() == "done", f"{told}: {call['output']!r}")
                self.report.holds(times >= 1, f"{told} is said to have run, and had no effect")
            else:
                self.report.holds("is not known" in json.dumps(call["error"]), f"{told}: {call['error']}")
                self.report.holds(not kind.repeatable, f"{told} was not repeated")
                self.unknown[kind.name] += 1

    def finish(self) -> None:
        """Count the effects of all calls, when nothing can have any more."""
        for mark, kind in self.done.items():
            times = self.effects.of(mark)
            self.report.holds(
                kind.repeatable or times <= 1, f"{kind.name} {mark} had its effect {times} times"
            )
            ids = self.effects.ids.get(mark, set())
            self.report.holds(len(ids) <= 1, f"{kind.name} {mark} was called as {ids}")


@row(
    "30",
    "`kill -9` in calls of tools that have effects: MCP servers and programs, repeatable or not",
    "a call that may not run twice has at most one effect, and its response says so where nobody knows "
    "whether it ran; others are repeated as the same call; every response completes",
)
async def kill_in_calls(form: Form, report: Report) -> None:
    """100 kills in full, 2 in short."""
    kills = form.of(2, 100)
    draw = form.draw("effects")
    effects = Effects(form.folder / "effects")
    caught: Counter[str] = Counter()
    restarts: list[float] = []
    async with mcp_server(effects) as url:
        server = Server(form.folder / "data", *SCRIPTED, port=free_port(draw))
        configure(server.folder, url, effects)
        async with serving(server), Client([server], History(), draw, key=MINE) as client:
            actors = Actors(client, effects, report)
            tasks = [
                asyncio.create_task(actors.act(kind, number)) for kind in KINDS for number in range(CLIENTS)
            ]
            for _ in range(kills):
                await _progress(actors, tasks)
                await asyncio.sleep(draw.uniform(0.0, 0.3))
                caught.update(kind.name for kind in actors.running.values())
                await server.kill()
                restarts.append(await server.start())
            actors.stopping = True
            await asyncio.gather(*tasks)
        actors.finish()
    report.figure(f"{kills} kills, responses under way at them: {_listed(caught)}")
    report.figure(
        f"{len(actors.done)} calls ended as they may; not known whether they ran: {_listed(actors.unknown)}"
    )
    report.figure(f"listening again after {spread(restarts)}")


async def _progress(actors: Actors, tasks: list[asyncio.Task[None]]) -> None:
    """Wait until each client has ended a call: so no run meets three deaths in a row, which it would be taken
    for the cause of (row 20b)."""
    before = actors.turns.copy()
    clients = [(kind.name, number) for kind in KINDS for number in range(CLIENTS)]
    async with asyncio.timeout(120):
        while any(actors.turns[client] == before[client] for client in clients):
            if failed := [task for task in tasks if task.done()]:
                await failed[0]
            await asyncio.sleep(0.02)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())) or "none"
