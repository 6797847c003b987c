"""Turns sound into text: Whisper models, a window of at most 30 s at a time.

A `SpeechEngine` has a model of its own, on a thread of its own that gives way to whatever generates. The
model is computed by transformers (`whisper`); which token comes next, and what follows from the times among
the tokens, is decided here (`decoding`, `segments`, `word_times`). `transcribe` goes through a longer sound
in windows, with an engine in this process or in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late
from engine.speech.gate import Gate
from engine.speech.values import (
    AT_ONCE,
    SAMPLE_RATE,
    Segment,
    SpeechConfig,
    SpeechInfo,
    SpeechStats,
    SpeechToken,
    Window,
    WindowText,
    Word,
)

if TYPE_CHECKING:
    from engine.speech.engine import SpeechEngine
    from engine.speech.transcribing import Transcriber, transcribe
else:
    __getattr__ = late(
        __name__,
        {
            "engine.speech.engine": ("SpeechEngine",),
            "engine.speech.transcribing": ("Transcriber", "transcribe"),
        },
    )

__all__ = [
    "AT_ONCE",
    "SAMPLE_RATE",
    "Gate",
    "Segment",
    "SpeechConfig",
    "SpeechEngine",
    "SpeechInfo",
    "SpeechStats",
    "SpeechToken",
    "Transcriber",
    "Window",
    "WindowText",
    "Word",
    "transcribe",
]
