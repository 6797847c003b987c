"""More candidates than choices: `best_of` and beam search, through both stateless views."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.support import wire
from tests.support.running import Running, http_client, running_app
from tests.support.usage import used

Json = dict[str, Any]
SAY = "Say alpha river stone green."
UNSUPPORTED, VALUE = "unsupported_parameter", "invalid_value"


@pytest.fixture
async def shipped(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with the shipped model."""
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=64 << 20)
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        yield client


async def complete(client: httpx.AsyncClient, **body: Any) -> Json:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    wire.validate_completion(reply.json())
    return dict(reply.json())


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": SAY}]
    return await client.post("/v1/chat/completions", json={"messages": messages, **body})


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"best_of": 3, "stream": True}, "stream", VALUE),
        ({"use_beam_search": True, "stream": True}, "stream", VALUE),
        ({"best_of": 1, "n": 2}, "best_of", VALUE),
        ({"best_of": 21}, "best_of", "integer_above_max_value"),
        ({"best_of": 17, "use_beam_search": True}, "best_of", VALUE),
        ({"length_penalty": 2.0}, "length_penalty", UNSUPPORTED),
        ({"early_stopping": "never"}, "early_stopping", UNSUPPORTED),
        ({"early_stopping": "soon", "use_beam_search": True}, "early_stopping", VALUE),
        ({"length_penalty": 1e9, "use_beam_search": True}, "length_penalty", "decimal_above_max_value"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop", UNSUPPORTED),
        ({"use_beam_search": True, "frequency_penalty": 0.5}, "frequency_penalty", UNSUPPORTED),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", UNSUPPORTED),
        ({"use_beam_search": True, "guided_regex": "a+"}, "guided_regex", UNSUPPORTED),
        ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),  # the scripted engine has no beams
        ({"num_assistant_tokens": 33}, "num_assistant_tokens", "integer_above_max_value"),
        ({"max_ngram_size": 0}, "max_ngram_size", "integer_below_min_value"),
        (
            {"assistant_confidence_threshold": 1.5},
            "assistant_confidence_threshold",
            "decimal_above_max_value",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_cannot_be_is_named(
    client: httpx.AsyncClient, path: str, body: Json, param: str, code: str
) -> None:
    asked: Json = {"messages": [{"role": "user", "content": "say a"}]}
    if path == "/v1/completions":
        asked = {"prompt": "say a"}
    reply = await client.post(path, json={**asked, **body})
    assert reply.status_code == 400, reply.text
    wire.validate_error(reply.json())
    error = reply.json()["error"]
    assert error["param"] == param and error["code"] in (code, "invalid_type")


async def test_beams_take_neither_tools_nor_scored_prompts(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    reply = await chat(client, use_beam_search=True, tools=[tool])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    body = {"prompt": "a", "use_beam_search": True, "echo": True, "logprobs": 1}
    reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "echo")


async def test_the_best_of_several_are_shown_and_all_are_counted(
    client: httpx.AsyncClient, server_app: Running
) -> None:
    full = await complete(client, prompt=["random 4", "say x"], n=2, best_of=5, seed=1)
    assert [choice["index"] for choice in full["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in full["choices"][2:]] == ["x", "x"]
    assert full["choices"][0]["logprobs"] is None
    one = await complete(client, prompt="say x")
    several = await complete(client, prompt="say x", best_of=5)
    assert several["usage"]["completion_tokens"] == 5 * one["usage"]["completion_tokens"]
    assert several["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    silent = await complete(client, prompt="say x", best_of=5, max_tokens=0, echo=True)
    assert silent["usage"]["completion_tokens"] == 0 and silent["choices"][0]["text"] == "say x"
    body = {"prompt": ["say a"] * 26, "best_of": 5}
    reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    answer = await chat(client, best_of=3, n=2, seed=4)
    wire.validate_chat(answer.json())
    assert len(answer.json()["choices"]) == 2


async def test_beams_over_http(shipped: httpx.AsyncClient) -> None:
    body = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": True}
    reply = await chat(shipped, **body, max_tokens=24, temperature=0.7, seed=3, logprobs=True, top_logprobs=1)
    assert reply.status_code == 200, reply.text
    wire.validate_chat(reply.json())
    assert reply.headers["x-antiphon-ignored"] == "temperature,seed"
    first, second = reply.json()["choices"]
    assert first["message"]["content"] != second["message"]["content"]
    entries = first["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == first["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    greedy = await chat(shipped, max_tokens=24, temperature=0.0)
    one = await chat(shipped, use_beam_search=True, max_tokens=24)
    assert one.json()["choices"] == greedy.json()["choices"]
    assert one.json()["usage"]["completion_tokens"] == greedy.json()["usage"]["completion_tokens"]
    full = await complete(shipped, prompt=[[5, 6, 7], [8, 9]], use_beam_search=True, n=2, max_tokens=5)
    assert len({choice["text"] for choice in full["choices"]}) == 4


@pytest.mark.parametrize(("n", "num_beams"), [(1, 1), (1, 4), (2, 2), (2, 8)])
async def test_beams_that_nobody_sees_are_counted(tmp_path: Path, n: int, num_beams: int) -> None:
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=64 << 20)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        asked = {"use_beam_search": True, "n": n, "best_of": num_beams, "return_token_ids": True}
        reply = await complete(client, prompt=[5, 6, 7], max_tokens=6, ignore_eos=True, **asked)
        shown = sum(len(choice["token_ids"]) for choice in reply["choices"])
        generated = engine.stats().output_tokens_total
        assert (shown, generated) == (6 * n, 1 + 5 * num_beams)
        # What two beams begin with in common is generated once, and shown by each.
        assert reply["usage"]["completion_tokens"] == max(shown, generated)
        assert (await used(server)).output_tokens == max(shown, generated)


async def test_guessing_can_be_asked_for_and_is_counted(shipped: httpx.AsyncClient) -> None:
    async def drafts() -> tuple[float, float]:
        lines = dict(
            line.rsplit(" ", 1)
            for line in (await shipped.get("/metrics")).text.splitlines()
            if line[0] != "#"
        )
        return (
            float(lines['antiphon_engine_drafts_total{model="antiphon-scripted"}']),
            float(lines['antiphon_engine_drafts_accepted_total{model="antiphon-scripted"}']),
        )

    none = await chat(shipped, temperature=0.0, num_assistant_tokens=0)
    assert await drafts() == (0, 0)
    some = await chat(shipped, temperature=0.0, num_assistant_tokens=4, max_ngram_size=2)
    made, accepted = await drafts()
    assert 0 < accepted <= made
    assert none.json()["choices"] == some.json()["choices"]
    reply = await shipped.post(
        "/v1/responses", json={"input": SAY, "temperature": 0, "num_assistant_tokens": 4}
    )
    assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
    text = reply.json()["output"][-1]["content"][0]["text"]
    assert text == none.json()["choices"][0]["message"]["content"]
