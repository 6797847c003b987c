"""No field is ignored in silence: every official field has its kind, and unknown ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from server.errors import ApiError
from server.ignored import collecting
from server.schema.chat import parse_chat
from server.schema.completions import parse_completion
from server.schema.fields import FIELDS, Api, SamplingFields, sampling_fields, screen
from server.schema.responses import parse_create
from tests.support import wire

Json = dict[str, Any]

OFFICIAL = {
    "responses": "CreateResponse",
    "input_tokens": "TokenCountsBody",
    "compact": "CompactResponseMethodPublicBody",
    "chat": "CreateChatCompletionRequest",
    "completions": "CreateCompletionRequest",
}

NOT_HONOURED = {
    "responses": {},
    "input_tokens": {"hint": "personality"},
    "compact": {"hint": "prompt_cache_retention prompt_cache_options"},
    "chat": {
        "hint": "prompt_cache_retention prompt_cache_options prediction verbosity",
        "refused": "audio functions function_call",
    },
    "completions": {"refused": "suffix"},
}
"""Every official field that does less than its name says; all others must be honoured."""


@pytest.mark.parametrize("api", OFFICIAL)
def test_every_official_field_has_its_kind(api: str) -> None:
    expected = dict.fromkeys(wire.properties(wire.schema(OFFICIAL[api])), "honoured")
    for kind, names in NOT_HONOURED[api].items():
        expected |= dict.fromkeys(names.split(), kind)
    assert {name: FIELDS[api][name].kind for name in expected} == expected


@pytest.mark.parametrize("api", OFFICIAL)
def test_fields_that_are_not_official_are_extensions_or_refused(api: str) -> None:
    official = wire.properties(wire.schema(OFFICIAL[api]))
    others = {name: rule.kind for name, rule in FIELDS[api].items() if name not in official}
    assert {name for name, kind in others.items() if kind not in ("extension", "refused")} <= {
        "client_metadata"
    }


@pytest.mark.parametrize("api", OFFICIAL)
def test_a_refused_field_is_400_unless_it_asks_for_the_default(api: str) -> None:
    for name, rule in FIELDS[api].items():
        if rule.accepts is None:
            continue
        with pytest.raises(ApiError) as caught:
            screen(cast(Api, api), {name: "something else entirely"})
        assert (caught.value.status, caught.value.code, caught.value.param) == (
            400,
            "unsupported_parameter",
            name,
        )
        for accepted in rule.accepts:
            screen(cast(Api, api), {name: accepted})


@pytest.mark.parametrize("api", ["responses", "chat", "completions"])
def test_a_list_that_allows_no_token_is_refused(api: str) -> None:
    with pytest.raises(ApiError) as caught:
        screen(cast(Api, api), {"allowed_token_ids": []})
    assert (caught.value.status, caught.value.param) == (400, "allowed_token_ids")


@pytest.mark.parametrize("prompt", [{"prompt": "say hi"}, {}])
def test_a_prompt_of_vectors_is_refused(prompt: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({**prompt, "prompt_embeds": "AAAA"})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "prompt_embeds")


@pytest.mark.parametrize("api", OFFICIAL)
def test_null_means_absent(api: str) -> None:
    with collecting() as ignored:
        kept = screen(cast(Api, api), dict.fromkeys([*FIELDS[api], "unheard_of"]))
    assert (kept, ignored.header()) == ({}, "")


def test_unknown_fields_pass_and_are_named() -> None:
    with collecting() as ignored:
        kept = screen("responses", {"input": "x", "frobnicate": 1, "verbosity": "low", "user": "u"})
    assert kept == {"input": "x", "user": "u"}
    assert ignored.header() == "frobnicate,verbosity"


@pytest.mark.parametrize(
    ("api", "field", "value", "here"),
    [
        ("responses", "max_tokens", 16, "'max_output_tokens'"),
        ("responses", "max_completion_tokens", 16, "'max_output_tokens'"),
        ("responses", "response_format", {"type": "json_object"}, "'text.format'"),
        ("responses", "messages", [{"role": "user", "content": "x"}], "'input'"),
        ("responses", "n", 2, "a request for each"),
        ("responses", "system", "Be kind.", "'instructions'"),
        ("responses", "stop_sequences", ["x"], "'stop'"),
        ("input_tokens", "messages", [], "'input'"),
        ("input_tokens", "system", "Be kind.", "'instructions'"),
        ("compact", "system", "Be kind.", "'instructions'"),
        ("compact", "conversation", "conv_1", "compaction_trigger"),
        ("chat", "input", "x", "'messages'"),
        ("chat", "system", "Be kind.", "'system'"),
        ("chat", "stop_sequences", ["x"], "'stop'"),
        ("chat", "max_output_tokens", 16, "'max_completion_tokens'"),
        ("chat", "previous_response_id", "resp_1", "POST /v1/responses"),
        ("completions", "messages", [], "/v1/chat/completions"),
        ("completions", "system", "Be kind.", "'prompt'"),
        ("completions", "stop_sequences", ["x"], "'stop'"),
        ("completions", "max_output_tokens", 16, "'max_tokens'"),
        ("completions", "moderation", {"model": "guard"}, "/v1/moderations"),
        ("completions", "tools", [{"type": "function"}], "/v1/chat/completions"),
        ("completions", "conversation", "conv_1", "POST /v1/responses"),
        ("completions", "instructions", "Be kind.", "'prompt'"),
        ("compact", "moderation", {"model": "guard"}, "/v1/moderations"),
        ("messages", "background", True, "in the background"),
        ("messages", "previous_response_id", "resp_1", "POST /v1/responses"),
        ("messages", "input", "x", "'messages'"),
        ("messages", "instructions", "Be kind.", "'system'"),
        ("messages", "response_format", {"type": "json_object"}, "'output_config.format'"),
        ("messages", "max_completion_tokens", 16, "'max_tokens'"),
        ("messages", "stop", ["x"], "'stop_sequences'"),
        ("messages", "n", 2, "a request for each"),
        ("messages", "reasoning_effort", "low", "'output_config.effort'"),
        ("messages", "functions", [], "'tools'"),
        ("count_tokens", "moderation", {"model": "guard"}, "/v1/moderations"),
    ],
)
def test_a_field_of_another_endpoint_is_refused_with_its_name_here(
    api: Api, field: str, value: Any, here: str
) -> None:
    with pytest.raises(ApiError) as caught:
        screen(api, {field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)
    assert "of another endpoint" in str(caught.value) and here in str(caught.value)


def test_a_default_is_the_same_json_value() -> None:
    with pytest.raises(ApiError):
        screen("chat", {"background": 0})  # 0 is not false
    with pytest.raises(ApiError):
        screen("responses", {"best_of": True})  # true is not 1
    assert screen("responses", {"prompt": None, "best_of": 1.0}) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", [1]),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("seed", 1 << 63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["a", 1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
    ],
)
def test_a_sampling_field_out_of_bounds_is_400_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_fields({field: value}, max_tokens=None)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith(field)
    wire.validate_error({"error": caught.value.error()})


@pytest.mark.parametrize(
    ("field", "value", "code", "param", "message"),
    [
        ("stop", 5, "invalid_type", "stop", "a string or an array, but got an integer"),
        ("stop", ["a", 1], "invalid_type", "stop[1]", "a string, but got an integer"),
        ("stop", "", "empty_string", "stop", "empty string"),
        ("stop", ["a" * 1025], "string_above_max_length", "stop[0]", "maximum length 1024"),
        ("logit_bias", [1], "invalid_type", "logit_bias", "an object, but got an array"),
        ("logit_bias", {"1": "1"}, "invalid_type", "logit_bias.1", "a number, but got a string"),
        ("logit_bias", {"1": 101}, "decimal_above_max_value", "logit_bias.1", "<= 100"),
        ("seed", 1e30, "integer_above_max_value", "seed", "<= 9223372036854775807, but got 1e+30"),
        ("top_k", 1e30, "integer_above_max_value", "top_k", "<= 2147483647, but got 1e+30"),
        ("top_k", -1e30, "integer_below_min_value", "top_k", ">= -1, but got -1e+30"),
        ("stop_token_ids", [1, 1e30], "integer_above_max_value", "stop_token_ids[1]", "<= 2147483647"),
    ],
)
def test_what_is_wrong_with_a_sampling_field_is_told_in_the_official_words(
    field: str, value: Any, code: str, param: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_fields({field: value}, max_tokens=None)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert message in caught.value.message


@pytest.mark.parametrize("parse", [parse_create, parse_chat, parse_completion])
def test_an_integer_of_more_than_64_bits_is_told_with_the_bounds_of_its_field(
    parse: Callable[[Json], object],
) -> None:
    asked = {"input": "x", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    name = {parse_create: "input", parse_chat: "messages", parse_completion: "prompt"}[parse]
    with pytest.raises(ApiError, match=r"'priority'.* <= 1000, but got 1e\+30 instead") as caught:
        parse({name: asked[name], "priority": orjson.loads(b"1" + b"0" * 30)})
    assert caught.value.code == "integer_above_max_value"


def test_sampling_fields_survive_their_own_dump() -> None:
    body = {
        "stop": "x",
        "logit_bias": {"5": 3},
        "top_k": -1,
        "top_p": 0,
        "seed": -(1 << 63),
        "temperature": 1,
    }
    fields = sampling_fields(body, max_tokens=5, logprobs=2)
    assert (fields.stop, fields.logit_bias, fields.top_k) == (["x"], {"5": 3.0}, 0)
    assert fields.top_p is not None and 0 < fields.top_p < 1e-3
    assert SamplingFields.model_validate(fields.model_dump()) == fields
