"""Tokens in, tokens out: equal to the completion of the same prompt, whole and in chunks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import wire

Json = dict[str, Any]
PATH = "/inference/v1/generate"
PROMPT = list(b"say one two three")

CASES: dict[str, Json] = {
    "plain": {},
    "several": {"n": 3, "max_tokens": 40},
    "scores": {"logprobs": 2, "prompt_logprobs": 1},
    "length": {"max_tokens": 3},
    "a stop string": {"stop": [" t"], "max_tokens": 40},
    "a stop token": {"stop_token_ids": [ord("w")], "max_tokens": 40},
}


async def generated(client: httpx.AsyncClient, **body: Any) -> Json:
    reply = await client.post(PATH, json={"token_ids": PROMPT, **body})
    assert reply.status_code == 200, reply.text
    assert "x-antiphon-ignored" not in reply.headers
    return dict(reply.json())


@pytest.mark.parametrize("name", CASES)
async def test_it_is_the_completion_of_its_prompt(client: httpx.AsyncClient, name: str) -> None:
    params = {"seed": 1, **CASES[name]}
    reply = await client.post("/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, **params})
    completion, found = reply.json(), await generated(client, sampling_params=params)
    assert found["object"] == "generation"
    assert found["usage"] == completion["usage"]
    for own, other in zip(found["choices"], completion["choices"], strict=True):
        for member in ("index", "token_ids", "finish_reason", "stop_reason"):
            assert own[member] == other[member]
        assert "text" not in own
    if "prompt_logprobs" in params:
        assert found["prompt_logprobs"] == completion["choices"][0]["prompt_logprobs"]
        assert len(found["prompt_logprobs"]) == len(PROMPT)
        scored = found["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in scored] == completion["choices"][0]["logprobs"][
            "token_logprobs"
        ]
        assert [entry["token"] for entry in scored] == [
            f"token_id:{token_id}" for token_id in found["choices"][0]["token_ids"]
        ]


@pytest.mark.parametrize("name", [name for name in CASES if name != "scores"])
async def test_a_stream_folds_to_the_whole(client: httpx.AsyncClient, name: str) -> None:
    asked = {"sampling_params": {"seed": 1, **CASES[name]}}
    full = await generated(client, **asked)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await client.post(PATH, json={"token_ids": PROMPT, **asked, **options})
    *chunks, last = wire.chunks(reply.content)
    assert {chunk["object"] for chunk in (*chunks, last)} == {"generation.chunk"}
    assert last["usage"] == full["usage"]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    for choice in full["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert [token_id for part in own for token_id in part["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


async def test_a_client_names_its_request(client: httpx.AsyncClient) -> None:
    found = await generated(client, request_id="mine")
    assert (found["id"], found["request_id"]) == ("cmpl-mine", "mine")
    found = await generated(client)
    assert found["request_id"] == found["id"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "say hi"}, "token_ids"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [1 << 30]}, "token_ids"),
        ({"token_ids": PROMPT, "sampling_params": []}, "sampling_params"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"token_ids": PROMPT, "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": PROMPT, "sampling_params": {"max_tokens": 1 << 30}}, "sampling_params.max_tokens"),
        ({"token_ids": PROMPT, "sampling_params": {"stop": [7]}}, "sampling_params.stop[0]"),
        ({"token_ids": PROMPT, "sampling_params": {"n": 129}}, "sampling_params.n"),
        (
            {"token_ids": PROMPT, "stream": True, "sampling_params": {"prompt_logprobs": 1}},
            "sampling_params.prompt_logprobs",
        ),
        ({"token_ids": PROMPT, "stream": "yes"}, "stream"),
    ],
    ids=range(14),
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: Json, param: str) -> None:
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 400, reply.text
    error = wire.validate_error(reply.json())
    assert error["param"] == param
    assert "'prompt'" not in error["message"]


async def test_what_is_not_read_is_named(client: httpx.AsyncClient) -> None:
    body = {"token_ids": PROMPT, "features": {}, "sampling_params": {"detokenize": False, "seed": 1}}
    reply = await client.post(PATH, json=body)
    assert reply.headers["x-antiphon-ignored"] == "features,sampling_params.detokenize"
