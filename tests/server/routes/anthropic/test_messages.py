"""The routes of the Messages API: which model answers, whom they let in, what is counted, how errors look."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.process.lifecycle import Refused
from tests.support.running import http_client, running_app
from tests.support.usage import used

Json = dict[str, Any]
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"


def asking(model: str = "claude-x", **fields: Any) -> Json:
    return {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "say hi"}], **fields}


@pytest.mark.parametrize(
    ("fallback", "asked", "answers"),
    [
        (None, "a", "a"),
        (None, "b", "b"),
        (None, "claude-opus-4-8", "a"),
        (None, "gpt-6", None),
        ("b", "a", "a"),
        ("b", "claude-opus-4-8", "b"),
        ("b", "gpt-6", "b"),
    ],
)
async def test_which_model_answers_to_a_name(
    tmp_path: Path, fallback: str | None, asked: str, answers: str | None
) -> None:
    names = {"served_model_name": ("a", "b"), "messages_model": fallback}
    async with running_app(tmp_path, **names) as running, http_client(running) as client:
        for path, status in ((PATH, 200), (COUNT, 200)):
            reply = await client.post(path, json=asking(asked))
            if answers is None:
                assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
            else:
                assert reply.status_code == status
                assert reply.json().get("model") in (answers, None)


@pytest.mark.parametrize(
    ("source", "field", "status"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "x"}, "data", 400),
        ({"type": "url", "url": "http://127.0.0.1:1/a.pdf"}, "url", 400),
        ({"type": "file", "file_id": "file-none"}, "file_id", 404),
    ],
)
async def test_a_document_that_cannot_be_read_is_told_by_its_source(
    tmp_path: Path, source: Json, field: str, status: int
) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        content = [{"type": "text", "text": "Read it."}, {"type": "document", "source": source}]
        reply = await client.post(PATH, json=asking(messages=[{"role": "user", "content": content}]))
        told = reply.json()["error"]
        assert (reply.status_code, told["details"]["param"]) == (
            status,
            f"messages[0].content[1].source.{field}",
        )
        assert "file_data" not in told["message"] and "file_url" not in told["message"]


async def test_errors_about_models_have_the_form_of_the_api_that_asks(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=("key",)) as running, http_client(running) as client:
        named = {"anthropic-version": "2023-06-01"}
        for key, status, kind in (("key", 404, "not_found_error"), ("none", 401, "authentication_error")):
            reply = await client.get("/v1/models/none", headers={"x-api-key": key, **named})
            told = reply.json()
            assert (reply.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
            assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
            plain = (await client.get("/v1/models/none", headers={"x-api-key": key})).json()
            assert plain["error"]["type"] == "invalid_request_error"


async def test_errors_about_files_have_the_form_of_the_api_that_asks(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        named = {"anthropic-version": "2023-06-01"}
        for reply in (
            await client.get("/v1/files/file-none", headers=named),
            await client.post("/v1/files", headers=named, files={"file": ("a.txt", b"a")}),
        ):
            told = reply.json()
            assert told["type"] == "error" and told["error"]["details"]["param"] in ("file_id", "purpose")
            assert told["request_id"] == reply.headers["request-id"]
        plain = (await client.get("/v1/files/file-none")).json()
        assert plain["error"]["code"] == "not_found"


async def test_a_fallback_that_is_not_served_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="messages_model names 'c', which is not served: a are"):
        async with running_app(tmp_path, served_model_name=("a",), messages_model="c"):
            pass


WRONG: list[tuple[Json, str]] = [
    ({"model": None}, "model"),
    ({"model": 1}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"stream": 1}, "stream"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"system": 1}, "system"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
]


async def test_what_is_wrong_is_told_by_its_path(client: httpx.AsyncClient) -> None:
    for fields, param in WRONG:
        reply = await client.post(PATH, json={**asking(), **fields})
        told = reply.json()
        assert (reply.status_code, told["type"]) == (400, "error"), (fields, told)
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["details"]["param"] == param, (fields, told)
        assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_what_is_missing_is_told_in_a_sentence(client: httpx.AsyncClient) -> None:
    for name in ("model", "max_tokens", "messages"):
        reply = await client.post(PATH, json=asking(**{name: None}))
        told = reply.json()["error"]
        assert told["details"] == {"error_code": "missing_required_parameter", "param": name}
        assert told["message"] == f"Missing required parameter: '{name}'."


async def test_errors_of_the_door_have_the_form_of_the_api(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=("secret",)) as running, http_client(running) as client:
        for headers, status, kind in (
            ({}, 401, "authentication_error"),
            ({"x-api-key": "other"}, 401, "authentication_error"),
            ({"x-api-key": "secret", "host": "evil.example"}, 421, "invalid_request_error"),
            ({"x-api-key": "secret", "content-type": "text/plain"}, 415, "invalid_request_error"),
        ):
            given = {"content-type": "application/json", **headers}
            reply = await client.post(PATH, content=b"{}", headers=given)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
        for method, path, status in (
            ("GET", PATH, 405),
            ("POST", f"{PATH}/batches", 404),
            ("GET", f"{PATH}/x", 404),
        ):
            reply = await client.request(method, path, headers={"x-api-key": "secret"})
            assert (reply.status_code, reply.json()["type"]) == (status, "error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await client.post(PATH, json=asking(), headers=headers)).status_code == 200
        # Elsewhere they stay as they are.
        assert (await client.post("/v1/messagesx", json={})).json()["error"]["code"] == "invalid_api_key"


async def test_limits_are_those_of_chat(tmp_path: Path) -> None:
    settings: Any = {"owner_limit": ("requests_per_minute=1",)}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        first, second = [await client.post(PATH, json=asking()) for _ in range(2)]
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "0"
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(second.headers["retry-after"]) >= 1
        # Counting costs nothing, and is not limited.
        assert (await client.post(COUNT, json=asking())).status_code == 200


async def test_a_message_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    async with running_app(tmp_path) as running, http_client(running) as client:
        usage = (await client.post(PATH, json=asking(metadata={"user_id": "ann"}))).json()["usage"]
        counted = await used(running)
        assert (counted.input_tokens, counted.output_tokens) == (
            usage["input_tokens"],
            usage["output_tokens"],
        )
        logged: Any = caplog.records[-1]
        assert logged.prompt_tokens == usage["input_tokens"] and logged.model == "antiphon-scripted"
        assert len(logged.safety_identifier) == 16 and "ann" not in caplog.text


async def test_tools_that_are_not_there_are_left_out_where_the_operator_says_so(tmp_path: Path) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    async with running_app(tmp_path, unsupported_tools="ignore") as running, http_client(running) as client:
        reply = await client.post(PATH, json=asking(tools=[search]))
        assert (reply.status_code, reply.headers["x-antiphon-ignored"]) == (200, "tools[0]")
        engine = running.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        assert "web_search" not in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
