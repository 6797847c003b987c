"""The models of a server's file, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engine import Engine, LoadError, PoolingEngine, SpeechEngine
from server.config import Config
from server.errors import ApiError
from server.loading import Child, FarChild, Held, Shelf, ShelfLine, Standing, standing
from server.model_registry.building import adapters_of, build_engine, build_others, caps_of
from server.model_registry.children import ChildOther, ChildText, InChild, is_needed, warn_where_lacking
from server.model_registry.registry import Models
from server.settings import ModelEntry
from server.telemetry import Reading

log = logging.getLogger("antiphon.models")


def first_of(config: Config) -> str | None:
    """The model of the file that has to be there: the default one, or the first, unless another one has
    started. None for none."""
    texts = [entry for entry in config.entries if entry.use == "text"]
    default = next((entry.id for entry in texts if entry.default), None)
    inside = config.serves_own_model or not all(entry.in_child for entry in texts)
    if default is None and not inside and texts:
        default = texts[0].id
    return default


class SeveralModels:
    """Loads the models of the file: those of other servers and of this process at the start, those in
    processes of their own when they are wanted.

    shared: the socket of the process that keeps these for several server processes.
    """

    def __init__(self, config: Config, shared: Path | None = None) -> None:
        self._config = config
        in_child = any(entry.in_child for entry in config.entries)
        self._line = ShelfLine(shared) if shared is not None and in_child else None
        # Whoever keeps the models for several processes sees to it that they fit.
        self.shelf = Shelf(
            memory_bytes=config.models_memory_bytes if self._line is None else None,
            load_s=config.model_load_s,
            max_waiting=math.ceil(config.max_waiting_for_load / config.api_server_count),
        )
        self.models = Models(config.entries, self.shelf)
        self.shelf.on_loaded = self._loaded
        self.on_loaded: Callable[[], None] = lambda: None
        self._children: dict[str, InChild] = {}
        self._inside: list[Engine] = []
        self._built: dict[
            str, list[Engine | PoolingEngine | SpeechEngine]
        ] = {}  # of this process, by entries
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Of what runs in this process, the last one first."""

    def save_for(self, database: str | None) -> None:
        """What its engines save belongs to a database; before they are built."""
        self._config = self._config.saving_for(database)

    def build(self) -> None:
        """Build what runs in this process, and look at the model that has to be there, where that has a
        process of its own. It imports what engines need: call it in a thread.

        Raises LoadError for folders that are not there or hold no such model.
        """
        first = first_of(self._config)
        for entry in self._config.entries:
            config = self._config.of_entry(entry)
            if entry.in_child:
                if entry.id == first:
                    build_engine(config)  # that process builds its own
                elif self._line is None:
                    warn_where_lacking(entry, config)
            elif entry.use != "text":
                self._built[entry.id] = [*build_others(config)]
            else:
                self._built[entry.id] = [build_engine(config)]

    async def start(self) -> None:
        """Start what was built for this process, and load the default model, and those that are to be there
        from the start. A default that cannot be loaded is a LoadError; another one is only told."""
        if self._line is not None:
            await self._line.open()
        for entry in self._config.entries:
            config = self._config.of_entry(entry)
            if entry.in_child:
                self._put(entry, config)
            else:
                await self._start_inside(entry, config)
        self.shelf.start()
        if self._line is not None:
            self._follow(self._line)
        first = first_of(self._config)
        for held in list(self.shelf):
            entry = self._children[held.name].entry
            if held.name == first:
                await self.shelf.loaded(held)
            elif entry.preload:
                try:
                    await self.shelf.loaded(held)
                except LoadError:
                    log.error("the server starts without %s", held.name)

    def _put(self, entry: ModelEntry, config: Config) -> None:
        wanted, replaced = partial(self._wanted, entry.id), partial(self._replaced, entry.id)
        line, num_servers = self._line, self._config.api_server_count
        if line is None:
            child: Child | FarChild = Child(entry.id, config, wanted, on_replaced=replaced)
        else:
            child = line.child(entry.id, wanted, replaced)
        kind = ChildText if entry.use == "text" else ChildOther
        model = self._children[entry.id] = kind(entry, config, child, num_servers=num_servers)
        # One that another process keeps is unloaded by that one.
        idle_s = entry.idle_s if line is None else None
        needed = is_needed(entry, first_of(self._config))
        self.shelf.add(Held(entry.id, model, pinned=entry.pin, needed=needed, idle_s=idle_s))
        if entry.use == "text":
            self.models.expect(entry, tuple(adapters_of(config)))

    def _follow(self, line: ShelfLine) -> None:
        """Serve what other processes have had loaded, and say what is used here."""

        def loaded(name: str) -> None:
            if (held := self.shelf.get(name)) is not None:
                self.shelf.want(held)

        line.uses = lambda: {
            held.name: (held.model.is_busy(), held.num_waiting, held.used_at) for held in self.shelf
        }
        line.on_loaded = loaded
        for name in self._children:
            if line.standing(name).state == "loaded":
                loaded(name)

    async def _start_inside(self, entry: ModelEntry, config: Config) -> None:
        for engine in self._built.pop(entry.id):
            self.closers.insert(0, engine.close)
            await engine.start()
            if isinstance(engine, PoolingEngine | SpeechEngine):
                self.models.add_other(engine, caps_of(config))
            else:
                self._inside.append(engine)
                self.models.add_entry(entry, engine, caps_of(config))

    def _wanted(self, id: str) -> None:
        """Somebody waits for a model that is not there, in the middle of what it was asked."""
        held = self.shelf.get(id)
        if held is not None and not held.is_kept:
            self.shelf.want(held)

    def _replaced(self, id: str) -> None:
        """The process of a model serves another one than before: serve that."""
        held = self.shelf.get(id)
        if held is not None:
            self.shelf.want(held)

    def _loaded(self, held: Held) -> None:
        match self._children[held.name]:
            case ChildText() as child:
                assert child.engine is not None
                self.models.add_entry(child.entry, child.engine, caps_of(child.config))
            case ChildOther() as child:
                assert child.engine is not None
                self.models.add_other(child.engine, caps_of(child.config))
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
        if self._line is not None:
            await self._line.close()

    def _standing(self, held: Held) -> Standing:
        child = self._children[held.name].child
        return standing(held, child) if isinstance(child, Child) else child.standing()

    def readings(self) -> Iterator[Reading]:
        """What there is of each model that is loaded when it is wanted, for metrics."""
        for held in self.shelf:
            stands = self._standing(held)
            yield Reading(
                "model",
                {
                    "loaded": int(stands.state == "loaded"),
                    "memory_bytes": stands.memory_bytes,
                    "load_waiting": stands.waiting,
                    "load_seconds": stands.load_s,
                    "loads_total": stands.loads,
                    "unloads_total": stands.unloads,
                    "load_failures_total": stands.load_failures,
                    "crashes_total": stands.crashes,
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
            held = self.shelf.get(entry.id)
            stands = Standing("loaded") if held is None else self._standing(held)
            found.append(
                {
                    "id": entry.id,
                    "object": "model.state",
                    "state": stands.state,
                    "engine": entry.engine,
                    "use": entry.use,
                    "child": entry.in_child,
                    "pid": stands.pid,
                    "aliases": self.models.aliases(entry.id),
                    "default": entry.default,
                    "pinned": entry.pin,
                    "idle_s": entry.idle_s,
                    "memory_bytes": stands.memory_bytes or None,
                    "waiting": stands.waiting,
                    "loads": stands.loads,
                    "crashes": stands.crashes,
                    "failure": stands.failure,
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
