"""Tiny random models for speech, as Whisper checkpoints are laid out; and sounds to be heard."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

LANGUAGES = ("en", "de", "fr")
NUM_TIMES = 1501
RATE = 16_000
_NEVER = {"<|startoftranscript|>", "<|startofprev|>", "<|startoflm|>", "<|nospeech|>", "<|translate|>"} | {
    *("<|transcribe|>", *(f"<|{code}|>" for code in LANGUAGES), *map(chr, range(128)))
} - {*"abcdefghijklmnopqrstuvwxyz.,"}


def make_whisper(folder: Path, *, several: bool = True, heads: bool = True, seed: int = 0) -> Path:
    """Write a model that hears 30 s at once. several: it knows LANGUAGES; else English alone. heads: it says
    which of its heads know where words are."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    folder.mkdir(parents=True, exist_ok=True)
    known = _write_tokenizer(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(known),
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 1500,
        "max_target_positions": 48,
        "init_std": 0.6,
        "pad_token_id": known["<|endoftext|>"],
        "bos_token_id": known["<|endoftext|>"],
        "eos_token_id": known["<|endoftext|>"],
        "decoder_start_token_id": known["<|startoftranscript|>"],
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    made: Any = WhisperForConditionalGeneration
    model = made(WhisperConfig(**sizes)).eval()
    settings = GenerationConfig(
        eos_token_id=known["<|endoftext|>"],
        pad_token_id=known["<|endoftext|>"],
        bos_token_id=known["<|endoftext|>"],
        decoder_start_token_id=known["<|startoftranscript|>"],
        no_timestamps_token_id=known["<|notimestamps|>"],
        prev_sot_token_id=known["<|startofprev|>"],
        is_multilingual=several,
        max_initial_timestamp_index=50,
        # what is written are letters, and the marks that stand before a window are not
        suppress_tokens=[
            at for name, at in known.items() if (len(name) == 1 and not name.isascii()) or name in _NEVER
        ],
        begin_suppress_tokens=[known["\u0120t"], known["<|endoftext|>"]],
        max_length=48,
        **({"alignment_heads": [[1, 0], [1, 1]]} if heads else {}),
        **(
            {
                "lang_to_id": {f"<|{code}|>": known[f"<|{code}|>"] for code in LANGUAGES},
                "task_to_id": {"translate": known["<|translate|>"], "transcribe": known["<|transcribe|>"]},
            }
            if several
            else {}
        ),
    )
    model.generation_config = settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    extractor: Any = WhisperFeatureExtractor(feature_size=16)
    extractor.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level vocabulary with a few words, and every mark of Whisper."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = [chr(byte) for byte in kept] + [chr(256 + at) for at in range(256 - len(kept))]
    merges = ["\u0120 a", "\u0120 t", "h e", "\u0120t he"]
    words = [*chars, *(merge.replace(" ", "") for merge in merges)]
    marks = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    marks += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    marks += ["<|notimestamps|>", *(f"<|{0.02 * at:.2f}|>" for at in range(NUM_TIMES))]
    known = {word: at for at, word in enumerate([*words, *marks])}
    bpe: Any = BPE(
        {word: known[word] for word in words}, [(each.split()[0], each.split()[1]) for each in merges]
    )
    made: Any = Tokenizer(bpe)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(mark, special=not mark[2].isdigit(), normalized=False) for mark in marks])
    made.save(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    special = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": end}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer", **special})
    return known


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def tone(seconds: float, *, seed: int = 0, rate: int = RATE) -> np.ndarray[Any, np.dtype[np.int16]]:
    """A sound that changes all the time: 16-bit samples."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.05, len(times))
    wave = 0.3 * np.sin(2 * np.pi * (200 + 80 * np.sin(times + seed)) * times) * (1 + np.sin(3 * times)) / 2
    samples: np.ndarray[Any, np.dtype[np.int16]] = (np.clip(wave + noise, -1, 1) * 32767).astype(np.int16)
    return samples


def sound_file(
    seconds: float, form: str = "wav", *, rate: int = RATE, channels: int = 1, seed: int = 0
) -> bytes:
    """A file of such a sound: wav, flac, ogg or mp3 by libsndfile; m4a or webm by FFmpeg."""
    wave = tone(seconds, seed=seed, rate=rate)
    if form in ("m4a", "webm"):
        return _by_ffmpeg(wave, form, rate)
    import soundfile

    file = io.BytesIO()
    data = np.repeat(wave[:, None], channels, axis=1)
    soundfile.write(file, data, rate, format=form.upper())
    return file.getvalue()


def _by_ffmpeg(wave: Any, form: str, rate: int) -> bytes:
    import av

    file = io.BytesIO()
    container, codec = {"m4a": ("mp4", "aac"), "webm": ("webm", "libopus")}[form]
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(wave[None, :], format="s16", layout="mono")
        frame.sample_rate = rate
        for each in stream.encode(frame):
            output.mux(each)
        output.mux(stream.encode(None))
    return file.getvalue()
