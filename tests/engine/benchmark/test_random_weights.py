"""Checkpoints with random weights: what is written loads, and is the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import SIZES, GenerateRequest, LocalEngine, ReaderParams, SamplingParams, write_random_model
from engine.models.families import parse
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.checkpoints import oracle_greedy

SMALL = {
    **SIZES["qwen3-0.6b"],
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SIZES, "small", SMALL)
    return "small"


PROMPT = tuple(range(100, 110))


async def greedy(folder: Path) -> tuple[int, ...]:
    engine = LocalEngine(folder)
    await engine.start()
    try:
        request = GenerateRequest(
            "r",
            PROMPT,
            SamplingParams(seed=0, max_tokens=6, temperature=0.0, ignore_eos=True),
            ReaderParams(dialect=False),
        )
        return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])
    finally:
        await engine.close()


async def test_the_same_seed_makes_the_same_model(small: str, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(small, tmp_path / name, seed=seed)
    a, b, c = [await greedy(tmp_path / name) for name in "abc"]
    assert a == b != c


async def test_other_libraries_read_the_same_model(small: str, tmp_path: Path) -> None:
    write_random_model(small, tmp_path)
    assert await greedy(tmp_path) == oracle_greedy(tmp_path, PROMPT, 6)


def test_every_id_decodes_and_turns_still_end(small: str, tmp_path: Path) -> None:
    write_random_model(small, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == SMALL["vocab_size"]
    assert all(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
    assert {tokenizer.token_bytes(token_id) for token_id in tokenizer.eos_token_ids} == {
        b"<|im_end|>",
        b"<|endoftext|>",
    }
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for token_id, tag in config["added_tokens_decoder"].items():
        assert tokenizer.token_bytes(int(token_id)).decode() == tag["content"]


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("qwen3-0.6b", 596e6), ("qwen3-1.7b", 1721e6), ("qwen3-4b", 4022e6), ("qwen3-8b", 8191e6)],
)
def test_the_sizes_are_those_of_the_models_of_that_name(size: str, parameters: float) -> None:
    shape = parse(SIZES[size], None)
    axes = shape.axes
    width = axes["hidden"]
    layer = 2 * width * axes["q"] + 2 * width * axes["kv"] + 3 * width * axes["middle"]
    count = layer * len(shape.windows) + width * axes["vocab"] * (1 if shape.tied else 2)
    assert count == pytest.approx(parameters, rel=0.002)
