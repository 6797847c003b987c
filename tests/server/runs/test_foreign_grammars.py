"""Grammars, schemas, regexes and tags that kill or hang: a 400, or one failed row; the server goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import Api, text
from tests.support.wire import Json

LEAST = -(2**63)
HUGE = '{"type": "integer", "minimum": -1e308, "maximum": -1e30}'
ENDLESS = 'start: X NL "\\n"\nNL: /\\n+/\nX: /[a-z]{%d}/'
"""Its mask behind so many letters is never made."""


def engine() -> LocalEngine:
    return LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=32 << 20)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running_app(folder, engine()) as server, http_client(server) as client:
        client.timeout = httpx.Timeout(100)
        yield client


def tag(pattern: str, end: str) -> Json:
    form = {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": pattern}, "end": end}
    return {"type": "structural_tag", "format": form}


def tool(schema: Any) -> Json:
    parameters = {
        "type": "object",
        "properties": {"n": schema},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "name": "f", "strict": True, "parameters": parameters}


def formatted(schema: Any) -> Json:
    whole = {"type": "object", "properties": {"n": schema}, "required": ["n"], "additionalProperties": False}
    return {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": whole}}}


CHAT: list[tuple[Json, str]] = [
    ({"guided_json": {"const": LEAST}}, "guided_json"),
    ({"guided_json": {"enum": [0, LEAST + 1]}}, "guided_json"),
    ({"guided_json": json.loads(HUGE)}, "guided_json"),
    ({"guided_json": {"type": "integer", "multipleOf": 2**31}}, "guided_json"),
    ({"guided_grammar": f'start: %json {{"const": {LEAST}}}'}, "guided_grammar"),
    ({"guided_grammar": 'start: NL "\\n"\nNL: /\\n+/'}, "guided_grammar"),
    ({"guided_grammar": "root ::= ro/ot"}, "guided_grammar"),
    ({"guided_grammar": "a ::= b"}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 400 + '"a"' + ")" * 400}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "[" * 400 + "a" + "]" * 400}, "guided_grammar"),
    ({"structured_outputs": {"structural_tag": json.dumps(tag("a+", "a"))}}, "structured_outputs"),
]
RESPONSES: list[tuple[Json, str]] = [
    (formatted({"const": LEAST}), "text.format"),
    (formatted(json.loads(HUGE)), "text.format"),
    ({"tools": [tool({"type": "integer", "enum": [LEAST]})]}, "tools[0].parameters"),
    ({"tools": [tool({"type": "string"}) | {"name": "g"}, tool({"const": LEAST})], "tool_choice": "required"},
     "tools[1].parameters"),
]  # fmt: skip


async def test_what_kills_is_a_400_that_names_the_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for body, param in CHAT:
            asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, **body}
            reply = await client.post("/v1/chat/completions", json=asked)
            check(reply, param)
        for body, param in RESPONSES:
            check(
                await client.post("/v1/responses", json={"input": "Go.", "max_output_tokens": 16, **body}),
                param,
            )
        asked = {
            "messages": [{"role": "user", "content": "Go."}],
            "max_tokens": 60,
            "guided_regex": "[0-9]{4}",
        }
        said = (await client.post("/v1/chat/completions", json=asked)).json()
        assert len(said["choices"][0]["message"]["content"]) == 4


def check(reply: httpx.Response, param: str) -> None:
    assert reply.status_code == 400, (param, reply.text)
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_schema"), error
    assert error["param"].startswith(param) and 10 < len(error["message"]) < 400, error


async def test_a_row_that_hangs_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:

        async def chat(**body: Any) -> httpx.Response:
            asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 60, "seed": 3, **body}
            return await client.post("/v1/chat/completions", json=asked)

        neighbours = [{"guided_regex": "[a-z]{40}"}, {"guided_regex": "[0-9]{40}"}, {}]
        alone = [(await chat(**body)).json()["choices"] for body in neighbours]
        *beside, hung = await asyncio.gather(
            *(chat(**body) for body in neighbours), chat(guided_grammar=ENDLESS % 20)
        )
        assert [reply.json()["choices"] for reply in beside] == alone
        check(hung, "guided_grammar")
        assert "following the grammar takes too long" in hung.json()["error"]["message"]
        form = {"type": "grammar", "syntax": "lark", "definition": ENDLESS % 22}
        custom = {"type": "custom", "name": "f", "format": form}
        other = {"type": "custom", "name": "g", "format": {**form, "definition": ENDLESS % 24}}
        check(await chat(tools=[custom], tool_choice="required"), "tools[0].format")
        # Which of several it was is not known.
        check(await chat(tools=[custom, other], tool_choice="required"), "tools")


async def test_what_hangs_later_is_a_400_that_names_the_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        shape = {"guided_grammar": ENDLESS % 20}
        form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": ENDLESS % 21}}
        custom = {"type": "custom", "custom": {"name": "f", "format": form}}
        for path, body, param in (
            ("chat/completions", shape, "guided_grammar"),
            ("chat/completions", {"tools": [custom], "tool_choice": "required"}, "tools[0].format"),
            ("completions", shape, "guided_grammar"),
        ):
            asked = (
                {"messages": [{"role": "user", "content": "Go."}]} if "chat" in path else {"prompt": "Go."}
            )
            check(
                await client.post(f"/v1/{path}", json={**asked, "max_tokens": 60, "seed": 3, **body}), param
            )
            shape = {"guided_grammar": ENDLESS % 22}  # the first is known by now


async def test_a_stored_run_that_kills_fails_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        form = {"type": "grammar", "syntax": "lark", "definition": ENDLESS % 20}
        custom = {"type": "custom", "name": "f", "format": form}
        begun = await Api(client).create("Go.", background=True, tools=[custom], tool_choice="required")
        failed = await Api(client).ended(begun["id"])
        assert failed["status"] == "failed" and failed["error"]["code"] == "invalid_prompt"
        assert failed["error"]["message"].startswith("Invalid schema for tool 'f': following the grammar")
        assert text(await Api(client).create("Say hi.", max_output_tokens=16)) is not None
    async with serving(tmp_path) as client:
        assert await Api(client).get(failed["id"]) == failed


async def test_many_hostile_schemas_and_one_that_is_not(tmp_path: Path) -> None:
    async with live_app(tmp_path, engine()) as server, http_client(server) as client:
        client.timeout = httpx.Timeout(200)

        async def chat(**body: Any) -> httpx.Response:
            asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, **body}
            return await client.post("/v1/chat/completions", json=asked)

        assert (await chat(guided_regex="[0-9]{4}")).status_code == 200
        hostile = [
            asyncio.create_task(chat(guided_json={"type": "integer", "multipleOf": 2**31 + 2 * n}))
            for n in range(12)
        ]
        await asyncio.sleep(0)
        for n in range(3):
            began = time.perf_counter()
            assert (
                await chat(guided_json={"type": "integer", "minimum": n, "maximum": n + 5})
            ).status_code == 200
            assert time.perf_counter() - began < 10, "one after the other they would take 18 s"
        for task in hostile:
            task.cancel()  # the clients leave
        await asyncio.gather(*hostile, return_exceptions=True)
        assert (await chat(guided_json={"type": "integer", "minimum": 7, "maximum": 9})).status_code == 200


@pytest.mark.parametrize("end", [LEAST, LEAST + 1])
async def test_the_scripted_engine_has_the_same_hold(tmp_path: Path, end: int) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        check(
            await client.post("/v1/responses", json={"input": "Go.", **formatted({"const": end})}),
            "text.format",
        )
        assert text(await Api(client).create("say hi")) == "hi"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_takes_the_trial_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    monkeypatch.setattr("engine.structured.isolation.constraints.LONG_S", 600.0)
    local = engine()
    async with live_app(tmp_path, local) as server, http_client(server) as client:
        client.timeout = httpx.Timeout(100)
        said: Json = (
            {"input": "Go."}
            if path == "/v1/responses"
            else {"messages": [{"role": "user", "content": "Go."}]}
        )
        asked = client.post(
            path, json={**said, "stream": stream, "guided_grammar": 'start: NL "\\n"\nNL: /\\n+/'}
        )
        leaving = asyncio.create_task(asked)
        while local._constraints is None or local._constraints._long._free:
            assert not leaving.done()
            await asyncio.sleep(0.01)
        leaving.cancel()
        async with asyncio.timeout(60):
            while not local._constraints._long._free:
                await asyncio.sleep(0.01)
