"""Chat completions with `store`: kept when they end, listed, changed, deleted, and nobody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from openai import AsyncOpenAI, NotFoundError
from sqlalchemy import insert

from engine import Fail, Say, ScriptedEngine
from server.admin.exports import exported
from storage.tables import runners
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import Gate, gated_at

Json = dict[str, Any]
CHAT = "/v1/chat/completions"


def asking(text: str = "say hello", **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": text}], "store": True, **fields}


async def made(client: httpx.AsyncClient, text: str = "say hello", **fields: Any) -> Json:
    reply = await client.post(CHAT, json=asking(text, **fields))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def listed(client: httpx.AsyncClient, **params: Any) -> list[str]:
    reply = await client.get(CHAT, params=params)
    assert reply.status_code == 200, reply.text
    if reply.json()["data"]:
        wire.validate("ChatCompletionList", reply.json())
    return [stored["id"] for stored in reply.json()["data"]]


async def test_the_round_trip_of_the_official_client(sdk: AsyncOpenAI) -> None:
    completions = sdk.chat.completions
    hello: list[Any] = [{"role": "user", "content": "say hello"}]
    first = await completions.create(model="antiphon-scripted", messages=hello, store=True)
    second = await completions.create(
        model="antiphon-scripted", messages=hello, store=True, metadata={"topic": "b"}, n=2
    )
    await completions.create(model="antiphon-scripted", messages=hello)
    assert [each.id async for each in completions.list()] == [first.id, second.id]
    assert [each.id async for each in completions.list(order="desc", limit=1)] == [second.id, first.id]
    assert [each.id async for each in completions.list(metadata={"topic": "b"})] == [second.id]
    assert [each.id async for each in completions.list(model="another")] == []
    assert (await completions.retrieve(second.id)).model_dump() == second.model_dump()
    changed = await completions.update(first.id, metadata={"topic": "c"})
    assert changed.model_dump()["metadata"] == {"topic": "c"}
    assert [each.id async for each in completions.list(metadata={"topic": "c"})] == [first.id]
    (message,) = [each async for each in completions.messages.list(first.id)]
    assert (message.role, message.content) == ("user", "say hello")
    assert (await completions.delete(first.id)).deleted
    with pytest.raises(NotFoundError):
        await completions.retrieve(first.id)
    assert [each.id async for each in completions.list()] == [second.id]


async def test_what_is_stored_is_what_was_answered(client: httpx.AsyncClient) -> None:
    whole = await made(client, "think hm so", metadata={"a": "b"}, logprobs=True)
    wire.validate("CreateChatCompletionResponse", whole)
    assert whole["metadata"] == {"a": "b"}
    assert (await client.get(f"{CHAT}/{whole['id']}")).json() == whole


@pytest.mark.parametrize("text", ["say one two three", "count 30"])
async def test_a_stream_is_stored_as_a_whole(client: httpx.AsyncClient, text: str) -> None:
    reply = await client.post(CHAT, json=asking(text, stream=True, seed=1, n=2))
    chunks = wire.chunks(reply.content)
    folded = wire.check_chunks(chunks, "CreateChatCompletionStreamResponse")
    (id,) = await listed(client)
    assert id == chunks[0]["id"]
    stored = (await client.get(f"{CHAT}/{id}")).json()
    plain = await made(client, text, seed=1, n=2, store=False)
    assert stored["choices"] == plain["choices"] and stored["usage"] == plain["usage"]
    assert [choice["message"]["content"] for choice in folded] == [
        choice["message"]["content"] for choice in stored["choices"]
    ]
    assert stored["metadata"] == {}


async def test_the_messages_have_pages(client: httpx.AsyncClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Json] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "user", "content": "say bye"},
    ]
    id = (await made(client, messages=messages))["id"]

    async def page(**params: Any) -> Json:
        reply = await client.get(f"{CHAT}/{id}/messages", params=params)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    whole = await page()
    assert [each["role"] for each in whole["data"]] == [each["role"] for each in messages]
    assert [each["id"] for each in whole["data"]] == [f"{id}-{place}" for place in range(5)]
    system, parts, calling, answer, _ = whole["data"]
    assert (system["content"], system["content_parts"]) == ("Be kind.", None)
    assert (parts["content"], parts["content_parts"]) == ("say hi", messages[1]["content"])
    assert (calling["content"], calling["tool_calls"]) == (None, [call])
    assert answer["tool_call_id"] == "call_1"
    assert not whole["has_more"]
    first = await page(limit=2)
    assert first["has_more"] and first["last_id"] == f"{id}-1"
    rest = await page(after=first["last_id"])
    assert first["data"] + rest["data"] == whole["data"]
    assert (await page(order="desc"))["data"] == whole["data"][::-1]
    reply = await client.get(f"{CHAT}/{id}/messages", params={"after": "msg_1"})
    assert (reply.status_code, wire.validate_error(reply.json())["param"]) == (404, "after")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/chatcmpl-1", None, 404, None),
        ("GET", "/chatcmpl-1/messages", None, 404, None),
        ("DELETE", "/chatcmpl-1", None, 404, None),
        ("POST", "/chatcmpl-1", {"metadata": {}}, 404, None),
        ("POST", "/chatcmpl-1", {}, 400, "metadata"),
        ("POST", "/chatcmpl-1", {"metadata": {"a": 1}}, 400, "metadata.a"),
        ("POST", "/chatcmpl-1", {"metadata": {"a" * 65: "b"}}, 400, None),
        ("GET", "?limit=0", None, 400, "limit"),
        ("GET", "?order=up", None, 400, "order"),
        ("GET", "?after=chatcmpl-1", None, 404, None),
        ("GET", "?metadata[a]=" + "b" * 513, None, 400, "metadata.a"),
        ("GET", "?metadata=a", None, 400, "metadata"),
        ("GET", "?metadata[a=b", None, 400, "metadata"),
        ("GET", "?model[]=a", None, 400, "model[]"),
        ("POST", "", asking(metadata={"a": 1}), 400, "metadata.a"),
        ("POST", "", asking(store="yes"), 400, "store"),
        ("POST", "", asking(request_id="a b"), 400, "request_id"),
        ("POST", "", asking(request_id=""), 400, "request_id"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, method: str, path: str, body: Json | None, status: int, param: str | None
) -> None:
    reply = await client.request(method, CHAT + path, json=body)
    assert reply.status_code == status, reply.text
    error = wire.validate_error(reply.json())
    assert param is None or error["param"] == param


async def test_they_are_their_owners(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:key-of-ann\nbob:key-of-bob\n")
    async with running_app(tmp_path, api_key_file=keys) as running:
        ann, bob = {"authorization": "Bearer key-of-ann"}, {"authorization": "Bearer key-of-bob"}
        async with http_client(running, **ann) as hers, http_client(running, **bob) as his:
            id = (await made(hers, metadata={"a": "b"}))["id"]
            assert await listed(hers) == [id] and await listed(his) == []
            assert await listed(his, **{"metadata[a]": "b"}) == []
            for method, path in (("GET", ""), ("GET", "/messages"), ("DELETE", "")):
                assert (await his.request(method, f"{CHAT}/{id}{path}")).status_code == 404
            assert (await his.post(f"{CHAT}/{id}", json={"metadata": {}})).status_code == 404
            # The name that a client gives is its own.
            named = (await made(hers, request_id="mine"))["id"]
            assert named == "chatcmpl-mine" == (await made(his, request_id="mine"))["id"]
            again = await hers.post(CHAT, json=asking(request_id="mine"))
            error = wire.validate_error(again.json())
            assert (again.status_code, error["code"], error["param"]) == (
                400, "request_id_taken", "request_id"
            )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_is_taken_from_the_beginning(tmp_path: Path, stream: bool) -> None:
    """Another server on the database cannot end a completion of the same id first: who is second hears it
    before anything is made for it."""
    gate = Gate()
    async with running_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as running:
        completions = running.context.completions
        async with http_client(running) as client:
            asked = asking("say one\nhold\nsay two", request_id="mine", stream=stream)
            first = asyncio.create_task(client.post(CHAT, json=asked))
            await gate.reached.wait()
            # To another process this one's list of completions at work is not known.
            known, completions._found = completions._found, {}
            elsewhere = running.context.storage
            alive = insert(runners).values(id=elsewhere.runner, beat=1)
            await elsewhere._write(lambda conn: conn.execute(alive))
            runner, elsewhere.runner = elsewhere.runner, "another"
            second = await client.post(CHAT, json=asked)
            completions._found, elsewhere.runner = known, runner
            assert second.status_code == 400, second.text
            assert wire.validate_error(second.json())["code"] == "request_id_taken"
            gate.release.set()
            assert (await first).status_code == 200
            assert await listed(client) == ["chatcmpl-mine"]
            assert (await client.post(CHAT, json=asked)).status_code == 400
            assert (await client.delete(f"{CHAT}/chatcmpl-mine")).status_code == 200
            assert (await client.post(CHAT, json=asked)).status_code == 200, "the claim went with its work"


async def test_what_fails_is_not_stored(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request, prompt: iter((Say("half "), Fail(RuntimeError("broken")))))
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        assert (await client.post(CHAT, json=asking())).status_code == 500
        reply = await client.post(CHAT, json=asking(stream=True))
        assert b"[DONE]" not in reply.content
        assert await listed(client) == []


async def test_they_outlive_the_server(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        whole = await made(client, metadata={"a": "b"})
    async with running_app(tmp_path) as running, http_client(running) as client:
        assert (await client.get(f"{CHAT}/{whole['id']}")).json() == whole


async def test_a_repeat_stores_nothing_again(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        key = {"idempotency-key": f"key-{stream}"}
        replies = [await client.post(CHAT, json=asking(stream=stream), headers=key) for _ in range(2)]
        assert replies[0].content == replies[1].content
        assert replies[1].headers["idempotent-replayed"] == "true"
    assert len(await listed(client)) == 2


async def test_a_server_that_stores_nothing_says_so(tmp_path: Path) -> None:
    async with running_app(tmp_path, store=False) as running, http_client(running) as client:
        reply = await client.post(CHAT, json=asking(metadata={"a": "b"}))
        assert reply.headers["x-antiphon-ignored"] == "store,metadata"
        assert await listed(client) == []


async def test_bytes_count(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_bytes_per_owner=3000) as running, http_client(running) as client:
        await made(client)
        reply = await client.post(CHAT, json=asking("say " + "x" * 4000))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "insufficient_quota")


async def test_the_sweep_lets_the_old_ones_go(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_responses_per_owner=2) as running, http_client(running) as client:
        ids = [(await made(client))["id"] for _ in range(4)]
        assert running.life._retention is not None
        await running.life._retention.sweep()
        assert await listed(client) == ids[2:]


async def test_an_export_has_them(server_app: Running, client: httpx.AsyncClient) -> None:
    whole = await made(client, metadata={"a": "b"})
    storage = server_app.context.storage
    pieces = [piece async for piece in exported(storage, "local")]
    lines = map(orjson.loads, b"".join(pieces).splitlines())
    (line,) = [line for line in lines if line["type"] == "chat_completion"]
    assert line["chat_completion"] == whole
    assert line["messages"] == asking()["messages"]


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with live_app(tmp_path, ScriptedEngine(tick_s=0.05)) as running, http_client(running) as client:
        async with client.stream("POST", CHAT, json=asking("count 200", stream=True)) as reply:
            await anext(reply.aiter_bytes())
        while list(running.context.completions):
            await client.get("/health")
        assert await listed(client) == []
