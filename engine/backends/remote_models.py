"""Models for vectors, scores and speech in the engine's process, for the servers before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from engine.admission import Admission, Place
from engine.backends.remote import PATIENCE_S, ask
from engine.backends.remote_line import Begin, EngineLine
from engine.backends.remote_wire import read, read_floats, read_text, text_form, window_form
from engine.pooling import PoolingInfo, PoolingStats, TextInput, Vector, Words
from engine.speech import AT_ONCE, Gate, SpeechInfo, SpeechStats, Window, WindowText
from engine.types import PromptTooLong

Info = TypeVar("Info")
Stats = TypeVar("Stats")


class _RemoteModel(Generic[Info, Stats]):
    """The model number `index` of those beside the one that generates, in the process that serves `line`.

    max_waiting, max_waiting_tokens: of all `num_servers` processes that ask it, together.
    """

    _no_stats: Stats

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

    async def start(self) -> Info:
        """Wait until the engine's process serves."""
        await self._line.open()
        other, self._number = self._line.others[self._index], self._line.num_replaced
        self._info = cast(Info, other.info)
        self._admission = Admission(
            max_running=other.max_running,
            max_waiting=self._max_waiting,
            max_waiting_tokens=self._max_waiting_tokens,
        )
        return self._info

    @property
    def info(self) -> Info:
        """The model served; only after `start`."""
        return self._info

    @property
    def admission(self) -> Admission:
        """The places of this process; only after `start`."""
        return self._admission

    def stats(self) -> Stats:
        """Counters for metrics: of the engine, whoever asks it."""
        stats = self._line.other_stats
        return cast(Stats, stats[self._index]) if self._index < len(stats) else self._no_stats

    async def _ask(self, what: str, *parts: object, begin: Begin = lambda: None) -> Any:
        return await ask(self._line, self._number, PATIENCE_S, what, self._index, *parts, begin=begin)

    @property
    def is_current(self) -> bool:
        """See `RemoteEngine.is_current`."""
        return self._number == self._line.num_replaced

    async def dead(self) -> BaseException:
        """See `Engine.dead`: an engine that has ended is waited for."""
        return await self._line.dead()

    async def close(self) -> None:
        """End what was asked; the engine's process stays."""
        await self._line.close()


class RemotePooling(_RemoteModel[PoolingInfo, PoolingStats]):
    """See `PoolingEngine`."""

    _no_stats = PoolingStats()

    async def encode(
        self, texts: Sequence[Words], *, prompt: str = "", cut: int | None = None, owner: str = ""
    ) -> list[TextInput]:
        """See `PoolingEngine.encode`; also raises EngineUnavailable."""
        words = [text if isinstance(text, str) else list(text) for text in texts]
        found = await self._ask("encode", words, prompt, cut, owner)
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
        begin = place.begin if place is not None else lambda: None
        vectors, cached = await self._ask("pool", forms, owner, weight, deadline, begin=begin)
        return [read_floats(vector) for vector in vectors], cached


class RemoteSpeech(_RemoteModel[SpeechInfo, SpeechStats]):
    """See `SpeechEngine`."""

    _no_stats = SpeechStats()

    def __init__(self, line: EngineLine, index: int, **settings: Any) -> None:
        super().__init__(line, index, **settings)
        self.gate = Gate(AT_ONCE)

    async def read(
        self, window: Window, *, owner: str = "", weight: float = 1.0, deadline: float | None = None
    ) -> WindowText:
        """See `SpeechEngine.read`; also raises EngineUnavailable."""
        return read(WindowText, await self._ask("hear", window_form(window), owner, weight, deadline))
