"""What a speech engine is started with, what it is asked, and what it makes of a window of sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config import Device, Dtype

SAMPLE_RATE = 16_000
"""Samples of a second of sound, as every Whisper model hears it."""

AT_ONCE = 4
"""Requests whose sound is in memory and is read by turns; more wait."""

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How a speech engine loads its model."""

    model: str | Path  # a folder, or a hub id
    name: str | None = None  # what the model is called; None: the last part of `model`
    dtype: Dtype = "auto"  # auto: float32 on a CPU, float16 on a GPU
    device: Device = "auto"
    max_waiting: int = 512  # requests that wait; more are refused
    num_threads: int | None = None  # of torch, within one operation


@dataclass(frozen=True, slots=True)
class SpeechInfo:
    """What a served model is, as its checkpoint says it.

    fingerprint: names weights and tokenizer. window_s: seconds that it hears at once. languages: codes of
    those that it knows, such as `en`; () for a model of English alone, which cannot translate.
    max_prompt_tokens: of the text before a window. words: whether the checkpoint names the heads that know
    where words are; other models' times of words are less exact.
    """

    name: str
    architecture: str
    fingerprint: str
    window_s: float
    vocab_size: int
    languages: tuple[str, ...]
    max_prompt_tokens: int
    words: bool


@dataclass(frozen=True, slots=True)
class SpeechStats:
    """A snapshot; totals grow, the rest are gauges."""

    windows_waiting: int = 0  # that were asked for and are not done
    windows_total: int = 0
    seconds_total: float = 0.0  # of sound in these windows
    tokens_total: int = 0  # that were decided on for them
    failures_total: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A window of sound, and how it is to be read.

    samples: 16-bit numbers in the machine's order, mono, SAMPLE_RATE a second; at most `window_s` of them.
    language: a code, or None, to have it recognized. prompt: words that may have come before. temperatures:
    tried one after the other until the text is neither improbable nor repetitive; 0 takes the likeliest
    token. words: with the times of words. seed: of what is drawn.
    """

    samples: bytes
    task: Task = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperatures: tuple[float, ...] = (0.0,)
    words: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SpeechToken:
    """A token of text with its natural log probability; base64 of its bytes, which may be part of a
    character."""

    id: int
    text: str
    data: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Word:
    """A word with the space before it, where it has one. start, end: seconds from the beginning of the
    window."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a window. start, end: seconds from the beginning of the window."""

    start: float
    end: float
    text: str
    tokens: tuple[SpeechToken, ...]
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowText:
    """What a window says.

    segments: none where nobody speaks. advance: samples behind which the next window begins. language: a
    code, the recognized one where none was given. avg_logprob: of all tokens. compression_ratio: bytes of the
    text for each of the same text compressed; much of it is repetition. no_speech_prob: that nobody speaks.
    temperature: of the attempt that was taken. num_prompt, num_tokens: tokens that went before, and that were
    decided on, whichever attempt was taken.
    """

    segments: tuple[Segment, ...]
    advance: int
    language: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    num_prompt: int
    num_tokens: int
