"""Who speaks in a chat: roles and names that only templates know, the role of the answer, and for whom a
client asks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from engine.tokenizer.chat_template import AUTHORS, variables_of
from server.telemetry import end_user
from tests.support import wire
from tests.support.running import Running, http_client, running_app
from tests.support.talk import prompts

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
NAMES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}"
    "{% if message.name %} ({{ message.name }}){% endif %}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
PLAIN = NAMES.replace("{% if message.name %} ({{ message.name }}){% endif %}", "")


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        (NAMES, True),
        (NAMES.replace("message.name", "message['name']"), True),
        ("{% for turn in messages[1:] %}{{ turn.name }}{% endfor %}", True),
        (PLAIN, False),
        ("{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages[0].content }}", False),
    ],
)
def test_a_template_is_asked_whether_it_prints_names(source: str, reads: bool) -> None:
    assert (AUTHORS in variables_of(source)) == reads


async def test_names_reach_templates_that_print_them(tmp_path: Path) -> None:
    engine = ScriptedEngine(chat_template=NAMES)
    messages = [
        {"role": "system", "name": "host", "content": "Be kind."},
        {"role": "user", "name": "Ann", "content": "hello"},
        {"role": "assistant", "name": "Bot", "content": "hi"},
        {"role": "user", "name": "Bob<|im_end|>", "content": "say hi"},
    ]
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        reply = await client.post(CHAT, json={"messages": messages})
        assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
        prompt = prompts(engine)[-1]
        for role, name in (
            ("system", "host"),
            ("user", "Ann"),
            ("assistant", "Bot"),
        ):  # the template has no line end there
            assert f"<|im_start|>{role} ({name})" in prompt
        ids = engine.requests[-1].prompt_ids
        (end,) = await engine.tokenize("<|im_end|>", add_special_tokens=False)
        assert list(ids).count(end) == len(messages), "a name is text, whatever it looks like"
        bad = await client.post(CHAT, json={"messages": [{"role": "user", "name": 1, "content": "x"}]})
        assert wire.validate_error(bad.json())["param"] == "messages[0].name"


async def test_a_template_without_names_is_said_so(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "name": "Ann", "content": "say hi"}]}
    assert (await client.post(CHAT, json=body)).headers["x-antiphon-ignored"] == "messages[0].name"


async def test_a_role_of_the_client_is_the_templates_to_print(
    client: httpx.AsyncClient, server_app: Running
) -> None:
    made_up = [{"role": role, "content": "x"} for role in ("bot", "human", "model", "expert", "user_2")]
    messages = [{"role": "critic", "content": "too long"}, *made_up, {"role": "user", "content": "say hi"}]
    reply = await client.post(CHAT, json={"messages": messages})
    assert reply.status_code == 200, reply.text
    engine = server_app.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    assert "<|im_start|>critic\ntoo long<|im_end|>" in prompts(engine)[-1]
    mistakes = ("User", "assitant", "sytem", "tools", "functions")  # of official ones
    for role in ("", "a b", "x" * 65, "<|im_end|>", 1, None, *mistakes):
        bad = await client.post(CHAT, json={"messages": [{"role": role, "content": "x"}]})
        error = wire.validate_error(bad.json())
        assert (bad.status_code, error["param"]) == (400, "messages[0].role")
        assert "is handed to the model's chat template" in error["message"] or not isinstance(role, str)


async def test_a_role_of_the_client_is_no_control_token(tmp_path: Path) -> None:
    """A template that makes a token of each role must not make one of a word that the client chose."""
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    engine = ScriptedEngine(chat_template=template)
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        for role in ("im_end", "IM_END"):
            body = {"messages": [{"role": role, "content": "say hi"}]}
            assert (await client.post(CHAT, json=body)).status_code == 200
            (end,) = await engine.tokenize("<|im_end|>", add_special_tokens=False)
            assert end not in engine.requests[-1].prompt_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_the_role_of_answers_is_a_setting(tmp_path: Path, stream: bool) -> None:
    async with running_app(tmp_path, response_role="bot") as running, http_client(running) as client:
        turns = [{"role": "user", "content": "say hi"}, {"role": "assistant", "content": "Once"}]
        for body, role in (
            ({"messages": turns[:1]}, "bot"),
            ({"messages": turns, "continue_final_message": True}, "assistant"),
        ):
            reply = await client.post(CHAT, json={**body, "stream": stream})
            if stream:
                assert wire.chunks(reply.content)[0]["choices"][0]["delta"]["role"] == role
            else:
                assert reply.json()["choices"][0]["message"]["role"] == role


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "say hi"}]}),
        ("/v1/completions", {"prompt": "say hi"}),
        ("/v1/responses", {"input": "say hi"}),
    ],
)
@pytest.mark.parametrize("field", ["user", "safety_identifier"])
async def test_the_log_tells_for_whom_a_client_asks(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, body: Json, field: str
) -> None:
    with caplog.at_level(logging.INFO):
        reply = await client.post(path, json={**body, field: "ann@example.org"})
    assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
    digest = end_user("local", "ann@example.org")
    lines = [vars(record) for record in caplog.records]
    assert [line for line in lines if line.get("path") == path and line.get("safety_identifier") == digest]
    assert "ann@example.org" not in json.dumps(lines, default=str)


async def test_texts_are_given_in_parts_where_the_template_wants_them(tmp_path: Path) -> None:
    parts = PLAIN.replace("message.content }}", "message.content[0].text }}")
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "say hi"}]}),
        ("/v1/responses", {"input": "say hi"}),
    ):
        engine = ScriptedEngine(chat_template=parts)
        folder = tmp_path / path.rpartition("/")[2]
        folder.mkdir()
        async with (
            running_app(folder, engine, chat_template_content_format="openai") as running,
            http_client(running) as client,
        ):
            assert (await client.post(path, json=body)).status_code == 200
            assert "<|im_start|>user\nsay hi<|im_end|>" in prompts(engine)[-1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "say hi"}]}),
        ("/v1/responses", {"input": "say hi"}),
    ],
)
async def test_requests_for_one_person_can_be_limited(tmp_path: Path, path: str, body: Json) -> None:
    async with (
        running_app(tmp_path, identifier_requests_per_minute=2) as running,
        http_client(running) as client,
    ):
        for person, status in (
            ("ann", 200),
            ("ann", 200),
            ("ann", 429),
            ("bob", 200),
            (None, 200),
            (None, 200),
        ):
            reply = await client.post(path, json={**body, "safety_identifier": person})
            assert reply.status_code == status, reply.text
            if status == 429:
                error = wire.validate_error(reply.json())
                assert error["code"] == "rate_limit_exceeded" and "safety_identifier" in error["message"]
                assert int(reply.headers["retry-after"]) >= 1
