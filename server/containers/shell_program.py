"""Runs commands of a shell inside of a container's session, in turn, and writes what came of each.

Its text is handed to the session as a cell, with `asked`, a JSON object, among its globals. So it imports
nothing of ours, and the session's variables stay as they are.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import IO, Any

SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


class Stream:
    """What a command writes, of which the first `most` bytes are kept. size: of all of it."""

    def __init__(self, pipe: IO[bytes], most: int) -> None:
        self._pipe = pipe
        self._most = most
        self.kept = bytearray()
        self.size = 0
        self.reader = threading.Thread(target=self._drain, daemon=True)
        self.reader.start()

    def _drain(self) -> None:
        while piece := os.read(self._pipe.fileno(), 65536):
            self.size += len(piece)
            self.kept += piece[: self._most - len(self.kept)]

    def told(self) -> list[Any]:
        """What was kept, and whether there was more."""
        kept = bytes(self.kept)
        return [base64.b64encode(kept).decode(), self.size > len(kept)]


def begin(command: str) -> subprocess.Popen[bytes]:
    """A shell at work, in a session of its own where the sandbox lets it have one. Raises OSError."""

    def shell(apart: bool) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [SHELL, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=apart,
        )

    try:
        return shell(apart=True)
    except PermissionError:  # what it leaves running then ends with the cell
        return shell(apart=False)


def run(command: str, until: float, most: int, begun: list[int]) -> tuple[list[Stream], int | None]:
    """Standard output and error of a command, of each at most so many bytes, and its exit code; None where
    its time was over, and nothing where that was so before it began."""
    if time.monotonic() >= until:
        return [], None
    process = begin(command)
    begun.append(process.pid)
    assert process.stdout is not None and process.stderr is not None, "they are pipes"
    streams = [Stream(pipe, most) for pipe in (process.stdout, process.stderr)]
    code: int | None = None
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    for stream in streams:  # what it has left running may hold the pipes
        stream.reader.join(0.5)
    return streams, code if code is None or code >= 0 else 128 - code


def answer(asked: dict[str, Any]) -> bytes:
    """The line that tells of all commands."""
    until, room = time.monotonic() + asked["seconds"], asked["bytes"]
    begun: list[int] = []
    told = list[list[Any]]()
    for command in asked["commands"]:
        # Of what is left, so that no command takes the room of those behind it, nor one stream the other's.
        most = room // (len(asked["commands"]) - len(told)) // 2
        try:
            streams, code = run(command, until, most, begun)
        except (OSError, ValueError) as fault:
            why = base64.b64encode(f"{fault}\n".encode("utf-8", "replace")).decode()
            told.append(["", False, why, False, 126])
            continue
        room -= sum(len(stream.kept) for stream in streams)
        if not streams:
            told.append(["", False, "", False, None])
        else:
            told.append([*streams[0].told(), *streams[1].told(), code])
    for pid in begun:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    return f"\n{asked['mark']}{json.dumps(told)}\n".encode()


if "asked" in globals():
    line = answer(json.loads(globals()["asked"]))
    while line:
        line = line[os.write(1, line) :]
