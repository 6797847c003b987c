"""What a call of a tool that the server runs adds to a response: `python -m benchmarks.tools`.

A server process with the scripted engine is asked for a response without a call, and for ones with a call of
a builtin tool, of an MCP server over streamable HTTP in a process of its own, and of one over the standard
streams of a program; by turns, each behind a response that has listed the tools already. What a call adds
holds the second generation, the commits of the call and of its result, and the call itself. Prints medians
and 95th percentiles of the seconds that a client waits.

With `--waiting` a server process with the shipped model makes texts alone, and beside 64 responses that wait
for a tool, by turns. Prints the tokens a second of both, and the processor time that a token takes of the
server: that is steady where a busy machine makes the other swing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.mcp_servers import stdio_command
from tests.support.processes import ROOT, free_port, server_process

ROUNDS = 200
WARM = 20
WAITING, WAITING_ROUNDS = 64, 9
TEXTS, TOKENS = 8, 512

APPEND = 'call append {"line": "x"}'
ASKED = {
    "no call": ("builtin:", "say x"),
    "builtin tool": ("builtin:", 'call calculator {"expression": "1 + 2"}'),
    "MCP over HTTP": ("builtin:web", APPEND),
    "MCP over streams": ("builtin:program", APPEND),
}
"""By kind: the server_url, and what is said to the scripted engine."""


@asynccontextmanager
async def mcp_process(log: Path) -> AsyncIterator[str]:
    """An MCP server over streamable HTTP in a process of its own; yields its URL."""
    port = free_port()
    child = await asyncio.create_subprocess_exec(
        *stdio_command(log),
        *("streamable-http", str(port)),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        child.kill()
        await child.wait()


async def main() -> None:
    """Ask by turns, and print."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        command = ", ".join(f'"{part}"' for part in stdio_command(data / "log"))
        async with mcp_process(data / "log") as url:
            (data / "antiphon.toml").write_text(
                f'[mcp.servers.web]\nurl = "{url}"\n[mcp.servers.program]\ncommand = [{command}]\n'
            )
            async with server_process(data) as server, server.client() as client:
                await measure(client)


async def measure(client: httpx.AsyncClient) -> None:
    """All kinds, one after the other, again and again."""

    async def ask(said: str, tool_url: str, previous: str | None) -> dict[str, Any]:
        tool = {
            "type": "mcp",
            "server_label": "m",
            "server_url": tool_url,
            "require_approval": "never",
        }
        body = {"input": said, "tools": [tool], "previous_response_id": previous}
        reply = await client.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        made: dict[str, Any] = reply.json()
        calls = [item["error"] for item in made["output"] if item["type"] == "mcp_call"]
        assert calls == [None] * said.startswith("call"), made["output"]
        return made

    listed = {url: (await ask("say hi", url, None))["id"] for url, _ in ASKED.values()}
    spent: dict[str, list[float]] = {kind: [] for kind in ASKED}
    for number in range(WARM + ROUNDS):
        for kind, (url, said) in ASKED.items():
            began = time.perf_counter()
            await ask(said, url, listed[url])
            if number >= WARM:
                spent[kind].append(time.perf_counter() - began)
    without = statistics.median(spent["no call"])
    for kind, seconds in spent.items():
        median, late = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
        print(
            f"{kind:17}: {median * 1e3:5.1f} ms (p95 {late * 1e3:5.1f}); "
            f"adds {(median - without) * 1e3:5.1f} ms"
        )


# ------------------------------------------------------------------------------------------------------------
# Beside responses that wait


async def main_waiting() -> None:
    """Rounds by turns, and their medians."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        async with mcp_process(data / "log") as url:
            (data / "antiphon.toml").write_text(f'[mcp.servers.web]\nurl = "{url}"\n')
            async with server_process(data, engine="local") as server, server.client() as client:
                while (await client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.1)
                alone: list[Pace] = []
                beside: list[Pace] = []
                for _ in range(WAITING_ROUNDS):
                    alone.append(await settled(client, server.child.pid))
                    ids = await asyncio.gather(*(waiting(client) for _ in range(WAITING)))
                    beside.append(await settled(client, server.child.pid))
                    await asyncio.gather(*(client.post(f"/v1/responses/{each}/cancel") for each in ids))
    told = {"tokens a second": 1.0, "microseconds of processor time a token": 1e6}
    for at, (unit, scale) in enumerate(told.items()):
        ratios = [there[at] / here[at] for here, there in zip(alone, beside, strict=True)]
        medians = [scale * statistics.median(pace[at] for pace in paces) for paces in (alone, beside)]
        print(f"{unit}: alone {medians[0]:.0f}, beside {WAITING} that wait for a tool {medians[1]:.0f}")
        print(f"  ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


class Pace(NamedTuple):
    """How fast texts were made, and what of the server's processor time went into one of their tokens."""

    tokens_per_s: float
    seconds_per_token: float


async def settled(client: httpx.AsyncClient, pid: int) -> Pace:
    """Medians of three times; another time before them ends what a change has begun."""
    paces = [await texts(client, pid) for _ in range(4)][1:]
    return Pace(*map(statistics.median, zip(*paces, strict=True)))


async def texts(client: httpx.AsyncClient, pid: int) -> Pace:
    """The pace of some texts at once."""
    body = {"input": "Tell me a story.", "max_output_tokens": TOKENS, "min_tokens": TOKENS, "store": False}
    began, had = time.perf_counter(), processor_seconds(pid)
    replies = await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(TEXTS)))
    took, used = time.perf_counter() - began, processor_seconds(pid) - had
    made = sum(int(reply.json()["usage"]["output_tokens"]) for reply in replies)
    return Pace(made / took, used / made)


def processor_seconds(pid: int) -> float:
    """What a process has had of processors since it began."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def waiting(client: httpx.AsyncClient) -> str:
    """The id of a response that waits for a tool now."""
    tool = {"type": "mcp", "server_label": "m", "server_url": "builtin:web", "require_approval": "never"}
    choice = {"type": "mcp", "server_label": "m", "name": "wait"}
    body = {"input": "Wait.", "tools": [tool], "tool_choice": choice, "background": True}
    response_id: str = (await client.post("/v1/responses", json=body)).json()["id"]
    async with client.stream("GET", f"/v1/responses/{response_id}?stream=true") as events:
        async for line in events.aiter_lines():
            if line == "event: response.mcp_call.in_progress":
                return response_id
    raise AssertionError("the response ended without a call")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--waiting", action="store_true", help="measure beside responses that wait for a tool"
    )
    asyncio.run(main_waiting() if parser.parse_args().waiting else main())
