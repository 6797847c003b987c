"""`SpeechEngine`: a model for speech, on a thread of its own, served to asyncio.

Its thread gives way to whatever generates, as that of a `PoolingEngine` does. It reads one window at a time;
owners take turns, each by the sound that was read for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine.admission import Admission
from engine.core import FairShare
from engine.model_folder import find_folder
from engine.pooling import give_way
from engine.speech.gate import Gate
from engine.speech.values import (
    AT_ONCE,
    SAMPLE_RATE,
    SpeechConfig,
    SpeechInfo,
    SpeechStats,
    Window,
    WindowText,
)
from engine.types import DeadlineExceeded, EngineDead, EngineError, LoadError, RequestFailed

if TYPE_CHECKING:
    from engine.speech.whisper import Whisper

log = logging.getLogger("antiphon.engine")


@dataclass(slots=True, eq=False)
class _Job:
    """A window that is to be read, and who waits for it."""

    window: Window
    owner: str
    weight: float
    done: asyncio.Future[WindowText]
    wanted: bool = True


@dataclass(slots=True)
class _Queue:
    """Jobs of all owners, the least served first. Of the thread alone."""

    share: FairShare = field(default_factory=FairShare)
    jobs: OrderedDict[str, deque[_Job]] = field(default_factory=OrderedDict)

    def add(self, job: _Job) -> None:
        if job.owner not in self.jobs:
            self.share.join(job.owner, self.jobs.keys())
            self.jobs[job.owner] = deque()
        self.jobs[job.owner].append(job)

    def take(self) -> _Job | None:
        """The next one that somebody waits for."""
        while self.jobs:
            owner = self.share.least(self.jobs)
            job = self.jobs[owner].popleft()
            if not self.jobs[owner]:
                del self.jobs[owner]
            if job.wanted:
                self.share.charge(owner, len(job.window.samples) / 2 / SAMPLE_RATE, job.weight)
                return job
        return None


class SpeechEngine:
    """A model in this process that reads windows of sound. All methods are called on one asyncio loop; none
    blocks it. gate: where sounds wait until they may be in memory."""

    def __init__(self, config: SpeechConfig) -> None:
        self._config = config
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs: set[_Job] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.gate = Gate(AT_ONCE)
        self._num_windows = self._num_tokens = self._num_failures = 0
        self._seconds = 0.0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> SpeechInfo:
        """Load the model and start the thread. Raises LoadError where it cannot be served."""
        self._asyncio = asyncio.get_running_loop()
        self._death: asyncio.Future[BaseException] = self._asyncio.create_future()
        loaded: asyncio.Future[Whisper] = self._asyncio.create_future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="speech", daemon=True)
        self._thread.start()
        model = await loaded
        self._admission = Admission(max_running=AT_ONCE, max_waiting=self._config.max_waiting)
        self._info = SpeechInfo(
            name=self._config.name or str(self._config.model).rstrip("/").rsplit("/", 1)[-1],
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            window_s=model.window_s,
            vocab_size=model.vocab_size,
            languages=model.languages,
            max_prompt_tokens=model.max_prompt,
            words=model.has_heads,
        )
        return self._info

    def _run(self, loaded: asyncio.Future[Whisper]) -> None:
        """The thread: load, say so, then read until closed or dead."""
        give_way()
        try:
            model = _open(self._config)
        except BaseException as error:
            failure = error if isinstance(error, LoadError) else _load_error(self._config.model, error)
            self._post(lambda: None if loaded.cancelled() else loaded.set_exception(failure))
            return
        self._post(lambda: None if loaded.cancelled() else loaded.set_result(model))
        try:
            self._read_all(model)
        except BaseException as error:  # whatever ends the thread ends the engine, for every caller
            death = error
            self._post(lambda: self._die(death))

    def _read_all(self, model: Whisper) -> None:
        import torch

        queue, threads = _Queue(), self._config.num_threads or torch.get_num_threads()
        with torch.inference_mode():
            while True:
                while not queue.jobs or not self._inbox.empty():
                    if (job := self._inbox.get()) is None:
                        return
                    queue.add(job)
                if (job := queue.take()) is None:
                    continue
                torch.set_num_threads(threads)  # another engine may have said otherwise
                self._read(model, job)

    def _read(self, model: Whisper, job: _Job) -> None:
        """Read one window; what fails is the window's own failure, unless the device has failed."""
        from engine.core import of_device
        from engine.speech.whisper import Dropped

        try:
            text = model.read(job.window, lambda: job.wanted and not self._closed)
        except Dropped:
            return
        except Exception as error:
            if of_device(error) and not _is_out_of_memory(error):
                raise
            log.error("a window of sound failed", exc_info=error)
            failure = (
                error
                if isinstance(error, RequestFailed)
                else RequestFailed(f"{type(error).__name__}: {error}")
            )
            self._post(lambda: self._failed(job, failure))
        else:
            self._post(lambda: self._done(job, text))

    def _post(self, callback: Callable[[], object]) -> None:
        """Run something on the asyncio loop, from the thread."""
        try:
            self._asyncio.call_soon_threadsafe(callback)
        except RuntimeError:
            self._inbox.put(None)  # the asyncio loop is gone, and with it every caller

    def _done(self, job: _Job, text: WindowText) -> None:
        self._num_windows += 1
        self._num_tokens += text.num_tokens
        self._seconds += len(job.window.samples) / 2 / SAMPLE_RATE
        if not job.done.done():
            job.done.set_result(text)

    def _failed(self, job: _Job, failure: EngineError) -> None:
        self._num_failures += 1
        if not job.done.done():
            job.done.set_exception(failure)

    def _die(self, error: BaseException) -> None:
        if self._death.done():
            return
        self._death.set_result(error)
        failure = EngineDead(f"the model for speech has stopped: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._end(failure)

    def _end(self, failure: EngineError) -> None:
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(failure)

    async def dead(self) -> BaseException:
        """Wait until the engine has died; returns why."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """Stop the thread; windows that wait end with EngineDead."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        if self._thread is not None:
            self._end(EngineDead("the engine was closed"))
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10.0)

    # -- what is served --------------------------------------------------------------------------------------

    @property
    def info(self) -> SpeechInfo:
        """The model served; only after `start`."""
        return self._info

    @property
    def admission(self) -> Admission:
        """The places of its requests; only after `start`."""
        return self._admission

    def stats(self) -> SpeechStats:
        """Counters for metrics."""
        return SpeechStats(
            windows_waiting=len(self._jobs),
            windows_total=self._num_windows,
            seconds_total=self._seconds,
            tokens_total=self._num_tokens,
            failures_total=self._num_failures,
        )

    async def read(
        self, window: Window, *, owner: str = "", weight: float = 1.0, deadline: float | None = None
    ) -> WindowText:
        """What a window says. Cancelling it ends the work at its next token. deadline: time.monotonic
        seconds.

        Raises DeadlineExceeded, RequestFailed (only this window) and EngineDead.
        """
        if self._death.done():
            raise EngineDead("the model for speech has stopped")
        if self._closed:
            raise EngineDead("the engine was closed")
        job = _Job(window, owner, weight, self._asyncio.create_future())
        self._jobs.add(job)
        self._inbox.put(job)
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(timeout):
                return await job.done
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
        finally:
            job.wanted = False
            self._jobs.discard(job)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _open(config: SpeechConfig) -> Whisper:
    """Load the model, on the calling thread."""
    import torch

    from engine.speech.whisper import Whisper

    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    with torch.inference_mode():
        return Whisper(config, find_folder(config.model), torch.device("cuda" if on_gpu else "cpu"))


def _load_error(model: str | Path, error: BaseException) -> LoadError:
    line = (str(error).strip().splitlines() or [""])[0]
    failure = LoadError(f"{model} cannot be loaded: {type(error).__name__}: {line}")
    failure.__cause__ = error
    return failure
