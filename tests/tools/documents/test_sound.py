"""Files of sound: every format as samples, and hostile ones refused, in a confined process."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest

from tests.support.speech_checkpoints import sound_file, tone
from tools import ReadingLimits, UnreadableDocument, read_sound
from tools.documents.reader import sound_reader
from tools.documents.sound import RATE

MINUTE = ReadingLimits(max_seconds=60.0)


@pytest.mark.parametrize(
    ("form", "rate", "channels"),
    [
        ("wav", 16_000, 1),
        ("wav", 44_100, 2),
        ("wav", 8_000, 1),
        ("flac", 48_000, 2),
        ("ogg", 16_000, 1),
        ("mp3", 44_100, 2),
        ("m4a", 16_000, 1),
        ("webm", 16_000, 1),
    ],
)
async def test_every_format_is_heard(form: str, rate: int, channels: int) -> None:
    file = sound_file(2.0, form, rate=rate, channels=channels)
    sound = await read_sound(file, f"speech.{form}", limits=MINUTE)
    assert sound.seconds == pytest.approx(2.0, abs=0.05)
    heard, told = np.frombuffer(sound.samples, np.int16), tone(2.0, rate=rate)
    if (form, rate) == ("wav", RATE):
        np.testing.assert_allclose(heard, told, atol=1)
    # the first second sounds the same, whatever noise a format loses and however it is delayed
    spectra = [
        np.abs(np.fft.rfft(each[:of])[:1000]).reshape(-1, 10).sum(1)
        for each, of in ((heard, RATE), (told, rate))
    ]
    # 0.88 to 0.92 for MP3, whose encoder does not make the same file twice; below 0 for a wrong rate.
    assert np.corrcoef(*spectra)[0, 1] > 0.8
    means = sound_reader().confinement()
    assert "limits" in means and len(means) > 1


def _wav(seconds: float, *, rate: int = RATE, size: int | None = None, channels: int = 1) -> bytes:
    """A wav file that says it has `size` bytes of samples."""
    data = bytes(int(seconds * rate) * 2 * channels)
    size = len(data) if size is None else size
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    head = b"RIFF" + struct.pack("<I", (36 + size) & 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", size) + data


def _bomb() -> bytes:
    """Days of silence in a few kilobytes."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(2_000_000, np.int16), 8_000, format="FLAC")
    return file.getvalue()


def _silent_film() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("rawvideo", rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        output.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        (b"no sound at all, but a text " * 50, "invalid_file", "no file of sound"),
        (b"%PDF-1.7 " + bytes(500), "invalid_file", "no file of sound"),
        (b"\x00" * 5000, "invalid_file", "no file of sound"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "invalid_file", "no file of sound"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "invalid_file", "no file of sound"),
        (sound_file(2.0, "mp3")[:40], "invalid_file", ""),
        (sound_file(2.0, "m4a")[:3000], "invalid_file", "damaged"),
        (sound_file(2.0, "flac")[:30], "invalid_file", "damaged"),
        (_wav(0.0), "invalid_file", "0 seconds"),
        (_wav(0.05), "invalid_file", "0.05 seconds"),
        (_wav(1.0, rate=7), "unsupported_file", "7 samples a second"),
        (_wav(0.01, channels=500), "unsupported_file", "channels"),
        (_wav(61.0), "too_large", "more than 60 seconds"),
        (_bomb(), "too_large", "more than 60 seconds"),
        (_silent_film(), "unsupported_file", "no sound"),
        (b"", "invalid_file", "empty"),
    ],
    ids=[
        *("text", "pdf", "zeros", "playlist", "concat", "cut-mp3", "cut-m4a", "cut-flac", "nothing", "short"),
        *("slow", "channels", "long", "bomb", "film", "empty"),
    ],
)
async def test_what_cannot_be_heard_is_refused(file: bytes, code: str, words: str) -> None:
    with pytest.raises(UnreadableDocument) as refused:
        await read_sound(file, "speech.wav", limits=MINUTE)
    assert refused.value.code == code
    assert words in refused.value.message


async def test_a_wav_that_says_it_is_endless_ends_where_its_bytes_do() -> None:
    sound = await read_sound(_wav(1.0, size=0xFFFFFFFF - 36), "speech.wav", limits=MINUTE)
    assert sound.seconds == pytest.approx(1.0)


async def test_damage_at_random_ends_no_reader() -> None:
    """A file with broken bytes is heard in part, or refused; and the next one is heard."""
    dice = np.random.default_rng(3)
    for form in ("wav", "flac", "ogg", "mp3", "m4a", "webm"):
        file = np.frombuffer(sound_file(1.0, form), np.uint8).copy()
        file[dice.integers(0, len(file), 200)] = dice.integers(0, 256, 200)
        try:
            sound = await read_sound(file.tobytes(), form, limits=MINUTE)
        except UnreadableDocument as refused:
            assert refused.code in ("invalid_file", "unsupported_file", "too_large")
        else:
            assert 0 < sound.seconds <= 60
    assert (await read_sound(sound_file(1.0), "speech.wav", limits=MINUTE)).seconds == 1.0
