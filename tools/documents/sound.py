"""Files of sound as samples: mono, 16 bits, 16,000 a second. What decodes them runs in a confined process.

wav, flac, ogg and mp3 are read by libsndfile, and everything else, of which m4a, mp4 and webm are the common
ones, by FFmpeg. Both are given a stream of bytes, and what they decode goes on in pieces: a file that says it
is endless, or unpacks to days of silence, is refused as soon as there is too much of it.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.documents.document import ReadingLimits, UnreadableDocument

RATE = 16_000
"""Samples a second."""

PIECE = 1 << 16
"""Frames of a file that are decoded at a time."""

MOST_CHANNELS = 64
RATES = (1_000, 768_000)
"""Lowest and highest rates of a file. Others are mistakes, or would have to be stretched beyond all
memory."""

LEAST_S = 0.1
"""Shorter sounds hold no word; the official limit."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound. samples: 16-bit numbers in the machine's order, mono, RATE a second."""

    samples: bytes

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / 2 / RATE


def prepare() -> None:
    """Load what decodes, so that whoever is forked has it. ModuleNotFoundError where it is not installed."""
    import av
    import numpy
    import soundfile  # noqa: F401

    av.logging.set_level(None)
    # The first of each kind would load what only it needs, and a confined process opens no file.
    for form in ("s16", "fltp"):
        _resampler().resample(_frame(numpy.zeros((1, 160), "i2" if form == "s16" else "f4"), 8_000, form))
    gc.collect()
    gc.freeze()


def parse(data: bytes, filename: str, url: str | None, limits: ReadingLimits) -> Sound:
    """A file as samples, at most `max_seconds` of them. Raises UnreadableDocument."""
    return Sound(b"".join(decoded(data, limits.max_seconds)))


def decoded(data: bytes, most_s: float) -> Iterator[bytes]:
    """A file's samples, in pieces. most_s: seconds of sound; more are refused. Raises UnreadableDocument, and
    what libraries raise on what is broken."""
    most, count = int(most_s * RATE), 0
    try:
        frames = _by_sndfile(data) if _is_plain(data[:16]) else _by_ffmpeg(data)
        for samples in _resampled(frames):
            count += len(samples) // 2
            if count > most:
                raise UnreadableDocument("too_large", f"This file has more than {most_s:g} seconds of sound.")
            yield samples
    except (UnreadableDocument, MemoryError):
        raise
    except Exception as error:
        message = "This file is damaged, or no file of sound: it cannot be decoded."
        raise UnreadableDocument("invalid_file", message) from error
    if count < LEAST_S * RATE:
        message = f"This file has {count / RATE:g} seconds of sound; {LEAST_S:g} are needed at least."
        raise UnreadableDocument("invalid_file", message)


def _is_plain(head: bytes) -> bool:
    """Whether it begins as a file that libsndfile reads: wav, flac, ogg, mp3."""
    if head.startswith((b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd")):
        return True
    # the mark of a frame of MPEG sound, layer III
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2


def _by_sndfile(data: bytes) -> Iterator[Any]:
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        if data.startswith(b"OggS"):  # of video, or of a codec that only the other library knows
            yield from _by_ffmpeg(data)
            return
        raise
    with file:
        _check(file.samplerate, file.channels)
        while len(piece := file.read(PIECE, dtype="float32", always_2d=True)):
            yield _frame(piece.mean(axis=1, dtype="f4")[None], file.samplerate, "fltp")


def _by_ffmpeg(data: bytes) -> Iterator[Any]:
    import av

    opened: Any = av.open(io.BytesIO(data), metadata_errors="ignore")
    with opened as container:
        streams = container.streams.audio
        if not streams:
            raise UnreadableDocument("unsupported_file", "This file has no sound.")
        streams[0].thread_type = "NONE"  # a confined process begins no thread
        streams[0].codec_context.thread_count = 1
        for frame in container.decode(streams[0]):
            _check(frame.sample_rate, len(frame.layout.channels))
            frame.pts = None  # gaps and jumps of the clock are no sound
            yield frame


def _check(rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        message = f"This file has {rate} samples a second; from {RATES[0]} to {RATES[1]} are read."
        raise UnreadableDocument("unsupported_file", message)
    if channels > MOST_CHANNELS:
        message = f"This file has {channels} channels; at most {MOST_CHANNELS} are read."
        raise UnreadableDocument("unsupported_file", message)


def _frame(samples: Any, rate: int, form: str) -> Any:
    """Mono samples [1, n] as FFmpeg has them."""
    import av

    frame = av.AudioFrame.from_ndarray(samples, format=form, layout="mono")
    frame.sample_rate = rate
    return frame


def _resampler() -> Any:
    import av

    return av.AudioResampler(format="s16", layout="mono", rate=RATE)


def _resampled(frames: Iterator[Any]) -> Iterator[bytes]:
    """The samples of all frames, at RATE and mono. A stream may change its rate or its channels on the
    way."""
    form: tuple[Any, ...] | None = None
    resampler: Any = None
    for frame in frames:
        now = (frame.format.name, frame.layout.name, frame.sample_rate)
        if now != form:
            if resampler is not None:
                yield from _bytes(resampler.resample(None))
            resampler, form = _resampler(), now
        yield from _bytes(resampler.resample(frame))
    if resampler is not None:
        yield from _bytes(resampler.resample(None))


def _bytes(frames: Sequence[Any]) -> Iterator[bytes]:
    for frame in frames:
        if frame.samples:
            yield frame.to_ndarray().tobytes()
