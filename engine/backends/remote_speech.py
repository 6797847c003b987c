"""A model for speech in the engine's process, for the servers before it."""

from __future__ import annotations

import math

from engine.admission import Admission
from engine.backends.remote import PATIENCE_S, ask
from engine.backends.remote_line import EngineLine
from engine.backends.remote_wire import read, window_form
from engine.speech import AT_ONCE, Gate, SpeechInfo, SpeechStats, Window, WindowText


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
