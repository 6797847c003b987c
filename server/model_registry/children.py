"""Models of the file that run in processes of their own, as the shelf loads them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine import LoadError
from server.config import Config
from server.errors import ApiError
from server.loading import Child, FarChild, ShelfHost, State
from server.model_registry.building import lacking, remote_engine, shipped_or_given
from server.settings import ModelEntry

if TYPE_CHECKING:
    from engine import RemoteEngine, RemotePooling, RemoteSpeech

log = logging.getLogger("antiphon.models")

ITSELF = 300 << 20
"""Bytes that a process with torch takes before it has read any weights."""


def expected_bytes(entry: ModelEntry, config: Config) -> int:
    """What the process of a model will take, as far as its entry and its files tell it."""
    if entry.memory_bytes is not None:
        return entry.memory_bytes
    if config.engine == "scripted":
        return ITSELF
    weights = 0
    where = Path(entry.path or "") if entry.use != "text" else Path(shipped_or_given(config))
    with suppress(OSError):
        weights = sum(file.stat().st_size for file in where.glob("*.safetensors"))
    return ITSELF + weights + (config.kv_cache_bytes or 0)


def is_needed(entry: ModelEntry, first: str | None) -> bool:
    """Whether there is to be no server without room for a model. first: the one that has to be there."""
    return entry.id == first or entry.preload or entry.pin


def warn_where_lacking(entry: ModelEntry, config: Config) -> None:
    """Say at the start what would else be told at the first request for a model."""
    if (why := lacking(entry, config)) is not None:
        log.warning("the server starts, and cannot load %s: %s", entry.id, why)


class InChild:
    """A model whose process this process keeps, or another one does."""

    def __init__(self, entry: ModelEntry, config: Config, child: Child | FarChild) -> None:
        self.entry = entry
        self.config = config
        self.child = child
        self._expected = expected_bytes(entry, config)

    def state(self) -> State:
        """See `Loadable.state`."""
        return self.child.state()

    def memory_bytes(self) -> int:
        """What its process takes now, or, while there is none, what it took or will take."""
        if self.entry.memory_bytes is None and (now := self.child.memory_bytes()):
            self._expected = now
        return self._expected

    async def load(self) -> None:
        """See `Loadable.load`."""
        await self._require_files()
        await self.child.start()

    async def _require_files(self) -> None:
        """LoadError where the folders of the model are not there: a process takes seconds to find it out."""
        if (why := await asyncio.to_thread(lacking, self.entry, self.config)) is not None:
            raise LoadError(why)

    async def unload(self) -> None:
        """See `Loadable.unload`."""
        await self.child.stop()

    async def close(self) -> None:
        """End its process for good, where this process keeps it."""
        await self.child.close()


class AskedHere(InChild):
    """One that this process asks.

    engine: what asks it, from its first load on, and another one once it is another model. num_servers:
    processes that ask it.
    """

    engine: RemoteEngine | RemotePooling | RemoteSpeech | None = None

    def __init__(
        self, entry: ModelEntry, config: Config, child: Child | FarChild, *, num_servers: int = 1
    ) -> None:
        super().__init__(entry, config, child)
        self.num_servers = num_servers

    @property
    def _is_asked(self) -> bool:
        """Whether what asks it was started with the model that it is now."""
        return self.engine is not None and self.engine.is_current

    def _build(self) -> RemoteEngine | RemotePooling | RemoteSpeech:
        """What asks it, not yet started. Raises LoadError."""
        raise NotImplementedError

    def state(self) -> State:
        """See `Loadable.state`; `loading`, too, where its process serves others and is not asked here yet."""
        state = super().state()
        return "loading" if state == "loaded" and not self._is_asked else state

    async def load(self) -> None:
        """See `Loadable.load`."""
        await super().load()
        if self._is_asked:
            return
        try:
            engine = await asyncio.to_thread(self._build)
            await engine.start()
        except Exception:  # its process would hold memory for nobody
            with suppress(ApiError):  # unless others use it
                await self.unload()
            raise
        self.engine = engine

    def is_busy(self) -> bool:
        """Whether a request has a place there."""
        return self.engine is not None and self.engine.admission.num_places > 0

    async def close(self) -> None:
        """See `InChild.close`; what asks it ends, too."""
        if self.engine is not None:
            await self.engine.close()
        await super().close()


class ChildText(AskedHere):
    """A model that generates."""

    engine: RemoteEngine | None = None

    def _build(self) -> RemoteEngine:
        return remote_engine(self.config, self.child.line, self.num_servers)


class ChildOther(AskedHere):
    """A model for vectors, scores or speech."""

    engine: RemotePooling | RemoteSpeech | None = None

    def _build(self) -> RemotePooling | RemoteSpeech:
        from engine import RemotePooling, RemoteSpeech

        kind = RemoteSpeech if self.entry.use == "speech" else RemotePooling
        return kind(
            self.child.line,
            0,
            num_servers=self.num_servers,
            max_waiting=self.config.max_waiting,
            max_waiting_tokens=self.config.max_waiting_tokens,
        )


class ChildOfAll(InChild):
    """A model that other processes ask, whose process this one keeps for them."""

    def __init__(self, entry: ModelEntry, config: Config, child: Child, host: ShelfHost) -> None:
        super().__init__(entry, config, child)
        self._host = host

    async def unload(self) -> None:
        """See `Loadable.unload`."""
        self._host.rests(self.entry.id)
        await super().unload()

    def is_busy(self) -> bool:
        """Whether a request has a place there, in whichever process."""
        return self._host.is_used(self.entry.id)
