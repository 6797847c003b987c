"""The short form of every row that takes seconds, as ordinary tests.

`python -m tests.chaos.run` runs all rows, at length; RELIABILITY.md has what came of that.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import run
from tests.chaos.report import ROWS, Form, carry_out

SEED = int(os.environ.get("ANTIPHON_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))


LONG = {"1a", "1b", "2", "5", "14", "20c", "22", "30", "35"}
"""Rows whose short form takes ten seconds and more."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(row.name, marks=[pytest.mark.long] if row.name in LONG else [])
        for row in run.in_order()
        if row.short
    ],
)
async def test_row(name: str, tmp_path: Path) -> None:
    print(f"ANTIPHON_CHAOS_SEED={SEED}")
    report, _ = await carry_out(ROWS[name], Form(tmp_path, SEED, full=False))
    if report.skipped:
        pytest.skip(report.skipped)
    assert report.broken == []
    assert report.figures


def test_rows_are_those_of_the_published_table() -> None:
    """Every row that can be run is in RELIABILITY.md, with the command that repeats it."""
    table = (Path(__file__).parents[2] / "RELIABILITY.md").read_text()
    for name in ROWS:
        assert f"\n| {name} |" in table and f"--rows {name} " in table, name
