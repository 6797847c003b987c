"""What a decode step has to read, against sizes worked out by hand; and how fast memory is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.support.checkpoints import make_checkpoint

# width 48, 3 layers, middle 80, 6 heads of 8 dimensions, 2 of them for keys and values, 300 tokens
LAYER = 48 * 48 + 2 * 48 * 16 + 48 * 48 + 3 * 48 * 80 + 2 * 48
HEAD = 300 * 48 + 48
TOKEN = 3 * 2 * 2 * 8  # keys and values of one token


async def read_by(engine: LocalEngine) -> list[int]:
    """Bytes of a step: of one sequence without a past, of one with 10 tokens, and of four."""
    await engine.start()
    try:
        return [engine.step_bytes(*each) for each in ((1, 0), (1, 10), (4, 10))]
    finally:
        await engine.close()


async def test_a_step_reads_all_weights_but_the_embedding_and_all_keys(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    bare, one, four = await read_by(LocalEngine(folder, cpu_kernels=False))  # whose panels are filled up
    assert bare == pytest.approx(4 * (3 * LAYER + HEAD), abs=64)  # and the rotation's frequencies
    assert one - bare == 4 * 10 * TOKEN and four - bare == 4 * (one - bare)


async def test_other_families_count_the_same_way(tmp_path: Path) -> None:
    """Through transformers' own modules: this one is tied, and slides over 20 tokens."""
    engine = LocalEngine(make_checkpoint("gemma2", tmp_path), cpu_kernels=False)
    bare, one, four = await read_by(engine)
    embedding, rest = 300 * 48, 3 * (2 * 48 * 6 * 16 + 2 * 48 * 2 * 16 + 3 * 48 * 80 + 4 * 48) + 48
    assert bare == 4 * (embedding + rest)
    assert four - bare == 4 * (one - bare)


async def test_an_embedding_that_is_the_head_is_read() -> None:
    """The shipped model, whose file holds each parameter once, in half the bytes."""
    bare, _, _ = await read_by(LocalEngine(CHECKPOINT))
    assert bare == pytest.approx(2 * (CHECKPOINT / "model.safetensors").stat().st_size, rel=0.01)


async def test_the_memory_s_pace_is_measured_while_the_engine_lives() -> None:
    engine = LocalEngine(CHECKPOINT)
    await engine.start()
    try:
        assert await engine.read_rate() > 1e8  # bytes a second: slower than any machine of this century
        assert await engine.tokenize("still there")
    finally:
        await engine.close()
