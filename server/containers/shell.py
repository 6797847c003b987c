"""Commands of a shell as a cell of Python: what runs them in a container's session, and what it says.

What comes back is the container's word and untrusted: it is read within bounds, and whatever is no whole
answer is taken for none.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tools import CellResult

Output = dict[str, Any]
"""What came of one command, as the item says it."""

PROGRAM = (files("server.containers") / "shell_program.py").read_text()

MAX_BYTES = 512 * 1024
"""Of the output of all commands of one call, of which each may have its share; more is thrown away."""
MAX_CHARACTERS = 32 * 1024
"""Of the output of one command, where the model has not asked for less or more."""
SPARE_S = 2.0
"""Seconds that are left of a cell's time when its commands have to end."""


class Commands:
    """The commands of one call. seconds: how long they may take together. max_output_length: characters of
    the output of each command, None for the usual number."""

    def __init__(self, commands: Sequence[str], seconds: float, max_output_length: int | None) -> None:
        self._commands = commands
        self._most = max_output_length or MAX_CHARACTERS
        self._mark = secrets.token_hex(16)
        asked = {"commands": [*commands], "seconds": seconds, "bytes": MAX_BYTES, "mark": self._mark}
        self.code = f"exec({PROGRAM!r}, {{'asked': {json.dumps(asked)!r}}})"

    def outputs(self, result: CellResult) -> list[Output]:
        """What came of each command."""
        _, _, said = result.logs.rpartition(self._mark)
        line, _, notes = said.partition("\n")
        told = _read(line) if said else None
        if told is None or len(told) != len(self._commands):  # they were cut short
            ended: Output = {"type": "exit", "exit_code": 137} if result.lost else {"type": "timeout"}
            return [{"stdout": "", "stderr": _cut(result.logs, self._most), "outcome": ended}] + [
                {"stdout": "", "stderr": "", "outcome": ended} for _ in self._commands[1:]
            ]
        outputs = [self._output(*each) for each in told]
        if notes.strip():
            outputs[-1]["stderr"] += notes
        return outputs

    def _output(self, stdout: _Said, stderr: _Said, code: int | None) -> Output:
        out, err = stdout.text, stderr.text
        of_err = min(len(err), max(self._most - len(out), self._most // 2))
        outcome: Output = {"type": "timeout"} if code is None else {"type": "exit", "exit_code": code}
        return {
            "stdout": _cut(out, self._most - of_err, more=stdout.more),
            "stderr": _cut(err, of_err, more=stderr.more),
            "outcome": outcome,
        }


@dataclass(frozen=True, slots=True)
class _Said:
    """What a command wrote to one stream. more: there was more of it, which was not kept."""

    text: str
    more: bool

    @classmethod
    def of(cls, kept: Any, more: Any) -> _Said:
        """Raises ValueError or TypeError for what is none."""
        return cls(base64.b64decode(kept).decode("utf-8", "replace"), more is True)


def _exit_code(told: Any) -> int | None:
    if told is not None and (type(told) is not int or not -255 <= told <= 255):
        raise ValueError("no exit code")
    return told


def _cut(text: str, most: int, *, more: bool = False) -> str:
    """The first characters of a text, and a note where there were more."""
    if len(text) <= most and not more:
        return text
    return f"{text[:most]}\n[cut: these are the first {min(len(text), most)} characters]"


def _read(line: str) -> list[tuple[_Said, _Said, int | None]] | None:
    try:
        told = json.loads(line)
        return [
            (_Said.of(out, out_more), _Said.of(err, err_more), _exit_code(code))
            for out, out_more, err, err_more, code in told
        ]
    except (ValueError, TypeError, binascii.Error, RecursionError):
        return None
