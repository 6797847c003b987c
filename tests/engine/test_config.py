"""`EngineConfig`: what it refuses, and what a draft model takes of it."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, EngineConfig, LoadError, LocalEngine


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is none of auto, float32"),
        ({"quantization": "int2"}, "quantization 'int2'"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype 'fp4'"),
        ({"kv_tier_dtype": "int4"}, "kv_tier_dtype 'int4' is none of auto, int8"),
        ({"kv_disk_bytes": -1}, "kv_disk_bytes is -1, and has to be at least 0"),
        ({"deterministic": True, "kv_tier_dtype": "int8"}, "which deterministic excludes"),
        ({"generation_config": "mine"}, "generation_config 'mine'"),
        ({"max_model_len": 0}, "max_model_len is 0, and has to be at least 1"),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s is nan"),
        ({"assistant_confidence_threshold": 1.5}, "is a probability"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(LoadError, match=match):
        EngineConfig("model", **fields)
    with pytest.raises(LoadError, match=match):
        LLM("model", **fields)


def test_a_whole_configuration_takes_no_further_settings() -> None:
    config = EngineConfig("model")
    for build in (LocalEngine, LLM):
        with pytest.raises(TypeError, match="settings already: dtype"):
            build(config, dtype="float32")


def test_a_draft_model_is_loaded_as_it_is_stored() -> None:
    config = EngineConfig(
        "large", draft_model="small", quantization="int8", dtype="bfloat16", lora={"a": "b"}, num_blocks=9
    )
    assert config.for_draft_model(64) == EngineConfig(
        "small", dtype="bfloat16", max_num_batched_tokens=64, text_only=True
    )
