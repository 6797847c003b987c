"""Reading what is stored: retrieve, list, input items, delete, and who may see what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, gated, gated_at, prompts, text


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


# ------------------------------------------------------------------------------------------------------------
# One response


async def test_a_running_response_shows_the_items_closed_so_far(tmp_path: Path) -> None:
    gate = Gate()

    async def seen(running: Any) -> None:
        api = Api(running)
        async with api.open("hi") as live:
            await gate.reached.wait()
            await live.until("output_item.done")
            now = await api.get(live.id)
            assert (now["status"], now["usage"]) == ("in_progress", None)
            assert [item["type"] for item in now["output"]] == ["reasoning"]
            gate.release.set()
            done = await live.done()
            assert await api.get(live.id) == done

    engine = ScriptedEngine(gated(gate, "<think>\nhm\n</think>\n\none ", "two"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        await seen(client)


async def test_an_unknown_response_is_a_404_everywhere(api: Api) -> None:
    path = "/v1/responses/resp_unknown"
    for method, tail, body in (
        ("GET", "", None),
        ("GET", "?stream=true", None),
        ("DELETE", "", None),
        ("POST", "/cancel", None),
        ("GET", "/input_items", None),
        ("GET", "/input_items?scope=all", None),
        ("POST", "/tool_outputs", {"tool_outputs": [{"call_id": "c", "output": "x"}]}),
    ):
        error = await api.fails(404, method, path + tail, json=body)
        assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
        assert "resp_unknown" in error["message"]
    assert (await api.refused(400, "hi", previous_response_id="resp_unknown"))["code"] == (
        "previous_response_not_found"
    )


@pytest.mark.parametrize(
    "query",
    ["stream=maybe", "include=nonsense", "include[]=nonsense", "stream=true&starting_after=x",
     "stream=true&starting_after=-2"],
)  # fmt: skip
async def test_a_bad_query_is_refused(api: Api, query: str) -> None:
    response = await api.create("say hi")
    error = await api.fails(400, "GET", f"/v1/responses/{response['id']}?{query}")
    assert error["param"]


async def test_include_is_taken_in_both_spellings(api: Api) -> None:
    response = await api.create("say hi")
    for name in ("include", "include[]"):
        params = [(name, "reasoning.encrypted_content"), (name, "message.output_text.logprobs")]
        reply = await api.http.get(f"/v1/responses/{response['id']}", params=params)
        assert api.response(reply) == response


# ------------------------------------------------------------------------------------------------------------
# Lists


async def test_the_list_is_newest_first_and_pages(api: Api) -> None:
    ids = [(await api.create(f"say {n}"))["id"] for n in range(5)]
    assert [r["id"] for r in (await api.page("/v1/responses"))["data"]] == ids[::-1]
    first = await api.page("/v1/responses", limit=2)
    assert ([r["id"] for r in first["data"]], first["has_more"]) == ([ids[4], ids[3]], True)
    assert [r["id"] for r in await api.pages("/v1/responses", limit=2)] == ids[::-1]
    assert [r["id"] for r in await api.pages("/v1/responses", limit=2, order="asc")] == ids
    last = await api.page("/v1/responses", after=ids[0])
    assert (last["data"], last["has_more"]) == ([], False)
    for listed in (await api.page("/v1/responses"))["data"]:
        assert listed == await api.get(listed["id"])


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "order=up", "status=done", "created_after=x"]
)
async def test_bad_list_parameters_are_refused(api: Api, query: str) -> None:
    error = await api.fails(400, "GET", f"/v1/responses?{query}")
    assert error["param"] == query.partition("=")[0]


async def test_an_unknown_cursor_is_a_404(api: Api) -> None:
    response = await api.create("say hi")
    await api.fails(404, "GET", "/v1/responses?after=resp_unknown")
    await api.fails(404, "GET", f"/v1/responses/{response['id']}/input_items?after=msg_unknown")
    await api.fails(404, "GET", f"/v1/responses/{response['id']}/input_items?scope=all&after=msg_unknown")


async def test_the_list_is_filtered_by_status_and_time(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        done = await api.create("say hi")
        short = await api.create("count 90", max_output_tokens=16)
        held = await api.create("say held", background=True)
        async with api.follow(held["id"]) as live:
            await live.until("in_progress")
        for status, wanted in (
            ("completed", [done["id"]]),
            ("incomplete", [short["id"]]),
            ("in_progress", [held["id"]]),
            ("failed", []),
        ):
            page = await api.page("/v1/responses", status=status)
            assert [r["id"] for r in page["data"]] == wanted, status
        born = done["created_at"]
        assert len((await api.page("/v1/responses", created_after=born - 1))["data"]) == 3
        assert (await api.page("/v1/responses", created_before=born - 1))["data"] == []
        assert (await api.page("/v1/responses", created_after=held["created_at"] + 2))["data"] == []
        gate.release.set()
        await api.ended(held["id"])


async def test_the_list_finds_what_waits_and_the_turns_of_a_conversation(api: Api) -> None:
    async def listed(**filters: str) -> list[str]:
        return [each["id"] for each in (await api.page("/v1/responses", **filters))["data"]]

    conversation = (await api.http.post("/v1/conversations", json={})).json()["id"]
    done = await api.create("say hi", conversation=conversation)
    begun = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
    waiting = (await api.http.get(f"/v1/responses/{begun['id']}?wait=20")).json()
    assert waiting["status"] == "in_progress"
    assert await listed(status="waiting") == [begun["id"]]
    assert await listed(status="in_progress") == [begun["id"]]
    assert await listed(conversation=conversation) == [done["id"]]
    assert await listed(conversation=conversation, status="waiting") == []
    assert await listed(conversation="conv_unknown") == []
    assert await listed(model="antiphon-scripted") == [begun["id"], done["id"]]
    assert await listed(model="another") == []
    (pending,) = waiting["pending_tool_calls"]
    outputs = {"tool_outputs": [{"call_id": pending["call_id"], "output": "sunny"}]}
    reply = await api.http.post(f"/v1/responses/{begun['id']}/tool_outputs", json=outputs)
    assert reply.status_code == 200
    await api.ended(begun["id"])
    assert await listed(status="waiting") == []


async def test_the_list_is_filtered_by_metadata(api: Api) -> None:
    both = await api.create("say a", metadata={"user": "1", "a b]": "\N{SNOWMAN}"})
    one = await api.create("say b", metadata={"user": "1"}, background=True)
    fork = (await api.http.post(f"/v1/responses/{both['id']}/fork", json={})).json()
    await api.create("say c", metadata={"user": "2"})
    await api.create("say d")
    found = [each["id"] for each in await api.pages("/v1/responses", limit=1, **{"metadata[user]": "1"})]
    assert found == [fork["id"], one["id"], both["id"]]
    wanted = {"metadata[user]": "1", "metadata[a b]]": "\N{SNOWMAN}"}
    found = [each["id"] for each in await api.pages("/v1/responses", **wanted)]
    assert found == [fork["id"], both["id"]]
    assert await api.pages("/v1/responses", **wanted, **{"metadata[more]": ""}) == []
    error = await api.fails(400, "GET", f"/v1/responses?metadata[{'k' * 65}]=1")
    assert error["param"].startswith("metadata")


@pytest.mark.parametrize(
    ("query", "hint"),
    [("stauts=waiting", "Did you mean 'status'?"), ("limit=1&x=2", "There are: limit, order, after, status")],
)
async def test_a_filter_that_the_list_does_not_know_is_refused(api: Api, query: str, hint: str) -> None:
    error = await api.fails(400, "GET", f"/v1/responses?{query}")
    assert (error["code"], error["param"]) == ("unknown_parameter", query.split("&")[-1].partition("=")[0])
    assert hint in error["message"]


async def test_input_items_are_the_new_input_in_resource_form(api: Api) -> None:
    first = await api.create([{"role": "user", "content": f"message {n}"} for n in range(5)])
    listed = (await api.input_items(first["id"]))["data"]
    assert [item["content"][0]["text"] for item in listed] == [f"message {n}" for n in (4, 3, 2, 1, 0)]
    assert all(item["id"].startswith("msg_") and item["status"] == "completed" for item in listed)
    paged = await api.pages(f"/v1/responses/{first['id']}/input_items", limit=2, order="asc")
    assert paged == listed[::-1]
    second = await api.create("say hi", previous_response_id=first["id"])
    own = (await api.input_items(second["id"]))["data"]
    assert [item["content"][0]["text"] for item in own] == ["say hi"]


async def test_scope_all_adds_the_history(api: Api) -> None:
    first = await api.create("say one")
    second = await api.create("say two", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    everything = await api.pages(path, scope="all", order="asc")
    assert [item["content"][0]["text"] for item in everything] == ["say one", "one", "say two"]
    assert everything[1] == first["output"][0]
    assert await api.pages(path, scope="all", order="asc", limit=1) == everything
    assert await api.pages(path, scope="all", limit=2) == everything[::-1]
    assert (await api.input_items(second["id"], scope="own"))["data"] == everything[2:]


async def test_an_item_that_stands_twice_is_listed_once_and_paging_ends(api: Api) -> None:
    item = {"id": "msg_mine", "role": "user", "content": "say hi"}
    first = await api.create([item])
    second = await api.create([item, {"role": "user", "content": "say ho"}], previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    said = [item["content"][0]["text"] for item in await api.pages(path, scope="all", order="asc", limit=1)]
    assert said == ["say hi", "hi", "say ho"]


# ------------------------------------------------------------------------------------------------------------
# Deleting


async def test_a_deleted_response_is_gone(api: Api) -> None:
    response = await api.create("say hi")
    await api.delete(response["id"])
    for method, tail in (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel")):
        await api.fails(404, method, f"/v1/responses/{response['id']}{tail}")
    await api.fails(404, "DELETE", f"/v1/responses/{response['id']}")
    assert (await api.page("/v1/responses"))["data"] == []
    error = await api.refused(400, "hi", previous_response_id=response["id"])
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert error["message"].startswith(
        f"Previous response with id '{response['id']}' not found. It may have been "
    )
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    await api.refused(404, [reference])


async def test_descendants_of_a_deleted_response_keep_answering(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("say one")
        second = await api.create("say two", previous_response_id=first["id"])
        await api.delete(first["id"])
        third = await api.create("say three", previous_response_id=second["id"])
        assert text(third) == "three"
        assert all(said in prompts(engine)[-1] for said in ("say one", "say two", "say three"))
        assert await api.get(second["id"]) == second
        await api.ended(second["id"])


async def test_deleting_a_run_in_flight_cancels_it_and_its_readers_see_that(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi") as live, api.open("hi", background=True) as other:
            await live.until("output_text.delta")
            await other.until("output_text.delta")
            await api.delete(live.id)
            cancelled = await live.done()
            assert (cancelled["status"], text(cancelled)) == ("cancelled", "one two")
            assert live.events[-1]["type"] == "response.cancelled"
            await api.fails(404, "GET", f"/v1/responses/{live.id}")
            gate.release.set()
            assert (await other.done())["status"] == "completed", "others go on"
        assert server.context.runs.num_active == 0


async def test_a_plain_create_whose_response_is_deleted_gets_it_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    async with running_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        waiting = asyncio.create_task(client.post("/v1/responses", json={"input": "hi"}))
        await gate.reached.wait()
        [running] = (await api.page("/v1/responses"))["data"]
        await api.delete(running["id"])
        cancelled = api.response(await waiting)
        assert (cancelled["id"], cancelled["status"]) == (running["id"], "cancelled")
        await api.fails(404, "GET", f"/v1/responses/{running['id']}")


# ------------------------------------------------------------------------------------------------------------
# Owners


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[tuple[Api, Api]]:
    async with (
        running_app(tmp_path, api_key=("sk-a", "sk-b")) as server,
        http_client(server, authorization="Bearer sk-a") as a,
        http_client(server, authorization="Bearer sk-b") as b,
    ):
        yield Api(a), Api(b)


async def test_a_foreign_response_is_the_404_of_an_unknown_one(tenants: tuple[Api, Api]) -> None:
    mine, theirs = tenants
    response = await mine.create(call(), tools=[WEATHER])
    path = f"/v1/responses/{response['id']}"
    call_id = response["output"][0]["call_id"]
    outputs = {"tool_outputs": [{"call_id": call_id, "output": "x"}]}
    for method, tail, body in (
        ("GET", "", None),
        ("GET", "?stream=true", None),
        ("DELETE", "", None),
        ("POST", "/cancel", None),
        ("GET", "/input_items", None),
        ("GET", "/input_items?scope=all", None),
        ("POST", "/tool_outputs", outputs),
    ):
        foreign = await theirs.fails(404, method, path + tail, json=body)
        unknown = await theirs.fails(404, method, "/v1/responses/resp_unknown" + tail, json=body)
        assert foreign["message"].replace(response["id"], "resp_unknown") == unknown["message"]
        assert {k: foreign[k] for k in ("code", "type", "param")} == {
            k: unknown[k] for k in ("code", "type", "param")
        }
    error = await theirs.refused(400, "hi", previous_response_id=response["id"])
    assert error["code"] == "previous_response_not_found"
    await theirs.refused(404, [{"type": "item_reference", "id": response["output"][0]["id"]}])
    assert (await theirs.page("/v1/responses"))["data"] == []
    continued = await mine.create([answer(call_id)], previous_response_id=response["id"])
    assert continued["status"] == "completed"


async def test_two_owners_may_use_the_same_item_id(tenants: tuple[Api, Api]) -> None:
    for api, said in zip(tenants, ("one", "two"), strict=True):
        response = await api.create([{"id": "msg_same", "role": "user", "content": f"say {said}"}])
        [item] = (await api.input_items(response["id"]))["data"]
        assert (item["id"], item["content"][0]["text"]) == ("msg_same", f"say {said}")


async def test_a_foreign_unstored_run_cannot_be_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate)), api_key=("sk-a", "sk-b")) as server,
        http_client(server, authorization="Bearer sk-a") as a,
        http_client(server, authorization="Bearer sk-b") as b,
        Api(a).open("hi", store=False) as live,
    ):
        await live.until("output_text.delta")
        await Api(b).fails(404, "POST", f"/v1/responses/{live.id}/cancel")
        gate.release.set()
        assert (await live.done())["status"] == "completed"
