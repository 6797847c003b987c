"""Serves the models of one process to several server processes: which are there, loading, and unloading.

A message is a JSON array on a line of a Unix socket, its first element the word that says what it is. What a
model is asked goes to the model's own process; here is said where it listens, and who uses it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from engine import EngineError
from server.errors import ApiError
from server.loading.child import Child
from server.loading.shelf import Shelf
from server.loading.standing import Standing, standing

log = logging.getLogger("antiphon.models")

TOLD_S = 0.1
"""How often server processes are told where models stand, where that has changed."""


@dataclass(slots=True, eq=False)
class _Client:
    """One server process. uses: for each model that it has used, whether it uses it now, and how many
    requests wait for it there."""

    writer: asyncio.StreamWriter
    uses: dict[str, tuple[bool, int]] = field(default_factory=dict)
    told: Mapping[str, Standing] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def send(self, *parts: object) -> None:
        self.writer.write(orjson.dumps(parts) + b"\n")


class ShelfHost:
    """Serves a shelf. path: of the socket, in a folder that only this user may enter. children: the processes
    of the models on it, by their names."""

    def __init__(self, path: Path, shelf: Shelf, children: Mapping[str, Child]) -> None:
        self._path = path
        self._shelf = shelf
        self._children = children
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None
        self._telling: asyncio.Task[None] | None = None
        self._words: Mapping[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "load": self._load,
            "unload": self._unload,
        }

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        os.chmod(self._path, 0o600)
        self._telling = asyncio.create_task(self._tell(), name="shelf")

    async def close(self) -> None:
        """Serve nobody any more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.writer.close()

    def is_used(self, name: str) -> bool:
        """Whether a server process uses a model now, or requests wait for it there."""
        return any(any(client.uses.get(name, ())) for client in self._clients)

    def rests(self, name: str) -> None:
        """Say that a model is about to be unloaded."""
        for client in self._clients:
            client.send("rests", name)

    # -- what is told ----------------------------------------------------------------------------------------

    def _standings(self) -> dict[str, Standing]:
        found = {}
        for held in self._shelf:
            waiting = sum(client.uses.get(held.name, (False, 0))[1] for client in self._clients)
            found[held.name] = replace(standing(held, self._children[held.name]), waiting=waiting)
        return found

    def _inform(self, client: _Client, standings: Mapping[str, Standing]) -> None:
        changed = {name: asdict(each) for name, each in standings.items() if client.told.get(name) != each}
        if changed:
            client.told = standings
            client.send("stands", changed)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            standings = self._standings()
            for client in self._clients:
                self._inform(client, standings)

    # -- what is asked ---------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One server process, to its end."""
        client = _Client(writer)
        self._clients.add(client)
        client.send("listens", {name: str(child.socket) for name, child in self._children.items()})
        self._inform(client, self._standings())
        try:
            while line := await reader.readline():
                word, *parts = orjson.loads(line)
                if word == "uses":
                    self._note(client, *parts)
                else:
                    task = asyncio.create_task(self._answer(client, word, *parts))
                    client.tasks.add(task)
                    task.add_done_callback(client.tasks.discard)
        except ConnectionError:
            pass
        finally:
            self._clients.discard(client)
            for task in client.tasks:
                task.cancel()
            writer.close()

    def _note(self, client: _Client, uses: Mapping[str, tuple[bool, int]]) -> None:
        """A server process uses models, or has used them until now."""
        for name, (busy, waiting) in uses.items():
            client.uses[name] = (busy, waiting)
            if (held := self._shelf.get(name)) is not None:
                held.use()

    async def _answer(self, client: _Client, word: str, id: int, name: str) -> None:
        said: tuple[object, ...] = ("done", id)
        try:
            await self._words[word](name)
        except ApiError as error:
            said = ("refused", id, error.status, error.code, error.message)
        except EngineError as error:
            said = ("failed", id, str(error))
        except Exception:  # whoever is not answered waits for ever
            log.exception("%s cannot be carried out for %s", word, name)
            said = ("failed", id, f"to {word} {name} has failed; the log says why")
        self._inform(client, self._standings())
        client.send(*said)

    async def _load(self, name: str) -> None:
        held = self._shelf.get(name)
        assert held is not None
        await asyncio.shield(self._shelf.want(held))

    async def _unload(self, name: str) -> None:
        held = self._shelf.get(name)
        assert held is not None
        await self._shelf.unload_idle(held)
