"""Text completions: every form of a prompt, echo, log probabilities, whole and in chunks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine import GenerateRequest, ScriptedEngine
from tests.support import wire
from tests.support.running import Running

Json = dict[str, Any]


async def whole(client: httpx.AsyncClient, **body: Any) -> Json:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    wire.validate_completion(reply.json())
    return dict(reply.json())


async def texts(client: httpx.AsyncClient, **body: Any) -> list[str]:
    return [choice["text"] for choice in (await whole(client, **body))["choices"]]


def scripted(running: Running) -> ScriptedEngine:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def latest(running: Running) -> GenerateRequest:
    return scripted(running).requests[-1]


CASES: dict[str, Json] = {
    "text": {"prompt": "say hello there"},
    "several": {"prompt": ["say a", "say b", "say c"], "n": 2},
    "tokens": {"prompt": [115, 97, 121, 32, 97]},
    "echo": {"prompt": "say a b c", "echo": True},
    "logprobs": {"prompt": "say a", "logprobs": 2},
    "no alternatives": {"prompt": "say a", "logprobs": 0},
    "echo with logprobs": {"prompt": ["say a", "say bc"], "echo": True, "logprobs": 1},
    "nothing but the prompt": {"prompt": "say a", "echo": True, "logprobs": 1, "max_tokens": 0},
    "nothing": {"prompt": "say a", "max_tokens": 0},
    "length": {"prompt": "count 50", "max_tokens": 5},
    "stop": {"prompt": "say one two three", "stop": [" t"]},
    "call markup is text": {"prompt": "call f {}", "max_tokens": 100},
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_folds_to_the_whole(client: httpx.AsyncClient, name: str) -> None:
    body = {**CASES[name], "seed": 1}
    full = await whole(client, **body)
    reply = await client.post(
        "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = wire.chunks(reply.content)
    choices = wire.check_chunks(chunks, "CreateCompletionResponse", include_usage=True)
    assert choices == full["choices"]
    assert chunks[-1]["usage"] == full["usage"]


async def test_the_forms_of_a_prompt(client: httpx.AsyncClient, server_app: Running) -> None:
    ids = list(await scripted(server_app).tokenize("say hello"))
    assert await texts(client, prompt="say hello") == ["hello"]
    assert await texts(client, prompt=["say hello", "say you"]) == ["hello", "you"]
    assert await texts(client, prompt=ids) == ["hello"]
    assert await texts(client, prompt=[ids, ids]) == ["hello", "hello"]
    assert await texts(client, prompt=ids, echo=True) == ["say hellohello"]


async def test_no_template_and_no_dialect(client: httpx.AsyncClient, server_app: Running) -> None:
    (text,) = await texts(client, prompt="call f {}", max_tokens=100)
    assert "<tool_call>" in text
    request = latest(server_app)
    assert await scripted(server_app).detokenize(request.prompt_ids) == "call f {}"
    assert not request.reader.dialect


async def test_sixteen_tokens_unless_told(client: httpx.AsyncClient) -> None:
    full = await whole(client, prompt="count 50")
    assert full["usage"]["completion_tokens"] == 16
    assert full["choices"][0]["finish_reason"] == "length"


async def test_choices_come_prompt_after_prompt(client: httpx.AsyncClient) -> None:
    full = await whole(client, prompt=["random 4", "say x"], n=2, seed=5)
    a, b, *same = [choice["text"] for choice in full["choices"]]
    assert a != b and same == ["x", "x"]
    assert full["usage"]["prompt_tokens"] == len("random 4") + len("say x")
    assert full["id"].startswith("cmpl-") and full["object"] == "text_completion"


async def test_log_probabilities_in_the_legacy_form(client: httpx.AsyncClient) -> None:
    (choice,) = (await whole(client, prompt="say ab", logprobs=2))["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    (echoed,) = (await whole(client, prompt="say ab", logprobs=2, echo=True))["choices"]
    logprobs = echoed["logprobs"]
    assert "".join(logprobs["tokens"]) == echoed["text"] == "say abab"
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(8))


async def test_token_ids_go_with_the_text(client: httpx.AsyncClient, server_app: Running) -> None:
    """What another server needs to go on from: every id, that of the end included, and log probabilities for
    each of them."""
    body = {"prompt": "say \u00fcb", "return_token_ids": True, "logprobs": 1, "stop": ["never"]}
    (choice,) = (await whole(client, **body))["choices"]
    engine = scripted(server_app)
    eos = engine.info.eos_token_ids[0]
    assert choice["token_ids"] == [*await engine.tokenize("\u00fcb"), eos]
    assert choice["prompt_token_ids"] == list(await engine.tokenize("say \u00fcb"))
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    chunks = wire.chunks((await client.post("/v1/completions", json={**body, "stream": True})).content)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part.get("prompt_token_ids") is not None for part in parts] == [
        True, *[False] * (len(parts) - 1)
    ]  # fmt: skip
    assert all(len(part["token_ids"]) == len(part["logprobs"]["tokens"]) for part in parts)
    assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
    (silent,) = (await whole(client, prompt="say a", max_tokens=0, return_token_ids=True))["choices"]
    assert silent["token_ids"] == [] and silent["prompt_token_ids"]
    (cut,) = (await whole(client, prompt="say one two", stop=[" t"], return_token_ids=True))["choices"]
    assert await engine.detokenize(cut["token_ids"]) == "one t"


async def test_log_probabilities_name_tokens_by_id(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "say ab", "logprobs": 1, "echo": True}
    (plain,) = (await whole(client, **asked))["choices"]
    (named,) = (await whole(client, **asked, return_tokens_as_token_ids=True))["choices"]
    ids = [f"token_id:{ord(char)}" for char in "say abab"]
    assert plain["text"] == named["text"] and named["logprobs"]["tokens"] == ids
    for name in ("token_logprobs", "text_offset"):
        assert named["logprobs"][name] == plain["logprobs"][name]
    assert all(key.startswith("token_id:") for top in named["logprobs"]["top_logprobs"][1:] for key in top)


async def test_no_tokens_asked_for_none_given(client: httpx.AsyncClient) -> None:
    full = await whole(client, prompt="say ab", max_tokens=0, echo=True)
    assert full["choices"][0]["text"] == "say ab"
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["completion_tokens"] == 0


MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
UNSUPPORTED = "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", MISSING),
        ({"prompt": None}, "prompt", MISSING),
        ({"prompt": 1}, "prompt", TYPE),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": ""}, "prompt", VALUE),
        ({"prompt": ["a", 1]}, "prompt[1]", TYPE),
        ({"prompt": ["a", ""]}, "prompt[1]", VALUE),
        ({"prompt": [[]]}, "prompt[0]", "empty_array"),
        ({"prompt": [1, "a"]}, "prompt[1]", TYPE),
        ({"prompt": [1, [2]]}, "prompt[1]", TYPE),
        ({"prompt": ["a", [1, 2.5]]}, "prompt[1][1]", TYPE),
        ({"prompt": [True]}, "prompt[0]", TYPE),
        ({"prompt": [-1]}, "prompt", VALUE),
        ({"prompt": [10**6]}, "prompt", VALUE),
        ({"prompt": ["a"] * 129}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", VALUE),
        ({"prompt": "a", "n": 129}, "n", "integer_above_max_value"),
        ({"prompt": "a", "n": 17, "logprobs": 1}, "n", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", UNSUPPORTED),
        ({"prompt": "a", "best_of": 21}, "best_of", "integer_above_max_value"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", VALUE),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "integer_above_max_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", TYPE),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", VALUE),
        ({"prompt": "a", "stop": ""}, "stop", "empty_string"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: Json, param: str, code: str) -> None:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = wire.validate_error(reply.json())
    assert (error["param"], error["code"]) == (param, code)


async def test_defaults_pass_and_the_rest_is_named(client: httpx.AsyncClient) -> None:
    body = {"prompt": "say a", "best_of": 1, "suffix": "", "n": 1, "seed": None, "frobnicate": 1}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-antiphon-ignored"] == "frobnicate"


async def test_the_sdk_reads_it(sdk: AsyncOpenAI) -> None:
    full = await sdk.completions.create(model="antiphon-scripted", prompt="say hello", logprobs=1)
    assert full.choices[0].text == "hello" and full.usage is not None
    stream = await sdk.completions.create(model="antiphon-scripted", prompt="say a b c", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a b c"
