"""What a server process knows of models whose processes another one keeps, and what it asks of them.

See `shelf_host`. What a model is asked goes over a line of its own to the model's process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from engine import EngineLine, LoadError
from server.errors import ApiError
from server.loading.shelf import State
from server.loading.standing import Standing

USED_S = 0.1
"""How often the other process is told which models are used, where that has changed."""

LONGEST_LINE = 4 << 20

Uses = Mapping[str, tuple[bool, int, float]]
"""By the names of models: whether one is used, how many requests wait for it, and when it was used last."""


class ShelfLine:
    """The connection with the process that keeps the models. path: of its socket. It lasts as long as this
    process, which ends with the other one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sockets: Mapping[str, str] = {}
        self._standings: dict[str, Standing] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._told_uses: Uses = {}
        self.children: dict[str, FarChild] = {}
        self.uses: Callable[[], Uses] = dict
        self.on_loaded: Callable[[str], None] = lambda name: None

    async def open(self) -> None:
        """Connect, and learn where the models stand."""
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
        for _ in range(2):  # where they listen, and where they stand
            self._read(await reader.readline())
        self._tasks.append(asyncio.create_task(self._read_all(reader), name="shelf-line"))
        self._tasks.append(asyncio.create_task(self._tell_all(), name="shelf-uses"))

    async def close(self) -> None:
        """Let go; the models stay where they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    def child(
        self, name: str, on_wanted: Callable[[], None], on_replaced: Callable[[], None] = lambda: None
    ) -> FarChild:
        """The process of a model, once this is open. on_wanted: told when somebody waits for it while it is
        not there. on_replaced: told when it serves another model than before."""
        line = EngineLine(Path(self._sockets[name]), on_wanted, on_replaced)
        child = self.children[name] = FarChild(self, name, line)
        return child

    def standing(self, name: str) -> Standing:
        """Where a model stands, as it was told last."""
        return self._standings.get(name) or Standing()

    # -- what comes ------------------------------------------------------------------------------------------

    async def _read_all(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._read(line)

    def _read(self, line: bytes) -> None:
        match orjson.loads(line):
            case ["listens", sockets]:
                self._sockets = sockets
            case ["stands", standings]:
                for name, told in standings.items():
                    self._stands(name, Standing(**told))
            case ["rests", name]:
                rests: Any = {"state": "unloaded", "pid": None, "memory_bytes": 0}
                self._stands(name, replace(self.standing(name), **rests))
            case ["done", id]:
                self._answered(id, None)
            case ["failed", id, why]:
                self._answered(id, LoadError(why))
            case ["refused", id, status, code, why]:
                self._answered(id, ApiError(status, why, code=code))
            case said:
                raise ValueError(f"{said!r} is nothing that can be told of models")

    def _stands(self, name: str, now: Standing) -> None:
        before = self.standing(name)
        self._standings[name] = now
        if (child := self.children.get(name)) is None:
            return
        if now.state == "loaded" != before.state:
            self.on_loaded(name)
        elif now.state in ("unloaded", "failed") and (now.state, now.failure) != (
            before.state,
            before.failure,
        ):
            child.line.rest()
            if now.failure is not None:
                child.line.refuse(f"The model '{name}' cannot be had now: {now.failure}.")

    def _answered(self, id: int, error: Exception | None) -> None:
        answer = self._answers.pop(id)
        if answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    # -- what goes -------------------------------------------------------------------------------------------

    async def ask(self, word: str, name: str) -> None:
        """Have a model loaded (`load`) or unloaded (`unload`). Raises LoadError and ApiError."""
        self.tell_uses()  # what is known there of what is used here is a moment old
        id = next(self._ids)
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        self._send(word, id, name)
        await answer

    def tell_uses(self) -> None:
        """Say which models are used, where that has changed."""
        uses = self.uses()
        if changed := {name: use[:2] for name, use in uses.items() if use != self._told_uses.get(name)}:
            self._told_uses = uses
            self._send("uses", changed)

    async def _tell_all(self) -> None:
        while True:
            self.tell_uses()
            await asyncio.sleep(USED_S)

    def _send(self, *parts: Any) -> None:
        assert self._writer is not None
        self._writer.write(orjson.dumps(parts) + b"\n")


class FarChild:
    """The process of one model that another process keeps; as `Child` otherwise."""

    def __init__(self, shelf: ShelfLine, name: str, line: EngineLine) -> None:
        self._shelf = shelf
        self.name = name
        self.line = line

    def state(self) -> State:
        """Where it stands; `loading`, too, until this process is connected with it."""
        state = self.standing().state
        return "loading" if state == "loaded" and not self.line.is_up else state

    def standing(self) -> Standing:
        """What the process that keeps it has told of it last."""
        return self._shelf.standing(self.name)

    def memory_bytes(self) -> int:
        """See `Child.memory_bytes`."""
        return self.standing().memory_bytes

    async def start(self) -> None:
        """See `Child.start`."""
        self.line.expect()
        await self._shelf.ask("load", self.name)
        await self.line.open()

    async def stop(self) -> None:
        """See `Child.stop`. Raises ApiError 409 where another process uses it."""
        await self._shelf.ask("unload", self.name)

    async def close(self) -> None:
        """Let go of it; its process stays."""
        await self.line.close()
