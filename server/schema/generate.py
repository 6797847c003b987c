"""Parses and checks the body of POST /inference/v1/generate: tokens in, tokens out.

The form is that of vLLM's `GenerateRequest`: sampling parameters stand together, under the names that they
have in text completions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from engine import RequestError
from server.errors import ApiError
from server.ignored import member
from server.schema.completions import DEFAULT_MAX_TOKENS, CompletionRequest, parse_completion
from server.shapes import mapping, missing, mistyped, name_others, refuse

FIELDS = (
    *("model", "token_ids", "sampling_params", "stream", "stream_options"),
    *("request_id", "cache_salt", "priority", "service_tier"),
)
PARAMS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words"),
    *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"),
    *("truncate_prompt_tokens", "num_assistant_tokens", "max_ngram_size", "assistant_confidence_threshold"),
)
_WITHIN = "sampling_params"


def parse_generation(body: Mapping[str, Any]) -> CompletionRequest:
    """A body of POST /inference/v1/generate, as the request for completions of one prompt that it comes to.
    Raises ApiError 400 with the field's own path."""
    name_others(body, FIELDS)
    if body.get("token_ids") is None:
        missing("token_ids")
    ids = body["token_ids"]
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        mistyped("token_ids", "an array of integers", ids)
    if not ids:
        refuse("token_ids", "Invalid 'token_ids': the prompt is empty.")
    params = {} if body.get(_WITHIN) is None else mapping(body[_WITHIN], _WITHIN)
    name_others(params, PARAMS, _WITHIN)
    params = {name: params[name] for name in PARAMS if params.get(name) is not None}
    most = params.get("max_tokens", DEFAULT_MAX_TOKENS)
    if type(most) is int and most < 1:
        path = member(_WITHIN, "max_tokens")
        refuse(path, f"Invalid '{path}': expected at least 1.")
    beside = {name: body[name] for name in FIELDS if name not in ("token_ids", _WITHIN) and name in body}
    with words_of_generation():
        return parse_completion({"prompt": ids, **beside, **params})


@contextmanager
def words_of_generation() -> Iterator[None]:
    """Have what is wrong with a completion name the field of the request that the completion was made of."""
    try:
        yield
    except (ApiError, RequestError) as error:
        param = error.param
        if param is None:
            raise
        root = re.split(r"[.\[]", param, maxsplit=1)[0]
        if root == "prompt":
            error.param = "token_ids" + param.removeprefix(root)
        elif root in PARAMS:
            error.param = member(_WITHIN, param)
        if isinstance(error, ApiError) and error.param is not None:
            error.message = error.message.replace(f"'{param}'", f"'{error.param}'")
        raise
