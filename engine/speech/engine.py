"""`SpeechEngine`: a model for speech, on a thread of its own, served to asyncio.

Its thread gives way to whatever generates. It reads one window at a time;
owners take turns, each by the sound that was read for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine.admission import Admission
from engine.core import FairShare
from engine.engine_thread import EngineThread, resolve
from engine.model_folder import find_folder, known_folder, read_config
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
from engine.types import EngineError, LoadError, RequestFailed

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

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it still; from any thread."""
        return not self.done.done()


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
    blocks it. gate: where sounds wait until they may be in memory. Raises LoadError for a folder that is not
    there, or holds no such model: a wrong path is told before anything is loaded."""

    def __init__(self, config: SpeechConfig) -> None:
        if (folder := known_folder(config.model)) is not None:
            _require_whisper(folder)
        self._config = config
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = EngineThread(
            "speech", "the model for speech", lambda: self._inbox.put(None), gives_way=True
        )
        self.gate = Gate(AT_ONCE)
        self._num_windows = self._num_tokens = self._num_failures = 0
        self._seconds = 0.0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> SpeechInfo:
        """Load the model and start the thread. Raises LoadError where it cannot be served."""
        model = await self._thread.start(self._config.model, lambda: _open(self._config), self._read_all)
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

    def _read_all(self, model: Whisper) -> None:
        """The thread's work: read until closed."""
        import torch

        from engine.kernels import own_threads, set_threads

        queue, threads = _Queue(), self._config.num_threads or own_threads()
        with torch.inference_mode():
            while True:
                while not queue.jobs or not self._inbox.empty():
                    if (job := self._inbox.get()) is None:
                        return
                    queue.add(job)
                if (job := queue.take()) is None:
                    continue
                set_threads(threads)  # another engine may have said otherwise
                self._read(model, job)

    def _read(self, model: Whisper, job: _Job) -> None:
        """Read one window; what fails is the window's own failure, unless the device has failed."""
        from engine.failures import of_device
        from engine.speech.whisper import Dropped

        try:
            text = model.read(job.window, lambda: job.wanted)
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
            self._thread.post(self._failed, job, failure)
        else:
            self._thread.post(self._done, job, text)

    def _done(self, job: _Job, text: WindowText) -> None:
        self._num_windows += 1
        self._num_tokens += text.num_tokens
        self._seconds += len(job.window.samples) / 2 / SAMPLE_RATE
        resolve(job.done, text)

    def _failed(self, job: _Job, failure: EngineError) -> None:
        self._num_failures += 1
        resolve(job.done, failure)

    async def dead(self) -> BaseException:
        """Wait until the engine has died; returns why."""
        return await self._thread.dead()

    async def close(self) -> None:
        """Stop the thread; windows that wait end with EngineDead."""
        await self._thread.close()

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
            windows_waiting=self._thread.num_waiting,
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
        return await self._thread.answer(
            lambda done: self._inbox.put(_Job(window, owner, weight, done)), deadline
        )


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _open(config: SpeechConfig) -> Whisper:
    """Load the model, on the calling thread."""
    import torch

    from engine.speech.whisper import Whisper

    folder = find_folder(config.model)
    _require_whisper(folder)
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    with torch.inference_mode():
        return Whisper(config, folder, torch.device("cuda" if on_gpu else "cpu"))


def _require_whisper(folder: Path) -> None:
    kind = read_config(folder).get("model_type", "unknown")
    if kind != "whisper":
        raise LoadError(f"{folder} is a model of the type {kind!r}; of those for speech, 'whisper' is served")
