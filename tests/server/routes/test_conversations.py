"""Conversations: a mutable log, its paging, its limits, and what real clients do with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from openai import AsyncOpenAI

from engine import ScriptedEngine
from engine.backends.script import Say, Wait
from server.access import LOCAL_OWNER
from storage import NewItem
from tests.support import wire
from tests.support.owners import two_owners
from tests.support.running import Running, http_client, running_app

Json = dict[str, Any]


def said(*texts: str) -> list[Json]:
    return [{"role": "user", "content": text} for text in texts]


async def make(client: httpx.AsyncClient, *texts: str, **fields: Any) -> str:
    reply = await client.post("/v1/conversations", json={"items": said(*texts), **fields})
    assert reply.status_code == 200, reply.text
    wire.validate("ConversationResource", reply.json())
    made: str = reply.json()["id"]
    assert made.startswith("conv_")
    return made


async def items(client: httpx.AsyncClient, conversation: str, query: str = "") -> Json:
    reply = await client.get(f"/v1/conversations/{conversation}/items?{query}")
    assert reply.status_code == 200, reply.text
    page: Json = reply.json()
    for item in page["data"]:
        wire.validate_item(item, "ConversationItem")
    assert page["first_id"] == (page["data"][0]["id"] if page["data"] else None)
    assert page["last_id"] == (page["data"][-1]["id"] if page["data"] else None)
    return page


def texts(page: Json) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


async def refused(reply: httpx.Response, status: int, param: str | None = None) -> Json:
    assert reply.status_code == status, reply.text
    error = wire.validate_error(reply.json())
    assert error["param"] == param
    return error


# ------------------------------------------------------------------------------------------------------------


async def test_create_read_update_delete(client: httpx.AsyncClient) -> None:
    conversation = await make(client, metadata={"topic": "tea"})
    path = f"/v1/conversations/{conversation}"
    got = (await client.get(path)).json()
    assert got["metadata"] == {"topic": "tea"}
    assert isinstance(got["created_at"], int)
    updated = (await client.post(path, json={"metadata": {"topic": "milk", "n": "1"}})).json()
    assert updated == {**got, "metadata": {"topic": "milk", "n": "1"}, "updated_at": updated["updated_at"]}
    assert (await client.get(path)).json() == updated
    assert (await client.post(path, json={"metadata": None})).json()["metadata"] == {}
    deleted = await client.delete(path)
    assert deleted.json() == {"id": conversation, "object": "conversation.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        await refused(await client.request(method, path), 404, "conversation_id")


@pytest.mark.parametrize("body", [None, {}, {"items": []}, {"items": None, "metadata": None}])
async def test_an_empty_conversation(client: httpx.AsyncClient, body: Json | None) -> None:
    reply = await client.post("/v1/conversations", json=body)
    assert reply.status_code == 200
    page = await items(client, reply.json()["id"])
    assert (page["data"], page["has_more"]) == ([], False)


async def test_items_are_normalised_and_keep_their_order(client: httpx.AsyncClient) -> None:
    conversation = await make(client)
    new = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "7"},
        {
            "type": "message",
            "id": "msg_mine",
            "role": "developer",
            "content": [{"type": "input_text", "text": "x"}],
        },
    ]
    added = (await client.post(f"/v1/conversations/{conversation}/items", json={"items": new})).json()
    wire.validate("ConversationItemList", added)
    assert added["has_more"] is False
    assert [item["type"] for item in added["data"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert added["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert added["data"][1]["content"][0]["type"] == "output_text"
    assert added["data"][4]["id"] == "msg_mine"
    assert all(item["status"] == "completed" for item in added["data"])
    assert (await items(client, conversation, "order=asc"))["data"] == added["data"]
    one = await client.get(f"/v1/conversations/{conversation}/items/msg_mine")
    assert one.json() == added["data"][4]


async def test_paging(client: httpx.AsyncClient) -> None:
    conversation = await make(client, *(str(number) for number in range(20)))
    await client.post(
        f"/v1/conversations/{conversation}/items", json={"items": said("20", "21", "22", "23", "24")}
    )
    newest = await items(client, conversation)
    assert texts(newest) == [str(number) for number in range(24, 4, -1)]
    assert newest["has_more"] is True
    rest = await items(client, conversation, f"after={newest['last_id']}")
    assert texts(rest) == ["4", "3", "2", "1", "0"]
    assert rest["has_more"] is False
    oldest = await items(client, conversation, "order=asc&limit=3")
    assert texts(oldest) == ["0", "1", "2"]
    then = await items(client, conversation, f"order=asc&limit=3&after={oldest['last_id']}")
    assert texts(then) == ["3", "4", "5"]
    exact = await items(client, conversation, "limit=25")
    assert (len(exact["data"]), exact["has_more"]) == (25, False)
    beyond = await items(client, conversation, f"order=asc&after={exact['first_id']}")
    assert beyond["data"] == []
    await refused(await client.get(f"/v1/conversations/{conversation}/items?after=msg_nobody"), 404, "after")


async def test_deleting_an_item_answers_with_the_conversation(client: httpx.AsyncClient) -> None:
    conversation = await make(client, "a", "b", "c")
    page = await items(client, conversation, "order=asc")
    path = f"/v1/conversations/{conversation}/items/{page['data'][1]['id']}"
    deleted = await client.delete(path)
    wire.validate("ConversationResource", deleted.json())
    assert deleted.json()["id"] == conversation
    assert texts(await items(client, conversation, "order=asc")) == ["a", "c"]
    await refused(await client.get(path), 404, "item_id")
    await refused(await client.delete(path), 404, "item_id")
    after_deleted = f"/v1/conversations/{conversation}/items?order=asc&after={page['data'][0]['id']}"
    assert texts((await client.get(after_deleted)).json()) == ["c"]


async def test_limits(client: httpx.AsyncClient) -> None:
    path = f"/v1/conversations/{await make(client)}"
    many = said(*("x" * 21))
    too_many = await client.post("/v1/conversations", json={"items": many})
    await refused(too_many, 400, "items")
    assert too_many.json()["error"]["code"] == "array_above_max_length"
    await refused(await client.post(f"{path}/items", json={"items": many}), 400, "items")
    assert (await client.post(f"{path}/items", json={"items": many[:20]})).status_code == 200
    await refused(await client.post(f"{path}/items", json={}), 400, "items")
    await refused(await client.post(f"{path}/items", json={"items": "text"}), 400, "items")
    await refused(await client.post(f"{path}/items", json={"items": [1]}), 400, "items[0]")
    await refused(await client.post(f"{path}/items?include=nothing", json={"items": []}), 400, "include[0]")
    await refused(await client.post(path, json={}), 400, "metadata")
    wrong: list[Any] = [[], "", 0, False]
    for empty in wrong:
        await refused(await client.post("/v1/conversations", json={"metadata": empty}), 400, "metadata")
    sixteen = {str(number): "v" for number in range(16)}
    assert (await client.post(path, json={"metadata": sixteen})).status_code == 200
    await refused(await client.post(path, json={"metadata": {**sixteen, "17": "v"}}), 400, "metadata")
    await refused(await client.post(path, json={"metadata": {"k": 1}}), 400, "metadata.k")
    await refused(await client.post(path, json={"metadata": {"k": "v" * 513}}), 400, "metadata.k")


async def test_ids_and_references(client: httpx.AsyncClient) -> None:
    first = await make(client, "kept")
    item = (await items(client, first, "timestamps=false"))["data"][0]
    second = await make(client)
    path = f"/v1/conversations/{second}/items"
    reference = {"items": [{"type": "item_reference", "id": item["id"]}]}
    taken = await client.post(f"{path}?timestamps=false", json=reference)
    assert taken.json()["data"] == [item]
    assert (await client.post(path, json={"items": [item]})).status_code == 200  # what we gave is taken back
    unknown = {"items": [{"type": "item_reference", "id": "msg_nobody"}]}
    await refused(await client.post(path, json=unknown), 404, "items[0].id")
    other = {**item, "content": [{"type": "input_text", "text": "changed"}]}
    (renamed,) = (await client.post(f"{path}?timestamps=false", json={"items": [other]})).json()["data"]
    assert renamed == {**other, "id": renamed["id"]} != other  # an id is one item's for good


async def test_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/conversations", json={"items": [], "colour": "red"})
    assert reply.headers["x-antiphon-ignored"] == "colour"
    assert "x-antiphon-ignored" not in (await client.post("/v1/conversations", json={"items": []})).headers


# ------------------------------------------------------------------------------------------------------------
# With turns


async def test_a_turn_sees_the_conversation_and_appends_to_it(client: httpx.AsyncClient) -> None:
    conversation = await make(client, "say ignored")
    for text in ("say one", "say two"):
        turn = await client.post("/v1/responses", json={"input": text, "conversation": conversation})
        assert turn.status_code == 200, turn.text
        assert turn.json()["conversation"] == {"id": conversation}
    page = await items(client, conversation, "order=asc")
    assert texts(page) == ["say ignored", "say one", "one", "say two", "two"]
    assert [item["role"] for item in page["data"]] == ["user", "user", "assistant", "user", "assistant"]


async def test_a_second_turn_at_the_same_time_is_locked_out(tmp_path: Path) -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    engine = ScriptedEngine(lambda request, prompt: [Say("first"), Wait(release, reached), Say(" done")])
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        conversation = await make(client)
        body = {"input": "x", "conversation": conversation}
        turn = asyncio.create_task(client.post("/v1/responses", json=body))
        await reached.wait()
        holder = (await client.get(f"/v1/conversations/{conversation}")).json()["active_response_id"]
        error = await refused(await client.post("/v1/responses", json=body), 400, "conversation")
        assert error["code"] == "conversation_locked" and holder in error["message"]
        assert holder.startswith("resp_")
        extra = await client.post(f"/v1/conversations/{conversation}/items", json={"items": said("aside")})
        assert extra.status_code == 200  # the log itself stays open
        release.set()
        assert (await turn).json()["status"] == "completed"
        assert "active_response_id" not in (await client.get(f"/v1/conversations/{conversation}")).json()
        assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_conversations_survive_a_restart(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        conversation = await make(client, "kept", metadata={"a": "b"})
        before = await items(client, conversation)
    async with running_app(tmp_path) as running, http_client(running) as client:
        assert await items(client, conversation) == before
        assert (await client.get(f"/v1/conversations/{conversation}")).json()["metadata"] == {"a": "b"}


async def test_the_sdk(sdk: AsyncOpenAI) -> None:
    made = await sdk.conversations.create(items=[{"role": "user", "content": "hi"}], metadata={"k": "v"})
    assert (await sdk.conversations.retrieve(made.id)).metadata == {"k": "v"}
    assert (await sdk.conversations.update(made.id, metadata={"k": "w"})).metadata == {"k": "w"}
    for number in range(3):
        batch = [{"role": "user", "content": f"{number}.{each}"} for each in range(20)]
        added = await sdk.conversations.items.create(made.id, items=batch)  # type: ignore[arg-type]
        assert len(added.data) == 20
    everything = [item async for item in sdk.conversations.items.list(made.id, order="asc")]
    assert len(everything) == 61
    last = await sdk.conversations.items.list(made.id, order="desc", limit=1)
    item_id = last.data[0].id
    assert item_id is not None
    assert (await sdk.conversations.items.retrieve(item_id, conversation_id=made.id)).id == item_id
    assert (await sdk.conversations.items.delete(item_id, conversation_id=made.id)).id == made.id
    assert (await sdk.conversations.delete(made.id)).deleted


# ------------------------------------------------------------------------------------------------------------
# What is ours


async def test_a_title_and_when_it_was_used(client: httpx.AsyncClient) -> None:
    conversation = await make(client, title="Tea", metadata={"a": "b"})
    path = f"/v1/conversations/{conversation}"
    got = (await client.get(path)).json()
    assert (got["title"], got["status"]) == ("Tea", "active")
    assert got["updated_at"] >= got["created_at"]
    changed = (await client.post(path, json={"title": "Milk"})).json()
    assert (changed["title"], changed["metadata"]) == ("Milk", {"a": "b"})
    assert "title" not in (await client.post(path, json={"title": None})).json()
    await refused(await client.post(path, json={"title": 7}), 400, "title")
    await refused(await client.post(path, json={"title": "x" * 513}), 400, "title")
    await refused(await client.post(path, json={"status": "closed"}), 400, "status")
    await refused(await client.post("/v1/conversations", json={"title": 7}), 400, "title")


async def test_a_list_of_conversations(client: httpx.AsyncClient) -> None:
    made = [await make(client, title=str(number)) for number in range(4)]
    await client.post(f"/v1/conversations/{made[1]}", json={"status": "archived"})
    await client.delete(f"/v1/conversations/{made[2]}")

    async def listed(**params: Any) -> list[str]:
        page = (await client.get("/v1/conversations", params=params)).json()
        for one in page["data"]:
            wire.validate("ConversationResource", one)
        return [one["id"] for one in page["data"]]

    assert await listed() == [made[3], made[1], made[0]]
    assert await listed(order="asc", limit=1) == [made[0]]
    assert await listed(order="asc", after=made[0]) == [made[1], made[3]]
    assert await listed(status="archived") == [made[1]]
    assert await listed(status="active") == [made[3], made[0]]
    await client.post(f"/v1/conversations/{made[1]}", json={"metadata": {"user": "1", "b": "2"}})
    assert await listed(**{"metadata[b]": "2", "metadata[user]": "1"}) == [made[1]]
    assert await listed(**{"metadata[b]": "1"}) == []
    await refused(await client.get("/v1/conversations?after=conv_none"), 404, "after")
    await refused(await client.get("/v1/conversations?status=closed"), 400, "status")


async def test_lists_hold_the_owners_own(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, two_owners(running) as (own, other):
        conversation = await make(own, "hi", title="mine")
        assert (await other.get("/v1/conversations")).json()["data"] == []
        path = f"/v1/conversations/{conversation}"
        await refused(await other.get(f"/v1/conversations?after={conversation}"), 404, "after")
        await refused(await other.delete(f"{path}/items"), 404, "conversation_id")
        await refused(await other.post(path, json={"title": "theirs"}), 404, "conversation_id")
        assert texts(await items(own, conversation)) == ["hi"]


async def test_an_archived_conversation_takes_nothing_new(client: httpx.AsyncClient) -> None:
    conversation = await make(client, "hi")
    path = f"/v1/conversations/{conversation}"
    await client.post(path, json={"status": "archived"})
    body = {"items": said("more")}
    for reply in (
        await client.post(f"{path}/items", json=body),
        await client.post("/v1/responses", json={"input": "say hi", "conversation": conversation}),
    ):
        error = await refused(reply, 400, "conversation")
        assert error["code"] == "conversation_archived"
    assert texts(await items(client, conversation)) == ["hi"]
    fork = (await client.post(f"{path}/fork")).json()
    assert fork["status"] == "active"
    assert (await client.post(f"/v1/conversations/{fork['id']}/items", json=body)).status_code == 200
    await client.post(path, json={"status": "active"})
    assert (await client.post(f"{path}/items", json=body)).status_code == 200


async def test_all_items_are_taken_out(client: httpx.AsyncClient) -> None:
    conversation = await make(client, "one", "two")
    path = f"/v1/conversations/{conversation}"
    fork = (await client.post(f"{path}/fork")).json()["id"]
    await client.post(f"/v1/conversations/{fork}/items", json={"items": said("three")})
    response = await client.post("/v1/responses", json={"input": "say hi", "conversation": conversation})
    cleared = await client.delete(f"{path}/items")
    wire.validate("ConversationResource", cleared.json())
    assert (await items(client, conversation))["data"] == []
    # What branches share goes out of all of them; what is a fork's own stays.
    assert texts(await items(client, fork)) == ["three"]
    assert (await client.get(f"/v1/responses/{response.json()['id']}")).json() == response.json()
    assert (await client.delete(f"{path}/items")).status_code == 200
    await client.post(f"{path}/items", json={"items": said("anew")})
    assert texts(await items(client, conversation)) == ["anew"]


async def test_items_say_when_they_came(client: httpx.AsyncClient) -> None:
    conversation = await make(client, "one")
    path = f"/v1/conversations/{conversation}/items"
    reply = await client.post("/v1/responses", json={"input": "say hi", "conversation": conversation})
    begun = (await client.get(f"/v1/conversations/{conversation}")).json()["created_at"]
    timed = await items(client, conversation, "order=asc")
    assert [type(item["created_at"]) is int and item["created_at"] >= begun for item in timed["data"]] == [
        True
    ] * 3
    wire.validate("ConversationItemList", timed)
    for item in timed["data"]:
        assert (await client.get(f"{path}/{item['id']}")).json() == item
    plain = await items(client, conversation, "order=asc&timestamps=false")
    assert plain["data"] == [{k: v for k, v in item.items() if k != "created_at"} for item in timed["data"]]
    assert plain["data"][-1] == reply.json()["output"][-1], "a response's items are of no conversation"
    first = timed["data"][0]["id"]
    assert "created_at" not in (await client.get(f"{path}/{first}?timestamps=false")).json()
    assert (await client.get(f"{path}/{first}?timestamps=perhaps")).status_code == 400
    fork = (await client.post(f"/v1/conversations/{conversation}/fork")).json()["id"]
    assert await items(client, fork, "order=asc") == timed


async def test_items_that_are_sent_back_are_the_same_items(client: httpx.AsyncClient) -> None:
    """When an item came is a conversation's to say: a client that says it is told that it does so in vain."""
    conversation = await make(client, "one")
    path = f"/v1/conversations/{conversation}/items"
    await client.post("/v1/responses", json={"input": "say hi", "conversation": conversation})
    shown = (await items(client, conversation, "order=asc"))["data"]
    reply = await client.post(path, json={"items": shown})
    assert reply.json()["data"] == shown and (await items(client, conversation, "order=asc"))["data"] == shown
    ignored = reply.headers["x-antiphon-ignored"].split(",")
    assert ignored == [f"items[{index}].created_at" for index in range(3)]
    body = {"input": [*shown, {"role": "user", "content": "say two"}]}
    made = (await client.post("/v1/responses", json=body)).json()
    listed = (await client.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json()["data"]
    assert [item["id"] for item in listed[:3]] == [item["id"] for item in shown]
    assert not any("created_at" in item for item in listed)
    [claimed] = (await client.post(path, json={"items": [{**said("x")[0], "created_at": 1}]})).json()["data"]
    assert claimed["created_at"] >= shown[0]["created_at"]


async def test_items_of_earlier_versions_say_once_when_they_came(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    """What a client had said of it was kept then; and of some it is not known."""
    conversation = await make(client)
    parts = [{"type": "input_text", "text": "x"}]
    item = {"type": "message", "role": "user", "content": parts, "id": "msg_1", "status": "completed"}
    body = orjson.dumps({**item, "created_at": "noon"})
    storage = server_app.context.storage
    old = NewItem("msg_1", "message", body)
    await storage.add_conversation_items(LOCAL_OWNER, conversation, [old])
    reply = await client.get(f"/v1/conversations/{conversation}/items/msg_1")
    assert reply.text.count("created_at") == 1 and reply.json()["created_at"] is None
    bare = await client.get(f"/v1/conversations/{conversation}/items/msg_1?timestamps=false")
    assert bare.json() == item


async def test_items_keep_the_metadata_of_their_clients(client: httpx.AsyncClient) -> None:
    mine = {"speaker": "ann", "tags": ["a", "b"]}
    item = {**said("say one")[0], "metadata": mine}
    created = await client.post("/v1/conversations", json={"items": [item]})
    assert "x-antiphon-ignored" not in created.headers
    conversation = created.json()["id"]
    output = {"type": "function_call_output", "call_id": "c", "output": "5", "metadata": mine}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = await client.post(f"/v1/conversations/{conversation}/items", json={"items": [call, output]})
    assert "x-antiphon-ignored" not in added.headers
    shown = (await items(client, conversation, "order=asc"))["data"]
    assert [each.get("metadata") for each in shown] == [mine, None, mine]
    reply = await client.post(
        "/v1/responses",
        json={"conversation": conversation, "input": [{**said("say two")[0], "metadata": mine}]},
    )
    assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
    assert (await items(client, conversation, "order=asc"))["data"][3]["metadata"] == mine
    wrong = await client.post("/v1/responses", json={"input": [{**said("x")[0], "metadata": "ann"}]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input[0].metadata"
    again = await client.post(f"/v1/conversations/{conversation}/items", json={"items": [shown[0]]})
    assert [each["id"] for each in again.json()["data"]] == [shown[0]["id"]]
