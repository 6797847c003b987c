"""`prompt_cache_key` and `cache_salt`: which of them salts the prefix cache, and what a client is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.prompting.cache_salt import _warn_of_both
from tests.support.running import http_client, running_app
from tests.support.wire import Json

CHAT: Json = {"messages": [{"role": "user", "content": "say hi"}]}
FORMS: list[tuple[str, Json]] = [
    ("/v1/responses", {"input": "say hi"}),
    ("/v1/chat/completions", CHAT),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_key_is_named_as_ignored_unless_it_salts(tmp_path: Path, path: str, body: Json) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        reply = await client.post(path, json={**body, "prompt_cache_key": "k"})
        assert reply.headers["x-antiphon-ignored"] == "prompt_cache_key"
        assert engine.requests[-1].cache_salt == ""


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_where_the_operator_says_so_keys_salt(
    tmp_path: Path, path: str, body: Json, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    async with (
        running_app(tmp_path, engine, prompt_cache_key_salts=True) as server,
        http_client(server) as client,
    ):
        for key in ("a", "b", "a", None):
            asked = body if key is None else {**body, "prompt_cache_key": key}
            reply = await client.post(path, json=asked)
            assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
        first, second, third, without = [request.cache_salt for request in engine.requests]
        assert first == third != second and without == "" and "" not in (first, second)
        _warn_of_both.cache_clear()
        for _ in range(2):
            both = {**body, "prompt_cache_key": "a", "cache_salt": "s"}
            reply = await client.post(path, json=both)
            assert reply.headers["x-antiphon-ignored"] == "prompt_cache_key"
            assert engine.requests[-1].cache_salt == "s"
    assert len([line for line in caplog.messages if "cache_salt wins" in line]) == 1


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_an_empty_key_is_a_400(tmp_path: Path, path: str, body: Json) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        reply = await client.post(path, json={**body, "prompt_cache_key": ""})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "prompt_cache_key", "empty_string")
