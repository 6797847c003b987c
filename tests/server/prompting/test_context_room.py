"""Limits on output that do not fit behind the prompt: refused, or taken as a maximum and named, by API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from tests.support import wire
from tests.support.running import http_client, running_app

HEADER = "x-antiphon-ignored"
CONTEXT = 200


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}]}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "say hi"}]},
            "max_completion_tokens",
        ),
        ("/v1/completions", {"prompt": "say hi"}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_and_completions_refuse_it_with_both_numbers(
    tmp_path: Path, path: str, prompt: dict[str, Any], limit: str, stream: bool
) -> None:
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=CONTEXT)) as running,
        http_client(running) as client,
    ):
        tokens = (await client.post("/tokenize", json=prompt)).json()["count"]
        asked = {**prompt, "stream": stream}
        fits = await client.post(path, json={**asked, limit: CONTEXT - tokens})
        assert fits.status_code == 200 and HEADER not in fits.headers, fits.text
        assert (await client.post(path, json=asked)).status_code == 200
        refused = await client.post(path, json={**asked, limit: CONTEXT - tokens + 1})
        assert refused.status_code == 400
        error = wire.validate_error(refused.json())
        assert (error["code"], error["param"]) == ("context_length_exceeded", limit)
        for number in (CONTEXT, CONTEXT + 1, tokens, CONTEXT - tokens + 1):
            assert f"{number} " in error["message"]


@pytest.mark.parametrize("kind", [{}, {"stream": True}, {"background": True}])
async def test_responses_takes_it_as_a_maximum_and_names_it(tmp_path: Path, kind: dict[str, Any]) -> None:
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=CONTEXT)) as running,
        http_client(running) as client,
    ):
        asked = {"input": "say hi", **kind}
        counted = await client.post("/v1/responses/input_tokens", json={"input": "say hi"})
        room = CONTEXT - counted.json()["input_tokens"]
        fits = await client.post("/v1/responses", json={**asked, "max_output_tokens": room})
        assert fits.status_code == 200 and HEADER not in fits.headers
        more = await client.post("/v1/responses", json={**asked, "max_output_tokens": room + 1})
        assert more.status_code == 200 and more.headers[HEADER] == "max_output_tokens"


async def test_a_completion_that_names_no_limit_ends_with_the_context(tmp_path: Path) -> None:
    """The API's own limit of 16 is nobody's wish."""
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=CONTEXT)) as running,
        http_client(running) as client,
    ):
        tokens = (await client.post("/tokenize", json={"prompt": "x"})).json()["tokens"]
        prompt = tokens[-1:] * (CONTEXT - 5)
        reply = await client.post("/v1/completions", json={"prompt": prompt})
        assert reply.status_code == 200, reply.text
