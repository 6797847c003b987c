"""Bounds that the operator sets on every request, the same on every API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.ignored import HEADER
from tests.server.limits.test_limiter import held
from tests.support import wire
from tests.support.running import http_client, running_app
from tests.support.talk import BUILTIN, WEATHER, answer, call, calls

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "count 60"}]}
APIS: dict[str, tuple[str, dict[str, Any], str]] = {
    "responses": ("/v1/responses", {"input": "count 60"}, "max_output_tokens"),
    "chat": ("/v1/chat/completions", CHAT, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": "count 60"}, "max_tokens"),
}


def generated(body: dict[str, Any]) -> int:
    usage = body["usage"]
    found: int = usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"]
    return found


@pytest.mark.parametrize("api", APIS)
async def test_answers_have_a_default_and_a_greatest_length(tmp_path: Path, api: str) -> None:
    path, body, field = APIS[api]
    caps = {"default_max_output_tokens": 20, "max_output_tokens": 24}
    async with running_app(tmp_path, **caps) as server, http_client(server) as client:
        default = 16 if api == "completions" else 20  # which has one of its own
        unset = await client.post(path, json=body)
        assert generated(unset.json()) == default
        assert HEADER not in unset.headers
        more = await client.post(path, json={**body, field: 50})
        assert (generated(more.json()), more.headers[HEADER]) == (24, field)
        fewer = await client.post(path, json={**body, field: 22})
        assert (generated(fewer.json()), HEADER in fewer.headers) == (22, False)


@pytest.mark.parametrize("api", APIS)
async def test_a_default_temperature(tmp_path: Path, api: str) -> None:
    path, body, _ = APIS[api]
    engine = ScriptedEngine()
    async with (
        running_app(tmp_path, engine, default_temperature=0.25) as server,
        http_client(server) as client,
    ):
        for given, expected in (({}, 0.25), ({"temperature": 0.5}, 0.5)):
            reply = (await client.post(path, json={**body, **given})).json()
            assert engine.requests[-1].sampling.temperature == expected
            assert reply.get("temperature", expected) == expected


@pytest.mark.parametrize("api", APIS)
async def test_the_longest_prompt(tmp_path: Path, api: str) -> None:
    path, body, _ = APIS[api]
    async with running_app(tmp_path, max_prompt_tokens=60) as server, http_client(server) as client:
        assert (await client.post(path, json=body)).status_code == 200
        long = {name: "word " * 90 if isinstance(value, str) else value for name, value in body.items()}
        if api == "chat":
            long = {"messages": [{"role": "user", "content": "word " * 90}]}
        reply = await client.post(path, json=long)
        assert reply.status_code == 400, reply.text
        error = wire.validate_error(reply.json())
        assert error["code"] == "context_length_exceeded"
        assert "is 60 tokens, as this server's `max_prompt_tokens` has it" in error["message"]


async def test_truncation_makes_a_prompt_fit_the_longest_one(tmp_path: Path) -> None:
    items = [{"role": "user", "content": f"word {number} " * 10} for number in range(9)]
    items.append({"role": "user", "content": "say hi"})
    async with running_app(tmp_path, max_prompt_tokens=100) as server, http_client(server) as client:
        reply = await client.post("/v1/responses", json={"input": items, "truncation": "auto"})
        assert reply.status_code == 200
        assert reply.json()["usage"]["input_tokens"] <= 100


async def test_a_generation_that_takes_too_long(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, ScriptedEngine(held), request_timeout_s=0.2) as server,
        http_client(server) as client,
    ):
        reply = await client.post("/v1/completions", json={"prompt": "hold"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
        response = (await client.post("/v1/responses", json={"input": "hold"})).json()
        assert response["status"] == "failed" and "deadline" in response["error"]["message"]
        assert (await client.post("/v1/responses", json={"input": "say hi"})).json()["status"] == "completed"


async def test_the_largest_output_of_a_tool(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_tool_output_bytes=300) as server, http_client(server) as client:
        asked = {"input": call(), "tools": [WEATHER]}
        made = (await client.post("/v1/responses", json=asked)).json()
        output = answer(calls(made)[0]["call_id"], "x" * 300)
        again = {"previous_response_id": made["id"], "input": [output]}
        for path, body in (
            ("/v1/responses", again),
            (f"/v1/responses/{made['id']}/tool_outputs", {"tool_outputs": [output]}),
            ("/v1/conversations", {"items": [output]}),
        ):
            reply = await client.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "item_too_large"), path
        assert (await client.post("/v1/responses", json={"input": "x" * 900})).status_code == 200
    async with running_app(tmp_path, max_tool_output_bytes=2) as server, http_client(server) as client:
        asked = {"input": 'call calculator {"expression": "999*999"}', "tools": [BUILTIN]}
        said = (await client.post("/v1/responses", json=asked)).json()
        [made] = [item for item in said["output"] if item["type"] == "mcp_call"]
        assert made["output"] is None and "at most 2 are taken" in str(made["error"])


async def test_a_server_that_stores_no_responses(tmp_path: Path) -> None:
    async with running_app(tmp_path, store=False) as server, http_client(server) as client:
        made = await client.post("/v1/responses", json={"input": "say hi"})
        assert made.json()["store"] is False and HEADER not in made.headers
        asked = await client.post("/v1/responses", json={"input": "say hi", "store": True})
        assert asked.json()["store"] is False and asked.headers[HEADER] == "store"
        assert (await client.get("/v1/responses")).json()["data"] == []
        for field in ("background", "await_tool_outputs"):
            refused = await client.post("/v1/responses", json={"input": "hi", field: True, "stream": True})
            error = wire.validate_error(refused.json())
            assert (refused.status_code, error["param"]) == (400, field)
