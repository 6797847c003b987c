"""The registry of rows, and the report of a run: figures, broken promises, lines for RELIABILITY.md."""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Form:
    """How much is done. folder: for everything that a row leaves behind."""

    folder: Path
    seed: int
    full: bool

    def draw(self, name: str) -> random.Random:
        """A source of chance of its own for everything that has a name: no part disturbs another's."""
        return random.Random(f"{self.seed} {name}")

    def of(self, short: int, full: int) -> int:
        """A number that depends on the form."""
        return full if self.full else short


@dataclass(slots=True)
class Report:
    """What came of a row: figures for the table, and what was broken (one line each)."""

    figures: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: str | None = None

    def figure(self, text: str) -> None:
        """A measured figure, as the table shows it."""
        self.figures.append(text)

    def breaks(self, lines: Iterable[str]) -> None:
        """What the checker found."""
        self.broken += lines

    def so_far(self, text: str) -> None:
        """A word from a row that takes minutes."""
        print(f"  ... {text}, {len(self.broken)} broken", file=sys.stderr, flush=True)

    def holds(self, condition: object, otherwise: str) -> None:
        """A criterion of the row."""
        if not condition:
            self.broken.append(otherwise)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its number in the table, the fault, the criterion, and what does it."""

    name: str
    fault: str
    criterion: str
    run: Callable[[Form, Report], Awaitable[None]]
    short: bool  # it is part of the short form


ROWS: dict[str, Row] = {}


def row(
    name: str, fault: str, criterion: str, *, short: bool = True
) -> Callable[[Callable[[Form, Report], Awaitable[None]]], Callable[[Form, Report], Awaitable[None]]]:
    """Register a row under a number, or a number and a letter."""

    def register(run: Callable[[Form, Report], Awaitable[None]]) -> Callable[[Form, Report], Awaitable[None]]:
        ROWS[name] = Row(name, fault, criterion, run, short)
        return run

    return register


async def carry_out(which: Row, form: Form) -> tuple[Report, float]:
    """Run a row; whatever it raises is a broken promise. Returns the report and the seconds it took."""
    report, began = Report(), time.monotonic()
    try:
        await which.run(form, report)
    except Exception:
        report.broken.append(traceback.format_exc())
    return report, time.monotonic() - began


# ------------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def spread(values: Sequence[float], unit: str = "s") -> str:
    """Median and largest."""
    if not values:
        return "none"
    return f"{statistics.median(values):.2f} {unit} (median), {max(values):.2f} {unit} (largest)"
