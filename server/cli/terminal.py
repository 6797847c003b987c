"""Reads turns from a terminal: lines that can be edited, several of them in one turn, and those of before."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import orjson

PASTE_S = 0.02  # the lines of one paste follow each other more closely than a person can type
MOST_TURNS = 500
"""Turns that the file of earlier ones keeps."""


def terminal_reader() -> Callable[[str], str]:
    """What reads a turn, with line editing and what was typed in earlier chats; pasted lines stay together.

    The standard library's readline does it all; where Python has libedit in its place, as on macOS, or
    nothing, lines that come together are taken together.
    """
    try:
        import readline
    except ImportError:
        return _read_together
    if "libedit" in (readline.__doc__ or ""):
        return _read_together
    # A terminal marks what is pasted, and readline then takes its line breaks for text.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter: a line break, as it is
    readline.set_auto_history(False)  # `remember` keeps what is worth it
    for turn in History().turns():
        readline.add_history(turn)
    return input


def drop_typed() -> None:
    """Drop what was typed and not read yet: it was meant for something else than the question that comes."""
    with suppress(ImportError, OSError):
        import termios

        if sys.stdin.isatty():
            termios.tcflush(sys.stdin, termios.TCIFLUSH)


def remember(turn: str) -> None:
    """Have the arrow keys bring this turn again, here and in later chats."""
    with suppress(ImportError):
        import readline

        readline.add_history(turn)
    History().add(turn)


class History:
    """What was typed in chats, in a file of this user's alone: a JSON text a line, the newest last.

    Where the file cannot be had, nothing is kept, and nobody is told: a chat goes on without.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = _file() if file is None else file

    def turns(self) -> list[str]:
        """The latest ones, the oldest first."""
        try:
            lines = self._file.read_bytes().splitlines()[-MOST_TURNS:]
            return [turn for line in lines if isinstance(turn := orjson.loads(line), str)]
        except (OSError, ValueError):
            return []

    def add(self, turn: str) -> None:
        """Keep one more, and no more than the file may hold."""
        kept = self.turns()
        if kept and kept[-1] == turn:
            return
        with suppress(OSError, orjson.JSONEncodeError):  # a turn may hold halves of characters
            lines = b"".join(orjson.dumps(each) + b"\n" for each in [*kept, turn][-MOST_TURNS:])
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = self._file.with_suffix(f".{os.getpid()}")
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(lines)
            beside.replace(self._file)


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state), "antiphon", "chat_history")


def _read_together(prompt: str) -> str:
    """A line, and the lines that came with it at once, which no person can have typed."""
    lines = [input(prompt)]
    while select.select([sys.stdin], [], [], PASTE_S)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)
