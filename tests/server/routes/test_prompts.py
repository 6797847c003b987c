"""Prompt templates: their versions, their variables, and what a request makes of them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine import ScriptedEngine
from tests.support import wire
from tests.support.owners import two_owners
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, calls, gated, prompts, text

Json = dict[str, Any]
PATH = "/v1/prompts"
FILE = {"type": "input_file"}


async def make(client: httpx.AsyncClient, template: Json, **fields: Any) -> str:
    reply = await client.post(PATH, json={"template": template, **fields})
    assert reply.status_code == 200, reply.text
    made: str = reply.json()["id"]
    assert made.startswith("pmpt_")
    return made


async def refused(reply: httpx.Response, status: int, param: str | None) -> Json:
    assert reply.status_code == status, reply.text
    error = wire.validate_error(reply.json())
    assert error["param"] == param, error
    return error


# ------------------------------------------------------------------------------------------------------------
# Prompts and their versions


async def test_versions_never_change_and_one_is_the_default(client: httpx.AsyncClient) -> None:
    first = {"instructions": "Greet {{name}}.", "temperature": 0.5}
    prompt = await make(client, first, name="greeting", metadata={"team": "a"})
    path = f"{PATH}/{prompt}"
    shown = (await client.get(path)).json()
    assert {**shown, "created_at": 0} == {
        "id": prompt,
        "object": "prompt",
        "created_at": 0,
        "name": "greeting",
        "metadata": {"team": "a"},
        "default_version": "1",
        "latest_version": "1",
    }
    added = (await client.post(path, json={"template": {"instructions": "Hello {{who}}"}})).json()
    assert (added["default_version"], added["latest_version"]) == ("2", "2")
    kept = (await client.post(path, json={"template": {"instructions": "3"}, "default_version": "1"})).json()
    assert (kept["default_version"], kept["latest_version"]) == ("1", "3")
    one = (await client.get(f"{path}/versions/1")).json()
    assert (one["template"], one["variables"]) == (first, ["name"])
    page = (await client.get(f"{path}/versions", params={"limit": 2})).json()
    assert [row["version"] for row in page["data"]] == ["3", "2"]
    assert page["has_more"]
    rest = (await client.get(f"{path}/versions", params={"after": page["last_id"]})).json()
    assert [row["version"] for row in rest["data"]] == ["1"]
    renamed = (await client.post(path, json={"name": None, "metadata": None})).json()
    assert (renamed["name"], renamed["metadata"]) == (None, {})


async def test_a_default_version_cannot_be_deleted(client: httpx.AsyncClient) -> None:
    prompt = await make(client, {"instructions": "one"})
    path = f"{PATH}/{prompt}"
    await client.post(path, json={"template": {"instructions": "two"}})
    error = await refused(await client.delete(f"{path}/versions/2"), 400, "version")
    assert error["code"] == "default_version"
    gone = await client.delete(f"{path}/versions/1")
    assert gone.json() == {"id": "1", "object": "prompt.version.deleted", "deleted": True}
    await refused(await client.get(f"{path}/versions/1"), 404, "version")
    await refused(await client.post(path, json={"default_version": "1"}), 404, "default_version")
    # Its number is not given again.
    added = (await client.post(path, json={"template": {"instructions": "three"}})).json()
    assert added["latest_version"] == "3"


async def test_a_deleted_prompt_is_unknown(client: httpx.AsyncClient) -> None:
    prompt = await make(client, {"instructions": "say hi"})
    deleted = await client.delete(f"{PATH}/{prompt}")
    assert deleted.json() == {"id": prompt, "object": "prompt.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        await refused(await client.request(method, f"{PATH}/{prompt}"), 404, "prompt_id")
    await refused(await client.get(f"{PATH}/{prompt}/versions"), 404, "prompt_id")
    await Api(client).refused(404, "x", prompt={"id": prompt})


async def test_prompts_are_listed_newest_first(client: httpx.AsyncClient) -> None:
    made = [await make(client, {"instructions": str(number)}) for number in range(3)]
    page = (await client.get(PATH, params={"limit": 2})).json()
    assert [row["id"] for row in page["data"]] == made[:0:-1]
    rest = (await client.get(PATH, params={"limit": 2, "after": page["last_id"]})).json()
    assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (made[:1], False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "template"),
        ({"template": "hi"}, "template"),
        ({"template": {}}, "template.instructions"),
        ({"template": {"input": "x"}}, "template.input"),
        ({"template": {"stream": True}}, "template.stream"),
        ({"template": {"instructions": 7}}, "template.instructions"),
        ({"template": {"temperature": 9}}, "template.temperature"),
        ({"template": {"messages": "hi"}}, "template.messages"),
        ({"template": {"messages": []}}, "template.messages"),
        ({"template": {"messages": [{"role": "cat", "content": "x"}]}}, "template.messages[0].role"),
        (
            {"template": {"messages": [{"type": "item_reference", "id": "msg_1"}]}},
            "template.messages[0].type",
        ),
        ({"template": {"tools": [{"type": "function"}]}}, "template.tools[0].name"),
        (
            {
                "template": {
                    "tools": [
                        {
                            "type": "mcp",
                            "server_label": "s",
                            "server_url": "builtin:",
                            "authorization": "secret",
                        }
                    ]
                }
            },
            "template.tools[0].authorization",
        ),
        ({"template": {"instructions": "x"}, "name": 3}, "name"),
        ({"template": {"instructions": "x"}, "metadata": {"a": 1}}, "metadata.a"),
    ],
)
async def test_bad_templates_are_refused(client: httpx.AsyncClient, body: Json, param: str) -> None:
    await refused(await client.post(PATH, json=body), 400, param)


async def test_what_a_template_says_in_vain_is_named(client: httpx.AsyncClient) -> None:
    reply = await client.post(PATH, json={"template": {"instructions": "x", "foo": 1}, "bar": 2})
    assert set(reply.headers["x-antiphon-ignored"].split(",")) == {"bar", "template.foo"}


async def test_nothing_to_change_is_refused(client: httpx.AsyncClient) -> None:
    prompt = await make(client, {"instructions": "x"})
    await refused(await client.post(f"{PATH}/{prompt}", json={}), 400, "template")


async def test_another_owners_prompt_is_unknown(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, two_owners(running) as (own, other):
        prompt = await make(own, {"instructions": "say hi"})
        path = f"{PATH}/{prompt}"
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/versions"),
            ("GET", f"{path}/versions/1"),
            ("DELETE", f"{path}/versions/1"),
        ):
            await refused(await other.request(method, where), 404, "prompt_id")
        await refused(await other.post(path, json={"name": "mine"}), 404, "prompt_id")
        error = await Api(other).refused(404, "x", prompt={"id": prompt})
        assert error["param"] == "prompt.id"
        assert (await other.get(PATH)).json()["data"] == []
        assert (await Api(own).create("x", prompt={"id": prompt}))["prompt"]["version"] == "1"


async def test_a_repeated_request_makes_one_prompt(client: httpx.AsyncClient) -> None:
    body, key = {"template": {"instructions": "x"}}, {"Idempotency-Key": "one"}
    first = await client.post(PATH, json=body, headers=key)
    again = await client.post(PATH, json=body, headers=key)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert len((await client.get(PATH)).json()["data"]) == 1


# ------------------------------------------------------------------------------------------------------------
# In requests


async def test_a_response_is_made_with_a_prompt(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        template = {
            "instructions": "You are {{name}}. {{ name }} speaks {{language}}.",
            "messages": [
                {"role": "user", "content": "Who is {{name}}?"},
                {"role": "assistant", "content": "I am {{name}}."},
            ],
            "temperature": 0.25,
        }
        prompt = await make(client, template)
        variables = {"name": "Ada {{language}}", "language": {"type": "input_text", "text": "French"}}
        response = await api.create("say done", prompt={"id": prompt, "variables": variables})
    assert text(response) == "done"
    assert response["prompt"] == {"id": prompt, "version": "1", "variables": variables}
    assert response["temperature"] == 0.25
    assert [item["role"] for item in response["instructions"]] == ["system", "user", "assistant"]
    # What was put in is not searched for names again.
    assert response["instructions"][0]["content"] == [
        {"type": "input_text", "text": "You are Ada {{language}}. Ada {{language}} speaks French."}
    ]
    (shown,) = prompts(engine)
    assert shown.index("speaks French.") < shown.index("I am Ada") < shown.index("say done")


async def test_only_instructions_are_as_those_of_a_request(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        prompt = await make(client, {"instructions": "Be {{how}}."})
        used = {"id": prompt, "variables": {"how": "brief"}}
        await Api(client).create("say hi", prompt=used)
        await Api(client).create("say hi", instructions="Be brief.")
        counted = await client.post("/v1/responses/input_tokens", json={"input": "say hi", "prompt": used})
    first, second = prompts(engine)
    assert first == second
    assert counted.json()["input_tokens"] == len(engine.requests[0].prompt_ids)


async def test_a_request_wins_over_its_template(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        template = {"instructions": "Be {{how}}.", "temperature": 0.25, "tools": [WEATHER]}
        prompt = await make(client, template)
        response = await api.create(
            "say hi", prompt={"id": prompt}, instructions="Be {{how}}, they say.", temperature=0.75, tools=[]
        )
        assert (response["temperature"], response["tools"]) == (0.75, [])
        assert response["instructions"] == "Be {{how}}, they say."
        with_tools = await api.create("say hi", prompt={"id": prompt, "variables": {"how": "nice"}})
        assert [tool["name"] for tool in with_tools["tools"]] == ["get_weather"]
    assert "Be {{how}}, they say." in prompts(engine)[0]


async def test_instructions_are_not_carried_over(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        template = {"messages": [{"role": "user", "content": "a shot {{n}}"}]}
        prompt = await make(client, template)
        first = await api.create("say hi", prompt={"id": prompt, "variables": {"n": "1"}})
        items = await api.input_items(first["id"])
        assert len(items["data"]) == 1
        await api.create("say ho", previous_response_id=first["id"])
        await api.create(
            "say he",
            previous_response_id=first["id"],
            prompt={"id": prompt, "variables": {"n": "2"}},
        )
    shown = prompts(engine)
    assert "a shot 1" in shown[0] and "a shot" not in shown[1]
    assert "a shot 2" in shown[2] and "a shot 1" not in shown[2]


@pytest.mark.parametrize(
    ("prompt", "status", "param"),
    [
        ("pmpt", 400, "prompt"),
        ({}, 400, "prompt.id"),
        ({"id": "pmpt_none"}, 404, "prompt.id"),
        ({"version": "9"}, 404, "prompt.version"),
        ({"version": "x"}, 404, "prompt.version"),
        ({"version": 1}, 400, "prompt.version"),
        ({"variables": {}}, 400, "prompt.variables.city"),
        ({"variables": {"city": None}}, 400, "prompt.variables.city"),
        ({"variables": {"city": "Paris", "town": "x"}}, 400, "prompt.variables.town"),
        ({"variables": {"city": 7}}, 400, "prompt.variables.city"),
        ({"variables": {"city": {"type": "input_audio"}}}, 400, "prompt.variables.city.type"),
        ({"variables": {"city": {"type": "input_text"}}}, 400, "prompt.variables.city.text"),
        ({"variables": ["city"]}, 400, "prompt.variables"),
        (
            {"variables": {"city": {"type": "input_image", "image_url": "data:image/png;base64,AA=="}}},
            400,
            "prompt.variables.city",
        ),
        ({"variables": {"city": {**FILE, "file_id": "file-none"}}}, 404, "prompt.variables.city.file_id"),
    ],
)
async def test_what_cannot_be_filled_in_is_named(
    client: httpx.AsyncClient, prompt: Any, status: int, param: str
) -> None:
    made = await make(client, {"instructions": "The weather of {{city}}"})
    if isinstance(prompt, dict) and prompt:
        prompt = {"id": made, **prompt}
    error = await Api(client).refused(status, "hi", prompt=prompt)
    assert error["param"] == param, error


async def test_a_file_is_a_variable(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    data = base64.b64encode(b"The sea is green.").decode()
    file = {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{data}"}
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        prompt = await make(client, {"messages": [{"role": "user", "content": "Read {{doc}} well."}]})
        response = await Api(client).create("say hi", prompt={"id": prompt, "variables": {"doc": file}})
        parts = response["instructions"][0]["content"]
        assert [part["type"] for part in parts] == ["input_text", "input_file", "input_text"]
    (shown,) = prompts(engine)
    assert shown.index("Read ") < shown.index("The sea is green.") < shown.index(" well.")


async def test_a_prompt_can_be_all_of_the_input(client: httpx.AsyncClient) -> None:
    prompt = await make(client, {"messages": [{"role": "user", "content": "say {{what}}"}]})
    reply = await client.post(
        "/v1/responses", json={"prompt": {"id": prompt, "variables": {"what": "something"}}}
    )
    assert text(Api.response(reply)) == "something"
    bare = await make(client, {"temperature": 0.5})
    await refused(await client.post("/v1/responses", json={"prompt": {"id": bare}}), 400, "input")


async def test_a_run_keeps_the_version_that_it_began_with(tmp_path: Path) -> None:
    """Also where the prompt is changed and deleted, and the process ends, in the middle."""
    gate, engine = Gate(), ScriptedEngine()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        prompt = await make(client, {"instructions": "The first of {{name}}."})
        used = {"id": prompt, "variables": {"name": "Ada"}}
        begun = await Api(client).create("hi", prompt=used, background=True, instructions=None)
        await asyncio.wait_for(gate.reached.wait(), 20)
        await client.post(f"{PATH}/{prompt}", json={"template": {"instructions": "Another."}})
        await client.delete(f"{PATH}/{prompt}")
        await server.context.runs.drain(0.0)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        ended = await Api(client).ended(begun["id"])
    assert (ended["status"], ended["prompt"]) == ("completed", {**used, "version": "1"})
    assert all("The first of Ada." in shown for shown in prompts(engine)) and engine.requests


async def test_outputs_of_tools_go_on_with_the_filled_prompt(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        prompt = await make(client, {"instructions": "Mind {{what}}.", "tools": [WEATHER]})
        used = {"id": prompt, "variables": {"what": "the gap"}}
        first = await api.create('call get_weather {"city": "Paris"}', prompt=used)
        await client.delete(f"{PATH}/{prompt}")
        (call,) = calls(first)
        reply = await client.post(
            f"/v1/responses/{first['id']}/tool_outputs", json={"tool_outputs": [answer(call["call_id"])]}
        )
        second = Api.response(reply)
    assert second["prompt"] == first["prompt"]
    assert second["instructions"] == first["instructions"]
    assert all("Mind the gap." in shown for shown in prompts(engine))


async def test_a_repeat_follows_its_run_though_the_prompt_is_gone(client: httpx.AsyncClient) -> None:
    prompt = await make(client, {"messages": [{"role": "user", "content": "say hi"}]})
    body, key = {"prompt": {"id": prompt}}, {"Idempotency-Key": "k"}
    first = await client.post("/v1/responses", json=body, headers=key)
    await client.delete(f"{PATH}/{prompt}")
    again = await client.post("/v1/responses", json=body, headers=key)
    assert again.json() == first.json()


async def test_the_official_sdk_names_a_prompt(live_server: Running, live_sdk: AsyncOpenAI) -> None:
    async with http_client(live_server) as client:
        prompt = await make(client, {"messages": [{"role": "user", "content": "say {{what}}"}]})
    response = await live_sdk.responses.create(
        prompt={"id": prompt, "version": "1", "variables": {"what": "hello"}}
    )
    assert response.output_text == "hello"
    assert response.prompt is not None and response.prompt.version == "1"
    assert isinstance(response.instructions, list)
    again = await live_sdk.responses.retrieve(response.id)
    assert again == response
