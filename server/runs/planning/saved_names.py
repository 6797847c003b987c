"""Names what an engine keeps on disk, and has it removed once what it was computed of is deleted.

What was computed of a response has the response's id for a name; what was computed in a conversation, the
conversation's, with its epoch: so the last turn takes the place of the one before, and the name is out of
date once an item is deleted. The database is what counts: whatever an engine has under a name that the
database does not know is removed, at the start, after each deletion, and with each sweep, for what others
have deleted. Where no engine does it, because its model is not loaded or keeps nothing any more, it is done
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from server.config import Config
from storage import StorageUnavailable

if TYPE_CHECKING:
    from engine import Engine, SavedKV
    from server.model_registry import Models
    from storage import Storage

log = logging.getLogger("antiphon.runs")

ASKED = 500
"""Names that the database is asked about at once."""


def name_of(conversation_id: str, epoch: int) -> str:
    """The name of what is computed in a conversation, as long as nothing is deleted of it."""
    return f"{conversation_id}.{epoch}"


def kv_folders(config: Config) -> dict[str | None, Path]:
    """Where models keep what they have computed, by the ids of their entries; None: the server's own."""
    entries = [entry for entry in config.entries if entry.use == "text" and entry.engine == "local"]
    found: dict[str | None, Path] = {entry.id: config.of_entry(entry).kv_disk_folder for entry in entries}
    return {None: config.kv_disk_folder, **found}


class SavedNames:
    """Compares what engines keep with what there is. folders: see `kv_folders`."""

    def __init__(self, storage: Storage, models: Models, folders: Mapping[str | None, Path]) -> None:
        self._storage = storage
        self._models = models
        self._folders = folders
        self._left: dict[Path, SavedKV] = {}  # what is in folders that no engine looks after
        self._stirred = asyncio.Event()
        self._stirred.set()

    def stir(self) -> None:
        """Something was deleted."""
        self._stirred.set()

    def forget(self, response_ids: Iterable[str]) -> None:
        """Responses were deleted: what was computed of them goes at once, and what is under way stays out."""
        gone = frozenset(response_ids)
        for engine in self._engines():
            engine.forget(gone)
        if self._unattended():
            self.stir()

    def forget_owner(self, owner: str) -> None:
        """The same of all that an owner had."""
        for engine in self._engines():
            engine.forget_owner(owner)
        if self._unattended():
            self.stir()

    async def compare(self) -> int:
        """Have forgotten what is not there any more; returns how many names that are. StorageUnavailable; an
        engine or a folder that fails holds up none of the others."""
        folders = self._unattended()
        self._left = {folder: left for folder, left in self._left.items() if folder in folders}
        # an engine that is away, because its model is not loaded, say, has its folder looked through instead
        engines = [engine for engine in self._engines() if not engine.stats().unavailable]
        compares: list[Callable[[], Awaitable[int]]] = [
            *(partial(self._compare_engine, engine) for engine in engines),
            *(partial(self._compare_folder, folder) for folder in folders),
        ]
        num_gone = 0
        for compare in compares:
            try:
                num_gone += await compare()
            except StorageUnavailable:
                raise
            except OSError as error:  # the next deletion and the next sweep try again
                log.warning("what was deleted could not be compared with what is on disk: %s", error)
            except Exception:
                log.exception("what was deleted could not be compared with what is on disk")
        return num_gone

    async def _compare_engine(self, engine: Engine) -> int:
        if gone := await self._gone(await engine.saved_names()):
            engine.forget(gone)
        return len(gone)

    async def _compare_folder(self, folder: Path) -> int:
        if not await asyncio.to_thread(folder.is_dir):
            return 0
        from engine import ForeignFolder, SavedKV  # numpy, which a server without such a folder does without

        if (left := self._left.get(folder)) is None:
            left = self._left[folder] = SavedKV(folder, database=await self._storage.database_id())
        try:
            if gone := await self._gone(await asyncio.to_thread(left.names)):
                await asyncio.to_thread(left.forget, gone)
        except ForeignFolder:  # what is there is not known to this database, and not gone
            return 0
        return len(gone)

    def _unattended(self) -> set[Path]:
        """The folders of which no engine removes anything now."""
        models = [model for model in self._models if model.engine.stats().tier.disk_bytes_limit]
        attended = {self._folders.get(None if m.entry is None else m.entry.id) for m in models}
        return {*self._folders.values()} - attended

    def _engines(self) -> Collection[Engine]:
        return {id(model.engine): model.engine for model in self._models}.values()

    async def _gone(self, names: Collection[str]) -> frozenset[str]:
        of_responses = [name for name in names if "." not in name]
        epochs = {name: name.rpartition(".")[0] for name in names if "." in name}
        gone: set[str] = set()
        for first in range(0, len(of_responses), ASKED):
            gone |= await self._storage.gone_responses(of_responses[first : first + ASKED])
        listed = list(epochs.items())
        for first in range(0, len(listed), ASKED):
            part = dict(listed[first : first + ASKED])
            there = await self._storage.conversation_epochs(set(part.values()))
            gone |= {name for name, id in part.items() if id not in there or name != name_of(id, there[id])}
        return frozenset(gone)

    async def run(self) -> None:
        """Compare at once, and then whenever it is stirred."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            try:
                if num := await self.compare():
                    log.info("removed from disk what was computed under %d names that are no more", num)
            except StorageUnavailable as error:
                log.warning("what was deleted is compared with what is on disk later: %s", error)
            except Exception:  # the next deletion and the next sweep try again
                log.exception("what was deleted could not be compared with what is on disk")
