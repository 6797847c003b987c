"""Names what an engine keeps on disk, and has it removed once what it was computed of is deleted.

What was computed of a response has the response's id for a name; what was computed in a conversation, the
conversation's, with its epoch: so the last turn takes the place of the one before, and the name is out of
date once an item is deleted. The database is what counts: whatever an engine has under a name that the
database does not know is removed, at the start, after each deletion, and with each sweep, for what others
have deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from storage import StorageUnavailable

if TYPE_CHECKING:
    from engine import Engine
    from server.model_registry import Models
    from storage import Storage

log = logging.getLogger("antiphon.runs")

ASKED = 500
"""Names that the database is asked about at once."""


def name_of(conversation_id: str, epoch: int) -> str:
    """The name of what is computed in a conversation, as long as nothing is deleted of it."""
    return f"{conversation_id}.{epoch}"


class SavedNames:
    """Compares what engines keep with what there is."""

    def __init__(self, storage: Storage, models: Models) -> None:
        self._storage = storage
        self._models = models
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

    def forget_owner(self, owner: str) -> None:
        """The same of all that an owner had."""
        for engine in self._engines():
            engine.forget_owner(owner)

    async def compare(self) -> int:
        """Have engines forget what is not there any more; returns how many names that are.
        StorageUnavailable."""
        num_gone = 0
        for engine in self._engines():
            if engine.stats().unavailable:  # it is not loaded, say; when it is, this is done again
                continue
            if gone := await self._gone(await engine.saved_names()):
                engine.forget(gone)
                num_gone += len(gone)
        return num_gone

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
