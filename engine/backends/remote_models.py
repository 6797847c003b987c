"""Models for vectors, scores and speech in the engine's process, for the servers before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.admission import Admission, Place
from engine.backends.remote import PATIENCE_S, ask
from engine.backends.remote_line import EngineLine
from engine.backends.remote_wire import read, read_floats, read_text, text_form, window_form
from engine.pooling import PoolingInfo, PoolingStats, TextInput, Vector, Words
from engine.speech import AT_ONCE, Gate, SpeechInfo, SpeechStats, Window, WindowText
from engine.types import PromptTooLong


class RemotePooling:
    """The pooling engine number `index` of the process that serves `line`; see `PoolingEngine`.

    max_waiting, max_waiting_tokens: of all `num_servers` processes that ask it, together.
    """

    def __init__(
        self,
        line: EngineLine,
        index: int,
        *,
        num_servers: int,
        max_waiting: int = 512,
        max_waiting_tokens: int | None = None,
    ) -> None:
        self._line = line
        self._index = index
        self._max_waiting = math.ceil(max_waiting / num_servers)
        self._max_waiting_tokens = (
            None if max_waiting_tokens is None else math.ceil(max_waiting_tokens / num_servers)
        )

    async def start(self) -> PoolingInfo:
        """Wait until the engine's process serves."""
        await self._line.open()
        self._info = self._line.pooling[self._index]
        self._admission = Admission(
            max_running=self._line.pooling_running[self._index],
            max_waiting=self._max_waiting,
            max_waiting_tokens=self._max_waiting_tokens,
        )
        return self._info

    @property
    def info(self) -> PoolingInfo:
        """See `PoolingEngine.info`."""
        return self._info

    @property
    def admission(self) -> Admission:
        """See `PoolingEngine.admission`: the places of this process."""
        return self._admission

    def stats(self) -> PoolingStats:
        """See `PoolingEngine.stats`: of the engine, whoever asks it."""
        stats = self._line.pooling_stats
        return stats[self._index] if self._index < len(stats) else PoolingStats()

    async def encode(
        self, texts: Sequence[Words], *, prompt: str = "", cut: int | None = None, owner: str = ""
    ) -> list[TextInput]:
        """See `PoolingEngine.encode`; also raises EngineUnavailable."""
        words = [text if isinstance(text, str) else list(text) for text in texts]
        found = await ask(self._line, PATIENCE_S, "encode", self._index, words, prompt, cut, owner)
        return [read_text(form) for form in found]

    async def pool(
        self,
        texts: Sequence[TextInput],
        *,
        owner: str = "",
        weight: float = 1.0,
        place: Place | None = None,
        deadline: float | None = None,
    ) -> tuple[list[Vector], int]:
        """See `PoolingEngine.pool`; also raises EngineUnavailable."""
        for text in texts:
            if not 0 < len(text.ids) <= self._info.max_model_len:
                raise PromptTooLong(len(text.ids), self._info.max_model_len)
        if not texts:
            return [], 0
        forms = [text_form(text) for text in texts]
        vectors, cached = await ask(
            self._line, PATIENCE_S, "pool", self._index, forms, owner, weight, deadline
        )
        if place is not None:
            place.begin()
        return [read_floats(vector) for vector in vectors], cached

    async def dead(self) -> BaseException:
        """See `PoolingEngine.dead`: an engine that has ended is waited for."""
        return await self._line.dead()

    async def close(self) -> None:
        """See `PoolingEngine.close`; the engine's process stays."""
        await self._line.close()


class RemoteSpeech:
    """The speech engine number `index` of the process that serves `line`; see `SpeechEngine`.

    max_waiting: of all `num_servers` processes that ask it, together.
    """

    def __init__(self, line: EngineLine, index: int, *, num_servers: int, max_waiting: int = 512) -> None:
        self._line = line
        self._index = index
        self._max_waiting = math.ceil(max_waiting / num_servers)
        self.gate = Gate(AT_ONCE)

    async def start(self) -> SpeechInfo:
        """Wait until the engine's process serves."""
        await self._line.open()
        self._info = self._line.speech[self._index]
        self._admission = Admission(
            max_running=self._line.speech_running[self._index], max_waiting=self._max_waiting
        )
        return self._info

    @property
    def info(self) -> SpeechInfo:
        """See `SpeechEngine.info`."""
        return self._info

    @property
    def admission(self) -> Admission:
        """See `SpeechEngine.admission`: the places of this process."""
        return self._admission

    def stats(self) -> SpeechStats:
        """See `SpeechEngine.stats`: of the engine, whoever asks it."""
        stats = self._line.speech_stats
        return stats[self._index] if self._index < len(stats) else SpeechStats()

    async def read(
        self, window: Window, *, owner: str = "", weight: float = 1.0, deadline: float | None = None
    ) -> WindowText:
        """See `SpeechEngine.read`; also raises EngineUnavailable."""
        form = window_form(window)
        return read(
            WindowText,
            await ask(self._line, PATIENCE_S, "hear", self._index, form, owner, weight, deadline),
        )

    async def dead(self) -> BaseException:
        """See `SpeechEngine.dead`: an engine that has ended is waited for."""
        return await self._line.dead()

    async def close(self) -> None:
        """See `SpeechEngine.close`; the engine's process stays."""
        await self._line.close()
