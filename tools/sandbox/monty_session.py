"""Cells for Monty, an interpreter of a part of Python in a process without system calls.

Its session is bytes: it is taken up from them before each cell, and put into them after it, so nothing has to
live between cells, and a cell that was cut short can be run again from where it began. Time and chance are
given from outside, so it then comes out the same.
"""

from __future__ import annotations

import ast
import asyncio
import datetime
import hashlib
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from tools.priority import let_stand_back
from tools.sandbox.cells import DATA, CellLimits, CellResult, Moment, SandboxError

if TYPE_CHECKING:
    from pydantic_monty import Monty, OsHandler

MAX_STATE = 8 * 1024 * 1024
"""Bytes of a session."""

MAX_DRAWN = 1024 * 1024
"""Random bytes that a cell may ask for at once."""

_LAST = "__"
"""The name under which the value of a cell's last expression is until it has been shown."""

_KEEPS = f"{_LAST} = "
"""What stands before that expression in what the interpreter is given."""

_SHOWN = f"None if {_LAST} is None else f'{{{_LAST}!r}}'"
"""That value as a text, by what code cannot name: a `repr` could be its own, and come to anything."""

LACKS = (
    "The interpreter knows a part of Python only: there are no third-party packages, no generators, and of "
    "the standard library little besides base64, bisect, collections, copy, csv, dataclasses, datetime, "
    "decimal, functools, hashlib, itertools, json, math, os, pathlib, random, re, sys, time, typing and "
    "unicodedata; io, statistics and string are among what is missing."
)
"""What a model is told of it."""


