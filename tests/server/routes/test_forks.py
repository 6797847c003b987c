"""Forks over HTTP: rewinding is a fork, and every point of a stored response can be gone on from."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine import ScriptedEngine
from tests.server.runs.execution.test_restart import child
from tests.support import wire
from tests.support.processes import free_port
from tests.support.running import http_client, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, calls, gated, text
from tests.support.wire import Json

KEY = {"idempotency-key": "once"}


def user(said: str) -> Json:
    return {"role": "user", "content": said}


async def texts(api: Api, conversation: str) -> list[str]:
    return [item["content"][0]["text"] for item in await api.conversation_items(conversation)]


async def fork(http: httpx.AsyncClient, path: str, body: Any = None, **headers: str) -> Json:
    reply = await http.post(f"{path}/fork", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    made: Json = reply.json()
    return made


# ------------------------------------------------------------------------------------------------------------
# Conversations


async def test_rewinding_a_conversation_is_a_fork(client: httpx.AsyncClient) -> None:
    api = Api(client)
    reply = await client.post("/v1/conversations", json={"metadata": {"of": "tea"}})
    conversation = reply.json()["id"]
    for said in ("say one", "say two"):
        await api.create(said, conversation=conversation)
    path = f"/v1/conversations/{conversation}"
    first = (await api.conversation_items(conversation))[1]["id"]
    made = await fork(client, path, {"after": first})
    wire.validate("ConversationResource", made)
    assert made["forked_from"] == {"conversation_id": conversation, "after": first}
    assert made["metadata"] == {"of": "tea"} and made["id"].startswith("conv_")
    assert (await client.get(f"/v1/conversations/{made['id']}")).json() == made
    assert "forked_from" not in (await client.get(path)).json()
    await api.create("say three", conversation=made["id"])
    assert await texts(api, conversation) == ["say one", "one", "say two", "two"]
    assert await texts(api, made["id"]) == ["say one", "one", "say three", "three"]
    paged = await api.pages(f"/v1/conversations/{made['id']}/items", limit=1, order="desc")
    assert [item["content"][0]["text"] for item in paged] == ["three", "say three", "one", "say one"]
    whole = await fork(client, f"/v1/conversations/{made['id']}", {"metadata": {}})
    assert whole["metadata"] == {}
    assert await texts(api, whole["id"]) == ["say one", "one", "say three", "three"]


async def test_a_fork_outlives_what_it_was_forked_from(client: httpx.AsyncClient) -> None:
    api = Api(client)
    conversation = await api.conversation(user("say a"), user("say b"))
    first, second = (item["id"] for item in await api.conversation_items(conversation))
    made = await fork(client, f"/v1/conversations/{conversation}")
    assert (await client.delete(f"/v1/conversations/{conversation}")).status_code == 200
    assert await texts(api, made["id"]) == ["say a", "say b"]
    turn = await api.create([{"type": "item_reference", "id": first}], conversation=made["id"])
    assert turn["status"] == "completed"
    deleted = await client.delete(f"/v1/conversations/{made['id']}/items/{second}")
    assert deleted.json()["forked_from"]["conversation_id"] == conversation
    assert "say b" not in await texts(api, made["id"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"after": 3}, "after"),
        ({"after": ""}, "after"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"starting_aftr": 3}, "starting_aftr"),
        ({"afer": "msg_1"}, "afer"),
        ({"item_id": "msg_1", "after": None}, "item_id"),
        ({"after": "msg_1", "starting_after": 3}, "starting_after"),
        ({"starting_after": -2}, "starting_after"),
        ({"starting_after": 1 << 70}, "starting_after"),
        ({"starting_after": True}, "starting_after"),
    ],
)
async def test_what_no_fork_can_be_made_of(client: httpx.AsyncClient, body: Json, param: str) -> None:
    api = Api(client)
    response = await api.create("say hi")
    path = f"/v1/responses/{response['id']}/fork"
    assert (await api.fails(400, "POST", path, json=body))["param"] == param
    if "starting_after" not in body:
        conversation = await api.conversation()
        path = f"/v1/conversations/{conversation}/fork"
        assert (await api.fails(400, "POST", path, json=body))["param"] == param


async def test_unknown_places(client: httpx.AsyncClient) -> None:
    api = Api(client)
    conversation, response = await api.conversation(user("a")), await api.create("say hi")
    for path in (f"/v1/conversations/{conversation}/fork", f"/v1/responses/{response['id']}/fork"):
        assert (await api.fails(404, "POST", path, json={"after": "msg_unknown"}))["param"] == "after"
    for kind, id in (("conversation", "conv_unknown"), ("response", "resp_unknown")):
        unknown = await api.fails(404, "POST", f"/v1/{kind}s/{id}/fork", json={"after": "msg_unknown"})
        assert unknown["param"] == f"{kind}_id"
    path = f"/v1/responses/{response['id']}/fork"
    beyond = await api.fails(400, "POST", path, json={"starting_after": 999})
    assert (beyond["code"], beyond["param"]) == ("cursor_beyond_log", "starting_after")
    path = f"/v1/conversations/{conversation}/fork"
    refused = await api.fails(400, "POST", path, json={"starting_after": 1})
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "starting_after")


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_a_response_is_forked_at_each_of_its_items(client: httpx.AsyncClient) -> None:
    api = Api(client)
    await api.create("say nothing")
    asked = f"{call(city='Paris')}\n{call(city='Rome')}"
    before = await api.create("say before")
    parent = await api.create(asked, tools=[WEATHER], previous_response_id=before["id"], metadata={"a": "b"})
    assert len(calls(parent)) == 2
    first = calls(parent)[0]
    made = await fork(client, f"/v1/responses/{parent['id']}", {"after": first["id"]})
    wire.validate_response(made)
    assert made["forked_from"] == {"response_id": parent["id"], "after": first["id"]}
    assert made["output"] == parent["output"][: parent["output"].index(first) + 1]
    assert (made["status"], made["metadata"]) == ("completed", {"a": "b"})
    assert made["usage"]["total_tokens"] == 0 and not made["usage"]["input_tokens_per_turn"]
    assert made["previous_response_id"] == before["id"] and made["tools"] == parent["tools"]
    assert made["id"] != parent["id"] and await api.get(made["id"]) == made
    # One call is pending where there were two.
    assert (await api.refused(400, "hi", previous_response_id=parent["id"]))["param"] == "input"
    done = await api.create(
        [answer(first["call_id"], "wet")], previous_response_id=made["id"], tools=[WEATHER]
    )
    assert text(done) == "The tool said: wet"
    fed = await api.outputs(made["id"], {first["call_id"]: "dry"})
    assert text(fed) == "The tool said: dry" and fed["previous_response_id"] == made["id"]
    said = [
        item["content"][0]["text"]
        for item in await api.pages(f"/v1/responses/{made['id']}/input_items", order="asc", scope="all")
        if item["type"] == "message"
    ]
    assert said == ["say before", "before", asked]
    listed = await api.pages("/v1/responses")
    assert [one for one in listed if one["id"] == made["id"]] == [made]


async def test_an_answer_is_made_anew(client: httpx.AsyncClient) -> None:
    api = Api(client)
    parent = await api.create("say hi")
    [asked] = (await api.input_items(parent["id"]))["data"]
    made = await fork(client, f"/v1/responses/{parent['id']}", {"after": asked["id"]})
    assert made["output"] == [] and made["forked_from"]["after"] == asked["id"]
    assert text(await api.create(None, previous_response_id=made["id"])) == "hi"
    at_once = await fork(client, f"/v1/responses/{parent['id']}", {"starting_after": -1})
    assert at_once["output"] == [] and at_once["forked_from"]["after"] is None
    assert text(await api.create([], previous_response_id=at_once["id"])) == "hi"


async def test_every_event_is_a_place_to_fork_at(client: httpx.AsyncClient) -> None:
    api = Api(client)
    whole = await api.stream(f"think well then say x\n{call()}", tools=[WEATHER])
    path = f"/v1/responses/{whole.response['id']}"
    done = 0
    for event in whole.events:
        if event["type"] == "response.output_item.done":
            done += 1
        made = await fork(client, path, {"starting_after": event["sequence_number"]})
        assert made["output"] == whole.response["output"][:done], event["type"]
    assert done == len(whole.response["output"]) > 1
    assert (await fork(client, path))["output"] == whole.response["output"]


async def test_a_fork_of_a_fork(client: httpx.AsyncClient) -> None:
    api = Api(client)
    parent = await api.create(f"{call(city='Paris')}\n{call(city='Rome')}", tools=[WEATHER])
    first = parent["output"][0]["id"]
    made = await fork(client, f"/v1/responses/{parent['id']}", {"after": first})
    again = await fork(client, f"/v1/responses/{made['id']}", {"metadata": {"n": "2"}})
    assert again["forked_from"] == {"response_id": made["id"], "after": first}
    assert again["output"] == made["output"] and again["metadata"] == {"n": "2"}
    await api.fails(
        404, "POST", f"/v1/responses/{made['id']}/fork", json={"after": parent["output"][1]["id"]}
    )
    for how in ("GET", "POST"):
        path = f"/v1/responses/{made['id']}" + ("?stream=true" if how == "GET" else "/fork")
        refused = await api.fails(400, how, path, json={"starting_after": 1})
        assert refused["code"] == "no_events"
    for id in (parent["id"], made["id"]):
        await api.delete(id)
    assert await api.get(again["id"]) == again
    refused = await api.fails(400, "POST", f"/v1/responses/{again['id']}/cancel")
    assert refused["code"] == "response_not_cancellable"


async def test_a_response_under_way_is_forked_at_what_it_has_done(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        api = Api(http)
        begun = await api.create("hi", background=True)
        await gate.reached.wait()
        path = f"/v1/responses/{begun['id']}/fork"
        assert (await api.fails(400, "POST", path))["code"] == "response_not_finished"
        made = await fork(http, f"/v1/responses/{begun['id']}", {"starting_after": 0})
        assert (made["output"], made["status"], made["background"]) == ([], "completed", False)
        yet = await api.fails(400, "POST", path, json={"starting_after": 900})
        assert yet["code"] == "cursor_beyond_log"
        gate.release.set()
        assert text(await api.ended(begun["id"])) == "one two three four"
        assert text(await api.create(None, previous_response_id=made["id"])) == "one two three four"


async def test_a_turn_of_a_conversation_is_forked_beside_it(client: httpx.AsyncClient) -> None:
    api = Api(client)
    conversation = await api.conversation(user("say a"))
    turn = await api.create("say b", conversation=conversation)
    made = await fork(client, f"/v1/responses/{turn['id']}")
    assert made["conversation"] is None and made["output"] == turn["output"]
    after = await api.create("say c", previous_response_id=made["id"])
    assert await texts(api, conversation) == ["say a", "say b", "b"]
    path = f"/v1/responses/{after['id']}/input_items"
    said = [item["content"][0]["text"] for item in await api.pages(path, order="asc", scope="all")]
    assert said == ["say a", "say b", "b", "say c"]


async def test_the_sdk_forks_by_post(sdk: AsyncOpenAI) -> None:
    from openai.types.responses import Response

    first = await sdk.responses.create(model="antiphon-scripted", input="say hi")
    made = await sdk.post(f"/responses/{first.id}/fork", cast_to=Response, body={"metadata": {"try": "2"}})
    assert (made.output_text, made.metadata) == ("hi", {"try": "2"})
    again = await sdk.responses.create(
        model="antiphon-scripted", input="say more", previous_response_id=made.id
    )
    assert again.output_text == "more"


# ------------------------------------------------------------------------------------------------------------
# Once


async def test_a_keyed_fork_is_made_once(client: httpx.AsyncClient) -> None:
    api = Api(client)
    conversation, response = await api.conversation(user("a")), await api.create("say hi")
    for path in (f"/v1/conversations/{conversation}/fork", f"/v1/responses/{response['id']}/fork"):
        replies = [await client.post(path, json={"metadata": {"a": "b"}}, headers=KEY) for _ in range(3)]
        assert len({reply.content for reply in replies}) == 1
        assert ["idempotent-replayed" in reply.headers for reply in replies] == [False, True, True]
        assert len({reply.headers["content-type"] for reply in replies}) == 1
        other = await api.fails(409, "POST", path, json={"metadata": {}}, headers=KEY)
        assert other["code"] == "idempotency_key_reused"
    assert len(await api.pages("/v1/responses")) == 2


async def test_a_fork_and_its_repeat_after_a_kill_are_one(tmp_path: Path) -> None:
    port = free_port()
    made: dict[str, Json] = {}
    async with child(tmp_path, port) as (process, url), httpx.AsyncClient(base_url=url) as http:
        api = Api(http)
        conversation, response = await api.conversation(user("a")), await api.create("say hi")
        paths = (f"/v1/conversations/{conversation}", f"/v1/responses/{response['id']}")
        for path in paths:
            made[path] = await fork(http, path, **KEY)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with child(tmp_path, port) as (_, url), httpx.AsyncClient(base_url=url) as http:
        for path in paths:
            assert await fork(http, path, **KEY) == made[path]
        assert len(await Api(http).pages("/v1/responses")) == 2
