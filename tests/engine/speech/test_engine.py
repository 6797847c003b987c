"""The speech engine against transformers' own Whisper: the same tokens, times and words of a random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from engine import LoadError
from engine.speech import SAMPLE_RATE, SpeechConfig, SpeechEngine, Window, transcribe
from engine.speech.whisper import IMPROBABLE, LEAST_ADVANCE, REPETITIVE, Whisper
from engine.speech.word_times import cheapest_path
from tests.support.pooling_checkpoints import make_embedder
from tests.support.speech_checkpoints import make_whisper, tone

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("speech") / "whisper")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(SpeechConfig(folder, num_threads=1))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def model(folder: Path) -> Whisper:
    with torch.inference_mode():
        return Whisper(SpeechConfig(folder), folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """transformers' model, feature extractor and tokenizer."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

    loaders: Any = (WhisperForConditionalGeneration, WhisperFeatureExtractor, WhisperTokenizer)
    return [loader.from_pretrained(folder) for loader in loaders]


def _expected(oracle: Any, wave: Any, **asked: Any) -> tuple[list[int], list[int]]:
    """What transformers' generate writes for a window: what it is given first, and what it adds, times
    included."""
    model, extractor, tokenizer = oracle
    features = extractor(wave.astype(np.float32) / 32768, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    if "prompt" in asked:
        ids = tokenizer.get_prompt_ids(asked.pop("prompt"), return_tensors="pt")
        asked["prompt_ids"] = ids
    with torch.no_grad():
        found = model.generate(
            features.input_features,
            return_timestamps=True,
            force_unique_generate_call=True,
            return_dict_in_generate=True,
            max_new_tokens=24,
            **asked,
        )
    ids = found.sequences[0].tolist()
    begin = ids.index(tokenizer.convert_tokens_to_ids("<|startoftranscript|>"))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    stop = ids.index(end, begin) if end in ids[begin:] else len(ids)
    num_asked = begin + 3
    return ids[:num_asked], ids[num_asked:stop]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "asked",
    [
        {"language": "de", "task": "transcribe"},
        {"language": "fr", "task": "translate"},
        {"task": "transcribe"},
        {"language": "en", "task": "transcribe", "prompt": "the ant"},
    ],
    ids=lambda asked: "-".join(map(str, asked.values())),
)
async def test_the_tokens_are_those_of_transformers(
    model: Whisper, oracle: Any, asked: dict[str, Any], seed: int
) -> None:
    wave = tone(4.0 + seed, seed=seed)
    given, expected = _expected(oracle, wave, **dict(asked))
    window = Window(wave.tobytes(), **asked)
    with torch.inference_mode():
        heard = model.hear(wave.astype(np.float32) / 32768)
        own = model.asked(window, window.language or model.recognize(heard))
        ids, _, _ = model.write(heard, own, 0.0, 0, lambda: True)
    end = oracle[2].convert_tokens_to_ids("<|endoftext|>")
    assert own == given
    assert [each for each in ids if each != end] == expected
    assert len(expected) > 3


