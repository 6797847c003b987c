"""The life of a pooling engine: what is shared, dropped, refused, and what fails alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import (
    DeadlineExceeded,
    EngineDead,
    LoadError,
    PoolingConfig,
    PoolingEngine,
    PromptTooLong,
    RequestFailed,
    TextInput,
)
from engine.pooling.paged import PagedWorker
from engine.pooling.step_size import LEAST, StepSize
from tests.support.pooling_checkpoints import make_classifier, make_embedder


@asynccontextmanager
async def _engine(folder: Path, kind: Any = "embedding", **settings: Any) -> AsyncIterator[PoolingEngine]:
    engine = PoolingEngine(PoolingConfig(folder, kind, num_threads=1, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("qwen3", tmp_path_factory.mktemp("decoder") / "m")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("bert", tmp_path_factory.mktemp("encoder") / "m")


def _text(*ids: int) -> TextInput:
    return TextInput(np.array(ids, np.int32))


def _check_integrity(engine: PoolingEngine) -> None:
    assert isinstance(engine._worker, PagedWorker)
    engine._worker.check_integrity()


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
async def test_a_raw_vector_is_not_brought_to_the_length_1(kind: str, decoder: Path, encoder: Path) -> None:
    """Whoever asks for one beside others of the same step gets it alone."""
    texts = [_text(9, 12, 10 + number) for number in range(6)]
    mixed = [replace(text, raw=number % 2 == 0) for number, text in enumerate(texts)]
    async with _engine(decoder if kind == "decoder" else encoder) as engine:
        normal, _ = await engine.pool(texts)
        found, _ = await engine.pool(mixed, owner="other")
    for number, (vector, expected) in enumerate(zip(found, normal, strict=True)):
        length = float(np.linalg.norm(vector))
        assert (abs(length - 1) > 1e-3) is (number % 2 == 0)
        np.testing.assert_allclose(vector / length, expected, atol=1e-5)


async def test_a_beginning_that_was_computed_is_found_again_by_its_owner_alone(decoder: Path) -> None:
    ids = list(np.arange(100) % 40 + 9)
    async with _engine(decoder) as engine:
        [first], cached = await engine.pool([_text(*ids)], owner="one")
        [again], found = await engine.pool([_text(*ids)], owner="one")
        [longer], longer_found = await engine.pool([_text(*ids, 9, 9)], owner="one")
        _, others = await engine.pool([_text(*ids)], owner="other")
        assert (cached, found, longer_found, others) == (0, 96, 96, 0)
        np.testing.assert_allclose(again, first, atol=1e-6)
        assert abs(longer - first).max() > 1e-3
        assert engine.stats().cached_tokens_total == 192
        _check_integrity(engine)


async def test_where_every_state_is_pooled_nothing_is_taken_from_the_cache(tmp_path: Path) -> None:
    folder = make_embedder("qwen2", tmp_path / "m")
    async with _engine(folder, max_num_batched_tokens=32) as engine:
        ids = list(np.arange(100) % 40 + 9)
        [first], _ = await engine.pool([_text(*ids)])
        [again], found = await engine.pool([_text(*ids)])
        assert found == 0
        np.testing.assert_allclose(again, first, atol=1e-6)


async def test_texts_that_are_dropped_between_two_steps_leave_nothing_behind(decoder: Path) -> None:
    async with _engine(decoder, max_num_batched_tokens=16) as engine:
        works = [asyncio.ensure_future(engine.pool([_text(*([9 + i] * 100))])) for i in range(40)]
        await works[0]
        for work in works[1:]:
            work.cancel()
        await asyncio.gather(*works[1:], return_exceptions=True)
        await engine.pool([_text(9)])
        assert engine.stats().texts_waiting == 0
        _check_integrity(engine)


@pytest.mark.parametrize("tier", ["decoder", "encoder"])
async def test_an_owner_with_few_texts_does_not_wait_for_one_with_many(
    tier: str, request: pytest.FixtureRequest
) -> None:
    async with _engine(request.getfixturevalue(tier), max_num_batched_tokens=128) as engine:
        many = asyncio.gather(engine.pool([_text(*([9] * 100)) for _ in range(400)], owner="many"))
        while not engine.stats().steps_total:
            await asyncio.sleep(0)
        before = engine.stats().steps_total
        await engine.pool([_text(10, 11)], owner="few")
        assert not many.done() and engine.stats().steps_total - before < 20
        many.cancel()
        with pytest.raises(asyncio.CancelledError):
            await many


async def test_owners_take_turns_in_having_texts_read(encoder: Path) -> None:
    """Twenty requests of one owner, of as many texts as a request may have, and a lone text of another."""
    async with _engine(encoder) as engine:
        pieces: list[int] = []
        encoded = engine._encoded

        def counted(texts: Any, *rest: Any) -> Any:
            pieces.append(len(texts))
            return encoded(texts, *rest)

        engine._encoded = counted  # type: ignore[method-assign]
        flood = [asyncio.ensure_future(engine.encode(["the river"] * 2048, owner="many")) for _ in range(20)]
        while not pieces:
            await asyncio.sleep(0)
        before = len(pieces)
        await engine.encode(["the dog"], owner="few")
        # What began between its own end and this line does not count.
        assert pieces.index(1) - before <= 1, "one that was under way, then its own"
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        long = await engine.encode(["dog " * 40_000, "dog"] * 2)
        assert pieces[-3:] == [1, 2, 1], "long texts are fewer at a time"
        assert len(long) == 4


async def test_a_step_has_as_many_tokens_as_take_a_moment() -> None:
    size = StepSize(2048)
    assert size.tokens == LEAST
    for _ in range(10):
        size.took(size.tokens, size.tokens * 0.0001)
    assert size.tokens == 1000
    for _ in range(20):
        size.took(size.tokens, size.tokens * 0.01)
    assert size.tokens == LEAST, "not fewer, however long they take"
    for _ in range(30):
        size.took(size.tokens, size.tokens * 1e-6)
    assert size.tokens == 2048


async def test_a_deadline_ends_a_request_and_a_closed_engine_takes_none(encoder: Path) -> None:
    async with _engine(encoder) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.pool([_text(*([9] * 100))] * 500, deadline=time.monotonic())
        assert engine.stats().texts_waiting == 0
        for count in (0, 121):
            with pytest.raises(PromptTooLong):
                await engine.pool([_text(*([9] * count))])
        await engine.close()
        with pytest.raises(EngineDead):
            await engine.pool([_text(9)])


@pytest.mark.parametrize("tier", ["decoder", "encoder"])
async def test_a_text_that_gives_nan_fails_and_its_neighbours_do_not(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr("engine.models.decoder.require_finite", lambda name, tensor: None)
    folder = make_embedder("qwen3" if tier == "decoder" else "bert", tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    weights[name][20] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    async with _engine(folder) as engine:
        good = asyncio.ensure_future(engine.pool([_text(9, 10, 11)]))
        with pytest.raises(RequestFailed, match="not finite"):
            await engine.pool([_text(*([9] * 40), 20)])
        [vector], _ = await good
        [again], _ = await engine.pool([_text(9, 10, 11)])
        np.testing.assert_allclose(again, vector, atol=1e-6)
        assert np.isfinite((await engine.pool([_text(*([9] * 41))]))[0][0]).all()


async def test_a_fingerprint_names_what_vectors_depend_on(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_embedder("llama", tmp_path / "m")
    dense, pooling = folder / "2_Dense" / "model.safetensors", folder / "1_Pooling" / "config.json"

    async def fingerprint() -> str:
        async with _engine(folder) as engine:
            return engine.info.fingerprint

    found = [await fingerprint(), await fingerprint()]
    assert found[0] == found[1]
    save_file({name: weight + 1 for name, weight in load_file(dense).items()}, dense)
    found.append(await fingerprint())
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"pooling_mode": ["max", "mean"]}))
    found.append(await fingerprint())
    assert len(set(found)) == 3


async def test_what_a_checkpoint_does_not_say_or_is_not_served_is_refused(tmp_path: Path) -> None:
    async def refused(folder: Path, kind: Any = "embedding") -> str:
        """As soon as it is built where that can be read without the model, else as it starts."""
        engine = None
        with pytest.raises(LoadError) as caught:
            engine = PoolingEngine(PoolingConfig(folder, kind))
            await engine.start()
        if engine is not None:
            await engine.close()
        return str(caught.value)

    folder = make_embedder("bert", tmp_path / "m")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode": "attention"}))
    assert "no pooling that is served: attention" in await refused(folder)
    pooling.unlink()
    assert "has no config.json, which says how the model pools" in await refused(folder)
    modules = folder / "modules.json"
    rows = json.loads(modules.read_text())
    modules.write_text(json.dumps([rows[0], {**rows[1], "type": "x.WeightedLayerPooling"}]))
    assert "no Pooling after its Transformer" in await refused(folder)
    modules.unlink()
    assert "ends with ForSequenceClassification" in await refused(folder, "rerank")
    classes = make_classifier("bert", tmp_path / "classes", 3)
    assert "3 labels; a reranker has one" in await refused(classes, "rerank")
    chatty = make_embedder("qwen3-with-head", tmp_path / "chatty", modules=False)
    told = chatty / "tokenizer_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    assert "nothing says how a text is told to it" in await refused(chatty)
    assert "is not a folder, nor a hub id" in await refused(tmp_path / "none")
