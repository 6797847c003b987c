"""A session of Python in a sandbox, seen from outside: cells go in, what they print comes out.

What the sandbox says is untrusted: it is read within bounds, and can tell nothing but how a cell ended and
which of the container's files it showed.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from tools.sandbox.cells import CellLimits, CellResult, SandboxError
from tools.sandbox.confinement import Confinement

PROGRAM = (files("tools.sandbox") / "worker.py").read_text()

START_S = 30.0
"""Seconds that a session may take to be ready, on a machine that is busy."""
READ_BYTES = 64 * 1024


class PythonSession:
    """One process of Python, which keeps its variables from cell to cell."""

    def __init__(self, confinement: Confinement, data: Path, limits: CellLimits, slot: int) -> None:
        """slot: tells the sessions apart that live at once, from 0."""
        self._confinement = confinement
        self._data = data
        self._limits = limits
        self.slot = slot
        self._process: asyncio.subprocess.Process | None = None
        self._output = -1
        self._logs = bytearray()
        self._cut = asyncio.Event()  # it has said more than is taken

    @property
    def alive(self) -> bool:
        """Whether it can take a cell."""
        return self._process is not None and self._process.returncode is None

    async def start(self, memory_bytes: int) -> None:
        """Start it. Raises SandboxError."""
        told = {
            "data": self._confinement.seen(self._data),
            "alone": self._confinement.command is None,
        }
        self._process, self._output = await self._confinement.start(
            PROGRAM, told, self._data, self._limits, self.slot, memory_bytes
        )
        try:
            async with asyncio.timeout(START_S):
                ready = await self._answer()
        except TimeoutError:
            ready = None
        if ready is None:
            self._take_output()
            said = self._logs.decode("utf-8", "replace").strip().splitlines()
            await self.close()
            raise SandboxError(f"the sandbox did not start: {said[-1] if said else 'it said nothing'}")

    async def run(self, code: str) -> CellResult:
        """Run a cell. It is interrupted when its time is over or it says too much, and the session ended
        where that is of no use."""
        process = self._process
        assert process is not None and process.stdin is not None, "it was started"
        self._logs, notes = bytearray(), list[str]()
        self._cut.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._output, self._take_output)
        try:
            with suppress(ConnectionError):
                process.stdin.write(_line({"code": code}))
            answer = asyncio.ensure_future(self._answer())
            cut = asyncio.ensure_future(self._cut.wait())
            try:
                await asyncio.wait(
                    {answer, cut}, timeout=self._limits.cell_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not answer.done():
                    notes.append(self._why_stopped())
                    with suppress(ConnectionError):
                        process.stdin.write(_line({"interrupt": True}))
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
            if self._output >= 0:
                loop.remove_reader(self._output)
        self._take_output()
        if said is None:
            await self.close()
            notes.append("The session was ended: its variables are gone.")
        text = self._logs.decode("utf-8", "replace")
        shown = tuple(said["images"]) if said is not None else ()
        logs = "\n".join([*filter(None, [text.rstrip("\n") if notes else text]), *notes])
        return CellResult(logs, said is not None and said["ok"] and not notes, shown, lost=said is None)

    def _why_stopped(self) -> str:
        if self._cut.is_set():
            return f"[cut: the code printed more than {self._limits.log_bytes} bytes, and was stopped]"
        return f"[the code was stopped: it may run for {self._limits.cell_s:g} s]"

    def end(self) -> None:
        """Kill it; the cell that it runs then ends."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End it, with all that it has started."""
        self.end()
        process, self._process = self._process, None
        if process is None:
            return
        # Whoever waits for a process waits for the end of what it has said, too.
        assert process.stdout is not None, "it is a pipe"
        while await process.stdout.read(READ_BYTES):
            pass
        await process.wait()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    async def _answer(self) -> dict[str, Any] | None:
        """The next line that it answers; None where it has ended, or answers what it never would."""
        assert self._process is not None and self._process.stdout is not None, "it was started"
        try:
            said = json.loads(await self._process.stdout.readline())
        except (ValueError, ConnectionError):  # too long, or no JSON
            return None
        if not isinstance(said, dict):
            return None
        images = said.get("images")
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            images = []
        return {"ok": said.get("ok") is True, "images": images[: self._limits.images]}

    def _take_output(self) -> None:
        """Take what was printed; what is beyond the limit is thrown away."""
        for _ in range(16):  # then others have their turn
            try:
                piece = os.read(self._output, READ_BYTES) if self._output >= 0 else b""
            except BlockingIOError:
                return
            if not piece:
                if self._output >= 0 and not self.alive:
                    asyncio.get_running_loop().remove_reader(self._output)
                return
            room = self._limits.log_bytes - len(self._logs)
            self._logs += piece[: max(room, 0)]
            if len(piece) > room:
                self._cut.set()


def _line(order: dict[str, Any]) -> bytes:
    return json.dumps(order).encode() + b"\n"
