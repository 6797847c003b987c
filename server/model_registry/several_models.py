"""The models of a server's file, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from engine import Engine, LoadError
from server.config import Config
from server.errors import ApiError
from server.loading import Held, Shelf
from server.model_registry.building import adapters_of, build_engine, build_others, caps_of
from server.model_registry.children import ChildOther, ChildText
from server.model_registry.registry import Models
from server.settings import ModelEntry
from server.telemetry import Reading

log = logging.getLogger("antiphon.models")


class SeveralModels:
    """Loads the models of the file: those of other servers and of this process at the start, those in
    processes of their own when they are wanted."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.shelf = Shelf(
            memory_bytes=config.models_memory_bytes,
            load_s=config.model_load_s,
            max_waiting=config.max_waiting_for_load,
        )
        self.models = Models(config.entries, self.shelf)
        self.shelf.on_loaded = self._loaded
        self.on_loaded: Callable[[], None] = lambda: None
        self._children: dict[str, ChildText | ChildOther] = {}
        self._inside: list[Engine] = []
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Of what runs in this process, the last one first."""

    async def start(self) -> None:
        """Start what runs in this process, and load the default model, and those that are to be there from
        the start. A default that cannot be loaded is a LoadError; another one is only told."""
        for entry in self._config.entries:
            config = self._config.of_entry(entry)
            if entry.in_child:
                self._put(entry, config)
            elif entry.use != "text":
                await self._start_other(entry, config)
            else:
                await self._start_inside(entry, config)
        self.shelf.start()
        first = self._first()
        for held in list(self.shelf):
            entry = self._children[held.name].entry
            if held.name == first:
                await self.shelf.want(held)
            elif entry.preload:
                try:
                    await self.shelf.want(held)
                except LoadError:
                    log.error("the server starts without %s", held.name)

    def _first(self) -> str | None:
        """The model that has to be there: the default one, or the first, unless another one has started."""
        texts = [entry for entry in self._config.entries if entry.use == "text"]
        default = next((entry.id for entry in texts if entry.default), None)
        if default is None and not self._inside and not self._config.serves_own_model and texts:
            default = texts[0].id
        return default

    def _put(self, entry: ModelEntry, config: Config) -> None:
        kind = ChildText if entry.use == "text" else ChildOther
        child = self._children[entry.id] = kind(entry, config, self._wanted)
        held = Held(entry.id, child, pinned=entry.pin, idle_s=entry.idle_s)
        self.shelf.add(held)
        if entry.use == "text":
            self.models.expect(entry, tuple(adapters_of(config)))

    async def _start_inside(self, entry: ModelEntry, config: Config) -> None:
        engine = await asyncio.to_thread(build_engine, config)
        self.closers.insert(0, engine.close)
        await engine.start()
        self._inside.append(engine)
        self.models.add_entry(entry, engine, caps_of(config))

    async def _start_other(self, entry: ModelEntry, config: Config) -> None:
        for engine in await asyncio.to_thread(build_others, config):
            self.closers.insert(0, engine.close)
            await engine.start()
            self.models.add_other(engine, caps_of(config))

    def _wanted(self, id: str) -> None:
        """Somebody waits for a model that is not there, in the middle of what it was asked."""
        held = self.shelf.get(id)
        if held is not None and not held.model.is_kept():
            self.shelf.want(held)

    def _loaded(self, held: Held) -> None:
        child = self._children[held.name]
        if isinstance(child, ChildOther):
            assert child.engine is not None
            self.models.add_other(child.engine, caps_of(child.config))
        elif child.engine is not None:
            self.models.add_entry(child.entry, child.engine, caps_of(child.config))
        self.on_loaded()

    def mortal(self) -> list[Engine]:
        """The engines of this process whose death is the process's."""
        return self._inside

    async def close(self) -> None:
        """End all processes, and what ran in this one."""
        await self.shelf.close()
        for close in self.closers:
            await close()
        await asyncio.gather(*(child.close() for child in self._children.values()))

    def readings(self) -> Iterator[Reading]:
        """What there is of each model that is loaded when it is wanted, for metrics."""
        for held in self.shelf:
            child = self._children[held.name]
            yield Reading(
                "model",
                {
                    "loaded": int(held.state == "loaded"),
                    "memory_bytes": child.memory_bytes() if child.is_kept() else 0,
                    "load_waiting": held.num_waiting,
                    "load_seconds": held.load_s,
                    "loads_total": held.num_loads,
                    "unloads_total": held.num_unloads,
                    "load_failures_total": held.num_failures,
                    "crashes_total": child.child.num_crashes,
                },
                {"model": held.name},
            )
        for model in self.models:
            if model.entry is not None and model.adapter is None:
                numbers = {
                    "breaker_open": int(model.breaker.shown_open),
                    "breaker_opened_total": model.breaker.num_opened,
                }
                yield Reading("model", numbers, {"model": model.name})

    # -- what operators ask ----------------------------------------------------------------------------------

    def described(self) -> list[dict[str, Any]]:
        """Every model of the server, for operators."""
        found = []
        for entry in self.models.entries:
            held, child = self.shelf.get(entry.id), self._children.get(entry.id)
            found.append(
                {
                    "id": entry.id,
                    "object": "model.state",
                    "state": "loaded" if held is None else held.state,
                    "engine": entry.engine,
                    "use": entry.use,
                    "child": entry.in_child,
                    "pid": None if child is None else child.child.pid,
                    "aliases": self.models.aliases(entry.id),
                    "default": entry.default,
                    "pinned": entry.pin,
                    "idle_s": entry.idle_s,
                    "memory_bytes": None if child is None or not child.is_kept() else child.memory_bytes(),
                    "waiting": 0 if held is None else held.num_waiting,
                    "loads": 0 if held is None else held.num_loads,
                    "crashes": 0 if child is None else child.child.num_crashes,
                    "failure": None if held is None else held.failure or _given_up(child),
                    "deprecation_date": None
                    if entry.deprecation_date is None
                    else entry.deprecation_date.isoformat(),
                    "fallback": [*entry.fallback],
                    "canary": None if entry.canary is None else entry.canary.model_dump(mode="json"),
                }
            )
        return found

    def id_of(self, name: str) -> str:
        """The id of a model that can be loaded and unloaded. ApiError 404 for none of the file, 400 for one
        that is there as long as the server."""
        return self._held(name).name

    async def load(self, id: str) -> None:
        """Load a model. ApiError 503 and LoadError, as `Models.choose`."""
        held = self._held(id)
        held.breaker.succeeded()  # an operator's word counts for more than what was
        await self.shelf.ready(held)

    async def unload(self, id: str) -> None:
        """Unload one that nobody uses. ApiError 409 for one that is used."""
        await self.shelf.unload_idle(self._held(id))

    def _held(self, name: str) -> Held:
        entry = self.models.entry(name)
        if entry is None:
            listed = ", ".join(f"'{each.id}'" for each in self.models.entries[:16])
            message = f"There is no model '{name}' in the file of models. It has {listed or 'none'}."
            raise ApiError(404, message, code="model_not_found", param="model")
        if (held := self.shelf.get(entry.id)) is None:
            message = (
                f"The model '{entry.id}' has no process of its own: it is loaded as long as the server runs."
            )
            raise ApiError(400, message, code="model_not_loadable", param="model")
        return held


def _given_up(child: ChildText | ChildOther | None) -> str | None:
    return None if child is None else child.child.given_up
