"""Models of the file that run in processes of their own, as the shelf loads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine import Engine
from server.config import Config
from server.loading import Child
from server.model_registry.building import remote_engine, shipped_or_given
from server.settings import ModelEntry

if TYPE_CHECKING:
    from engine import RemotePooling, RemoteSpeech

ITSELF = 300 << 20
"""Bytes that a process with torch takes before it has read any weights."""


class _InChild:
    """What both kinds have in common. engine: what asks it, from its first load on. on_wanted: told when
    somebody waits for it while it is not there."""

    engine: Engine | RemotePooling | RemoteSpeech | None = None

    def __init__(self, entry: ModelEntry, config: Config, on_wanted: Callable[[str], None]) -> None:
        self.entry = entry
        self.config = config
        self.child = Child(entry.id, config, lambda: on_wanted(entry.id))
        self._measured = 0

    def is_up(self) -> bool:
        """Whether it serves now."""
        return self.child.line.is_up

    def is_kept(self) -> bool:
        """Whether it has a process, or is about to have one again."""
        return self.child.is_kept

    def memory_bytes(self) -> int:
        """What its process takes now, or, while there is none, what it took or will take."""
        if self.entry.memory_bytes is not None:
            return self.entry.memory_bytes
        if now := self.child.memory_bytes():
            self._measured = now
        return self._measured or self._expected()

    def _expected(self) -> int:
        if self.config.engine == "scripted":
            return ITSELF
        weights = 0
        where = Path(self.entry.path or "") if self.entry.use != "text" else shipped_or_given(self.config)
        folder = Path(where)
        with suppress(OSError):
            weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return ITSELF + weights + (self.config.kv_cache_bytes or 0)

    async def unload(self) -> None:
        """End its process."""
        await self.child.stop()

    def is_busy(self) -> bool:
        """Whether a request has a place there."""
        return self.engine is not None and self.engine.admission.num_places > 0

    async def close(self) -> None:
        """End its process for good, and what asks it."""
        if self.engine is not None:
            await self.engine.close()
        await self.child.close()


class ChildText(_InChild):
    """A model that generates."""

    engine: Engine | None = None

    async def load(self) -> None:
        """See `Loadable.load`."""
        if self.engine is not None:
            await self.child.start()
            return
        engine = await asyncio.to_thread(remote_engine, self.config, self.child.line)
        await self.child.start()
        await engine.start()
        self.engine = engine


class ChildOther(_InChild):
    """A model for vectors, scores or speech."""

    engine: RemotePooling | RemoteSpeech | None = None

    async def load(self) -> None:
        """See `Loadable.load`."""
        await self.child.start()
        if self.engine is None:
            from engine import RemotePooling, RemoteSpeech

            kind = RemoteSpeech if self.entry.use == "speech" else RemotePooling
            engine = kind(
                self.child.line,
                0,
                num_servers=1,
                max_waiting=self.config.max_waiting,
                max_waiting_tokens=self.config.max_waiting_tokens,
            )
            await engine.start()
            self.engine = engine