class MontyInterpreter:
    """Runs the cells of all containers, each with the session that it is given.

    Its pool is used from threads: the one for event loops leaves threads of its own behind, which abort the
    process as it ends.
    """

    def __init__(self, limits: CellLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.live, thread_name_prefix="monty")
        self._places = asyncio.Semaphore(limits.live)
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        self._pool: Monty | None = None

    async def start(self) -> None:
        """Start its processes. Raises SandboxError."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._start)

    def _start(self) -> None:
        try:
            from pydantic_monty import Monty

            pool = Monty(min_processes=0, max_processes=self._limits.live)
            pool.__enter__()
        except ImportError:
            raise SandboxError("Monty is not installed: pip install -e '.[code]'") from None
        except (OSError, RuntimeError) as fault:
            raise SandboxError(f"Monty cannot be started: {fault}") from None
        self._pool = pool

    async def close(self) -> None:
        """End its processes."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.get_running_loop().run_in_executor(self._threads, pool.__exit__, None, None, None)
        self._threads.shutdown()

    async def run(
        self,
        code: str,
        owner: str,
        data: Path,
        state: bytes | None,
        moment: Moment,
        memory: int,
        stop: asyncio.Event,
    ) -> CellResult:
        """Run a cell, when its owner's turn has come. state: the session as of the cell before. stop: set to
        stop it. A cell that is stopped leaves the session as it was."""
        if (turns := self._turns.get(owner)) is None:
            turns = self._turns[owner] = asyncio.Semaphore(self._limits.per_owner)
        async with turns, self._places:
            held = _Held()
            work = partial(self._run, code, data, state, moment, memory, held)
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
            most_s = self._limits.cell_s + self._limits.grace_s
            try:
                # The interpreter stops a cell itself; one that keeps it from looking at the clock is ended.
                await asyncio.wait({running, stopped}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                held.end()
                await asyncio.wait({running})
            return running.result()

    def _run(
        self, code: str, data: Path, state: bytes | None, moment: Moment, memory: int, held: _Held
    ) -> CellResult:
        import pydantic_monty as monty

        assert self._pool is not None, "it was started"
        limits = self._limits
        logs = monty.CollectString(limits.log_bytes)
        session = self._pool.checkout(
            limits={
                "max_memory": memory,
                "max_feed_duration_secs": limits.cell_s,
                "max_suspensions": 100_000,
                "max_total_sleep_secs": limits.cell_s,
            },
            # What a policy says itself would be that of the first cell for as long as the session lives.
            os_policy={"datetime": "call_host", "random_start": "call_host", "sleep": "zero"},
        )
        folder = monty.MountDir(
            host_path=data, virtual_path=DATA, mode="read-write", write_bytes_limit=limits.data_bytes
        )
        error: str | None = None
        value: str | None = None
        code, last = _keeping_last(code.removeprefix("\ufeff"))
        world = _world(moment)

        def feed(code: str) -> Any:
            return session.feed_run(code, mount=folder, print_callback=logs, cwd=DATA, os=world)

        def stopped(why: str) -> CellResult:
            told = f"{_bounded(why, limits.log_bytes)}\nThe variables are those of the cell before."
            return CellResult(f"{logs.output}{told}", ok=False, state=state)

        try:
            with folder, session:
                try:
                    if session.worker_pid is not None:
                        let_stand_back(session.worker_pid)
                    if not held.take(session.worker_pid):
                        return stopped("The code was stopped before it began.")
                    if state is not None:
                        session.load_session(state)
                    try:
                        feed(code)
                        if last is not None:
                            value = feed(f"{_SHOWN}[:{limits.log_bytes}]")
                    except (monty.MontyRuntimeError, monty.MontySyntaxError) as fault:
                        error = fault.display() if last is None else _as_written(fault.display(), *last)
                        if _is_flood(fault, limits.log_bytes):
                            error = (
                                f"[cut: the code printed more than {limits.log_bytes} bytes, and was stopped]"
                            )
                        if _is_late(fault):
                            error = f"[the code was stopped: it may run for {limits.cell_s:g} s]"
                        if _is_end(fault):
                            return stopped(error)
                    try:
                        if last is not None:
                            feed(f"{_LAST} = None")
                        kept = session.dump()
                    except monty.MontyRuntimeError as fault:
                        return stopped(f"The variables cannot be kept: {fault.display()}")
                finally:
                    held.leave()  # before the process is another cell's
        except monty.MontyCrashedError:
            return stopped("The interpreter was ended: the code took too much time or memory.")
        if len(kept) > MAX_STATE:
            has = f"{len(kept)} bytes, and {MAX_STATE} can be kept."
            return stopped(f"The variables have become too large: {has}")
        shown = logs.output if value is None else f"{logs.output}{value}\n"
        return CellResult(_bounded(shown + (error or ""), limits.log_bytes), error is None, state=kept)


class _Held:
    """The process that runs a cell, from when it is known until the cell has ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._process: int | None = None

    def take(self, process: int | None) -> bool:
        """The cell begins in a process; False where it is not to begin any more."""
        with self._lock:
            self._process = process
            return not self._ended

    def leave(self) -> None:
        """The cell has ended, and the process is no longer its own."""
        with self._lock:
            self._process = None

    def end(self) -> None:
        """End the process, or keep the cell from beginning."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.kill(self._process, signal.SIGKILL)


def _keeping_last(code: str) -> tuple[str, tuple[str, int] | None]:
    """A cell that has no value itself, and has that of its last expression under a name; and the line in
    which that expression begins, as it was written, and where in it, None where no value is to be shown. What
    the interpreter made of a value for this process could take any amount of memory and time, whatever the
    limits of the cell."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the interpreter says what is wrong
        body = []
    if not body or not isinstance(body[-1], ast.Expr) or code.rstrip().endswith(";"):
        return f"{code}\nNone", None
    lines = code.encode().splitlines(keepends=True)  # columns are counted in bytes
    row, column = body[-1].lineno - 1, body[-1].col_offset
    before, rest = lines[row][:column], lines[row][column:]
    lines[row] = before + _KEEPS.encode() + rest
    return b"".join(lines).decode(), ((before + rest).decode().rstrip(), len(before.decode()))


def _as_written(told: str, line: str, at: int) -> str:
    """What an error says, with the line of the last expression as it was written, and the marks below it."""
    given = re.escape(f"    {line[:at]}{_KEEPS}{line[at:]}")
    marked = re.compile(rf"^{given}(?:\n( {{{at + 4}}}) {{{len(_KEEPS)}}}( *~+)$|$)", re.MULTILINE)
    return marked.sub(lambda found: f"    {line}" + (f"\n{found[1]}{found[2]}" if found[2] else ""), told)


def _bounded(text: str, most: int) -> str:
    """A text of at most so many bytes, with a note where there was more."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return text
    return f"{encoded[:most].decode('utf-8', 'ignore')}\n[cut: these are the first {most} bytes]"


def _world(moment: Moment) -> OsHandler:
    """What a cell sees of the world: the time, which stands still, and bytes that follow from a seed."""
    at = datetime.datetime.fromtimestamp(moment.at, datetime.UTC)
    drawn = 0

    def answer(*, name: str, args: tuple[Any, ...], **_: Any) -> Any:
        nonlocal drawn
        from pydantic_monty import NOT_HANDLED

        match name:
            case "datetime.now":
                return at.astimezone(args[0]) if args and args[0] is not None else at.replace(tzinfo=None)
            case "date.today":
                return at.date()
            case "time.time":
                return moment.at
            case "os.urandom" if args[0] <= MAX_DRAWN:
                drawn += 1
                return hashlib.shake_256(f"{moment.seed}:{drawn}".encode()).digest(args[0])
        return NOT_HANDLED

    return answer


def _is_end(fault: Any) -> bool:
    """Whether a session is in no certain state after an error: a limit stopped it."""
    return isinstance(fault.exception(), TimeoutError | MemoryError)


def _is_late(fault: Any) -> bool:
    """Whether the limit of a cell's time was exceeded."""
    return isinstance(fault.exception(), TimeoutError) and str(fault.exception()).startswith(
        "feed time limit exceeded"
    )


def _is_flood(fault: Any, log_bytes: int) -> bool:
    """Whether what was exceeded is the limit of what is printed, which is told as one of memory."""
    return isinstance(fault.exception(), MemoryError) and str(fault.exception()).endswith(
        f"> {log_bytes} bytes"
    )
