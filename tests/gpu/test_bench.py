"""The bench for GPUs does what it says, on a small model and without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine import runner
from engine.kernels.launch import STAND_IN
from engine.models import linear
from tests.gpu import figures
from tests.gpu.models import Bench

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 150_000,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(runner, "kernels_for", lambda device: STAND_IN)
    monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(figures, "CONTEXT", 80)
    yield Bench("small", torch.device("cpu"), config=SMALL, max_num_seqs=3, max_model_len=256)


def test_every_stream_is_in_every_step(bench: Bench) -> None:
    limits = figures.Ceilings(1e9, 1e9)
    step, tokens = figures.decode(bench, "small", 3, limits, 0.5)
    assert step.share is not None
    assert tokens.value == pytest.approx(3000 / step.value)
    assert "goal 50 %" in step.line()


def test_the_second_of_two_equal_prompts_hits_the_cache(bench: Bench) -> None:
    ids = figures.prompt(200, 1)
    handles = [bench.submit(ids, 1)]
    bench.run_until_decoding(handles)
    bench.run_until_decoding([bench.submit(ids, 1)])
    assert bench.loop.scheduler.counters.prefix_hits == 192
    bench.reset(512)
    bench.run_until_decoding([bench.submit(ids, 1)])
    assert bench.loop.scheduler.counters.prefix_hits == 0
