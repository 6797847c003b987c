"""What is shown to a person who waits, on a terminal and where there is none."""

from __future__ import annotations

import io
import queue

import pytest

from server import progress
from server.progress import Progress


class Screen(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: queue.Queue[str] = queue.Queue()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.drawn.put(text or " ")
        return super().write(text)


def test_short_work_says_nothing_where_nobody_watches() -> None:
    out = io.StringIO()
    with Progress("copying", total=10, unit="B", out=out) as shown:
        shown.add(10)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "unit", "done", "told"),
    [
        (None, "", 0.0, "copying: 0 s"),
        (4 * 1024**3, "B", 3 * 1024**3, "copying: 3.0 GiB of 4.0 GiB (75%), 0 s"),
        (None, "B", 12, "copying: 12 B, 0 s"),
        (8, "requests", 2, "copying: 2 requests of 8 requests (25%), 0 s"),
    ],
)
def test_long_work_says_a_line_every_few_seconds(
    total: float | None, unit: str, done: float, told: str
) -> None:
    lines: queue.Queue[str] = queue.Queue()
    with Progress("copying", total=total, unit=unit, say=lines.put, line_s=0.01) as shown:
        shown.reached(done)
        while (line := lines.get(timeout=10)) != told:  # the first may be of before
            assert line.startswith("copying: ")
        lines.get(timeout=10)


def test_without_a_log_a_line_goes_to_its_stream() -> None:
    said = queue.Queue[str]()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            said.put(text)
            return len(text)

    with Progress("loading", out=Out(), line_s=0.01):
        assert said.get(timeout=10) == "antiphon: loading: 0 s"


def test_on_a_terminal_a_bar_is_drawn_and_wiped_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DRAW_S", 0.01)
    screen = Screen()
    with Progress("copying", total=4, unit="files", out=screen) as shown:
        shown.add(3)
        shown.now("checking")
        while not ("checking" in screen.getvalue() and "3/4" in screen.getvalue()):
            assert screen.drawn.get(timeout=10)
    assert screen.getvalue().endswith("\r")
    shown.close()  # again: nothing
