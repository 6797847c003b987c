"""The general tier: transformers decoders through the attention interface, each against its own plain
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import load_model
from engine.models.general import GeneralDecoder
from engine.types import LoadError
from tests.engine.checkpoints import SMALL, oracle_greedy
from tests.engine.driver import Driver, greedy
from tests.engine.test_greedy import prompts

Find = Callable[[str], Path]
COUNT = 10
FAMILIES = ["gemma2", "olmo2", "phi3", "gpt_neox", "cohere2", "gpt_oss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_equals_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    driver = Driver(folder, max_num_batched_tokens=48, num_blocks=100)
    assert isinstance(driver.loop.runner.model, GeneralDecoder)
    handles = [driver.submit(prompt, greedy(COUNT)) for prompt in prompts()]
    driver.run()
    expected = [oracle_greedy(folder, prompt, COUNT) for prompt in prompts()]
    assert [driver.tokens(handle) for handle in handles] == expected
    # and behind cached prefixes
    longer = [(*prompt, 1, 2, 3) for prompt in prompts()[-2:]]
    for prompt in longer:
        assert driver.generate(prompt, greedy(COUNT)) == oracle_greedy(folder, prompt, COUNT)
    assert driver.loop.scheduler.counters.prefix_hits > 100


def build(folder: Path, model_type: str, **fields: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type 'conv'"),
        (
            "llama4_text",
            {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
            "chunked_attention",
        ),
        ("bloom", {}, "layer 0 does not attend through the attention interface"),
        ("falcon", {"alibi": True}, "attention implementations of its own"),
        ("mamba", {}, "linear_attention"),
    ],
)
def test_architectures_that_need_what_is_not_here_are_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], match: str
) -> None:
    folder = build(tmp_path, model_type, **fields)
    with pytest.raises(LoadError, match=match) as caught:
        load_model(folder, dtype="float32", device=torch.device("cpu"), max_model_len=None)
    assert "\n" not in str(caught.value)


def test_the_trial_finds_tokens_mixed_behind_the_attention(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that lets one token see the one before it, past the attention, would mix requests."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    plain = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(LoadError, match="mix tokens"):
        load_model(checkpoint("olmo2"), dtype="float32", device=torch.device("cpu"), max_model_len=None)


def test_longrope_is_served_up_to_where_it_would_depend_on_the_batch(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 128,
    }
    fields = {"rope_parameters": rope, "pad_token_id": 0, "original_max_position_embeddings": 128}
    folder = build(tmp_path, "phi3", **fields)
    model = load_model(folder, dtype="float32", device=torch.device("cpu"), max_model_len=None)
    assert model.spec.max_positions == 128
