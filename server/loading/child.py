"""An engine in a process of its own: begun, ended, and begun again where it has ended by itself.

What was asked of it when its process ended waits until it is back, and goes on at the next token; that is the
work of `engine.RemoteEngine`, whose line leads here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from engine import EngineLine, LoadError
from server.config import Config
from server.loading.shelf import State

log = logging.getLogger("antiphon.models")

SETTLED_S = 10.0
"""A process that has lived for this long is begun again at once when it ends; before that, after a pause."""

PAUSES_S = (0.0, 0.5, 2.0, 8.0)
"""The pauses before it is begun again while it does not settle; behind the last it is given up."""

ENDING_S = 10.0
"""How long a process may take to end before it is killed."""


class Child:
    """The process of one model, through all of its lives. `line` leads to it.

    on_wanted: told when somebody waits for it while it is not there. folder: where its sockets are to be; by
    default in one of its own. on_replaced: told when it serves another model than before, because its files
    have changed.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        on_wanted: Callable[[], None] | None = None,
        folder: Path | None = None,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._config = config
        self._folder = folder
        self._on_wanted = on_wanted
        self._on_replaced = on_replaced
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # it is not begun while it ends
        self._line: EngineLine | None = None
        self.num_crashes = 0
        self.given_up: str | None = None
        """Why it is not begun again by itself."""

    def save_for(self, database: str | None) -> None:
        """What it saves belongs to a database; from its next life on."""
        self._config = self._config.saving_for(database)

    @property
    def line(self) -> EngineLine:
        """The connection with it, which outlives its lives."""
        if self._line is None:
            self._line = EngineLine(self.socket, self._on_wanted, self._replaced)
        return self._line

    def _replaced(self) -> None:
        log.warning(
            "%s has changed on disk: it is another model now, and what began with the one before fails",
            self.name,
        )
        self._on_replaced()

    @property
    def socket(self) -> Path:
        """Where its process listens, in each of its lives."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="antiphon-"))  # for this user only
        return self._folder / "engine.sock"

    @property
    def is_kept(self) -> bool:
        """Whether it has a process, or is about to be begun again."""
        return self._keeping is not None and not self._keeping.done()

    def state(self) -> State:
        """Where it stands."""
        if not self.is_kept:
            return "unloaded"
        return "loaded" if self.line.is_up else "loading"

    @property
    def pid(self) -> int | None:
        """Of the process that lives now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def memory_bytes(self) -> int:
        """What its process holds in memory now; 0 where there is none."""
        if (pid := self.pid) is not None:
            with suppress(OSError, ValueError, IndexError):  # it has just ended, or this is no Linux
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                return pages * os.sysconf("SC_PAGE_SIZE")
        return 0

    async def start(self) -> None:
        """Begin it, and return when it serves. Raises LoadError."""
        async with self._turn:
            line = self.line
            if self.is_kept:  # it has just ended, and is on its way back
                await line.ready()
                return
            self.given_up = None
            line.expect()
            try:
                await self._begin()
                await line.open()
            except BaseException:
                await self._end()
                raise
            self._keeping = asyncio.create_task(self._keep(), name=f"engine-{self.name}")

    async def stop(self) -> None:
        """End it; whoever wants it later has it begun again."""
        async with self._turn:
            if self._line is not None:
                self._line.rest()
            await self._end()

    async def close(self) -> None:
        """End it for good."""
        await self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(ENDING_S):
                await process.wait()
        except TimeoutError:
            log.error("the engine's process of %s does not end; it is killed", self.name)
            process.kill()
            await process.wait()

    async def _begin(self) -> None:
        """One life: until it says that it serves. Raises LoadError with what it says otherwise."""
        folder = self.socket.parent
        told = {
            "name": "engine",
            "label": f"engine {self.name}",
            "folder": str(folder),
            "settings": self._config.dumped(),
        }
        try:
            folder.mkdir(mode=0o700, exist_ok=True)  # a child that lost its parent removes it
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "server.process.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a terminal's signals are for the server, which ends its children
            )
        except OSError as error:
            raise LoadError(f"the process of {self.name} cannot be started: {error}") from None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(orjson.dumps(told) + b"\n")
        while line := await _next_line(process.stdout):
            said: Any = None
            with suppress(ValueError):
                said = orjson.loads(line)
            match said:
                case {"ready": _}:
                    return
                case {"refused": [*reasons]}:
                    await process.wait()
                    raise LoadError("; ".join(map(str, reasons)))
                case _:
                    sys.stdout.buffer.write(line)
        raise LoadError(f"the process of {self.name} ended before it served ({_how(await process.wait())})")

    async def _keep(self) -> None:
        """Begin it again whenever it ends by itself."""
        brief = 0  # lives in a row that did not settle
        while True:
            began = time.monotonic()
            process = self._process
            assert process is not None and process.stdout is not None
            while await process.stdout.read(4096):
                pass
            code = await process.wait()
            self.num_crashes += 1
            brief = 0 if time.monotonic() - began >= SETTLED_S else brief + 1
            why = f"the engine's process of {self.name} has ended ({_how(code)})"
            while True:
                if brief > len(PAUSES_S):
                    self._give_up(why)
                    return
                log.error("%s; it is started again", why)
                await asyncio.sleep(PAUSES_S[max(0, brief - 1)])
                try:
                    await self._begin()
                    break
                except LoadError as error:
                    brief, why = brief + 1, str(error)

    def _give_up(self, why: str) -> None:
        log.error("%s; it is given up until it is wanted again", why)
        self.given_up = why
        self.line.refuse(f"The model '{self.name}' cannot be had now: {why}.")


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """A line of what a process prints, empty at the end. Of one above 64 KiB, which is none of ours, only a
    part may come."""
    while True:
        try:
            return await stream.readline()
        except ValueError:  # it was too long, and is thrown away
            continue


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
