"""Runs the cells of containers: gives each its folder and its session, and takes in which files have changed.

A container's folder and session live here between cells as long as there is room, and are built anew from
what storage has of it where they do not, or where another process has changed it since. Where sessions are
processes, a folder lives no longer than its session.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tools.sandbox.cells import CellLimits, CellResult, Fetch, Load, Moment, SandboxError, Tier, Workspace
from tools.sandbox.confinement import USERS, Confinement
from tools.sandbox.folder import (
    MAX_PATH,
    Folder,
    Mark,
    TooMuch,
    create_file,
    differences,
    is_path,
    open_file,
    remove,
    replace_file,
    scan,
    space_taken,
)
from tools.sandbox.ground import Ground
from tools.sandbox.monty_session import LACKS, MontyInterpreter
from tools.sandbox.python_session import PythonSession
from tools.sandbox.starts import Starts

log = logging.getLogger("antiphon.sandbox")

_IN_TURN = itertools.cycle(range(USERS))
"""Numbers of sessions. The one that has just ended comes last: until the system has taken notice, which some
do late, its processes still count as those of their user."""
TOLD, MAX_TOLD = 5, 100
"""Names of files that are not kept: how many a cell's output tells, and how many characters of each."""
WATCH_S = 0.2
"""Seconds between two looks at how much the memory and the files of a running cell take."""
WATCHERS = 4
"""Threads for these looks."""
TURN_S = 90.0
"""Seconds that a cell waits where all sessions that there may be are at work."""

LOST = "[the session has ended since the last cell: its variables are gone, the files are there]"


@dataclass(eq=False, slots=True)
class _Room:
    """What is here of a container. version, cells: as of which it is; None where nobody knows. known: digests
    of its files in storage, by path. marks: of those in its folder. unkept: paths in it
    that no file of a container can have. place: a folder on disk, where its tier
    needs one. folder: that of the files; None where there is none yet.
    used: by the loop's clock, when its last cell ended."""

    owner: str
    place: Path | None
    folder: Folder | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int | None = None
    cells: int = 0
    known: dict[str, str] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    unkept: frozenset[str] = frozenset()
    whole: bool = False  # the folder is what the last result says
    session: PythonSession | None = None
    users: int = 0
    used: float = 0.0

    @property
    def gone(self) -> bool:
        """Whether its place was removed, as by what cleans the machine of temporary files."""
        return self.place is not None and not self.place.is_dir()


