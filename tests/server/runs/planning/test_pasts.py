"""Remembered pasts: what is remembered is what storage would have said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import GenerateRequest, ScriptedEngine
from server.clock import now_us
from server.prompting import to_messages
from server.runs.planning.calls import Calls
from server.runs.planning.pasts import IDLE_S, Pasts, read_items
from storage import ConversationHistory, Storage
from tests.support.running import Running, http_client, running_app
from tests.support.talk import WEATHER, Api, answer, call, calls
from tests.support.wire import Json


async def past_of(server: Running, pasts: Pasts, response_id: str) -> Any:
    """What is remembered, which must be what is stored."""
    storage = server.context.storage
    found = await pasts.of(await storage.get_response("local", response_id), now_us())
    stored = await storage.history("local", previous_response_id=response_id)
    items = [item for item, _ in read_items(stored)]
    assert found.said == read_items(stored)
    assert found.calls == Calls().and_then(found.said)
    assert to_messages(found.items, told=found.told) == to_messages(items)
    return found.items


@pytest.mark.sampled(2)
@pytest.mark.parametrize("max_bytes", [1 << 20, 20_000, 1])
async def test_any_tree_of_turns_has_the_past_that_is_stored(tmp_path: Path, max_bytes: int) -> None:
    """Branches, calls, turns of conversations, deletions, and never more memory than is allowed."""
    drawn = random.Random(max_bytes)
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, pasts = Api(client), Pasts(server.context.storage, max_bytes)
        conversation = await api.conversation()
        ended: list[Json] = [
            await api.create("say first"),
            await api.create("say there", conversation=conversation),
        ]
        for number in range(40):
            parent = drawn.choice(ended[-6:])
            asked: Any = drawn.choice([f"say {number}", call()])
            outputs = [answer(each["call_id"]) for each in calls(parent)]
            if outputs:
                asked = [*outputs, {"role": "user", "content": f"say {number}"}]
            ended.append(await api.create(asked, previous_response_id=parent["id"], tools=[WEATHER]))
            for response in (ended[-1], drawn.choice(ended)):
                await past_of(server, pasts, response["id"])
            if number % 7 == 3:
                gone = ended.pop(drawn.randrange(len(ended)))
                assert (await client.delete(f"/v1/responses/{gone['id']}")).status_code == 200
            assert 0 <= pasts._num_bytes <= max_bytes
        assert pasts._num_bytes == sum(past.num_bytes for past in pasts._pasts.values())


async def test_an_item_that_is_taken_out_of_a_conversation_is_seen_no_more(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, pasts = Api(client), Pasts(server.context.storage)
        items = [{"role": "user", "content": "secret"}]
        made = (await client.post("/v1/conversations", json={"items": items})).json()["id"]
        first = await api.create("say a", conversation=made)
        second = await api.create("say b", previous_response_id=first["id"])
        assert len(await past_of(server, pasts, second["id"])) == 5
        secret = (await api.conversation_items(made))[0]["id"]
        assert (await client.delete(f"/v1/conversations/{made}/items/{secret}")).status_code == 200
        assert len(await past_of(server, pasts, second["id"])) == 4


async def conversation_past_of(server: Running, pasts: Pasts, id: str) -> Any:
    """What is remembered of a conversation, which must be what is stored."""
    storage = server.context.storage
    found = await pasts.of_conversation("local", id, now_us())
    stored = await storage.history("local", conversation_id=id)
    assert found.said == read_items(stored)
    assert found.calls == Calls().and_then(found.said)
    assert to_messages(found.items, told=found.told) == to_messages(found.items)
    assert found.head == (await storage.get_conversation("local", id)).head
    return found.items


@pytest.mark.parametrize("max_bytes", [1 << 20, 20_000, 1])
async def test_any_conversation_has_the_past_that_is_stored(tmp_path: Path, max_bytes: int) -> None:
    """Turns, forks, items that are added and taken out, by this server or by another, and never more memory
    than is allowed."""
    drawn = random.Random(max_bytes)
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, pasts = Api(client), Pasts(server.context.storage, max_bytes)
        ids = [await api.conversation() for _ in range(2)]
        for number in range(40):
            id = drawn.choice(ids)
            if number % 6 == 5:
                forked = await client.post(f"/v1/conversations/{id}/fork", json={})
                ids.append(forked.json()["id"])
            if number % 5 == 3:
                items = [{"role": "user", "content": f"n{number}"}] * drawn.randrange(1, 3)
                assert (
                    await client.post(f"/v1/conversations/{id}/items", json={"items": items})
                ).status_code == 200
            else:
                await api.create(f"say {number}", conversation=id)
            held = await conversation_past_of(server, pasts, id)
            if number % 4 == 2:
                gone = drawn.choice(await api.conversation_items(id))["id"]
                await server.context.storage.delete_conversation_item("local", id, gone, now_us())
                assert len(await conversation_past_of(server, pasts, id)) == len(held) - 1
                for each in ids:
                    await conversation_past_of(server, pasts, each)
            assert 0 <= pasts._num_bytes <= max_bytes
        assert pasts._num_bytes == sum(past.num_bytes for past in pasts._pasts.values())
        assert pasts._used_at.keys() == pasts._pasts.keys()


async def test_a_turn_of_a_conversation_reads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    asked = Storage.conversation_history

    async def watched(storage: Storage, *args: Any, **kwargs: Any) -> ConversationHistory:
        found = await asked(storage, *args, **kwargs)
        read.append(len(found.items))
        return found

    monkeypatch.setattr(Storage, "conversation_history", watched)
    async with running_app(tmp_path, engine := Fresh()) as server, http_client(server) as client:
        api = Api(client)
        id = await api.conversation()
        for number in range(5):
            await api.create(f"say {number}", conversation=id)
        assert read == [0, 2, 2, 2, 2] and engine.num_checked == 5


async def test_what_was_taken_out_of_a_conversation_is_forgotten(tmp_path: Path) -> None:
    """At once where this server took it out, with the next sweep where another did, or nobody came back."""
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, pasts = Api(client), server.context.runs._pasts
        ids = [await api.conversation() for _ in range(4)]
        for id in ids:
            for words in ("say secret", "say on"):
                await api.create(words, conversation=id)
        assert list(pasts._pasts) == ids
        first, second, third, fourth = ids
        secrets = {id: (await api.conversation_items(id))[0]["id"] for id in ids}
        assert (await client.delete(f"/v1/conversations/{first}/items/{secrets[first]}")).status_code == 200
        assert list(pasts._pasts) == [second, third, fourth]
        await server.context.storage.delete_conversation_item("local", second, secrets[second], now_us())
        await server.context.storage.delete_conversation("local", third, now_us())
        await pasts.forget_gone()
        assert list(pasts._pasts) == [fourth]
        pasts._used_at = {id: used_at - IDLE_S - 1 for id, used_at in pasts._used_at.items()}
        await pasts.forget_gone()
        assert not pasts._pasts and not pasts._num_bytes


class Fresh(ScriptedEngine):
    """Holds every prompt against one that nothing was remembered for."""

    num_checked = 0

    def generate(self, request: GenerateRequest, place: Any = None) -> Any:
        text = self.tokenizer.decode(request.prompt_ids)
        assert list(request.prompt_ids) == self.tokenizer.encode(text)
        self.num_checked += 1
        return super().generate(request, place)


async def test_a_deleted_past_is_unknown_and_the_chain_behind_it_goes_on(tmp_path: Path) -> None:
    engine = Fresh()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api, ids = Api(client), list[str]()
        for number in range(12):
            behind = {"previous_response_id": ids[-1]} if ids else {}
            ids.append((await api.create(f"say {number}", **behind))["id"])
        reply = await request_after(client, ids[5])
        assert reply.status_code == 200
        await client.delete(f"/v1/responses/{ids[5]}")
        gone = await request_after(client, ids[5])
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")
        before = len(engine.requests[-1].prompt_ids)
        assert (await request_after(client, ids[-1])).status_code == 200
        assert len(engine.requests[-1].prompt_ids) > before and engine.num_checked == 14


async def test_the_past_of_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    """At once where this server deleted it, with the next sweep where another or retention did."""
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, pasts = Api(client), server.context.runs._pasts
        first = [(await api.create(f"say {number}"))["id"] for number in range(4)]
        for id in first:
            await api.create("say on", previous_response_id=id)
        assert list(pasts._pasts) == first and pasts._num_bytes > 0
        assert (await client.delete(f"/v1/responses/{first[0]}")).status_code == 200
        assert list(pasts._pasts) == first[1:]
        for id in first[1:3]:
            await server.context.storage.delete_response("local", id, now_us())
        assert list(pasts._pasts) == first[1:]
        assert server.life._retention is not None
        await server.life._retention.sweep()
        assert list(pasts._pasts) == first[3:]
        assert pasts._num_bytes == sum(past.num_bytes for past in pasts._pasts.values())


async def request_after(client: httpx.AsyncClient, response_id: str) -> httpx.Response:
    return await client.post("/v1/responses", json={"input": "say on", "previous_response_id": response_id})
