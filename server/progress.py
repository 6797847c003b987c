"""Shows a person who waits that something goes on: a bar on a terminal, elsewhere a line every few seconds.

Work that is over before the first line is due says nothing where nobody watches.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from tqdm import tqdm

LINE_S = 5.0
"""Seconds between two lines where standard error is no terminal, and before the first one."""

DRAW_S = 0.5
"""Seconds between two drawings of a bar, so that its clock goes on while nothing is counted."""

_UNITS = ("", "K", "M", "G", "T")


class Progress:
    """A piece of work that takes a while, as a `with` around it.

    what: a phrase, such as `copying the database`. total: how much there is to do, in `unit`; None where
    nobody knows. The unit `B` is bytes. out: where it is shown; the default is standard error. say: takes the
    lines instead, as a log does; no bar is drawn then. Counts may come from any thread.
    """

    def __init__(
        self,
        what: str,
        *,
        total: float | None = None,
        unit: str = "",
        out: TextIO | None = None,
        say: Callable[[str], None] | None = None,
        line_s: float | None = None,
    ) -> None:
        self.what = what
        self.total = total
        self._unit = unit
        self._out = sys.stderr if out is None else out
        self._to_log = say is not None
        self._say = say or self._print
        self._line_s = LINE_S if line_s is None else line_s
        self._bar = self._new_bar() if say is None and self._out.isatty() else None
        self._began = time.monotonic()
        self._done: float = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is shown from here on; a bar is wiped off. Again: nothing."""
        self._over.set()
        if self._watch.ident is not None and not self._to_log:  # an event loop does not wait for it
            self._watch.join()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def add(self, amount: float = 1) -> None:
        """So much more is done."""
        self.reached(self._done + amount)

    def reached(self, done: float, total: float | None = None) -> None:
        """So much is done in all. total: of how much, where that is known by now."""
        self._done = done
        self.total = self.total if total is None else total

    def now(self, what: str) -> None:
        """Say what is done from here on."""
        self.what = what

    def _new_bar(self) -> tqdm:
        return tqdm(
            desc=self.what,
            total=self.total,
            unit=self._unit or "it",
            unit_scale=self._unit == "B",
            unit_divisor=1024 if self._unit == "B" else 1000,
            leave=False,
            file=self._out,
            bar_format=None if self._unit else "{desc} {elapsed}",
        )

    def _tell(self) -> None:
        while not self._over.wait(self._line_s if self._bar is None else DRAW_S):
            if self._bar is None:
                self._say(self._line())
                continue
            self._bar.total = self.total
            self._bar.n = self._done
            self._bar.set_description(self.what, refresh=True)

    def _line(self) -> str:
        seconds = f"{time.monotonic() - self._began:.0f} s"
        if not self._unit:
            return f"{self.what}: {seconds}"
        if not self.total:
            return f"{self.what}: {_amount(self._done, self._unit)}, {seconds}"
        share = f"{_amount(self._done, self._unit)} of {_amount(self.total, self._unit)}"
        return f"{self.what}: {share} ({self._done / self.total:.0%}), {seconds}"

    def _print(self, line: str) -> None:
        print(f"antiphon: {line}", file=self._out, flush=True)


def _amount(number: float, unit: str) -> str:
    """A number as a person reads it: bytes with K, M, G or T."""
    if unit != "B":
        return f"{number:g} {unit}"
    prefix = 0
    while number >= 1024 and prefix < len(_UNITS) - 1:
        number, prefix = number / 1024, prefix + 1
    return f"{number:.0f} B" if prefix == 0 else f"{number:.1f} {_UNITS[prefix]}iB"
