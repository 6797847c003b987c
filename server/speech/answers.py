"""Writes what was heard: as JSON, as plain text, as subtitles, and as events of a stream."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Segment, SpeechToken, WindowText
from server.speech.requests import SpeechRequest, language_name

FRAMES_A_SECOND = 100
"""Of the features that `seek` counts."""

POSITIONS_A_SECOND = 50
"""States that a model's encoder makes of a second of sound: what is counted as its tokens."""


@dataclass(slots=True)
class Heard:
    """What was heard so far. seconds: of the whole sound. windows: at which second each began, and its
    text."""

    seconds: float
    windows: list[tuple[float, WindowText]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for _, window in self.windows for segment in window.segments).strip()

    @property
    def language(self) -> str:
        """The code of the language that was recognized, or named."""
        return self.windows[0][1].language

    @property
    def audio_tokens(self) -> int:
        """Of the whole sound."""
        return round(self.seconds * POSITIONS_A_SECOND)

    @property
    def text_tokens(self) -> int:
        """Of what stood before the first window."""
        return self.windows[0][1].num_prompt if self.windows else 0

    @property
    def output_tokens(self) -> int:
        """That the model decided on."""
        return sum(window.num_tokens for _, window in self.windows)

    @property
    def segments(self) -> Iterator[tuple[float, WindowText, Segment]]:
        """Every segment, with the second at which its window began."""
        return ((start, window, each) for start, window in self.windows for each in window.segments)


def answer(heard: Heard, asked: SpeechRequest) -> tuple[Any, str]:
    """The body of a reply, a JSON object or a text, and its media type."""
    match asked.format:
        case "text":
            return heard.text + "\n", "text/plain"
        case "srt":
            return "".join(_srt(heard)), "text/plain"
        case "vtt":
            return "".join(_vtt(heard)), "text/vtt"
        case "verbose_json":
            return _verbose(heard, asked), "application/json"
    body: dict[str, Any] = {"text": heard.text}
    if asked.logprobs:
        body["logprobs"] = _logprobs(each for _, _, segment in heard.segments for each in segment.tokens)
    if asked.task == "transcribe":
        body["usage"] = _duration(heard)
    return body, "application/json"


def _verbose(heard: Heard, asked: SpeechRequest) -> dict[str, Any]:
    spoken = "english" if asked.task == "translate" else language_name(heard.language)
    body: dict[str, Any] = {
        "task": asked.task,
        "language": spoken,
        "duration": round(heard.seconds, 3),
        "text": heard.text,
    }
    if asked.segments:
        body["segments"] = [_segment(number, *each) for number, each in enumerate(heard.segments)]
    if asked.words:
        body["words"] = [
            {"word": word.text.strip(), "start": _at(start, word.start), "end": _at(start, word.end)}
            for start, _, segment in heard.segments
            for word in segment.words
        ]
    if asked.task == "transcribe":
        body["usage"] = _duration(heard)
    return body


def _segment(number: int, start: float, window: WindowText, segment: Segment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(start * FRAMES_A_SECOND),
        "start": _at(start, segment.start),
        "end": _at(start, segment.end),
        "text": segment.text,
        "tokens": [token.id for token in segment.tokens],
        "temperature": window.temperature,
        "avg_logprob": window.avg_logprob,
        "compression_ratio": window.compression_ratio,
        "no_speech_prob": window.no_speech_prob,
    }


def _at(start: float, seconds: float) -> float:
    return round(start + seconds, 2)


def _duration(heard: Heard) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(heard.seconds, 3)}


def _logprobs(tokens: Iterable[SpeechToken]) -> list[dict[str, Any]]:
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": [*b64decode(token.data)]} for token in tokens
    ]


def _srt(heard: Heard) -> Iterator[str]:
    for number, (start, _, segment) in enumerate(heard.segments, 1):
        times = f"{_clock(start + segment.start, ',')} --> {_clock(start + segment.end, ',')}"
        yield f"{number}\n{times}\n{_line(segment.text)}\n\n"


def _vtt(heard: Heard) -> Iterator[str]:
    yield "WEBVTT\n\n"
    for start, _, segment in heard.segments:
        times = f"{_clock(start + segment.start, '.')} --> {_clock(start + segment.end, '.')}"
        yield f"{times}\n{_line(segment.text)}\n\n"


def _line(text: str) -> str:
    """A text on one line, without what a player would take for the times of the next one."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, thousandths = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"


# ------------------------------------------------------------------------------------------------------------
# Events


def deltas(text: str, segments: Sequence[Segment], asked: SpeechRequest) -> Iterator[dict[str, Any]]:
    """The events of a window's segments. text: what was told before; the first piece of all begins at a
    word."""
    for segment in segments:
        piece = segment.text if text else segment.text.lstrip()
        text += piece
        event: dict[str, Any] = {"type": "transcript.text.delta", "delta": piece}
        if asked.logprobs:
            event["logprobs"] = _logprobs(segment.tokens)
        yield event


def done(heard: Heard, asked: SpeechRequest) -> dict[str, Any]:
    """The last event."""
    event: dict[str, Any] = {"type": "transcript.text.done", "text": heard.text}
    if asked.logprobs:
        event["logprobs"] = _logprobs(each for _, _, segment in heard.segments for each in segment.tokens)
    inputs = heard.audio_tokens + heard.text_tokens
    event["usage"] = {
        "type": "tokens",
        "input_tokens": inputs,
        "input_token_details": {"text_tokens": heard.text_tokens, "audio_tokens": heard.audio_tokens},
        "output_tokens": heard.output_tokens,
        "total_tokens": inputs + heard.output_tokens,
    }
    return event
