"""What a sandbox is asked and what it answers: the limits of a cell, what came of it, and which files it
changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["bubblewrap", "landlock", "monty", "command"]

MIB = 1024 * 1024

RUN_CODE = "code.run"
"""The name of the tool that runs cells. No function can have it, and no model is shown it."""

RUN_SHELL = "shell.run"
"""The same of the tool that runs commands of a shell."""

NO_CODE = "code.none"
"""The name of a tool that runs nothing: its description says why no sandbox was found, where one was looked
for."""

DATA = "/mnt/data"
"""The folder of a container's files, as its code sees it."""


class SandboxError(Exception):
    """A sandbox cannot be had, or not be started; the message says why."""


@dataclass(frozen=True, slots=True)
class CellLimits:
    """What code may use.

    cell_s: seconds that a cell may take; it is interrupted then, and its process ended grace_s later.
    memory_bytes: address space of each process, and memory of all processes of a session together; of the
    heap, where the interpreter is Monty. data_bytes, files: of all files of a container. log_bytes: of a
    cell's output. images: shown of a cell. processes: at once, threads included. descriptors: that all
    processes of a session hold open. scratch_bytes: of /tmp, and of shared memory. idle_s: seconds after
    which a session without a cell ends. per_owner, live: sessions that may live at once.
    """

    cell_s: float = 60.0
    grace_s: float = 5.0
    memory_bytes: int = 1024 * MIB
    data_bytes: int = 256 * MIB
    files: int = 1000
    log_bytes: int = MIB
    images: int = 8
    processes: int = 64
    descriptors: int = 1024
    scratch_bytes: int = 64 * MIB
    idle_s: float = 600.0
    per_owner: int = 2
    live: int = 16


@dataclass(frozen=True, slots=True)
class Workspace:
    """A container as storage has it, for the cell that is about to run.

    key: names it. version: raised by each change. files: the digest and the size in bytes of each file, by
    its path below `/mnt/data`. state: the session as of the last finished cell, where the tier can keep it.
    cells: how many have run. memory_bytes: in the place of that of the limits, where it is lower.
    """

    key: str
    owner: str
    version: int = 0
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    state: bytes | None = None
    cells: int = 0
    memory_bytes: int | None = None


Load = Callable[[], Awaitable[Workspace]]
"""Reads a container from storage."""
Write = Callable[[bytes], object]
"""Takes the next bytes of a file."""
Fetch = Callable[[str, Write], Awaitable[None]]
"""Hands all bytes of the file that a digest names, in pieces."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a cell runs, as its code sees it, where the tier can pin that: the time in seconds since the
    epoch, and a seed. A cell that is run again with the same moment comes out the same."""

    at: float
    seed: str


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of a cell.

    logs: what it printed, its last expression's value, and the traceback of an error. ok: whether it ended
    without an error. images: paths of those of its files that it showed. changed, removed: paths of files, as
    far as is known; those that it only touched are among them. state: the session now, where the tier can
    keep it. lost: whether the session ended, so that its variables are gone.
    """

    logs: str
    ok: bool
    images: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    state: bytes | None = None
    lost: bool = False
