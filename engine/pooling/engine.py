"""`PoolingEngine`: a model for vectors or scores, on a thread of its own, served to asyncio.

The thread, and with it the threads that torch begins for it, has a low priority with the operating system:
where the processor is busy, whatever generates goes first. A table's does not. What it does is mostly
Python's own, and who holds the interpreter's lock while others have the processor keeps all from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from engine.admission import Admission, Place
from engine.engine_thread import EngineThread, give_way
from engine.model_folder import find_folder, known_folder
from engine.pooling.recipe import Recipe, read_recipe
from engine.pooling.texts import TextInput, Texts, Words
from engine.pooling.values import PoolingConfig, PoolingInfo, PoolingStats
from engine.pooling.work import Close, Drop, Inbox, Item, Outcome, Submit, Vector, Worker
from engine.turns import Turns
from engine.types import EngineDead, PromptTooLong

log = logging.getLogger("antiphon.engine")

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
    done: asyncio.Future[tuple[list[Vector], int]]
    place: Place | None = None
    cached: int = 0


class PoolingEngine:
    """A model in this process for vectors of texts, or scores of pairs. All methods are called on one asyncio
    loop; none blocks it. Raises LoadError for a folder that is not there, or holds no such model: a wrong
    path is told before anything is loaded."""

    def __init__(self, config: PoolingConfig) -> None:
        if (folder := known_folder(config.model)) is not None:
            read_recipe(folder, config.kind)
        self._config = config
        self._is_table = False
        self._inbox: Inbox = SimpleQueue()
        self._pool = ThreadPoolExecutor(1, "texts", initializer=self._give_way)
        self._turns = Turns(self._pool)
        self._thread = EngineThread(
            "pooling", f"the model for {config.kind}", lambda: self._inbox.put(Close())
        )
        self._jobs: dict[int, _Job] = {}  # by the handle of each text
        self._next_handle = 0
        self._num_texts = self._num_tokens = self._num_cached = self._num_steps = self._num_failures = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> PoolingInfo:
        """Load the model and start the thread. Raises LoadError where it cannot be served."""
        recipe, self._texts, self._worker = await self._thread.start(
            self._config.model, self._load, self._steps
        )
        self._admission = Admission(
            max_running=AT_ONCE,
            max_waiting=self._config.max_waiting,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )
        self._info = self._describe(recipe)
        return self._info

    def _load(self) -> tuple[Recipe, Texts, Worker]:
        """On the thread."""
        recipe = read_recipe(find_folder(self._config.model), self._config.kind)
        self._is_table = recipe.head == "table"
        self._give_way()
        return recipe, *_open(self._config, recipe)

    def _give_way(self) -> None:
        """On a thread that computes or reads texts."""
        if not self._is_table:
            give_way()

    def _steps(self, loaded: tuple[Recipe, Texts, Worker]) -> None:
        """The thread's work: step until closed."""
        import torch

        worker = loaded[2]
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
                outcomes = worker.step(partial(self._thread.post, self._begun))
                idle = outcomes is None
                if outcomes is not None:
                    self._num_steps += 1
                if outcomes:
                    self._thread.post(self._receive, outcomes)

    async def dead(self) -> BaseException:
        """Wait until the engine has died; returns why."""
        return await self._thread.dead()

    async def close(self) -> None:
        """Stop the thread; requests still running end with EngineDead."""
        await self._thread.close()
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
            engine="paged" if paged else "table" if self._is_table else "transformers",
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
            self._thread.require_alive()
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
        self._thread.require_alive()
        for text in texts:
            if not 0 < len(text.ids) <= self._info.max_model_len:
                raise PromptTooLong(len(text.ids), self._info.max_model_len)
        if not texts:
            return [], 0
        first, self._next_handle = self._next_handle, self._next_handle + len(texts)
        handles = range(first, first + len(texts))

        def submit(done: asyncio.Future[tuple[list[Vector], int]]) -> None:
            job = _Job(first, [None] * len(texts), len(texts), done, place)
            self._jobs.update(dict.fromkeys(handles, job))
            self._inbox.put(Submit([Item(first + i, text, owner, weight) for i, text in enumerate(texts)]))

        try:
            vectors, cached = await self._thread.answer(submit, deadline)
        finally:
            left = [handle for handle in handles if self._jobs.pop(handle, None) is not None]
            if left:
                self._inbox.put(Drop(left))
        self._num_texts += len(texts)
        self._num_tokens += sum(len(text.ids) for text in texts)
        self._num_cached += cached
        return vectors, cached

    def _begun(self, handles: Sequence[int]) -> None:
        """The thread begins with texts."""
        for handle in handles:
            job = self._jobs.get(handle)
            if job is not None and job.place is not None:
                job.place.begin()

    def _receive(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            job = self._jobs.pop(outcome.handle, None)
            if job is None or job.done.done():
                continue
            if outcome.error is not None:
                self._num_failures += 1
                job.done.set_exception(outcome.error)
                continue
            job.vectors[outcome.handle - job.first] = outcome.vector
            job.cached += outcome.cached
            job.missing -= 1
            if not job.missing:
                job.done.set_result(([each for each in job.vectors if each is not None], job.cached))


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


def _open(config: PoolingConfig, recipe: Recipe) -> tuple[Texts, Worker]:
    """Load the tokenizer and the model, on the calling thread."""
    import torch

    from engine.models import is_pooled_natively
    from engine.pooling.encoder import EncoderWorker
    from engine.pooling.paged import PagedWorker
    from engine.pooling.static import TableWorker

    texts = Texts(recipe)
    if recipe.config.get("auto_map"):
        log.warning("%s brings code of its own, which is not run: transformers has its own", config.model)
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    with torch.inference_mode():
        kind: Any = EncoderWorker
        if recipe.head == "table":
            kind = TableWorker
        elif is_pooled_natively(dict(recipe.config)):
            kind = PagedWorker
        worker: Worker = kind(config, recipe, texts, device)
    return texts, worker
