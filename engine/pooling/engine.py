"""`PoolingEngine`: a model for vectors or scores, on a thread of its own, served to asyncio.

The thread, and with it the threads that torch begins for it, has a low priority with the operating system:
where the processor is busy, whatever generates goes first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from engine.admission import Admission, Place
from engine.model_folder import find_folder
from engine.pooling.recipe import Recipe, read_recipe
from engine.pooling.texts import TextInput, Texts, Words
from engine.pooling.turns import Turns
from engine.pooling.values import PoolingConfig, PoolingInfo, PoolingStats
from engine.pooling.work import Close, Drop, Inbox, Item, Outcome, Submit, Vector, Worker
from engine.types import DeadlineExceeded, EngineDead, EngineError, LoadError, PromptTooLong

log = logging.getLogger("antiphon.engine")

NICENESS = 15
"""Added to that of the process: a thread that generates gets some thirty times as much of a busy core."""

ENCODED_AT_ONCE = 16
CHARACTERS_AT_ONCE = 100_000
"""Texts, and their characters, that are tokenized before others have their turn; one at least."""

AT_ONCE = 64
"""Requests whose texts are computed side by side; more wait."""


@dataclass(slots=True)
class _Job:
    """The texts of one request: which of them are missing yet, and what came of the others."""

    first: int
    vectors: list[Vector | None]
    missing: int
    done: asyncio.Future[None]
    place: Place | None = None
    cached: int = 0


class PoolingEngine:
    """A model in this process for vectors of texts, or scores of pairs. All methods are called on one asyncio
    loop; none blocks it."""

    def __init__(self, config: PoolingConfig) -> None:
        self._config = config
        self._inbox: Inbox = SimpleQueue()
        self._pool = ThreadPoolExecutor(1, "texts", initializer=give_way)
        self._turns = Turns(self._pool)
        self._jobs: dict[int, _Job] = {}  # by the handle of each text
        self._next_handle = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._num_texts = self._num_tokens = self._num_cached = self._num_steps = self._num_failures = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> PoolingInfo:
        """Load the model and start the thread. Raises LoadError where it cannot be served."""
        self._asyncio = asyncio.get_running_loop()
        self._death: asyncio.Future[BaseException] = self._asyncio.create_future()
        loaded: asyncio.Future[tuple[Recipe, Texts, Worker]] = self._asyncio.create_future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="pooling", daemon=True)
        self._thread.start()
        recipe, self._texts, self._worker = await loaded
        self._admission = Admission(
            max_running=AT_ONCE,
            max_waiting=self._config.max_waiting,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )
        self._info = self._describe(recipe)
        return self._info

    def _run(self, loaded: asyncio.Future[tuple[Recipe, Texts, Worker]]) -> None:
        """The thread: load, say so, then step until closed or dead."""
        give_way()
        try:
            recipe = read_recipe(find_folder(self._config.model), self._config.kind)
            texts, worker = _open(self._config, recipe)
        except BaseException as error:
            failure = error if isinstance(error, LoadError) else _load_error(self._config.model, error)
            self._post(lambda: None if loaded.cancelled() else loaded.set_exception(failure))
            return
        self._post(lambda: None if loaded.cancelled() else loaded.set_result((recipe, texts, worker)))
        try:
            self._steps(worker)
        except BaseException as error:  # whatever ends the thread ends the engine, for every caller
            death = error
            self._post(lambda: self._die(death))

    def _steps(self, worker: Worker) -> None:
        import torch

        with torch.inference_mode():
            idle = False
            while True:
                while idle or not self._inbox.empty():
                    idle = False
                    command = self._inbox.get()
                    if isinstance(command, Close):
                        return
                    if isinstance(command, Drop):
                        for handle in command.handles:
                            worker.drop(handle)
                    else:
                        for item in command.items:
                            worker.add(item)
                outcomes = worker.step()
                idle = outcomes is None
                if outcomes is not None:
                    self._num_steps += 1
                if outcomes:
                    self._post(lambda outcomes=outcomes: self._receive(outcomes))  # type: ignore[misc]

    def _post(self, callback: Callable[[], object]) -> None:
        """Run something on the asyncio loop, from the thread."""
        try:
            self._asyncio.call_soon_threadsafe(callback)
        except RuntimeError:
            self._inbox.put(Close())  # the asyncio loop is gone, and with it every caller

    def _die(self, error: BaseException) -> None:
        if self._death.done():
            return
        self._death.set_result(error)
        failure = EngineDead(
            f"the model for {self._config.kind} has stopped: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        self._end(failure)

    def _end(self, failure: EngineError) -> None:
        for job in {id(job): job for job in self._jobs.values()}.values():
            if not job.done.done():
                job.done.set_exception(failure)

    async def dead(self) -> BaseException:
        """Wait until the engine has died; returns why."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """Stop the thread; requests still running end with EngineDead."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(Close())
        if self._thread is not None:
            self._end(EngineDead("the engine was closed"))
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10.0)
        self._turns.close(EngineDead("the engine was closed"))
        self._pool.shutdown(wait=False)

    # -- what is served --------------------------------------------------------------------------------------

    @property
    def info(self) -> PoolingInfo:
        """The model served; only after `start`."""
        return self._info

    @property
    def admission(self) -> Admission:
        """The places of its queue; only after `start`."""
        return self._admission

    def stats(self) -> PoolingStats:
        """Counters for metrics."""
        return PoolingStats(
            texts_waiting=len(self._jobs),
            texts_total=self._num_texts,
            tokens_total=self._num_tokens,
            cached_tokens_total=self._num_cached,
            steps_total=self._num_steps,
            failures_total=self._num_failures,
        )

    def _describe(self, recipe: Recipe) -> PoolingInfo:
        worker, embeds = self._worker, recipe.kind == "embedding"
        paged = type(worker).__name__ == "PagedWorker"
        digest = hashlib.blake2b(worker.fingerprint + self._texts.fingerprint(), digest_size=16)
        how = (recipe.kind, recipe.modes, recipe.include_prompt, recipe.normalized, recipe.lower_case)
        digest.update(repr((how, sorted(recipe.prompts.items()))).encode())
        dimensions = recipe.dimensions(worker.hidden) if embeds else 0
        return PoolingInfo(
            name=self._config.name or str(self._config.model).rstrip("/").rsplit("/", 1)[-1],
            kind=recipe.kind,
            architecture=worker.architecture,
            engine="paged" if paged else "transformers",
            fingerprint=digest.hexdigest(),
            max_model_len=worker.max_len,
            vocab_size=worker.vocab_size,
            pooling=recipe.modes,
            pooling_source=recipe.source,
            causal=paged or recipe.causal,
            normalized=recipe.normalized,
            dimensions=dimensions,
            cuts=recipe.cuts,
            default_dimensions=min(recipe.cut or dimensions, dimensions),
            prompts=recipe.prompts,
            default_prompt=recipe.default_prompt,
            labels=recipe.labels,
            activation=None if embeds else recipe.activation.lower(),
            instructed=recipe.head == "yes_no",
        )

    # -- texts -----------------------------------------------------------------------------------------------

    async def encode(
        self, texts: Sequence[Words], *, prompt: str = "", cut: int | None = None, owner: str = ""
    ) -> list[TextInput]:
        """Token ids of texts, pairs of texts, or token ids; see `Texts.encode`. Owners take turns. Raises
        RenderError and EngineDead."""
        found: list[TextInput] = []
        while len(found) < len(texts):
            if self._closed:
                raise EngineDead("the engine was closed")
            some = _first(texts, len(found))
            found += await self._turns.do(owner, partial(self._encoded, some, prompt, cut))
        return found

    def _encoded(self, texts: Sequence[Words], prompt: str, cut: int | None) -> list[TextInput]:
        return [self._texts.encode(text, prompt=prompt, cut=cut) for text in texts]

    async def pool(
        self,
        texts: Sequence[TextInput],
        *,
        owner: str = "",
        weight: float = 1.0,
        place: Place | None = None,
        deadline: float | None = None,
    ) -> tuple[list[Vector], int]:
        """A vector, or scores, for each text, and how many of all their tokens the prefix cache had.

        Cancelling it drops the texts. place: one that the caller took in the queue, and gives back.
        deadline: time.monotonic seconds. Raises PromptTooLong for a text that the model has no room for, or
        that has no tokens, DeadlineExceeded, RequestFailed (only this request) and EngineDead.
        """
        if self._death.done():
            raise EngineDead(f"the model for {self._config.kind} has stopped")
        if self._closed:
            raise EngineDead("the engine was closed")
        for text in texts:
            if not 0 < len(text.ids) <= self._info.max_model_len:
                raise PromptTooLong(len(text.ids), self._info.max_model_len)
        if not texts:
            return [], 0
        first, self._next_handle = self._next_handle, self._next_handle + len(texts)
        job = _Job(first, [None] * len(texts), len(texts), self._asyncio.create_future(), place)
        handles = range(first, first + len(texts))
        self._jobs.update(dict.fromkeys(handles, job))
        self._inbox.put(Submit([Item(first + i, text, owner, weight) for i, text in enumerate(texts)]))
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(timeout):
                await job.done
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
        finally:
            left = [handle for handle in handles if self._jobs.pop(handle, None) is not None]
            if left:
                self._inbox.put(Drop(left))
        self._num_texts += len(texts)
        self._num_tokens += sum(len(text.ids) for text in texts)
        self._num_cached += job.cached
        return [vector for vector in job.vectors if vector is not None], job.cached

    def _receive(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            job = self._jobs.pop(outcome.handle, None)
            if job is None or job.done.done():
                continue
            if job.place is not None:
                job.place.begin()
            if outcome.error is not None:
                self._num_failures += 1
                job.done.set_exception(outcome.error)
                continue
            job.vectors[outcome.handle - job.first] = outcome.vector
            job.cached += outcome.cached
            job.missing -= 1
            if not job.missing:
                job.done.set_result(None)


def _first(texts: Sequence[Words], start: int) -> Sequence[Words]:
    """The texts behind `start` that are tokenized in one go."""
    stop, length = start, 0
    while stop < len(texts) and stop - start < ENCODED_AT_ONCE and length < CHARACTERS_AT_ONCE:
        words = texts[stop]
        length += (
            len(words)
            if isinstance(words, str)
            else sum(len(each) if isinstance(each, str) else 1 for each in words)
        )
        stop += 1
    return texts[start:stop]


def give_way() -> None:
    """Lower the priority of the calling thread, and of those that it begins, where the system can."""
    with suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))


def _open(config: PoolingConfig, recipe: Recipe) -> tuple[Texts, Worker]:
    """Load the tokenizer and the model, on the calling thread."""
    import torch

    from engine.models import is_pooled_natively
    from engine.pooling.encoder import EncoderWorker
    from engine.pooling.paged import PagedWorker

    texts = Texts(recipe)
    if recipe.config.get("auto_map"):
        log.warning("%s brings code of its own, which is not run: transformers has its own", config.model)
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    with torch.inference_mode():
        kind: Any = PagedWorker if is_pooled_natively(dict(recipe.config)) else EncoderWorker
        worker: Worker = kind(config, recipe, texts, device)
    return texts, worker


def _load_error(model: str | Path, error: BaseException) -> LoadError:
    line = (str(error).strip().splitlines() or [""])[0]
    failure = LoadError(f"{model} cannot be loaded: {type(error).__name__}: {line}")
    failure.__cause__ = error
    return failure