class Sandbox:
    """Runs Python for all containers of this process."""

    def __init__(self, tier: Tier, limits: CellLimits, confinement: Confinement | None = None) -> None:
        """confinement: of the tiers that start processes of Python."""
        self.tier = tier
        self.limits = limits
        self.confinement = confinement
        self._monty = MontyInterpreter(limits) if tier == "monty" else None
        self._rooms: dict[str, _Room] = {}
        self._ground: Ground | None = None
        self._starts = Starts()
        self._slots = set[int]()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # of owners whose cells wait for a session
        self._rested = asyncio.Event()  # for those who wait; see `_wake`
        # Of their own: what else the server does on threads must not keep the watch from its look.
        self._watchers = ThreadPoolExecutor(WATCHERS, thread_name_prefix="sandbox-watch")
        self._starting = asyncio.Lock()
        self._tidying: asyncio.Task[None] | None = None

    @property
    def exact(self) -> bool:
        """Whether a cell that was cut short can be run again from where it began, and comes out the same."""
        return self.tier == "monty"

    @property
    def about(self) -> str:
        """What a model is to know of the interpreter."""
        if self.tier == "monty":
            return LACKS
        found = () if self.confinement is None else self.confinement.python.packages
        packages = f"Among the packages are {', '.join(found)}." if found else "There are no other packages."
        return f"It is Python with the standard library. {packages} There is no internet."

    async def start(self) -> None:
        """Make room for containers. Raises SandboxError."""
        async with self._starting:
            if self._ground is None:
                await self._start()

    async def _start(self) -> None:
        if self._monty is not None:
            await self._monty.start()
        self._ground = await asyncio.to_thread(Ground.claim)
        self._tidying = asyncio.create_task(self._tidy(), name="sandbox")

    async def close(self) -> None:
        """End all sessions."""
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        await asyncio.gather(*(self._end_session(room) for room in self._rooms.values()))
        if self._monty is not None:
            await self._monty.close()
        self._watchers.shutdown(wait=False)
        if self._ground is not None:
            await asyncio.to_thread(self._ground.leave)
        self._ground, self._rooms = None, {}

    @property
    def keys(self) -> tuple[str, ...]:
        """The containers of which there is anything here."""
        return tuple(self._rooms)

    @property
    def num_live(self) -> int:
        """Sessions that live."""
        return sum(room.session is not None for room in self._rooms.values())

    # -- cells -----------------------------------------------------------------------------------------------

    async def run(self, code: str, key: str, owner: str, load: Load, moment: Moment, fetch: Fetch) -> Outcome:
        """Run a cell in the container of this key, which is loaded when its turn has come.

        The outcome is to be kept (`Outcome.keep`) or let go once storage has its changes, or cannot take
        them; until then no other cell of the container runs here. Raises SandboxError, and what `load`
        raises.
        """
        await self.start()
        room = self._room(key, owner)
        room.users += 1
        await self._enter(room)
        try:
            result = await self._run(room, code, await load(), moment, fetch)
        except BaseException:
            room.version = None
            self._leave(room)
            raise
        return Outcome(result, room, self._leave)

    async def _enter(self, room: _Room) -> None:
        try:
            await room.busy.acquire()
        except BaseException:
            room.users -= 1
            raise

    async def _run(
        self, room: _Room, code: str, space: Workspace, moment: Moment, fetch: Fetch
    ) -> CellResult:
        memory = min(self.limits.memory_bytes, space.memory_bytes or self.limits.memory_bytes)
        fresh = self._monty is None and (room.session is None or not room.session.alive)
        behind = room.version != space.version
        if fresh or room.gone or (behind and not await self._catch_up(room, space, fetch)):
            fresh = self._monty is None
            await self._build(room, space, fetch, memory)
        room.version, room.cells = None, space.cells + 1  # until the outcome is kept
        if self._monty is not None:
            assert isinstance(room.folder, Path), "its tier has it on disk"
            stop, look = asyncio.Event(), partial(self._too_many, room.folder)
            cell = self._monty.run(code, room.owner, room.folder, space.state, moment, memory, stop)
            result = await self._watched(cell, look, stop.set)
        else:
            session = room.session
            assert session is not None, "it was built"
            result = await self._watched(session.run(code), session.excess, session.end)
            if fresh and space.cells:
                result = replace(result, logs=f"{LOST}\n{result.logs}")
        return await self._with_changes(room, result)

    async def _watched(
        self, cell: Coroutine[Any, Any, CellResult], excess: Callable[[], str | None], end: Callable[[], None]
    ) -> CellResult:
        """Run a cell, and end it where it takes too much, such as memory, or room for files. excess: says of
        what; it is asked on a thread."""
        running = asyncio.ensure_future(cell)
        why: str | None = None
        try:
            while not (await asyncio.wait({running}, timeout=WATCH_S))[0]:
                look = asyncio.get_running_loop().run_in_executor(self._watchers, excess)
                if (why := await look) is not None:
                    end()
                    break
            result = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if why is not None:
            result = replace(
                result, logs=f"{result.logs}\n[the code was stopped: {why}]", ok=False, lost=True
            )
        return result

    def _too_many(self, folder: Path) -> str | None:
        """Whether a cell of the interpreter, which bounds the bytes, makes too many files."""
        try:
            space_taken(folder, ())
        except TooMuch as fault:
            return str(fault)
        except OSError as fault:
            return f"The folder cannot be read: {fault.strerror}."
        return None

    def _excess(self, folder: Folder) -> str | None:
        """Why the files of a folder cannot be kept; None where they can."""
        try:
            found = scan(folder)
        except TooMuch as fault:
            return str(fault)
        except OSError as fault:
            return f"The folder cannot be read: {fault.strerror}."
        if len(found) > self.limits.files:
            return f"There are {len(found)} files; {self.limits.files} can be kept."
        size = sum(mark[0] for mark in found.values())
        if size > self.limits.data_bytes:
            return f"The files have {size} bytes; {self.limits.data_bytes} can be kept."
        return None

    async def _with_changes(self, room: _Room, result: CellResult) -> CellResult:
        """The result with what became of the files. Where they cannot be kept, they stay as they were."""
        assert room.folder is not None, "it was built"
        if (why := await asyncio.to_thread(self._excess, room.folder)) is not None:
            note = f"[the files are as they were before this code: {why}]"
            await self._empty(room)
            room.whole = False
            return replace(result, logs=f"{result.logs.rstrip()}\n{note}", ok=False, images=(), lost=True)
        unkept: list[str] = []
        marks = await asyncio.to_thread(scan, room.folder, unkept)
        changed, removed = differences(room.marks, marks)
        if room.session is not None:
            touched = room.session.touched
            also = (path for path, mark in marks.items() if touched is None or mark[2] in touched)
            changed = [*{*changed, *also}]
        shown = tuple(path for path in result.images if path in marks)
        new = sorted({*unkept} - room.unkept)
        room.marks, room.whole, room.unkept = marks, True, frozenset(unkept)
        logs = "\n".join(filter(None, (result.logs.rstrip(), _not_kept(new)))) if new else result.logs
        return replace(
            result, logs=logs, images=shown, changed=tuple(sorted(changed)), removed=tuple(sorted(removed))
        )

    # -- rooms -----------------------------------------------------------------------------------------------

    def _room(self, key: str, owner: str) -> _Room:
        room = self._rooms.get(key)
        if room is None:
            in_memory = self.confinement is not None and self.confinement.in_memory
            room = self._rooms[key] = _Room(owner, None if in_memory else self._new_place())
        return room

    def _new_place(self) -> Path:
        assert self._ground is not None, "it was started"
        return self._ground.folder()

    async def _build(self, room: _Room, space: Workspace, fetch: Fetch, memory: int) -> None:
        """Make a room's folder what storage has of the container, in a new session where sessions live.
        Raises SandboxError."""
        size = sum(num_bytes for _, num_bytes in space.files.values())
        # A client may have added files while a cell did.
        if len(space.files) > self.limits.files or size > self.limits.data_bytes:
            most = f"{self.limits.files} files of {self.limits.data_bytes} bytes"
            has = f"{len(space.files)} files of {size} bytes"
            raise SandboxError(f"the container has {has}, and can have {most}: delete some")
        await self._starts.turn(room.owner)
        await self._empty(room)
        if self.confinement is not None:
            await self._open(room, memory)
            assert room.session is not None, "it was opened"
            room.folder = room.session.folder
        assert room.folder is not None, "it was made"
        try:
            for path, (digest, _) in space.files.items():
                if is_path(path):
                    with await asyncio.to_thread(_new_file, room.folder, path) as file:
                        await fetch(digest, file.write)
        except OSError as fault:
            raise SandboxError(f"the container's files cannot be brought to it: {fault.strerror}") from None
        if room.session is not None and self.confinement is not None:
            await asyncio.to_thread(self.confinement.give, room.folder, room.session.slot)
        room.marks = await asyncio.to_thread(scan, room.folder)

    async def _catch_up(self, room: _Room, space: Workspace, fetch: Fetch) -> bool:
        """Bring files into a folder that clients have changed since its last cell; False where there is more
        to be done, or code has put something else in their places."""
        if room.version is None or room.cells != space.cells or room.folder is None:
            return False
        wanted = {path: digest for path, (digest, _) in space.files.items()}
        gone = room.known.keys() - wanted.keys()
        new = [path for path, digest in wanted.items() if room.known.get(path) != digest]
        slot = None if room.session is None else room.session.slot
        try:
            for path in gone:
                replace_file(room.folder, path, None)
            for path in new:
                with open(replace_file(room.folder, path, self._user(slot)), "wb") as file:
                    await fetch(wanted[path], file.write)
        except OSError:
            return False
        room.marks = await asyncio.to_thread(scan, room.folder)
        return True

    def _user(self, slot: int | None) -> int:
        return 0 if slot is None or self.confinement is None else self.confinement.user(slot)

    async def _empty(self, room: _Room) -> None:
        await self._end_session(room)
        room.marks, room.unkept = {}, frozenset()
        if room.gone:
            room.place = self._new_place()
        if self._monty is not None:
            assert room.place is not None, "its tier has it on disk"
            await asyncio.to_thread(remove, room.place)
            room.place.mkdir(mode=0o700)
            room.folder = room.place

    async def _end_session(self, room: _Room) -> None:
        """End a room's session, if it has one, and the folder of its files with it. Its number is another's
        only after that."""
        session, room.session = room.session, None
        if session is None:
            return
        room.folder = None
        try:
            await session.close()
        finally:
            self._release(room, session)

    def _release(self, room: _Room, session: PythonSession) -> None:
        if room.session is session:
            room.session = room.folder = None
        session.release()
        self._slots.discard(session.slot)
        self._wake()

    async def _open(self, room: _Room, memory: int) -> None:
        """Start a session in a room, in the place of the one that was least recently used where there are
        enough; where all of them are at work, once one is not. Raises SandboxError."""
        assert self.confinement is not None, "this tier starts processes"
        if (turns := self._turns.get(room.owner)) is None:
            turns = self._turns[room.owner] = asyncio.Lock()
        try:
            async with asyncio.timeout(TURN_S), turns:
                await self._make_place(room.owner)
                if len(self._slots) >= USERS:
                    raise SandboxError("too many sessions are about to end; try again later")
                slot = next(number for number in _IN_TURN if number not in self._slots)
                self._slots.add(slot)
                room.session = PythonSession(self.confinement, room.place, self.limits, slot)
        except TimeoutError:
            raise SandboxError("too many sessions run code just now; try again later") from None
        try:
            await room.session.start(memory)
        except BaseException:
            await self._end_session(room)
            raise

    async def _make_place(self, owner: str) -> None:
        """Wait until an owner may have one session more, and end another one for it if need be."""
        while True:
            live = [other for other in self._rooms.values() if other.session is not None]
            own = [other for other in live if other.owner == owner]
            if len(own) < self.limits.per_owner and len(live) < self.limits.live:
                return
            idle = [o for o in (own if len(own) >= self.limits.per_owner else live) if not o.busy.locked()]
            if idle:
                await self._end_session(min(idle, key=lambda other: other.used))
            else:
                await self._rested.wait()

    def _leave(self, room: _Room) -> None:
        if room.session is not None and room.session.closed:  # what is left of it takes memory
            self._release(room, room.session)
        room.users -= 1
        room.used = asyncio.get_running_loop().time()
        room.busy.release()
        self._wake()

    def _wake(self) -> None:
        """Have those look again who wait for a session to end, or to have nothing to do."""
        self._rested.set()
        self._rested = asyncio.Event()

    async def forget(self, key: str) -> None:
        """Let go of a container that is no more."""
        room = self._rooms.get(key)
        if room is not None and not room.users:
            del self._rooms[key]
            await self._end_session(room)
            if room.place is not None:
                await asyncio.to_thread(remove, room.place)

    async def end(self, key: str) -> None:
        """End a container's session at once, even in the middle of a cell, and let go of what is here of it,
        unless a cell is still about to end."""
        room = self._rooms.get(key)
        if room is not None and room.users and room.session is not None:
            room.session.end()
        await self.forget(key)

    async def _tidy(self) -> None:
        """End what nobody has used for a while."""
        while True:
            await asyncio.sleep(min(self.limits.idle_s, 30.0))
            self._starts.tidy()
            since = asyncio.get_running_loop().time() - self.limits.idle_s
            for key, room in [*self._rooms.items()]:
                if not room.users and room.used < since:
                    with suppress(OSError):
                        await self.forget(key)


