"""Goes through a sound in windows, each of which begins where the one before it says."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from engine.speech.values import SAMPLE_RATE, SpeechInfo, Window, WindowText

REST_S = 0.1
"""What is left at the end of a sound and is shorter says nothing: a model would make something up."""


class Transcriber(Protocol):
    """What reads windows of sound: a `SpeechEngine`, or one in another process."""

    @property
    def info(self) -> SpeechInfo:
        """The model served."""
        ...

    async def read(
        self, window: Window, *, owner: str = "", weight: float = 1.0, deadline: float | None = None
    ) -> WindowText:
        """See `SpeechEngine.read`."""
        ...


async def transcribe(
    engine: Transcriber,
    samples: memoryview,
    asked: Window,
    *,
    owner: str = "",
    weight: float = 1.0,
    deadline: float | None = None,
) -> AsyncGenerator[tuple[float, WindowText]]:
    """Each window's text, and the second of the sound at which the window begins.

    samples: as those of a `Window`, of any length. asked: how each window is to be read, its own samples left
    out; its prompt stands before the first one, and the language that is recognized there is that of all.
    Raises what `SpeechEngine.read` raises.
    """
    at, num_samples = 0, len(samples) // 2
    rest = int(REST_S * SAMPLE_RATE)
    most = int(engine.info.window_s * SAMPLE_RATE)
    while at == 0 or at + rest < num_samples:
        stop = min(num_samples, at + most)
        window = replace(asked, samples=bytes(samples[2 * at : 2 * stop]), seed=asked.seed + at)
        found = await engine.read(window, owner=owner, weight=weight, deadline=deadline)
        yield at / SAMPLE_RATE, found
        at += max(1, found.advance)
        asked = replace(asked, prompt="", language=found.language)
