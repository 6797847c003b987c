"""The bench for GPUs does what it says, on a small model and without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.benchmark.roofline import step_bytes
from engine.executor import runner
from engine.executor.gpu_launcher import STAND_IN
from engine.kernels.fp8 import FP8
from engine.models import linear, loader
from engine.models.fp8 import Fp8
from tests.gpu import figures
from tests.gpu.models import Bench

CPU = torch.device("cpu")
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
    monkeypatch.setattr(loader, "open_library", lambda: None)  # whose weights lie as only it reads them
    monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(figures, "CONTEXT", 80)
    yield Bench("small", CPU, config=SMALL, max_num_seqs=3, max_model_len=256)


def test_every_stream_is_in_every_step(bench: Bench) -> None:
    limits = figures.Ceilings(1e9, 1e9)
    step, tokens = figures.decode(bench, "small", 3, limits, 0.5)
    assert step.share is not None
    assert tokens.value == pytest.approx(3000 / step.value)
    assert "goal 50 %" in step.line()


def test_eight_bits_have_a_floor_of_their_own(bench: Bench) -> None:
    narrow = Bench(
        "small", CPU, config=SMALL, max_num_seqs=3, max_model_len=256, quantization="fp8", kv_dtype=FP8
    )
    assert isinstance(narrow.model.layers[1].gate_up, Fp8)
    assert narrow.runner.pools[0].dtype is FP8
    limits = figures.Ceilings(1e9, 1e9)
    step, _ = figures.decode(narrow, "small", 3, limits, None)
    assert step.share is not None and step.goal is None
    read = [step_bytes(each.model, 3, 80, each.runner.kv_dtype) for each in (narrow, bench)]
    assert step.share * step.value == pytest.approx(read[0] / 1e6)
    assert read[0] < read[1]


def test_the_second_of_two_equal_prompts_hits_the_cache(bench: Bench) -> None:
    ids = figures.prompt(200, 1)
    handles = [bench.submit(ids, 1)]
    bench.run_until_decoding(handles)
    bench.run_until_decoding([bench.submit(ids, 1)])
    assert bench.loop.scheduler.counters.prefix_hits == 192
    bench.reset(512)
    bench.run_until_decoding([bench.submit(ids, 1)])
    assert bench.loop.scheduler.counters.prefix_hits == 0