@pytest.mark.parametrize("seed", range(2))
async def test_segments_and_words_are_those_of_transformers(model: Whisper, oracle: Any, seed: int) -> None:
    """Of a window of 30 s, whose stretches transformers cuts as well, and whose words it finds by the same
    heads."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    whisper, extractor, tokenizer = oracle
    wave = tone(30.0, seed=seed)
    features = extractor(wave.astype(np.float32) / 32768, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    with torch.no_grad():
        found = whisper.generate(
            features.input_features,
            language="en",
            return_timestamps=True,
            return_segments=True,
            max_new_tokens=24,
        )
    first = tokenizer.convert_tokens_to_ids("<|0.00|>")
    with torch.inference_mode():
        own = model.read(Window(wave.tobytes(), language="en", words=True), lambda: True)
    for ours, theirs in zip(own.segments, found["segments"][0], strict=False):
        assert ours.start == pytest.approx(float(theirs["start"]))
        assert ours.end == pytest.approx(float(theirs["end"]))
        assert [token.id for token in ours.tokens] == [int(each) for each in theirs["tokens"] if each < first]
    assert own.segments
    words = [word for segment in own.segments for word in segment.words]
    assert "".join(word.text for word in words) == "".join(segment.text for segment in own.segments)
    assert all(0 <= word.start <= word.end <= 30.0 for word in words)
    assert [word.start for word in words] == sorted(word.start for word in words)
    cost = np.random.default_rng(seed).normal(size=(9, 40))
    for ours, theirs in zip(cheapest_path(cost), _dynamic_time_warping(cost), strict=True):
        np.testing.assert_array_equal(ours, theirs)


async def test_a_long_sound_is_read_in_windows(engine: SpeechEngine) -> None:
    wave = tone(65.0, seed=3)
    asked = Window(b"", language="en", prompt="the ant")
    found = [each async for each in transcribe(engine, memoryview(wave.tobytes()), asked)]
    starts = [start for start, _ in found]
    assert starts[0] == 0.0 and len(found) >= 3
    advances = [text.advance / SAMPLE_RATE for _, text in found]
    assert np.cumsum([0.0, *advances[:-1]]) == pytest.approx(starts)
    assert min(advances[:-1]) >= LEAST_ADVANCE / SAMPLE_RATE
    assert sum(advances) > 65.0 - 0.1
    # a window says the same wherever it lies, but for the words before it
    start, text = found[1]
    stop = int((start + 30) * SAMPLE_RATE)
    again = await engine.read(Window(wave[int(start * SAMPLE_RATE) : stop].tobytes(), language="en"))
    assert again == text


async def test_an_improbable_text_is_tried_again_at_the_next_temperature(engine: SpeechEngine) -> None:
    window = Window(tone(5.0, seed=11).tobytes(), language="en", temperatures=(0.0, 1.0), seed=5)
    one, other = await engine.read(window), await engine.read(window)
    assert one == other  # what is drawn depends on the seed alone
    calm = await engine.read(replace(window, temperatures=(0.0,)))
    again = calm.avg_logprob < IMPROBABLE or calm.compression_ratio > REPETITIVE
    assert one.temperature == (1.0 if again else 0.0)
    assert one.num_tokens > calm.num_tokens if again else one == calm


async def test_owners_take_turns_and_who_leaves_is_not_waited_for(engine: SpeechEngine) -> None:
    order: list[str] = []

    async def read(owner: str) -> None:
        await engine.read(Window(tone(3.0).tobytes(), language="en"), owner=owner)
        order.append(owner)

    many = [asyncio.create_task(read("many")) for _ in range(4)]
    await asyncio.sleep(0)
    few = asyncio.create_task(read("few"))
    await asyncio.sleep(0)
    many[-1].cancel()
    await asyncio.gather(*many, few, return_exceptions=True)
    assert order.index("few") <= 2
    assert len(order) == 4
    assert engine.stats().windows_waiting == 0


async def test_a_model_of_english_alone_is_asked_for_nothing_else(tmp_path: Path) -> None:
    engine = SpeechEngine(
        SpeechConfig(make_whisper(tmp_path / "english", several=False, heads=False), num_threads=1)
    )
    info = await engine.start()
    try:
        assert (info.languages, info.words, info.window_s) == ((), False, 30.0)
        text = await engine.read(Window(tone(3.0).tobytes(), words=True))
        assert text.language == "en" and text.num_prompt == 1
        assert any(segment.words for segment in text.segments)
    finally:
        await engine.close()


async def test_what_is_no_model_for_speech_is_refused(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    with pytest.raises(LoadError, match="of the type 'bert'"):
        await SpeechEngine(SpeechConfig(folder)).start()
    with pytest.raises(LoadError, match="is not a folder"):
        await SpeechEngine(SpeechConfig(tmp_path / "nothing")).start()