def _new_file(folder: Folder, path: str) -> BufferedWriter:
    """See `create_file`; a file that nobody waits for any more is closed."""
    return os.fdopen(create_file(folder, path), "wb")


def _not_kept(paths: Sequence[str]) -> str:
    """What a cell's output says of files whose names no file of a container can have."""
    shown = ", ".join(ascii(path)[:MAX_TOLD] for path in paths[:TOLD])
    more = f" and {len(paths) - TOLD} more" if len(paths) > TOLD else ""
    return (
        f"[not kept, because of their names: {shown}{more}. Give them names of printable characters, and "
        f"paths of at most {MAX_PATH} bytes.]"
    )


@dataclass(slots=True)
class Outcome:
    """What came of a cell, and the hold on its container."""

    result: CellResult
    _room: _Room
    _leave: Callable[[_Room], None]
    _held: bool = True

    def open(self, path: str) -> int:
        """A descriptor of one of the container's files, for reading. Raises OSError where it is none."""
        if self._room.folder is None:
            raise OSError("the files are as they were before")
        return open_file(self._room.folder, path)

    def keep(self, version: int, files: Mapping[str, str]) -> None:
        """Storage has the changes, as of this version of the container, whose files have these digests."""
        if self._held:
            self._room.known = dict(files)
            self._held, self._room.version = False, version if self._room.whole else None
            self._leave(self._room)

    def let_go(self) -> None:
        """Storage does not have the changes: the folder is built anew before the next cell."""
        if self._held:
            self._held = False
            self._leave(self._room)
