"""A Whisper model: loads it by transformers, and reads one window of sound at a time, on one thread."""

from __future__ import annotations

import hashlib
import logging
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models import Checkpoint
from engine.speech.decoding import Marks, Rules, compression_ratio, mean, pick
from engine.speech.segments import Stretch, stretches
from engine.speech.values import SAMPLE_RATE, Segment, SpeechConfig, SpeechToken, Window, WindowText, Word
from engine.speech.word_times import FRAME_S, token_starts, words_of
from engine.types import LoadError, RequestFailed

log = logging.getLogger("antiphon.engine")

REPETITIVE = 2.4
IMPROBABLE = -1.0
SILENT = 0.6
"""An attempt whose text compresses better, or whose tokens are less likely on average, is made again at the
next temperature; a window that is as likely to have no speech, and whose text is improbable, has none.
Figures of the model's makers."""

FEATURES_A_SECOND = 100

LEAST_ADVANCE = SAMPLE_RATE
"""Samples from one window to the next at least: a model that gets on by less has lost its way, and an hour of
sound would take it days."""


class Dropped(Exception):
    """Nobody waits for the window any more."""


class Whisper:
    """A loaded model; all of it runs on one thread."""

    def __init__(self, config: SpeechConfig, folder: Path, device: torch.device) -> None:
        """folder: of a Whisper model. Raises LoadError for one that lacks a file."""
        from transformers import WhisperFeatureExtractor

        checkpoint = Checkpoint(folder)
        self._device = device
        self._model = _load(folder, _dtype(config, device), device)
        self._tokenizer = _tokenizer(folder)
        extractor: Any = WhisperFeatureExtractor
        self._extractor = extractor.from_pretrained(folder, local_files_only=True)
        self._config = self._model.config
        self._marks = _marks(self._model, self._tokenizer)
        self._rules = Rules(self._marks, int(self._config.vocab_size), device)
        self._bytes = _byte_table()
        self._names = {token: code for code, token in self._marks.languages.items()}
        heads = getattr(self._model.generation_config, "alignment_heads", None)
        self.has_heads = bool(heads)
        self._heads = [tuple(each) for each in heads or _later_heads(self._config)]
        self.architecture = type(self._model).__name__
        self.vocab_size = int(self._config.vocab_size)
        self.num_frames = 2 * int(self._config.max_source_positions)
        self.window_s = self.num_frames / FEATURES_A_SECOND
        self.languages = tuple(self._marks.languages)
        # Half of the context is for what comes before a window, and half for the window, as it was trained.
        self.max_prompt = int(self._config.max_target_positions) // 2 - 1
        digest = hashlib.blake2b(checkpoint.fingerprint(), digest_size=16)
        digest.update(repr(self._marks).encode())
        self.fingerprint = digest.hexdigest()

    # -- a window --------------------------------------------------------------------------------------------

    def read(self, window: Window, wanted: Callable[[], bool]) -> WindowText:
        """What a window says. wanted: asked before each token; where it says no, Dropped is raised."""
        sound = np.frombuffer(window.samples, np.int16).astype(np.float32) / 32768.0
        duration = len(sound) / SAMPLE_RATE
        heard = self.hear(sound)
        language = window.language or self.recognize(heard)
        asked = self.asked(window, language)
        num_tokens, attempts = 0, window.temperatures or (0.0,)
        for temperature in attempts:
            ids, logprobs, no_speech = self.write(heard, asked, temperature, window.seed, wanted)
            num_tokens += len(ids)
            ended = ids[-1:] == [self._marks.end]
            ids = ids[:-1] if ended else ids
            text = self._text(ids)
            likely, ratio = mean(logprobs), compression_ratio(text)
            silent = no_speech > SILENT and likely < IMPROBABLE
            if silent or not (ratio > REPETITIVE or likely < IMPROBABLE):
                break
        found: tuple[Segment, ...] = ()
        advance = duration
        if not silent:
            cut, advance = stretches(ids, self._marks.first_time, duration)
            moments = self._moments(heard, asked, ids, duration) if window.words else None
            found = tuple(self._segment(ids, logprobs, moments, each.within(duration)) for each in cut)
        return WindowText(
            segments=tuple(each for each in found if each.text.strip()),
            advance=min(len(sound), max(LEAST_ADVANCE, round(advance * SAMPLE_RATE))),
            language=language,
            temperature=temperature,
            avg_logprob=likely,
            compression_ratio=ratio,
            no_speech_prob=no_speech,
            num_prompt=len(asked),
            num_tokens=num_tokens,
        )

    def hear(self, sound: Any) -> Any:
        """The states of the encoder for a window, which silence fills up."""
        features = self._extractor(
            sound,
            sampling_rate=SAMPLE_RATE,
            return_tensors="pt",
            padding="max_length",
            max_length=int(self.window_s * SAMPLE_RATE),
        ).input_features
        features = features.to(self._device, self._model.dtype)
        return self._model.get_encoder()(features)

    def recognize(self, heard: Any) -> str:
        """The code of the likeliest language; `en` for a model that knows no other."""
        if not self._names:
            return "en"
        given = torch.tensor([[self._marks.start]], device=self._device)
        logits = self._model(encoder_outputs=heard, decoder_input_ids=given).logits[0, -1]
        known = sorted(self._names)
        return self._names[known[int(logits[known].argmax())]]

    def asked(self, window: Window, language: str) -> list[int]:
        """The tokens that stand before those of a window: words that came before, and what is to be
        written."""
        return [*self._before(window), *self._asks(window.task, language)]

    def _before(self, window: Window) -> list[int]:
        """The tokens of the words before a window: the last ones, where they are too many."""
        words = window.prompt.strip()
        if not words or self._marks.before is None:
            return []
        ids = self._tokenizer(" " + words, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [self._marks.before, *ids[-self.max_prompt + 1 :]] if ids else []

    def _asks(self, task: str, language: str) -> list[int]:
        """The tokens that say what is to be written."""
        marks = self._marks
        if not marks.languages:
            return [marks.start]
        asked = marks.translate if task == "translate" else marks.transcribe
        return [marks.start, marks.languages[language], *([] if asked is None else [asked])]

    def write(
        self, heard: Any, asked: Sequence[int], temperature: float, seed: int, wanted: Callable[[], bool]
    ) -> tuple[list[int], list[float], float]:
        """The tokens of one attempt with their log probabilities, and how likely it is that nobody speaks."""
        from transformers import DynamicCache, EncoderDecoderCache

        caches: Any = EncoderDecoderCache
        cache = caches(DynamicCache(config=self._config), DynamicCache(config=self._config))
        generator = torch.Generator(self._device).manual_seed(seed + round(temperature * 100))
        room = int(self._config.max_target_positions) - len(asked)
        ids: list[int] = []
        logprobs: list[float] = []
        no_speech = 0.0
        given = torch.tensor([list(asked)], device=self._device)
        for step in range(min(room, int(self._config.max_target_positions) // 2)):
            if not wanted():
                raise Dropped
            output = self._model(
                encoder_outputs=heard, decoder_input_ids=given, past_key_values=cache, use_cache=True
            )
            if step == 0 and self._marks.no_speech is not None:
                at = list(asked).index(self._marks.start)
                no_speech = float(output.logits[0, at].float().softmax(dim=-1)[self._marks.no_speech])
            logits = output.logits[0, -1].float()
            if not bool(torch.isfinite(logits).all()):
                raise RequestFailed("the model computed numbers that are not finite")
            token, logprob = pick(self._rules.apply(logits, ids), temperature, generator)
            ids.append(token)
            logprobs.append(logprob)
            if token == self._marks.end:
                break
            given = torch.tensor([[token]], device=self._device)
        return ids, logprobs, no_speech

    # -- what is shown ---------------------------------------------------------------------------------------

    def _text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without marks and times."""
        return self._bytes_of(ids).decode("utf-8", "replace")

    def _bytes_of(self, ids: Sequence[int]) -> bytes:
        spoken = [each for each in ids if each < self._marks.end]
        pieces = self._tokenizer.convert_ids_to_tokens(spoken)
        return bytes(self._bytes[char] for piece in pieces for char in piece if char in self._bytes)

    def _segment(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        moments: Any,
        place: Stretch,
    ) -> Segment:
        """The tokens of a stretch as a segment. moments: when each of all tokens begins, and where the
        last one ends; None: words have no times."""
        spoken = [at for at in range(place.first, place.stop) if ids[at] < self._marks.end]
        tokens = []
        for at in spoken:
            data = self._bytes_of([ids[at]])
            text = data.decode("utf-8", "replace")
            tokens.append(SpeechToken(ids[at], text, b64encode(data).decode(), logprobs[at]))
        words: tuple[Word, ...] = ()
        if moments is not None:
            words = words_of(self._pieces(ids, spoken, moments))
        return Segment(place.start, place.end, self._text([ids[at] for at in spoken]), tuple(tokens), words)

    def _pieces(
        self, ids: Sequence[int], spoken: Sequence[int], moments: Any
    ) -> list[tuple[str, float, float]]:
        """Whole characters with their times: tokens that end within a character are joined with the next."""
        found: list[tuple[str, float, float]] = []
        data, start = b"", 0.0
        for number, at in enumerate(spoken):
            start = start if data else float(moments[at])
            data += self._bytes_of([ids[at]])
            try:
                text = data.decode()
            except UnicodeDecodeError:
                if number + 1 < len(spoken):
                    continue
                text = data.decode("utf-8", "replace")
            found.append((text, start, float(moments[at + 1])))
            data = b""
        return found

    def _moments(self, heard: Any, asked: Sequence[int], ids: Sequence[int], duration: float) -> Any:
        """When each token begins, and where the last one ends: [len(ids) + 1] seconds."""
        spoken = [each for each in ids if each < self._marks.end]
        if not spoken:
            return np.full(len(ids) + 1, duration)
        # The text alone, without times, is read once more: so the heads were trained to look.
        given = [*asked, self._marks.no_times, *spoken, self._marks.end]
        given = given[: int(self._config.max_target_positions)]
        self._model.set_attn_implementation("eager")  # others do not tell where they look
        try:
            output = self._model(
                encoder_outputs=heard,
                decoder_input_ids=torch.tensor([given], device=self._device),
                output_attentions=True,
                use_cache=False,
            )
        finally:
            self._model.set_attn_implementation("sdpa")
        positions = max(1, min(round(duration / FRAME_S), self.num_frames // 2))
        rows = [output.cross_attentions[layer][0, head] for layer, head in self._heads]
        attention = torch.stack(rows).float()[:, :, :positions].cpu().numpy()
        begins = token_starts(attention)[len(asked) :]  # a token's row is that of the one before it
        moments, number = [], 0
        for each in ids:
            moments.append(begins[min(number, len(begins) - 1)])
            number += each < self._marks.end
        return np.minimum([*moments, begins[min(number, len(begins) - 1)]], duration)


# ------------------------------------------------------------------------------------------------------------


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers
    from transformers.utils import logging as told

    quiet: Any = told.disable_progress_bar
    quiet()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader: Any = transformers.WhisperForConditionalGeneration
            model, loading = loader.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                attn_implementation="sdpa",
            )
    except Exception as error:  # transformers raises what it likes; one line says what it was
        line = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(f"transformers cannot load {folder}: {type(error).__name__}: {line}") from error
    missing = sorted(each for each in loading["missing_keys"] if not each.startswith("proj_out"))
    if missing:
        raise LoadError(f"{folder} lacks weights of Whisper: {missing[0]} ({len(missing)} in all)")
    return model.eval().to(device)


def _tokenizer(folder: Path) -> Any:
    from transformers import WhisperTokenizer

    try:
        loader: Any = WhisperTokenizer
        return loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        line = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(f"the tokenizer of {folder} cannot be loaded: {line}") from error


def _marks(model: Any, tokenizer: Any) -> Marks:
    """Raises LoadError where the tokenizer lacks a mark that every Whisper model has."""
    known = tokenizer.get_vocab()
    settings = model.generation_config

    def needed(name: str) -> int:
        if name not in known:
            raise LoadError(f"the tokenizer of the model for speech has no token {name!r}")
        return int(known[name])

    no_times = needed("<|notimestamps|>")
    several = bool(getattr(settings, "is_multilingual", "<|translate|>" in known))
    languages = {
        name[2:-2]: int(token) for name, token in (getattr(settings, "lang_to_id", None) or {}).items()
    }
    if several and not languages:
        first, stop = needed("<|startoftranscript|>") + 1, needed("<|translate|>")
        names = tokenizer.convert_ids_to_tokens(range(first, stop))
        languages = {name[2:-2]: first + at for at, name in enumerate(names)}
    latest = getattr(settings, "max_initial_timestamp_index", None)
    return Marks(
        end=needed("<|endoftext|>"),
        start=needed("<|startoftranscript|>"),
        first_time=no_times + 1,
        no_times=no_times,
        before=known.get("<|startofprev|>"),
        no_speech=known.get("<|nospeech|>", known.get("<|nocaptions|>")),
        transcribe=known.get("<|transcribe|>"),
        translate=known.get("<|translate|>"),
        languages=languages if several else {},
        last_first_time=None if latest is None else no_times + 1 + int(latest),
        banned=tuple(getattr(settings, "suppress_tokens", None) or ()),
        banned_first=tuple(getattr(settings, "begin_suppress_tokens", None) or ()),
    )


def _later_heads(config: Any) -> list[tuple[int, int]]:
    """Every head of the later half of the layers: what looks at the sound, where a checkpoint does not say
    it."""
    layers = range(config.decoder_layers // 2, config.decoder_layers)
    return [(layer, head) for layer in layers for head in range(config.decoder_attention_heads)]


def _byte_table() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, and
    the others, in their order, for characters from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    others = [byte for byte in range(256) if byte not in set(kept)]
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}


def _dtype(config: SpeechConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    return torch.float16 if device.type == "cuda" else torch.float32
