"""What a call of a tool that the server runs adds to a response: `python -m benchmarks.tools`.

A server process with the scripted engine is asked for a response without a call, and for ones with a call of
a builtin tool, of an MCP server over streamable HTTP in a process of its own, and of one over the standard
streams of a program; by turns, each behind a response that has listed the tools already. What a call adds
holds the second generation, the commits of the call and of its result, and the call itself. Prints medians
and 95th percentiles of the seconds that a client waits.

With `--waiting` two server processes with the shipped model make texts at once, one of them beside 64
responses that wait for a tool; then the other one has those. Prints the tokens a second of both, and the
processor time that a token takes of the server, which is steady where a busy machine makes the other swing;
and whether the second is more by no more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
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
WAITING = 64
PAIRS, WARM_PAIRS = 30, 3
TEXTS, TOKENS = 8, 64
MOST = 1.02
"""By how much a token may take more beside those that wait."""

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
    """Two servers at once, one of which has responses that wait; then the other one has them."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            mcp_process(Path(folder) / "log") as url,
            local_server(Path(folder) / "first", url) as first,
            local_server(Path(folder) / "second", url) as second,
        ):
            halves = [await half(*both) for both in ((first, second), (second, first))]
    for at, what in enumerate(Pace._fields):
        ratios = [[pair[1][at] / pair[0][at] for pair in pairs] for pairs in halves]
        low, high = interval(ratios)
        medians = [
            statistics.median(pair[which][at] for pairs in halves for pair in pairs) for which in (0, 1)
        ]
        print(f"{what}: alone {medians[0]:.4g}, beside {WAITING} that wait for a tool {medians[1]:.4g}")
        print(f"  ratio {middle(ratios):.4f}, with 95 % confidence {low:.4f} to {high:.4f}")
        if what == "seconds_per_token":
            verdict = "yes" if high <= MOST else "no" if low > MOST else "it cannot be said"
            print(f"  at most {MOST:g}: {verdict}")


@asynccontextmanager
async def local_server(data: Path, url: str) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A server with the shipped model, on one thread: several wait for each other in loops, which on a busy
    machine is most of what they do. Yields a client and its process id."""
    data.mkdir(mode=0o700)
    (data / "antiphon.toml").write_text(f'[mcp.servers.web]\nurl = "{url}"\n')
    async with (
        server_process(data, "--num-threads", "1", engine="local") as server,
        server.client() as client,
    ):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        yield client, server.child.pid


class Pace(NamedTuple):
    """How fast texts were made, and what of the server's processor time went into one of their tokens."""

    tokens_per_s: float
    seconds_per_token: float


async def half(
    beside: tuple[httpx.AsyncClient, int], alone: tuple[httpx.AsyncClient, int]
) -> list[tuple[Pace, Pace]]:
    """Pairs of paces: of the server alone, and of the one that has responses that wait."""
    client, _ = beside
    ids = await asyncio.gather(*(waiting(client) for _ in range(WAITING)))
    pairs = []
    for number in range(-WARM_PAIRS, PAIRS):
        # At once: whatever else the machine does, it does to both.
        one, other = await asyncio.gather(texts(*alone), texts(*beside))
        print(f"\r{number + 1} of {PAIRS} pairs", end="", file=sys.stderr, flush=True)
        if number >= 0:
            pairs.append((one, other))
    await asyncio.gather(*(client.post(f"/v1/responses/{each}/cancel") for each in ids))
    return pairs


def middle(ratios: list[list[float]]) -> float:
    """The ratio of both halves, in one of which each server has the part of the other."""
    return statistics.geometric_mean(statistics.median(half) for half in ratios)


def interval(ratios: list[list[float]]) -> tuple[float, float]:
    """Where that ratio lies with 95 % confidence, by drawing pairs again (a bootstrap)."""
    draw = random.Random(0)
    found = sorted(middle([draw.choices(half, k=len(half)) for half in ratios]) for _ in range(2000))
    return found[50], found[-51]


async def texts(client: httpx.AsyncClient, pid: int) -> Pace:
    """The pace of some texts at once."""
    body = {"input": "Tell me a story.", "max_output_tokens": TOKENS, "min_tokens": TOKENS, "store": False}
    began, had = time.perf_counter(), processor_seconds(pid)
    replies = await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(TEXTS)))
    took, used = time.perf_counter() - began, processor_seconds(pid) - had
    made = sum(int(reply.json()["usage"]["output_tokens"]) for reply in replies)
    return Pace(made / took, used / made)


def processor_seconds(pid: int) -> float:
    """What the threads of a process have had of processors since they began."""
    told = (task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(each.split()[0]) for each in told) / 1e9


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
