"""What several server processes before one engine carry: `python -m benchmarks.processes`.

Streams of an emulated engine, each of so many tokens a second, stored in one PostgreSQL database: first by
one process, which has the engine in it, and then by `--servers` processes before the engine's process. Which
of the two goes first changes from round to round. The engine is the scripted one, which makes a chunk of
`CHUNK_TOKENS` tokens whenever it is due, and catches up where it is late. Prints the tokens a second that
arrive, how many cores each process kept busy meanwhile, and the ratio of both sides.

The ratio says something only where one process cannot carry what is offered, and where there is a core for
each process, for PostgreSQL and for the clients. What is offered and how many cores there are is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.crowd import read
from tests.support.postgres import Postgres, postgres_server
from tests.support.processes import server_process

CHUNK_TOKENS = 5  # of " more", which the scripted engine says where the end of a turn does not count

CPU = re.compile(r'^process_cpu_seconds_total(?:\{process="([^"]+)"\})? (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second that came, and the processor seconds that each process took meanwhile."""

    rate: float
    cpu: dict[str, float]


@asynccontextmanager
async def serving(postgres: Postgres, folder: Path, servers: int, tick_s: float) -> AsyncIterator[str]:
    """Where `servers` processes serve a new database."""
    flags = ("--db", await postgres.fresh(), "--tick-s", repr(tick_s), "--log-level", "warning")
    async with server_process(folder, *flags, "--api-server-count", str(servers)) as server:
        yield server.url


async def cpu_seconds(url: str) -> dict[str, float]:
    """What each process has used so far."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        page = (await client.get("/metrics")).text
    return {name or "server": float(seconds) for name, seconds in CPU.findall(page)}


async def measure(url: str, streams: int, tokens: int) -> Round:
    """Have all streams read to their ends."""
    before = await cpu_seconds(url)
    fields = {"max_output_tokens": tokens, "ignore_eos": True}
    crowd = await read(url, streams, "say go", store=True, fields=fields)
    after = await cpu_seconds(url)
    assert crowd.events, "nothing came"
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    return Round(streams * tokens / crowd.seconds, used)


async def main(options: argparse.Namespace) -> None:
    """Rounds by turns; medians."""
    sides = (1, options.servers)
    tokens, offered = int(options.rate * options.seconds), options.streams * options.rate
    found: dict[int, list[Round]] = {servers: [] for servers in sides}
    with postgres_server() as postgres, tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            urls = {}
            for servers in sides:
                data = Path(folder) / f"data-{servers}"
                tick_s = CHUNK_TOKENS / options.rate
                urls[servers] = await stack.enter_async_context(serving(postgres, data, servers, tick_s))
                await measure(urls[servers], options.streams, min(tokens, 1000))  # warms up
            for number in range(options.rounds):
                for servers in sides if number % 2 == 0 else sides[::-1]:
                    found[servers].append(await measure(urls[servers], options.streams, tokens))
    print(f"{options.streams} streams of {options.rate} tokens/s, {os.cpu_count()} cores")
    rates = {}
    for servers, rounds in found.items():
        rates[servers] = statistics.median(each.rate for each in rounds)
        names = sorted(rounds[0].cpu)
        total = tokens * options.streams
        cpu = ", ".join(
            f"{name} {statistics.median(each.cpu[name] / (total / each.rate) for each in rounds):.2f}"
            for name in names
        )
        print(f"{servers} server processes: {rates[servers]:,.0f} tokens/s of {offered:,} (cores: {cpu})")
    ratio = rates[options.servers] / rates[1]
    print(f"{options.servers} processes carry {ratio:.2f} x of one, in {options.rounds} rounds")
    if rates[1] > 0.95 * offered:
        print("one process carries all that is offered: give a higher --rate or more --streams")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--servers", type=int, default=2, help="server processes (2)")
    parser.add_argument("--streams", type=int, default=4, help="streams at once (4)")
    parser.add_argument("--rate", type=int, default=13_000, help="tokens a second of each (13,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each is (10 s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (5)")
    asyncio.run(main(parser.parse_args()))
