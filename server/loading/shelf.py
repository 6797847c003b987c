"""Which models are in memory: loaded when they are wanted, unloaded when idle, or to make room."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from engine import EngineError, LoadError
from server.errors import ApiError
from server.loading.breaker import Breaker

log = logging.getLogger("antiphon.models")

State = Literal["unloaded", "waiting", "loading", "loaded", "failed"]

LOOK_S = 0.25
"""Between two looks whether a model has become idle."""


class Loadable(Protocol):
    """What can be loaded and unloaded."""

    async def load(self) -> None:
        """Return when it serves. Raises LoadError."""

    async def unload(self) -> None:
        """Give its memory back."""

    def state(self) -> State:
        """Where it stands. While it is `loading` it may be one that has served, and is on its way back."""

    def is_busy(self) -> bool:
        """Whether somebody uses it."""

    def memory_bytes(self) -> int:
        """What it takes now, or would take."""


class Held:
    """One model of the shelf. pinned: it is never unloaded by itself. needed: there is no server without it.
    idle_s: seconds of rest after which it is unloaded. too_large: why there can never be room for it."""

    too_large: str | None = None

    def __init__(
        self,
        name: str,
        model: Loadable,
        *,
        pinned: bool = False,
        needed: bool = False,
        idle_s: float | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.pinned = pinned
        self.needed = needed
        self.idle_s = idle_s
        self.breaker = Breaker()
        self.num_waiting = 0
        self.num_loads = self.num_unloads = self.num_failures = 0
        self.load_s = 0.0
        """How long it took the last time."""
        self.failure: str | None = None
        self.step: Literal["waiting", "loading"] | None = None
        self.used_at = time.monotonic()
        self.loading: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """Where it stands."""
        state = self.model.state()
        if self.step is not None and state != "waiting":
            return self.step
        return "failed" if state == "unloaded" and self.failure is not None else state

    @property
    def is_up(self) -> bool:
        """Whether it serves now."""
        return self.step is None and self.model.state() == "loaded"

    @property
    def is_kept(self) -> bool:
        """Whether it has memory, though it may not serve at this moment."""
        return self.model.state() in ("loading", "loaded")

    @property
    def takes_memory(self) -> bool:
        """Whether it has memory, or is about to have."""
        return self.is_kept or self.step == "loading"

    def use(self) -> None:
        """Somebody wants it."""
        self.used_at = time.monotonic()

    def idle_for(self, now: float) -> float:
        """Seconds since it was used last; 0 while it is."""
        if self.model.is_busy() or self.num_waiting:
            self.used_at = now
        return now - self.used_at


class Shelf:
    """All models that are loaded when they are wanted.

    memory_bytes: what they may take together; None: no limit. load_s: how long a request waits for one, and
    how long room is waited for that nobody wants any more. max_waiting: how many requests wait for the same
    one.
    """

    def __init__(
        self, *, memory_bytes: int | None = None, load_s: float = 60.0, max_waiting: int = 64
    ) -> None:
        self._memory_bytes = memory_bytes
        self._load_s = load_s
        self._max_waiting = max_waiting
        self._held: dict[str, Held] = {}
        self._one_loads = asyncio.Lock()  # each takes all of the disk
        self._sweeping: asyncio.Task[None] | None = None
        self.on_loaded: Callable[[Held], None] = lambda held: None

    def add(self, held: Held) -> None:
        """Put a model there, unloaded. Raises LoadError for one that is needed and can never have room."""
        held.too_large = too_large(held.name, held.model.memory_bytes(), self._memory_bytes)
        if held.too_large is not None and held.needed:
            raise LoadError(
                f"{held.too_large}; the server starts without it where it is no default, preload or pin"
            )
        if held.too_large is not None:
            log.warning("the server starts, and cannot load %s: %s", held.name, held.too_large)
        self._held[held.name] = held

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def get(self, name: str) -> Held | None:
        """The model of this name, where it is one that is loaded when it is wanted."""
        return self._held.get(name)

    @property
    def memory_used(self) -> int:
        """Bytes of those that are loaded, or are being loaded."""
        return _bytes(held for held in self if held.takes_memory)

    def start(self) -> None:
        """Unload what is idle from now on."""
        self._sweeping = asyncio.create_task(self._sweep(), name="idle-models")

    async def close(self) -> None:
        """Stop loading and unloading; what is loaded stays."""
        tasks = [held.loading for held in self if held.loading is not None]
        tasks += [] if self._sweeping is None else [self._sweeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ready(self, held: Held) -> None:
        """Return when a model serves. ApiError 503 where too many wait for it, or where it takes too long;
        LoadError where it cannot be loaded."""
        held.use()
        if held.is_up:
            return
        if held.num_waiting >= self._max_waiting:
            raise _loading(held, "and too many requests wait for it already")
        try:
            async with asyncio.timeout(self._load_s):
                await self.loaded(held)
        except TimeoutError:
            waits = held.state == "waiting"
            raise _loading(held, "and has no room yet" if waits else "which takes long") from None

    async def loaded(self, held: Held) -> None:
        """Return when a model serves, however long that takes. LoadError where it cannot be loaded."""
        held.num_waiting += 1
        try:
            await asyncio.shield(self.want(held))
        finally:
            held.num_waiting -= 1
            held.use()

    def want(self, held: Held) -> asyncio.Task[None]:
        """Have a model loaded; the task of it, which whoever waits shields. It ends with ApiError 503 where
        there is no room, and nobody has wanted the model for `load_s`."""
        held.use()
        if held.loading is None or held.loading.done():
            held.loading = asyncio.create_task(self._load(held), name=f"load-{held.name}")
            held.loading.add_done_callback(_noted)
        return held.loading

    async def _load(self, held: Held) -> None:
        if held.is_up:
            return
        held.step, held.failure = "waiting", None
        try:
            if held.too_large is not None:
                raise LoadError(held.too_large)
            while not await self._load_if_it_fits(held):
                if held.idle_for(time.monotonic()) >= self._load_s:
                    raise _loading(held, "and has no room yet")
                await asyncio.sleep(LOOK_S)  # and what fits beside the others is loaded meanwhile
        except EngineError as error:
            held.num_failures += 1
            held.failure = str(error)
            if isinstance(error, LoadError):
                error.model = held.name
            held.breaker.failed()
            log.error("%s cannot be loaded: %s", held.name, error)
            raise
        finally:
            held.step = None
        held.num_loads += 1
        held.use()
        log.info("%s serves, after %.1f s", held.name, held.load_s)
        self.on_loaded(held)

    async def _load_if_it_fits(self, held: Held) -> bool:
        """Load a model where there is room for it, or room can be made; returns whether that was so. Raises
        LoadError."""
        async with self._one_loads:
            if not await self._make_room(held):
                return False
            held.step = "loading"
            log.info("loading %s", held.name)
            began = time.monotonic()
            await held.model.load()
            held.load_s = time.monotonic() - began
            return True

    async def _make_room(self, held: Held) -> bool:
        """Unload those that were idle for longest, until a model fits; False, and none is unloaded, where it
        would not fit beside those that are used. LoadError where it cannot beside pinned ones."""
        if self._memory_bytes is None or held.is_kept:  # one on its way back has its memory
            return True
        while True:
            needs, used = held.model.memory_bytes(), self.memory_used
            if used == 0 or used + needs <= self._memory_bytes:  # alone it may take more than was expected
                return True
            pinned = _bytes(each for each in self if each.pinned and each.takes_memory)
            if pinned and pinned + needs > self._memory_bytes:
                raise LoadError(
                    f"{held.name} takes about {_gib(needs)}, and pinned models take {_gib(pinned)} of "
                    f"models_memory_bytes, {_gib(self._memory_bytes)}"
                )
            now = time.monotonic()
            idle = [each for each in self._loaded() if not each.pinned and not each.model.is_busy()]
            # One that was used a moment ago may have been promised to a request that has no place yet.
            idle = [each for each in idle if each.idle_for(now) >= LOOK_S]
            if (stays := used - _bytes(idle)) and stays + needs > self._memory_bytes:
                return False
            await self.unload(max(idle, key=lambda each: each.idle_for(now)), "to make room")

    def _loaded(self) -> Sequence[Held]:
        return [held for held in self if held.state == "loaded"]

    async def unload(self, held: Held, why: str) -> None:
        """Unload a model, whoever uses it."""
        log.info("%s is unloaded: %s", held.name, why)
        held.num_unloads += 1
        held.failure = None
        await held.model.unload()

    async def unload_idle(self, held: Held) -> None:
        """Unload a model on somebody's word. ApiError 409 while it is used."""
        if held.model.is_busy() or held.step is not None or held.num_waiting:
            message = f"The model '{held.name}' is in use. Try again when its requests have ended."
            raise ApiError(409, message, code="model_busy")
        if held.is_up:
            await self.unload(held, "it was asked for")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for held in self._loaded():
                if held.idle_for(now) >= (held.idle_s or float("inf")) and not held.pinned:
                    await self.unload(held, f"it was idle for {held.idle_s:g} s")


def too_large(name: str, needs: int, most: int | None) -> str | None:
    """Why a model that takes so many bytes can never have room, and what to do; None where it can."""
    if most is None or needs <= most:
        return None
    return (
        f"{name} takes about {_gib(needs)}, and models_memory_bytes is {_gib(most)}: raise that, or give the "
        "model the memory_bytes that it really takes"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _bytes(held: Iterable[Held]) -> int:
    return sum(each.model.memory_bytes() for each in held)


def _loading(held: Held, more: str) -> ApiError:
    seconds = str(max(1, round(held.load_s) or 5))
    return ApiError(
        503,
        f"The model '{held.name}' is being loaded, {more}. Try again in {seconds} s.",
        code="model_loading",
        headers={"retry-after": seconds},
    )


def _noted(task: asyncio.Task[None]) -> None:
    """Whoever waits is told of a failure; where nobody does any more, the log was."""
    if not task.cancelled():
        task.exception()
