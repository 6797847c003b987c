"""SIGHUP before the server can act on it: it is remembered; by itself, it would end the process.

What is noted here is a handler of Python's, and not the kernel's "ignored", which a program that this process
starts would inherit.
"""

from __future__ import annotations

import signal

_noted: list[int] = []


def note_hangups() -> None:
    """Remember every SIGHUP from now on, until somebody else handles it; call it in the main thread."""
    signal.signal(signal.SIGHUP, lambda number, frame: _noted.append(number))


def hung_up() -> bool:
    """Whether one came since `note_hangups`."""
    return bool(_noted)
