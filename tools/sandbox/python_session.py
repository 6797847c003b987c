"""A session of Python in a sandbox, seen from outside: cells go in, what they print comes out.

What the sandbox says is untrusted: it is read within bounds, and can tell nothing but how a cell ended and
which of the container's files it showed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from tools.priority import end_first, let_session_stand_back
from tools.sandbox.cells import DATA, CellLimits, CellResult, SandboxError
from tools.sandbox.confinement import SCRATCH, SCRATCH_NAME, Confinement
from tools.sandbox.folder import MAX_ENTRIES, Folder, TooMuch, remove, space_taken
from tools.sandbox.processes import (
    below,
    descriptors_of,
    go_on,
    inodes_mapped_by,
    kill,
    lives,
    memory_of,
    of_session,
    seen_as,
    stop,
    written_by,
)

log = logging.getLogger("antiphon.sandbox")

PROGRAM = (files("tools.sandbox") / "worker.py").read_text()

START_S = 30.0
"""Seconds that a session may take to be ready, on a machine that is busy."""
READ_BYTES = 64 * 1024
CLOSE_S = 5.0
"""Seconds that the end of a session is waited for."""
WRITES_A_S = 64 * 1024 * 1024
"""Bytes a second that a session may write to a disk, which is the database's, too."""
AHEAD_S = 0.5
"""So many seconds' worth of them may be written at once."""
ROUNDS = 40
"""Looks for processes that were started while others were being stopped."""
SETTLE_S = 5.0
"""Seconds that processes may take to stop or to end, for which each has to get a processor."""
DATA_NAME = "data"
"""Of the folder of the files, where they are on disk."""


