"""The models of the file for several server processes, kept by the process that started these."""

from __future__ import annotations

import asyncio
from pathlib import Path

from server.config import Config
from server.loading import Child, Held, Shelf, ShelfHost
from server.model_registry.children import ChildOfAll, is_needed, warn_where_lacking
from server.model_registry.several_models import first_of


class SharedModels:
    """Loads models in processes of their own when a server process wants them, and unloads what none uses.

    path: of the socket where server processes ask; they find it there once this is started. The models' own
    sockets are beside it. Raises LoadError for a model that is needed and can never have room.
    """

    def __init__(self, config: Config, path: Path) -> None:
        self._children: dict[str, Child] = {}
        self._shelf = Shelf(memory_bytes=config.models_memory_bytes)
        self._host = ShelfHost(path, self._shelf, self._children)
        for number, entry in enumerate(config.entries):
            if entry.in_child:
                own, folder = config.of_entry(entry), path.with_name(f"model-{number}")
                warn_where_lacking(entry, own)
                child = self._children[entry.id] = Child(entry.id, own, folder=folder)
                model = ChildOfAll(entry, own, child, self._host)
                needed = is_needed(entry, first_of(config))
                held = Held(entry.id, model, pinned=entry.pin, needed=needed, idle_s=entry.idle_s)
                self._shelf.add(held)

    def save_for(self, database: str | None) -> None:
        """What the models save belongs to a database; before any of them is loaded."""
        for child in self._children.values():
            child.save_for(database)

    async def start(self) -> None:
        """Take what server processes ask."""
        await self._host.start()
        self._shelf.start()

    async def close(self) -> None:
        """End all models' processes."""
        await self._shelf.close()
        await self._host.close()
        await asyncio.gather(*(child.close() for child in self._children.values()))
