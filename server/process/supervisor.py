"""Server processes at one port, before one engine in a process of its own: `api_server_count` and
`engine_process`.

This process starts the others, accepts connections and hands each to the server that has the fewest open,
starts again what has ended, keeps the models of the file, and passes signals on. It looks into no connection.
All processes end with it, in whatever way it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from engine import LoadError
from server.admin import address_file, leave_address
from server.config import Config, ConfigError
from server.model_registry import SharedModels, is_hosted
from server.process.seat import ENGINE, server_name, shelf_socket
from server.process.serve import (
    CLOSING_S,
    ECHO_S,
    base_url,
    bind,
    cannot_listen,
    print_banner,
    refuse,
)
from server.process.sockets import BATCH, PAUSE_S, raise_descriptor_limit
from server.process.systemd import ServiceManager

log = logging.getLogger("antiphon")

SETTLED_S = 10.0
"""A process that has lived for this long is started again at once when it ends; before that, it is tried
after a pause, which is twice as long every time."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

KILLED_S = 2.0
"""How long after its own time to end a process is killed."""


def supervise(config: Config, flags: Mapping[str, Any], *, began: float, reread: Callable[[], Config]) -> int:
    """Serve with `api_server_count` server processes before an engine's until a signal; returns the exit
    code, as `serve` does.

    flags: those that the processes are to be started with. began, reread: as `serve` has them.
    """
    if (reason := unshared(config)) is not None:
        return refuse(reason)
    raise_descriptor_limit()
    folder = Path(tempfile.mkdtemp(prefix="antiphon-"))  # for this user only
    try:
        return asyncio.run(_Supervisor(config, flags, folder, began, reread).run())
    except LoadError as error:
        return refuse(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unshared(config: Config) -> str | None:
    """Why the model and the database cannot be had from several processes, where that is asked for."""
    if not config.has_several_processes:
        return None
    several = config.api_server_count > 1
    asked = f"--api-server-count {config.api_server_count}" if several else "--engine-process"
    inside = [entry.id for entry in config.entries if entry.engine != "upstream" and not entry.in_child]
    if inside:
        return (
            f"{asked} has several processes, and {' and '.join(inside)} would be computed in each of them: "
            "give child = true, for a process of its own that all ask"
        )
    if config.db_file is None or not several:
        return None
    return (
        f"{asked} needs a database that several processes can share, which SQLite is not: give --db "
        "postgresql+asyncpg://USER:PASSWORD@HOST/NAME"
    )


class _Member:
    """One process, through all of its lives."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()  # in this life
        self.reload = False  # it is to read its settings again, once it is ready
        self.banner = ""
        self.channel: socket.socket | None = None  # of a server: over which it is handed connections
        self.num_open = 0

    def signal(self, number: int) -> None:
        """Send it a signal, where it lives."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def rank(self) -> tuple[bool, int]:
        """The least of all gets the next connection."""
        return not self.ready.is_set(), self.num_open


class _Supervisor:
    def __init__(
        self,
        config: Config,
        flags: Mapping[str, Any],
        folder: Path,
        began: float,
        reread: Callable[[], Config],
    ) -> None:
        self._config = config
        self._flags = {name: value for name, value in flags.items() if value is not None}
        self._folder = folder
        self._began = began
        self._reread = reread
        self._manager = ServiceManager.of(os.environ)
        self._admin_token = secrets.token_urlsafe(32)
        self._models = SharedModels(config, shelf_socket(folder))
        self._engine = _Member(ENGINE, -1)
        self._servers = [_Member(server_name(index), index) for index in range(config.api_server_count)]
        self._opened = asyncio.Event()
        self._database: str | None = None  # its id, once a server has opened it
        self._stop = asyncio.Event()
        self._first_signal: float | None = None
        self._started = False  # all were ready once: what ends now is started again
        self._code = 0
        self._reasons: set[str] = set()  # why processes did not start, each printed once
        self._turn = 0
        self._unhanded: socket.socket | None = None
        self._others: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """The whole story, in order."""
        try:
            self._sock = bind(self._config.host, self._config.port)
        except OSError as exc:
            return refuse(cannot_listen(self._config, exc))
        self._url = base_url(self._sock, tls=self._config.ssl_certfile is not None)
        self._status = f"listens on {self._url}"
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        # One that came before needs nothing: the processes have yet to read their settings.
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        await self._models.start()
        keeping = [asyncio.create_task(self._start(), name="start")]
        if is_hosted(self._config):
            keeping.append(asyncio.create_task(self._keep_engine(), name=ENGINE))
        keeping.append(asyncio.create_task(self._keep(self._servers[0]), name="server-0"))
        stopped = asyncio.create_task(self._stop.wait())
        alive = asyncio.create_task(self._manager.alive(), name="alive")
        try:
            waiting = {stopped, *keeping}
            while not self._stop.is_set() and waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopped}:
                    task.result()  # a fault of ours ends everything
            await self._end()
        finally:
            for task in (stopped, alive, *keeping, *self._others):
                task.cancel()
            await asyncio.gather(stopped, alive, *keeping, *self._others, return_exceptions=True)
            for member in (*self._servers, self._engine):
                member.signal(signal.SIGKILL)
            await self._models.close()
            loop.remove_reader(self._sock)
            self._sock.close()
            if self._started:
                address_file(self._config).unlink(missing_ok=True)
        return self._code

    async def _start(self) -> None:
        """Once the first server is ready, which has found the database in order, start the others; once all
        are, say so."""
        first, *others = self._servers
        waiting = asyncio.create_task(self._manager.while_starting("starting"))
        try:
            await first.ready.wait()
            self._others = [asyncio.create_task(self._keep(each), name=each.name) for each in others]
            for each in others:
                await each.ready.wait()
        finally:
            waiting.cancel()
        self._started = True
        leave_address(self._config, self._url, self._admin_token)
        print_banner(first.banner)
        self._manager.ready(self._status)
        if len(self._servers) > 1:
            log.info("%d server processes take turns", len(self._servers))

    async def _keep_engine(self) -> None:
        """Once a server has said for which database engines save, have the engine's process run."""
        await self._opened.wait()
        await self._keep(self._engine)

    async def _keep(self, member: _Member) -> None:
        """Have a process run, in one life after the other."""
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._live(member)
            if self._stop.is_set():
                return
            if not self._started:  # it has said why
                self._code = code if code > 0 else 1
                self._stop.set()
                return
            if time.monotonic() - began >= SETTLED_S:
                pause = FIRST_PAUSE_S
            log.error("the process %s has ended (%s); it is started again", member.name, _how(code))
            await asyncio.sleep(0 if time.monotonic() - began >= SETTLED_S else pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _live(self, member: _Member) -> int:
        """One life of a process; its exit code."""
        theirs: socket.socket | None = None
        if member.index >= 0:
            member.channel, theirs = socket.socketpair()
            member.channel.setblocking(False)
            member.num_open = 0
        told = {
            "name": member.name,
            "index": member.index,
            "flags": self._flags,
            "folder": str(self._folder),
            "url": self._url,
            "admin_token": self._admin_token,
            "channel": None if theirs is None else theirs.fileno(),
            "began": self._began,
            "database": self._database,
        }
        try:
            process = member.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "server.process.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=() if theirs is None else (theirs.fileno(),),
                # A terminal signals its whole group: this process passes on what is for the others, in order.
                start_new_session=True,
            )
            if theirs is not None:
                theirs.close()
                self._attach(member)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(orjson.dumps(told) + b"\n")
            while line := await _line(process.stdout):
                self._said(member, line)
            return await process.wait()
        except OSError as error:
            log.error("the process %s cannot be started: %s", member.name, error)
            return 1
        finally:
            if theirs is not None:
                theirs.close()
            member.ready.clear()
            self._detach(member)

    def _said(self, member: _Member, line: bytes) -> None:
        """A process has printed a line: it is ready, or why it does not start, or what a tool of it says."""
        try:
            told = orjson.loads(line)
        except ValueError:
            told = None
        match told:
            case {"ready": str(banner)}:
                member.banner = banner
                member.ready.set()
                if member.reload:
                    member.reload = False
                    member.signal(signal.SIGHUP)
            case {"database": str() | None as id, **rest} if member.index >= 0 and not rest:
                self._database = id
                self._models.save_for(id)
                self._opened.set()
            case {"refused": [*reasons]}:
                refuse(*(reason for reason in reasons if reason not in self._reasons))
                self._reasons.update(reasons)
            case _:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()

    # -- connections -----------------------------------------------------------------------------------------

    def _attach(self, member: _Member) -> None:
        """A server can be handed connections."""
        assert member.channel is not None
        asyncio.get_running_loop().add_reader(member.channel, self._hear, member)
        self._listen()

    def _detach(self, member: _Member) -> None:
        """It has ended, and its connections with it."""
        if member.channel is not None:
            asyncio.get_running_loop().remove_reader(member.channel)
            member.channel.close()
            member.channel = None

    def _hear(self, member: _Member) -> None:
        """A server says how many of its connections are closed, a byte each."""
        assert member.channel is not None
        with contextlib.suppress(BlockingIOError):
            try:
                told = member.channel.recv(4096)
            except ConnectionError:
                told = b""
            member.num_open -= len(told)
            if not told:
                self._detach(member)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            # Where nobody can be handed a connection, the others wait in the kernel's queue.
            if self._unhanded is None:
                try:
                    self._unhanded, _ = self._sock.accept()
                except (BlockingIOError, InterruptedError, ConnectionError):
                    return
                except OSError as error:
                    log.error("no connection can be accepted for now: %s", error.strerror)
                    self._pause()
                    return
            if not self._hand(self._unhanded):
                self._pause()
                return
            self._unhanded.close()
            self._unhanded = None

    def _hand(self, conn: socket.socket) -> bool:
        """Hand a connection to a server that has the fewest; whether one could take it."""
        num = len(self._servers)
        turns = [self._servers[(self._turn + step) % num] for step in range(num)]
        for member in sorted((each for each in turns if each.channel is not None), key=lambda it: it.rank):
            assert member.channel is not None
            try:
                socket.send_fds(member.channel, [b"+"], [conn.fileno()])
            except OSError:  # it has ended, or has too many to take already
                continue
            member.num_open += 1
            self._turn = member.index + 1
            return True
        return False

    def _pause(self) -> None:
        """Accept nothing for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._listen()

    # -- signals and the end ---------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._stop.set()
        elif now - self._first_signal >= ECHO_S:
            self._code = 128 + number
            for server in self._servers:
                server.signal(number)

    def _reload(self) -> None:
        """Every server reads its settings again, and says what it took over."""
        if self._started:
            self._manager.reloading()
        self._pass_on_reload()
        if self._started:
            self._manager.ready(self._status)

    def _pass_on_reload(self) -> None:
        try:
            new = self._reread()
        except ConfigError as error:
            log.error("SIGHUP: nothing was reloaded: %s", error)
            return
        if self._started:
            leave_address(new, self._url, self._admin_token)
        for server in self._servers:
            if server.ready.is_set():
                server.signal(signal.SIGHUP)
            else:  # while it imports what it needs, the signal would end it
                server.reload = True

    async def _end(self) -> None:
        """Drain the servers, which may still need engines, and then end the engine."""
        self._manager.stopping("ending")
        refused = not self._started and self._code
        grace = 0.0 if refused else self._config.drain_grace_s
        codes = await asyncio.gather(
            *(self._ended(server, grace + CLOSING_S + KILLED_S) for server in self._servers)
        )
        await self._ended(self._engine, CLOSING_S)
        self._code = self._code or max(codes)

    async def _ended(self, member: _Member, seconds: float) -> int:
        """Tell a process to end, and wait for it; one that takes longer is killed. Returns 0 where it ended
        as it was told."""
        process = member.process
        if process is None or process.returncode is not None:
            return 0
        member.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                code = await process.wait()
        except TimeoutError:
            log.error("the process %s does not end; it is killed", member.name)
            member.signal(signal.SIGKILL)
            await process.wait()
            return 1
        return code if code >= 0 else 1


async def _line(output: asyncio.StreamReader) -> bytes:
    """The next line of a process's output, without those that are too long; nothing at its end."""
    while True:
        with contextlib.suppress(ValueError):
            return await output.readline()


def _how(code: int) -> str:
    """How a process ended."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
