"""What a turn costs the server, and what streams leave in memory: `python -m benchmarks.turns [TREE ...]`.

One server of each source tree (this one without any), with a scripted engine and SQLite in a new folder, and
in turn, so that two trees are compared in one run. One client makes turns one after the other: of a chain by
`previous_response_id`, of a conversation, with outputs of a function, and reads of a response. Then crowds of
64 streams. Prints, for each tree, the milliseconds that a turn took and those of the process's processor
time, the ratio of both trees' milliseconds, and by how much resident memory grew in all crowds but the first.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.crowd import read, run

HERE = Path(__file__).parents[1]
ROUNDS, TURNS = 16, 10
CROWDS, STREAMS, COUNT = 4, 64, 400
MAIN = "import sys; from server.cli import main; sys.exit(main())"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """A server process, and a client of it."""

    pid: int
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> Json:
        """What a POST is answered with."""
        reply = await self.client.post(path, json=body)
        found: Json = reply.raise_for_status().json()
        return found

    async def chain(self) -> None:
        """Turns that continue each other."""
        last: str | None = None
        for _ in range(TURNS):
            last = (await self.post("/v1/responses", input="say hi", previous_response_id=last))["id"]

    async def conversation(self) -> None:
        """Turns of one conversation."""
        of = (await self.post("/v1/conversations"))["id"]
        for _ in range(TURNS):
            await self.post("/v1/responses", input="say hi", conversation=of)

    async def function(self) -> None:
        """Calls of a function, and turns with their outputs: two turns each."""
        for _ in range(TURNS // 2):
            asked = await self.post("/v1/responses", input="call weather {}", tools=[WEATHER])
            (call,) = [item for item in asked["output"] if item["type"] == "function_call"]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
            await self.post(
                "/v1/responses", input=[output], previous_response_id=asked["id"], tools=[WEATHER]
            )

    async def reads(self) -> None:
        """One turn, and reads of its response for the others."""
        made = await self.post("/v1/responses", input="say hi")
        for _ in range(TURNS - 1):
            (await self.client.get(f"/v1/responses/{made['id']}")).raise_for_status()

    def cpu_ms(self) -> float:
        """Processor time of all its threads so far."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e6

    def resident(self) -> int:
        """Its resident memory in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def serving(tree: Path) -> AsyncIterator[Server]:
    """A server of a source tree."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--engine", "scripted", "--port", "0", "--data", folder, "--log-level", "error")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, "serve", *flags,
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            said = re.search(rb"http://[0-9.:]+", await process.stdout.readline())
            assert said is not None, f"the server of {tree} did not start"
            async with httpx.AsyncClient(base_url=said.group().decode(), timeout=60) as client:
                yield Server(process.pid, client)
        finally:
            process.kill()
            await process.wait()


async def compare(servers: list[Server], what: Callable[[Server], Awaitable[None]]) -> None:
    """Turns of one kind at each server, and the next one first in the next round."""
    took: list[list[tuple[float, float]]] = [[] for _ in servers]
    for at in range(ROUNDS + 2):
        for number in sorted(range(len(servers)), reverse=at % 2 == 1):
            server = servers[number]
            began, cpu = time.perf_counter(), server.cpu_ms()
            await what(server)
            ms = (time.perf_counter() - began) * 1000
            if at >= 2:  # the first ones are for warming up
                took[number].append((ms / TURNS, (server.cpu_ms() - cpu) / TURNS))
    shown = "; ".join(
        f"{statistics.median(ms for ms, _ in each):.2f} ms ({statistics.median(cpu for _, cpu in each):.2f})"
        for each in took
    )
    ratio = [statistics.median(b[0] / a[0] for a, b in zip(took[0], each, strict=True)) for each in took[1:]]
    print(f"{what.__name__:12} {shown}" + "".join(f"  {each:.2f} x" for each in ratio))


async def main() -> None:
    """All kinds of turns, then the crowds."""
    trees = [Path(tree).resolve() for tree in sys.argv[1:]] or [HERE]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(tree)) for tree in trees]
        print(f"{', '.join(map(str, trees))}: milliseconds a turn (of the processor)")
        for what in (Server.chain, Server.conversation, Server.function, Server.reads):
            await compare(servers, what)
        events = (CROWDS - 1) * STREAMS * COUNT
        for tree, server in zip(trees, servers, strict=True):
            resident = 0
            for at in range(CROWDS):
                if at == 1:
                    resident = server.resident()
                await read(str(server.client.base_url), STREAMS, f"count {COUNT}", store=True)
            grown = server.resident() - resident
            print(f"{tree}: {events:,} events of ended streams left {grown / 2**20:.0f} MiB behind")


if __name__ == "__main__":
    run(main())
