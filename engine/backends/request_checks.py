"""Checks whether a model can serve a request, before anything is started.

The checks need no more than the request and `ModelInfo`. Constraints are checked by `structured`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.types import (
    SAMPLING_RANGES,
    GenerateRequest,
    ModelInfo,
    PromptTooLong,
    RequestError,
    SamplingParams,
)

MAX_LOGPROBS = 20
MOST_BIAS = 1e30  # far more than bans, and still a number when it is added to a logit

LONG_PROMPT = 32 * 1024
"""Tokens; a look at each takes some 0.05 us, so of more it is taken in a thread."""


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raise RequestError or PromptTooLong for what could never run."""
    limit, vocab_size, sampling = info.max_model_len, info.vocab_size, request.sampling
    if not len(request.prompt_ids):
        raise RequestError("the prompt is empty")
    if len(request.prompt_ids) + 1 > limit:
        raise PromptTooLong(len(request.prompt_ids), limit)
    prefix = request.flat_prefix
    for what, ids in (("prompt", request.prompt_ids), ("prefix", prefix)):
        if _is_outside(ids, vocab_size):
            raise RequestError(f"the {what} has a token id outside 0..{vocab_size - 1}")
    if len(prefix) > limit - len(request.prompt_ids):
        raise RequestError("the prefix does not fit behind the prompt")
    _check_sampling(sampling, vocab_size)
    if request.adapter is not None and request.adapter not in dict(info.adapters):
        raise RequestError(f"there is no adapter {request.adapter!r}")
    if request.media and "image" not in info.modalities:
        raise RequestError("this model takes text only")


def _is_outside(ids: Sequence[int], vocab_size: int) -> bool:
    if not len(ids):
        return False
    if isinstance(ids, array):
        from engine.step import token_array  # numpy, only where it is needed

        known = token_array(ids)
        return bool(known.min() < 0 or known.max() >= vocab_size)
    return min(ids) < 0 or max(ids) >= vocab_size


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    biased = [token for token, _ in sampling.logit_bias]
    for field, ids in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        if _is_outside(ids, vocab_size):
            raise RequestError(f"{field} has a token id outside 0..{vocab_size - 1}", param=field)
    if not all(abs(bias) <= MOST_BIAS for _, bias in sampling.logit_bias):  # nor is what is not a number
        raise RequestError(f"logit_bias has a number beyond {MOST_BIAS:g}", param="logit_bias")
    for field, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(f"{field} must be between 0 and {MAX_LOGPROBS}", param=field)
    for field, (least, most) in SAMPLING_RANGES.items():
        if not least <= getattr(sampling, field) <= most:  # what is not a number is neither
            raise RequestError(f"{field} must be between {least:g} and {most:g}", param=field)
