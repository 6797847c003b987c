"""What hostile code in a sandbox costs the streams beside it: `python -m benchmarks.cells TIER`.

Eight streams of the shipped model run all the time in this process. In every second window cells run beside
them, each in a new container, and do the worst that they can: they compute, also on many processes at once,
take memory, flood their output, or write files. A tier without processes and files ends such cells at once.
Printed are the streams' tokens a second beside the cells as a share of those of the window before, how long a
container's first cell and later ones take while nothing else runs, and how much memory idle containers take.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from benchmarks.streams import Streams
from tools.sandbox import CellLimits, Moment, Sandbox, Tier, Workspace, Write, find_sandbox
from tools.sandbox.processes import below

GOAL = 0.91
"""Of the streams' tokens a second: each token takes 10 % longer at most."""
MOMENT = Moment(1e9, "s")
FIRST, LATER, IDLE = 5, 200, 20
HOSTILE = {
    "a loop without an end": "while True: pass",
    "processes that compute": """
import os
try:
    while os.fork():
        pass
except OSError:
    pass
while True:
    pass
""",
    "memory": """
kept = []
while True:
    try:
        kept.append(bytearray(1 << 20))
    except MemoryError:
        pass
""",
    "output": "while True: print('x' * 1000)",
    "files": """
number = 0
while True:
    try:
        with open(f'f{number % 100}', 'wb') as file:
            file.write(bytes(1 << 16))
    except OSError:
        pass
    number += 1
""",
}


class Container:
    """One container of a sandbox, whose cells always begin with no files."""

    def __init__(self, sandbox: Sandbox, key: str) -> None:
        self._sandbox = sandbox
        self._space = Workspace(key, "bench", files={})

    async def run(self, code: str) -> None:
        """Run a cell to its end, whatever that is."""

        async def fetch(digest: str, write: Write) -> None:
            raise AssertionError("there are no files")

        async def load() -> Workspace:
            return self._space

        space = self._space
        outcome = await self._sandbox.run(code, space.key, space.owner, load, MOMENT, fetch)
        result, version = outcome.result, space.version + 1
        self._space = replace(space, version=version, state=result.state, cells=space.cells + 1)
        outcome.keep(version, {})


async def measure(tier: Tier, rounds: int, window_s: float, python: Path | None, hostile: list[str]) -> None:
    """Print the figures of one tier. hostile: what code does, by its names in HOSTILE."""
    found = await find_sandbox(tier, CellLimits(per_owner=IDLE, live=IDLE), python=python)
    if found.sandbox is None:
        raise SystemExit(f"this machine cannot have {tier}: {found.told}")
    containers = [Container(found.sandbox, f"first{number}") for number in range(FIRST)]
    firsts = [await _took(container, "1 + 1") for container in containers]
    laters = sorted([await _took(containers[-1], f"{number} + 1") for number in range(LATER)])
    print(
        f"{tier}: first cell {statistics.median(firsts) * 1e3:.0f} ms (median of {FIRST}); later ones"
        f" {laters[LATER // 2] * 1e3:.1f} ms (p50), {laters[LATER * 95 // 100] * 1e3:.1f} ms (p95)",
        flush=True,
    )
    for number in range(FIRST, IDLE):
        await Container(found.sandbox, f"first{number}").run("1 + 1")
    idle = _children_bytes() / IDLE / 1e6
    print(f"{IDLE} idle containers: {idle:.1f} MB each, what they share counted once", flush=True)
    streams = Streams()
    await streams.start()
    for name in hostile:
        ratios = []
        for number in range(rounds):
            cells = _again_and_again(found.sandbox, f"{name}/{number}", HOSTILE[name])
            alone, beside = await streams.alone_and_beside(window_s, cells)
            ratios.append(beside / alone)
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name}: median {statistics.median(ratios):.2f}, goal {GOAL} ({told})", flush=True)
    await streams.close()
    await found.sandbox.close()


def _children_bytes() -> int:
    """Memory of all processes that this one has started, and of theirs."""
    total = 0
    for process in below(os.getpid())[1:]:
        with suppress(OSError):  # it has ended
            told = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(
                int(line.split()[1]) for line in told.splitlines() if line.startswith(("Pss:", "SwapPss:"))
            )
    return total * 1024


async def _took(container: Container, code: str) -> float:
    began = time.perf_counter()
    await container.run(code)
    return time.perf_counter() - began


async def _again_and_again(sandbox: Sandbox, key: str, code: str) -> None:
    number = 0
    while True:
        await Container(sandbox, f"{key}/{number}").run(code)
        number += 1


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tier", choices=get_args(Tier))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--python", type=Path, help="the interpreter of cells; default: this one")
    parser.add_argument("--hostile", nargs="*", choices=[*HOSTILE], default=[*HOSTILE], help="default: all")
    asked = parser.parse_args()
    asyncio.run(measure(asked.tier, asked.rounds, asked.window, asked.python, asked.hostile))


if __name__ == "__main__":
    main()
