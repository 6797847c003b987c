"""What a request says to a chat template that does not read it is named, on every API that renders one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import ModelInfo, ScriptedEngine
from server.ignored import collecting
from server.prompting import name_idle_drafts
from server.schema import SamplingFields
from tests.support.running import http_client, running_app
from tests.support.talk import BUILTIN

Json = dict[str, Any]

SILENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""A template that can be told nothing."""
HEARS_EFFORT = (
    "{{ reasoning_effort | default('') }}{% if not tone is defined %}{% set tone = 1 %}{% endif %}" + SILENT
)

RESPONSES = ("/v1/responses", "/v1/responses/input_tokens")
CHAT = ("/v1/chat/completions", "/tokenize")


def body_for(path: str, effort: str | None, kwargs: Json) -> Json:
    """The same question in the words of each API."""
    body: Json = {"chat_template_kwargs": kwargs}
    if path in RESPONSES:
        return {**body, "input": "say hi", "reasoning": {"effort": effort}}
    return {**body, "messages": [{"role": "user", "content": "say hi"}], "reasoning_effort": effort}


@pytest.mark.parametrize("path", [*RESPONSES, *CHAT])
@pytest.mark.parametrize(
    ("template", "effort", "kwargs", "named"),
    [
        (SILENT, "low", {}, ["EFFORT"]),
        (SILENT, None, {"enable_thinkin": True}, ["chat_template_kwargs.enable_thinkin"]),
        (HEARS_EFFORT, "low", {"tone": "dry"}, []),
        (HEARS_EFFORT, "max", {"tones": 1}, ["chat_template_kwargs.tones"]),
    ],
)
async def test_what_the_template_does_not_read_is_named(
    path: str, template: str, effort: str | None, kwargs: Json, named: list[str], tmp_path: Path
) -> None:
    field = "reasoning.effort" if path in RESPONSES else "reasoning_effort"
    async with (
        running_app(tmp_path, ScriptedEngine(chat_template=template)) as running,
        http_client(running) as client,
    ):
        reply = await client.post(path, json=body_for(path, effort, kwargs))
    assert reply.status_code == 200, reply.text
    told = reply.headers.get("x-antiphon-ignored", "")
    assert told == ",".join(named).replace("EFFORT", field)


@pytest.mark.parametrize("path", [*RESPONSES, *CHAT])
async def test_an_effort_that_there_is_none_of_is_refused_with_those_that_there_are(
    path: str, tmp_path: Path
) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        reply = await client.post(path, json=body_for(path, "enormous", {}))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (
        400,
        "reasoning.effort" if path in RESPONSES else "reasoning_effort",
    )
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert f"'{effort}'" in error["message"]


ALL: Json = {"num_assistant_tokens": 4, "max_ngram_size": 2, "assistant_confidence_threshold": 0.5}


@pytest.mark.parametrize(
    ("capabilities", "said", "named"),
    [
        ({"drafts"}, ALL, ["assistant_confidence_threshold"]),
        ({"drafts", "draft_model"}, ALL, ["max_ngram_size"]),
        ({"drafts"}, {**ALL, "num_assistant_tokens": 0}, [*ALL][1:]),
        ({"drafts", "draft_model"}, {**ALL, "num_assistant_tokens": 0}, [*ALL][1:]),
        ({"drafts"}, {"max_ngram_size": 2}, []),
        (set(), ALL, [*ALL]),
        (set(), {"num_assistant_tokens": 0}, []),
    ],
)
def test_what_is_said_of_drafts_that_are_not_made_is_named(
    capabilities: set[str], said: Json, named: list[str]
) -> None:
    info = ModelInfo("m", 100, 100, "f", (), capabilities=frozenset(capabilities))
    with collecting() as ignored:
        name_idle_drafts(info, SamplingFields(**said))
    assert ignored.header() == ",".join(named)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "say hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}], "tools": [BUILTIN]}),
        ("/v1/completions", {"prompt": "say hi"}),
    ],
)
async def test_every_api_names_drafts_that_are_not_made(path: str, body: Json, tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        reply = await client.post(path, json={**body, "assistant_confidence_threshold": 0.5})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-antiphon-ignored"] == "assistant_confidence_threshold"