class PythonSession:
    """One process of Python, which keeps its variables from cell to cell."""

    def __init__(self, confinement: Confinement, place: Path | None, limits: CellLimits, slot: int) -> None:
        """place: the folder that the session has to itself, where files of containers are on disk. slot:
        tells the sessions apart that live at once, from 0."""
        self._confinement = confinement
        self._place = place
        self._limits = limits
        self.slot = slot
        self._memory = limits.memory_bytes
        self._folder: Folder | None = None
        self._scratch: list[int] = []  # descriptors of the other folders in memory
        self._process: asyncio.subprocess.Process | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._output = -1
        self._logs = bytearray()
        self._cut = asyncio.Event()  # it has said more than is taken
        self._written = 0  # bytes, by the processes that were there at the last look
        self._write_at = 0.0  # when nothing of what it may write is used
        self._held = False  # it has written too much, and is stopped for a while
        self._ending = False  # the cell is to end, and is not stopped any more
        # what the worker had mapped when the last cell ended: see `_map`
        self._mapped: frozenset[int] | None = frozenset()
        # inodes of files that the last cell may have written as memory that is mapped; None: of any
        self.touched: frozenset[int] | None = frozenset()

    @property
    def alive(self) -> bool:
        """Whether it can take a cell."""
        return self._process is not None and self._process.returncode is None

    @property
    def closed(self) -> bool:
        """Whether it has been ended."""
        return self._process is None

    @property
    def folder(self) -> Folder:
        """The folder of the container's files, as long as the session was not released."""
        assert self._folder is not None, "it was started, and not released"
        return self._folder

    async def start(self, memory_bytes: int) -> None:
        """Start it, with an empty folder of files. Raises SandboxError."""
        self._memory = memory_bytes
        data = None if self._place is None else await asyncio.to_thread(self._make_folders, self._place)
        started = await self._confinement.start(PROGRAM, data, self._limits, self.slot, memory_bytes)
        self._process, self._output = started.process, started.output
        self._orders = started.orders
        try:
            async with asyncio.timeout(START_S):
                ready = await self._answer()
            if ready is not None:
                if started.channel is None:
                    self._folder = data
                else:
                    self._folder, *self._scratch = _shown(started.channel)
                await asyncio.to_thread(self._confinement.give, self.folder, self.slot)
                await asyncio.to_thread(self._hold_back)
        except (TimeoutError, OSError):
            ready = None
        except BaseException:
            await self.close()
            self.release()
            raise
        finally:
            if started.channel is not None:
                started.channel.close()
        if ready is None:
            self._take_output()
            said = self._logs.decode("utf-8", "replace").strip().splitlines()
            await self.close()
            self.release()
            raise SandboxError(f"the sandbox did not start: {said[-1] if said else 'it said nothing'}")

    def _hold_back(self) -> None:
        """Have the worker, which cannot write to `/proc` itself under bubblewrap, stand back behind the
        server."""
        worker = self._worker(self._processes())
        if self._confinement.alone and worker is not None:
            end_first(worker)
            let_session_stand_back(worker)

    def _make_folders(self, place: Path) -> Path:
        place.chmod(0o711)  # the user that code runs as finds its folders in it
        for name in (DATA_NAME, SCRATCH_NAME):
            remove(place / name)
            (place / name).mkdir(mode=0o700)
            self._confinement.give(place / name, self.slot)
        return place / DATA_NAME

    def release(self) -> None:
        """Let go of the folders. Those in memory are then no more."""
        held, self._folder, self._scratch = [self._folder, *self._scratch], None, []
        for folder in held:
            if isinstance(folder, int):
                os.close(folder)

    def excess(self) -> str | None:
        """What the session takes more of than it may; None where nothing is. One that writes to a disk faster
        than it may is stopped until some later look."""
        own, limits = self._processes(), self._limits
        processes = [seen_as(process) for process in own]
        # The one tier whose files are on a disk and whose processes are the server's own.
        if self._confinement.tier == "landlock":
            self._pace(own[self._confinement.num_own - 1 :], written_by(processes))
        memory = memory_of(processes, self._memory)
        if memory > self._memory:
            return f"Its processes took {memory} bytes of memory; {self._memory} may be taken."
        if (number := descriptors_of(processes)) > limits.descriptors:
            return f"Its processes held {number} descriptors; {limits.descriptors} may be held."
        try:
            taken, entries = space_taken(self._place or self.folder, processes)
            entries += sum(space_taken(folder, ())[1] for folder in self._scratch)
        except TooMuch as fault:
            return str(fault)
        except OSError as fault:
            return f"The folder cannot be read: {fault.strerror}."
        if entries > MAX_ENTRIES:
            return f"There are more than {MAX_ENTRIES} files and folders."
        most = limits.data_bytes + limits.scratch_bytes
        if self._place is not None and taken > most:
            return f"The files took {taken} bytes; {most} may be taken, {limits.data_bytes} of them kept."
        return None

    def _pace(self, code: list[int], written: int) -> None:
        """Stop the processes that run code while more was written than may be, and then let them go on."""
        now = time.monotonic()
        new, self._written = max(written - self._written, 0), written
        self._write_at = max(self._write_at, now) + new / WRITES_A_S
        held = self._write_at - now > AHEAD_S and not self._ending
        if held:
            stop(code)
        elif self._held:
            go_on(code)
        self._held = held

    def _processes(self) -> list[int]:
        process = self._process
        if process is None or sys.platform != "linux":
            return []
        return below(process.pid) if self._confinement.alone else of_session(process.pid)

    def _worker(self, processes: list[int]) -> int | None:
        """The process that runs cells, of these; those before it confine it. None before it is there."""
        place = self._confinement.num_own
        return processes[place - 1] if len(processes) >= place else None

    def _settle(self) -> bool:
        """End what a cell has left running, and let the worker not go on before the next one, nor any of its
        threads; whether that is so."""
        own, rounds, known = self._confinement.num_own, 0, set[int]()
        until, pause_s = time.monotonic() + SETTLE_S, 0.0
        while rounds < ROUNDS and time.monotonic() < until:
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0002, 0.01)
            processes = self._processes()
            if not stop(processes[own - 1 : own]):
                continue
            if not kill(left := processes[own:]):
                return True
            rounds += not known.issuperset(left)
            known.update(left)
        return False

    async def run(self, code: str) -> CellResult:
        """Run a cell. It is interrupted when its time is over or it says too much, and the session ended
        where that is of no use."""
        orders = self._orders
        assert orders is not None, "it was started"
        self._logs, notes = bytearray(), list[str]()
        self._cut.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._output, self._take_output)
        try:
            self._ending = False
            go_on(self._processes()[:3])
            with suppress(ConnectionError):
                orders.write(_line({"code": code}))
            answer = asyncio.ensure_future(self._answer())
            cut = asyncio.ensure_future(self._cut.wait())
            try:
                await asyncio.wait(
                    {answer, cut}, timeout=self._limits.cell_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not answer.done():
                    notes.append(self._why_stopped())
                    self._ending = True
                    go_on(self._processes())
                    with suppress(ConnectionError):
                        orders.write(_line({"interrupt": True}))
                    await asyncio.wait({answer}, timeout=self._limits.grace_s)
                said = answer.result() if answer.done() else None
            finally:
                cut.cancel()
                answer.cancel()
                await asyncio.gather(cut, answer, return_exceptions=True)
        except BaseException:
            await self.close()  # nobody knows what of the cell is still to come
            raise
        finally:
            self._hear_no_more()
        self._take_output()
        stops = said is not None and self._confinement.tier != "command"
        if stops and not await asyncio.to_thread(self._settle):
            said = None  # it starts processes faster than they can be stopped
        # Many short cells, none of which anybody has looked at, can take what one may not.
        if said is not None and (why := await asyncio.to_thread(self.excess)) is not None:
            said = None
            notes.append(f"[{why}]")
        reported = frozenset[int]() if said is None else said["mapped"]
        before, now = self._mapped, await asyncio.to_thread(self._map)
        self._mapped = now
        self.touched = None if before is None or now is None else before | now | reported
        if said is None:
            await self.close()
            notes.append("The session was ended: its variables are gone.")
        text = self._logs.decode("utf-8", "replace")
        if isinstance(self._folder, Path):
            text = text.replace(str(self._folder), DATA)
        shown = tuple(said["images"]) if said is not None else ()
        logs = "\n".join([*filter(None, [text.rstrip("\n") if notes else text]), *notes])
        return CellResult(logs, said is not None and said["ok"] and not notes, shown, lost=said is None)

    def _hear_no_more(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().remove_reader(self._output)

    def _map(self) -> frozenset[int] | None:
        """The inodes of files that the worker has mapped into its memory, and can write; None: of any."""
        worker = self._worker(self._processes())
        return frozenset() if worker is None else inodes_mapped_by(worker)

    def _why_stopped(self) -> str:
        if self._cut.is_set():
            return f"[cut: the code printed more than {self._limits.log_bytes} bytes, and was stopped]"
        return f"[the code was stopped: it may run for {self._limits.cell_s:g} s]"

    def end(self) -> None:
        """Kill what is in its group; the cell that it runs then ends, and `close` sees to the rest."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end_others(self, leader: int) -> None:
        """Kill what has left the group of the first process. In a namespace of its own all end with that."""
        rounds = 0 if self._confinement.alone or sys.platform != "linux" else ROUNDS
        while rounds and kill(of_session(leader)[1:]):
            rounds -= 1

    async def close(self) -> None:
        """End it, with all that it has started, in a bounded time."""
        self._hear_no_more()
        first = self._processes()[1:2] if self._confinement.alone else []
        self.end()
        if self._orders is not None:
            self._orders.close()
        output, self._output = self._output, -1
        process, self._process = self._process, None
        try:
            if process is not None:
                await self._over(process, first)
        finally:
            if output >= 0:
                os.close(output)

    async def _over(self, process: asyncio.subprocess.Process, first: list[int]) -> None:
        """Wait until a process that was killed has ended, with all that it has started. first: see
        `_uncounted`."""
        await asyncio.to_thread(self._end_others, process.pid)
        # Whoever waits for a process waits for the end of what it has said, too; and what an operator's
        # command has put elsewhere may keep that open.
        assert process.stdout is not None, "it is a pipe"
        try:
            async with asyncio.timeout(CLOSE_S):
                while await process.stdout.read(READ_BYTES):
                    pass
                await process.wait()
            await self._uncounted(first)
        except TimeoutError:
            log.warning("a process that the sandbox has started outlives its end, out of reach")
            process._transport.close()  # type: ignore[attr-defined]  # there is no public way

    async def _uncounted(self, first: list[int]) -> None:
        """Wait until the kernel has taken notice of the ends of all processes, because until then they count
        as processes of their user. first: of a namespace; it ends after all others in it."""
        async with asyncio.timeout(CLOSE_S):
            while any(map(lives, first)):
                await asyncio.sleep(0.002)

    async def _answer(self) -> dict[str, Any] | None:
        """The next line that it answers; None where it has ended, or answers what it never would."""
        assert self._process is not None and self._process.stdout is not None, "it was started"
        try:
            said = json.loads(await self._process.stdout.readline())
        except (ValueError, RecursionError, ConnectionError):  # too long, too deep, or no JSON
            return None
        if not isinstance(said, dict):
            return None
        images = said.get("images")
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            images = []
        mapped = said.get("mapped")
        inodes = mapped if isinstance(mapped, list) else []
        return {
            "ok": said.get("ok") is True,
            "images": images[: self._limits.images],
            "mapped": frozenset(each for each in inodes if isinstance(each, int)),
        }

    def _take_output(self) -> None:
        """Take what was printed; what is beyond the limit is thrown away."""
        for _ in range(16):  # then others have their turn
            try:
                piece = os.read(self._output, READ_BYTES) if self._output >= 0 else b""
            except BlockingIOError:
                return
            if not piece:
                if self._output >= 0 and not self.alive:
                    # Not at once: uvloop then calls what it has just let go of.
                    asyncio.get_running_loop().call_soon(self._hear_no_more)
                return
            room = self._limits.log_bytes - len(self._logs)
            self._logs += piece[: max(room, 0)]
            if len(piece) > room:
                self._cut.set()


def _shown(channel: socket.socket) -> list[int]:
    """The descriptors of the folders that the worker has sent before it was ready. Raises OSError."""
    channel.setblocking(False)
    _, handed, _, _ = socket.recv_fds(channel, 1, 1 + len(SCRATCH))
    if len(handed) != 1 + len(SCRATCH):
        raise OSError("not all folders were shown")
    return handed


def _line(order: dict[str, Any]) -> bytes:
    return json.dumps(order).encode() + b"\n"
