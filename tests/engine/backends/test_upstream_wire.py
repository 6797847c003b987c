"""Requests to other servers: nothing of how tokens are drawn is left behind."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from engine import GenerateRequest, SamplingParams
from engine.backends.upstream_wire import completion_body

PLAIN = SamplingParams(seed=1, max_tokens=9)
OTHERS: dict[str, Any] = {
    "seed": 2,
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((7, 1.0),),
    "min_tokens": 3,
    "stop_token_ids": (7,),
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
}
BY_THE_READER = {"stop", "include_stop"}
"""Where the text ends is for whoever reads it here to say."""
REFUSED = {"bad_words"}
"""By a capability that engines over other servers do not have."""
HOW_SOON = {"num_assistant_tokens", "max_ngram_size", "assistant_confidence_threshold"}
"""They change when tokens come and never which; how a server guesses ahead is its operator's to say."""


def test_every_sampling_parameter_reaches_the_server() -> None:
    """A new one is sent, or is named above with its reason."""

    def body(sampling: SamplingParams) -> dict[str, Any]:
        request = GenerateRequest("r", (1, 2), sampling)
        return completion_body(request, (), room=100, eos=(0,), priority=False)

    for name, value in OTHERS.items():
        assert body(replace(PLAIN, **{name: value})) != body(PLAIN), name
    known = OTHERS.keys() | BY_THE_READER | REFUSED | HOW_SOON
    assert known == {field.name for field in fields(SamplingParams)}
