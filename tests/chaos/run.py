"""The command that runs rows: `python -m tests.chaos.run --rows 1a,3,22 --seed 7 --full`.

It prints the seed first, then what each row measured and what was broken, and at the end the lines for
RELIABILITY.md. The exit code is 1 if anything was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import (  # noqa: F401
    batches,
    bombs,
    cells,
    children,
    clients,
    compactions,
    disks,
    effects,
    engines,
    filing,
    forks,
    hostile,
    ingestion,
    kills,
    kv_traces,
    migrations,
    overload,
    processes,
    replicas,
    saved_kv,
    soak,
)
from tests.chaos.report import ROWS, Form, Report, Row, carry_out


def main() -> int:
    """Run the chosen rows, one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.run", description="Faults, done to real servers."
    )
    parser.add_argument(
        "--rows", default="", help="numbers with commas, such as 1,3,22 (default: all); 1 means 1a, 1b..."
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--full", action="store_true", help="the long form, whose figures are published")
    parser.add_argument("--list", action="store_true", help="show the rows and leave")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server is left behind
    chosen = [row for row in in_order() if _wanted(row, options.rows)]
    if options.list:
        for row in chosen:
            print(f"{row.name:4} {row.fault}: {row.criterion}")
        return 0
    print(
        f"seed {options.seed}, {'full' if options.full else 'short'} form, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return 1 if asyncio.run(_run(chosen, options.seed, options.full)) else 0


async def _run(chosen: list[Row], seed: int, full: bool) -> int:
    """How many rows were broken."""
    table, num_broken = [], 0
    for row in chosen:
        folder = Path(tempfile.mkdtemp(prefix=f"antiphon-chaos-{row.name}-"))
        report, seconds = await carry_out(row, Form(folder, seed, full))
        verdict = "skipped" if report.skipped else "BROKEN" if report.broken else "holds"
        print(f"\nrow {row.name}: {row.fault}: {verdict} ({seconds:.0f} s)")
        for line in (*report.figures, *([report.skipped] if report.skipped else [])):
            print(f"  {line}")
        for line in report.broken[:20]:
            print(f"  BROKEN {line[:1500]}")
        if report.broken:
            num_broken += 1
            print(f"  {len(report.broken)} broken; what the servers left is in {folder}")
        else:
            shutil.rmtree(folder)
        sys.stdout.flush()
        table.append(_line(row, report, seed, full))
    print("\n" + "\n".join(table))
    return num_broken


def _line(row: Row, report: Report, seed: int, full: bool) -> str:
    measured = report.skipped or "; ".join(report.figures)
    if report.broken:
        measured += f"; **{len(report.broken)} broken**"
    command = f'`make chaos ARGS="--rows {row.name} --seed {seed}{" --full" if full else ""}"`'
    day = time.strftime("%Y-%m-%d")
    return f"| {row.name} | {row.fault} | {row.criterion} | {measured} | {day} | {command} |"


def in_order() -> list[Row]:
    """Every row, by its number."""
    return sorted(ROWS.values(), key=lambda row: (int(row.name.rstrip("abcdefgh")), row.name))


def _wanted(row: Row, names: str) -> bool:
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    return not wanted or row.name in wanted or row.name.rstrip("abcdefgh") in wanted


if __name__ == "__main__":
    sys.exit(main())
