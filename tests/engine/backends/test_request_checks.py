"""Which requests a model could never carry out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine import GenerateRequest, ModelInfo, PromptTooLong, RequestError, SamplingParams, check_request
from engine.core.batch_state import LEAST_TEMPERATURE
from tests.support.driver import Driver, greedy

INFO = ModelInfo("m", max_model_len=64, vocab_size=300, fingerprint="", eos_token_ids=(299,))
ASKED = GenerateRequest("r", (1, 2), SamplingParams(seed=0, max_tokens=4))
EXTREMES: dict[str, dict[str, Any]] = {
    "a cold draw": {"temperature": 1e-45},
    "a cold draw with penalties": {"temperature": 1e-45, "presence_penalty": 2.0, "repetition_penalty": 0.01},
    "a draw as cold as there is": {"temperature": LEAST_TEMPERATURE, "repetition_penalty": 0.01},
    "a cold draw with a floor": {"temperature": LEAST_TEMPERATURE, "min_p": 1e-45, "top_p": 1e-45},
    "filters of nearly nothing": {"temperature": 1.0, "min_p": 1e-300, "top_p": 1e-300, "top_k": 5},
    "strong penalties": {"temperature": 1.0, "repetition_penalty": 100.0, "frequency_penalty": 100.0},
    "a hot draw": {"temperature": 100.0, "top_p": 0.5},
}


def test_a_request_that_fits_passes() -> None:
    check_request(replace(ASKED, prompt_ids=tuple(range(63))), INFO)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", 1e30),
        ("presence_penalty", float("-inf")),
        ("logit_bias", ((300, 1.0),)),
        ("logit_bias", ((1, 1e39),)),
        ("logit_bias", ((3, float("nan")),)),
        ("stop_token_ids", (-1,)),
        ("logprobs", 21),
    ],
)
def test_what_no_model_can_do_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(replace(ASKED, sampling=replace(ASKED.sampling, **{field: value})), INFO)
    assert caught.value.param == field and field in str(caught.value)


def test_a_prompt_must_leave_room() -> None:
    with pytest.raises(PromptTooLong):
        check_request(replace(ASKED, prompt_ids=(1,) * 64), INFO)
    with pytest.raises(RequestError, match="empty"):
        check_request(replace(ASKED, prompt_ids=()), INFO)


@pytest.mark.parametrize("name", EXTREMES)
def test_numbers_at_their_edges_are_drawn_with(checkpoint: Any, name: str) -> None:
    driver = Driver(checkpoint("qwen3"))
    sampling = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, **EXTREMES[name])
    beside = [driver.submit((5, 6, 7), replace(sampling, seed=seed)) for seed in range(3)]
    handle = driver.submit((1, 2, 3), greedy(8, ignore_eos=True))
    driver.run()
    assert all(driver.end(each) is not None and len(driver.tokens(each)) == 8 for each in beside)
    assert driver.tokens(handle) == Driver(checkpoint("qwen3")).generate(
        (1, 2, 3), greedy(8, ignore_eos=True)
    )


def test_nearly_no_temperature_is_none(checkpoint: Any) -> None:
    driver = Driver(checkpoint("qwen3"))
    cold = driver.generate((1, 2, 3), replace(greedy(8), temperature=1e-45))
    assert cold == driver.generate((1, 2, 3), greedy(8))
