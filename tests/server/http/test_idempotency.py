"""`Idempotency-Key`: a request is carried out once, however often and wherever it is sent."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, ConflictError
from sqlalchemy import text as text_of_sql

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from server.clock import now_us
from server.http import body as http_body
from server.http import idempotency
from storage import KeyedRequest, KnownRequest, Limits
from tests.server.runs.execution.test_restart import child
from tests.server.runs.test_disconnect import eventually
from tests.support import wire
from tests.support.postgres import Postgres
from tests.support.processes import free_port
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, call, calls, gated, text
from tests.support.wire import Json

KEY = {"idempotency-key": "once"}
ANN, BOB = "sk-ann-0123456789abcdef", "sk-bob-0123456789abcdef"

CHAT: Json = {"model": "antiphon-scripted", "messages": [{"role": "user", "content": "hi"}]}


class Held:
    """A server whose generations wait at a gate, and clients of it."""

    def __init__(self, server: Running, http: httpx.AsyncClient, engine: ScriptedEngine, gate: Gate) -> None:
        self.server, self.http, self.engine, self.gate = server, http, engine, gate
        self.api = Api(http)

    async def post(self, path: str, body: Any = None, *, key: str = "once", **headers: str) -> httpx.Response:
        """POST with a key."""
        return await self.http.post(path, json=body, headers={"idempotency-key": key, **headers})

    async def respond(self, input: Any = "hi", **body: Any) -> httpx.Response:
        """POST /responses with the key."""
        return await self.post("/v1/responses", {"input": input, **body})


@asynccontextmanager
async def held(
    folder: Path, *, live: bool = True, open: bool = False, **settings: Any
) -> AsyncIterator[Held]:
    """`open`: nothing waits at the gate."""
    gate = Gate()
    if open:
        gate.release.set()
    engine = ScriptedEngine(gated(gate))
    app = live_app if live else running_app
    async with app(folder, engine, **settings) as server, http_client(server) as http:
        yield Held(server, http, engine, gate)


def replayed(reply: httpx.Response) -> bool:
    return bool(reply.headers.get("idempotent-replayed") == "true")


def error(reply: httpx.Response, status: int) -> Json:
    assert reply.status_code == status, reply.text
    return wire.validate_error(reply.json())


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_a_repeat_of_a_stream_is_that_stream(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        first = await here.respond(stream=True)
        again = await here.respond(stream=True)
        assert again.content == first.content
        assert (replayed(first), replayed(again)) == (False, True)
        assert len(here.engine.requests) == 1


async def test_a_repeat_that_is_refused_reads_nothing(tmp_path: Path) -> None:
    """A reader that nobody closes would keep the response in memory, and its run at work, for good."""
    async with held(tmp_path) as here:
        here.gate.release.set()
        asked = {"stream": True, "cache_salt": "x"}
        assert (await here.respond(**asked)).status_code == 200
        wrong = {**KEY, "x-antiphon-profile": "bogus"}
        again = await here.http.post("/v1/responses", json={"input": "hi", **asked}, headers=wrong)
        assert again.status_code == 400
        assert here.server.context.runs.feed.total_readers == 0


async def test_a_repeat_of_a_stream_under_way_joins_it_from_its_first_event(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        first = asyncio.create_task(here.respond(stream=True))
        await here.gate.reached.wait()
        async with here.http.stream(
            "POST", "/v1/responses", json={"input": "hi", "stream": True}, headers=KEY
        ) as again:
            chunks = again.aiter_raw()
            seen = await anext(chunks)
            assert b'"sequence_number":0' in seen
            here.gate.release.set()
            seen += b"".join([chunk async for chunk in chunks])
        assert seen == (await first).content
        assert len(here.engine.requests) == 1


async def test_a_repeat_of_a_plain_request_waits_and_gets_the_same_bytes(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        first = asyncio.create_task(here.respond())
        await here.gate.reached.wait()
        second = asyncio.create_task(here.respond())
        await eventually(lambda: here.server.context.runs.feed.total_readers == 2)
        here.gate.release.set()
        replies = [await first, await second, await here.respond()]
        assert len({reply.content for reply in replies}) == 1
        assert [replayed(reply) for reply in replies] == [False, True, True]
        assert text(here.api.response(replies[2])) == "one two three four"


async def test_a_repeat_of_a_background_request_is_the_response_as_it_stands(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        first = here.api.response(await here.respond(background=True))
        async with here.api.follow(first["id"]) as live:
            await live.until("output_text.delta")
        again = await here.respond(background=True)
        assert here.api.response(again)["status"] == "in_progress"
        assert int(again.headers["openai-poll-after-ms"]) > 0
        here.gate.release.set()
        done = await here.api.ended(first["id"])
        again = await here.respond(background=True)
        assert again.json() == done
        assert "openai-poll-after-ms" not in again.headers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_fifty_at_once_are_one_generation(tmp_path: Path, stream: bool, store: bool) -> None:
    async with held(tmp_path, live=False, open=True) as here:
        posts = [here.respond(stream=stream, store=store) for _ in range(50)]
        replies = await asyncio.gather(*posts)
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.content for reply in replies}) == 1
        assert sum(map(replayed, replies)) == 49
        assert len(here.engine.requests) == 1


async def test_a_run_of_another_server_that_was_quicker_is_joined(tmp_path: Path) -> None:
    """Both had looked, both plan: the start transaction decides."""
    async with held(tmp_path, open=True) as here:
        storage = here.server.context.storage
        first = await here.respond()
        look, looked = storage.find_request, asyncio.Event()

        async def too_early(request: KeyedRequest) -> KnownRequest | None:
            if looked.is_set():
                return await look(request)
            looked.set()
            return None

        storage.find_request = too_early  # type: ignore[method-assign]
        again = await here.respond()
        assert looked.is_set()
        assert (again.content, replayed(again)) == (first.content, True)
        assert len(here.engine.requests) == 1


async def test_another_body_is_refused_and_the_order_of_keys_is_no_other_body(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        first = await here.respond("hi", metadata={"a": "1", "b": "2"})
        assert first.status_code == 200
        other = await here.respond("ho", metadata={"a": "1", "b": "2"})
        assert error(other, 409)["code"] == "idempotency_key_reused"
        assert other.headers["x-should-retry"] == "false"
        same = b'{"metadata": {"b":"2",\n "a":"1"}, "input": "hi"}'
        headers = {**KEY, "content-type": "application/json"}
        again = await here.http.post("/v1/responses", content=same, headers=headers)
        assert again.content == first.content


async def test_a_key_is_its_owners(tmp_path: Path) -> None:
    async with held(tmp_path, open=True, api_key=(ANN, BOB)) as here:
        ids = []
        for key in (ANN, BOB, ANN, BOB):
            headers = {"authorization": f"Bearer {key}"}
            ids.append((await here.post("/v1/responses", {"input": "hi"}, **headers)).json()["id"])
        assert ids[:2] == ids[2:] and ids[0] != ids[1]
        assert len(here.engine.requests) == 2


async def test_a_refused_request_does_not_use_its_key_up(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        error(await here.respond(previous_response_id="resp_0"), 400)
        error(await here.respond(temperature=9), 400)
        assert (await here.respond()).status_code == 200


async def test_two_keys_are_refused(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        headers = [("idempotency-key", "one"), ("idempotency-key", "two")]
        reply = await here.http.post("/v1/responses", json={"input": "hi"}, headers=headers)
        assert error(reply, 400)["param"] == "Idempotency-Key"
        assert not here.engine.requests


async def test_a_deleted_response_leaves_its_key_free(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        first = (await here.respond()).json()["id"]
        await here.api.delete(first)
        again = await here.respond()
        assert again.json()["id"] != first and not replayed(again)


async def test_a_client_that_lost_its_connection_finds_its_run(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        left = asyncio.create_task(here.respond(store=False))
        await here.gate.reached.wait()
        left.cancel()
        await eventually(lambda: here.server.context.runs.feed.total_readers == 0)
        again = asyncio.create_task(here.respond(store=False))
        await eventually(lambda: here.server.context.runs.feed.total_readers == 1)
        here.gate.release.set()
        assert text(here.api.response(await again)) == "one two three four"
        assert len(here.engine.requests) == 1


# ------------------------------------------------------------------------------------------------------------
# store=false


async def test_an_unstored_response_is_kept_for_its_repeats_and_for_nothing_else(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        first = await here.respond(store=False)
        response = here.api.response(first)
        assert response["store"] is False
        again = await here.respond(store=False)
        assert (again.content, replayed(again)) == (first.content, True)
        path = f"/v1/responses/{response['id']}"
        for method, suffix in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("GET", "?wait=1"),
            ("GET", "/input_items"),
            ("DELETE", ""),
            ("POST", "/cancel"),
        ):
            await here.api.fails(404, method, path + suffix)
        outputs = {"tool_outputs": [{"call_id": "call_1", "output": "sunny"}]}
        await here.api.fails(404, "POST", f"{path}/tool_outputs", json=outputs)
        assert await here.api.pages("/v1/responses") == []
        unknown = await here.api.refused(400, "hi", previous_response_id=response["id"])
        assert unknown["code"] == "previous_response_not_found"
        reference = {"type": "item_reference", "id": response["output"][0]["id"]}
        await here.api.refused(404, [reference])
        count = {"input": "hi", "previous_response_id": response["id"]}
        await here.api.fails(400, "POST", "/v1/responses/input_tokens", json=count)
        assert (await here.respond(store=False)).content == first.content, "nothing of that touched it"
        assert len(here.engine.requests) == 1


async def test_its_conversation_gets_its_turn_once(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        conversation = await here.api.conversation()
        for _ in range(2):
            await here.respond(store=False, conversation=conversation)
        items = await here.api.conversation_items(conversation)
        assert [item["role"] for item in items] == ["user", "assistant"]
        await here.api.create("and now", conversation=conversation)
        assert len(await here.api.conversation_items(conversation)) == 4


async def test_it_can_be_cancelled_while_it_runs(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        streaming = asyncio.create_task(here.respond(store=False, stream=True))
        await here.gate.reached.wait()
        [run] = here.server.context.runs._tasks._runs.values()
        cancelled = await here.api.cancel(run.plan.response_id)
        assert (cancelled["status"], cancelled["store"]) == ("cancelled", False)
        first = await streaming
        assert (await here.respond(store=False, stream=True)).content == first.content


async def test_it_is_gone_with_its_key(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        first = (await here.respond(store=False)).json()["id"]
        storage = here.server.context.storage
        swept = [one.requests async for one in storage.sweep(Limits(request_age=0), now_us() + 1_000_000)]
        assert sum(swept) == 1
        assert (await here.respond(store=False)).json()["id"] != first


# ------------------------------------------------------------------------------------------------------------
# Tool outputs


async def test_a_continuation_by_tool_outputs_happens_once(server_app: Running) -> None:
    async with http_client(server_app) as http:
        api = Api(http)
        asked = await api.create(call(), tools=[WEATHER])
        body = {"tool_outputs": [{"call_id": calls(asked)[0]["call_id"], "output": "sunny"}]}
        path = f"/v1/responses/{asked['id']}/tool_outputs"
        posts = [http.post(path, json=body, headers=KEY) for _ in range(10)]
        replies = await asyncio.gather(*posts)
        assert len({reply.content for reply in replies}) == 1
        assert text(api.response(replies[0])) == "The tool said: sunny"
        assert len(await api.pages("/v1/responses")) == 2
        other = await http.post(path, json={**body, "stream": True}, headers=KEY)
        assert error(other, 409)["code"] == "idempotency_key_reused"
        streamed = [
            await http.post(path, json={**body, "stream": True}, headers={"idempotency-key": "other"})
            for _ in range(2)
        ]
        assert streamed[0].content == streamed[1].content
        assert len(await api.pages("/v1/responses")) == 3


async def test_outputs_for_a_waiting_run_are_answered_with_the_same_bytes(live_server: Running) -> None:
    async with http_client(live_server) as http:
        api = Api(http)
        begun = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
        waiting = (await http.get(f"/v1/responses/{begun['id']}?wait=30")).json()
        [pending] = waiting["pending_tool_calls"]
        body = {"tool_outputs": [{"call_id": pending["call_id"], "output": "sunny"}]}
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        first = await http.post(path, json=body, headers=KEY)
        done = await api.ended(begun["id"])
        again = await http.post(path, json=body, headers=KEY)
        assert (again.content, replayed(again)) == (first.content, True)
        assert done["status"] == "completed"


# ------------------------------------------------------------------------------------------------------------
# Everything else


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stateless_reply_is_given_again(tmp_path: Path, path: str, stream: bool) -> None:
    body = {**CHAT, "stream": stream} if "chat" in path else {"prompt": "hi", "stream": stream}
    async with held(tmp_path, open=True) as here:
        replies = [await here.post(path, body) for _ in range(2)]
        assert {reply.status_code for reply in replies} == {200}
        assert replies[0].content == replies[1].content
        assert replies[0].headers["content-type"] == replies[1].headers["content-type"]
        assert [replayed(reply) for reply in replies] == [False, True]
        assert len(here.engine.requests) == 1
        body["max_tokens"] = 1
        assert error(await here.post(path, body), 409)["code"] == "idempotency_key_reused"


async def test_a_reply_is_given_again_with_what_it_said_of_ignored_fields(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "hi"})):
            replies = [await here.post(path, {**body, "frobnicate": 1}) for _ in range(2)]
            assert [reply.headers["x-antiphon-ignored"] for reply in replies] == ["frobnicate"] * 2


async def test_what_is_kept_with_what_was_done_names_what_was_ignored(client: httpx.AsyncClient) -> None:
    path = f"/v1/conversations/{(await client.post('/v1/conversations', json={})).json()['id']}"
    more = {"items": [{"role": "user", "content": "hi", "created_at": 1}]}
    for route, body, ignored in (
        ("/v1/conversations", {"frobnicate": 1}, "frobnicate,?foo"),
        (f"{path}/fork", {}, "?foo"),
        (f"{path}/items", more, "items[0].created_at,?foo"),
    ):
        replies = [await client.post(f"{route}?foo", json=body, headers=KEY) for _ in range(2)]
        assert replies[0].content == replies[1].content
        assert [reply.headers["x-antiphon-ignored"] for reply in replies] == [ignored] * 2


async def test_repeats_wait_for_what_is_at_work_here(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        posts = [asyncio.create_task(here.post("/v1/chat/completions", CHAT)) for _ in range(20)]
        await here.gate.reached.wait()
        assert error(await here.post("/v1/chat/completions", {**CHAT, "n": 2}), 409)
        here.gate.release.set()
        replies = await asyncio.gather(*posts)
        assert len({reply.content for reply in replies}) == 1
        assert len(here.engine.requests) == 1


async def test_a_conversation_and_its_items_are_made_once(client: httpx.AsyncClient) -> None:
    made = [await client.post("/v1/conversations", json={}, headers=KEY) for _ in range(2)]
    assert made[0].content == made[1].content
    path = f"/v1/conversations/{made[0].json()['id']}/items"
    items = {"items": [{"role": "user", "content": "hi"}]}
    added = [await client.post(path, json=items, headers=KEY) for _ in range(2)]
    assert added[0].content == added[1].content
    assert len((await client.get(path)).json()["data"]) == 1


async def test_a_cancel_without_a_body_is_repeated(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        begun = await here.api.create("hi", background=True)
        path = f"/v1/responses/{begun['id']}/cancel"
        replies = [await here.http.post(path, headers=KEY) for _ in range(2)]
        assert replies[0].content == replies[1].content
        assert replies[0].json()["status"] == "cancelled"


async def test_an_error_is_no_result(tmp_path: Path) -> None:
    fail = asyncio.Event()
    fail.set()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if fail.is_set():
            raise RuntimeError("once")
        yield Say("well")

    engine = ScriptedEngine(script)
    async with running_app(tmp_path, engine) as server, http_client(server) as http:
        for stream in (False, True):
            fail.set()
            body = {**CHAT, "stream": stream}
            key = {"idempotency-key": f"stream {stream}".replace(" ", "-")}
            error(await http.post("/v1/chat/completions", json=body, headers=key), 500)
            fail.clear()
            again = await http.post("/v1/chat/completions", json=body, headers=key)
            assert (again.status_code, replayed(again)) == (200, False)
        lost = KeyedRequest("local", "/v1/conversations/conv_0/items", "once", b"", now_us())
        error(await http.post(lost.route, json={"items": []}, headers=KEY), 404)
        assert await server.context.storage.find_request(lost) is None


async def test_a_stream_that_failed_in_the_middle_is_no_result(tmp_path: Path) -> None:
    gate = Gate()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield Say("one")
        yield gate.wait()
        if len(engine.requests) == 1:
            raise RuntimeError("once")

    engine = ScriptedEngine(script)
    gate.release.set()
    async with running_app(tmp_path, engine) as server, http_client(server) as http:
        replies = [
            await http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=KEY)
            for _ in range(3)
        ]
        assert b"[DONE]" not in replies[0].content
        assert b"[DONE]" in replies[1].content
        assert replies[2].content == replies[1].content
        assert [replayed(reply) for reply in replies] == [False, False, True]


async def test_a_request_whose_client_left_goes_on_and_is_kept(tmp_path: Path) -> None:
    async with held(tmp_path) as here:
        left = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
        await here.gate.reached.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        again = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
        here.gate.release.set()
        assert (await again).status_code == 200
        assert replayed(await again)
        assert len(here.engine.requests) == 1


async def test_it_goes_on_for_the_grace_and_no_longer(tmp_path: Path) -> None:
    async with held(tmp_path, resume_grace_s=0) as here:
        left = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
        await here.gate.reached.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await eventually(lambda: here.engine.stats().running == 0)
        here.gate.release.set()
        again = await here.post("/v1/chat/completions", CHAT)
        assert (again.status_code, replayed(again)) == (200, False)


async def test_a_reply_that_is_too_large_is_not_kept_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 10)
    async with held(tmp_path, open=True) as here:
        assert (await here.post("/v1/chat/completions", CHAT)).status_code == 200
        again = await here.post("/v1/chat/completions", CHAT)
        assert error(again, 409)["code"] == "idempotency_reply_not_kept"
        assert again.headers["x-should-retry"] == "false"
        assert len(here.engine.requests) == 1


async def test_a_secret_is_not_kept(server_app: Running, client: httpx.AsyncClient) -> None:
    headers = {**KEY, "authorization": f"Bearer {server_app.life.admin_token}"}
    made = await client.post("/admin/keys", json={"name": "ann"}, headers=headers)
    assert made.status_code == 200
    again = await client.post("/admin/keys", json={"name": "ann"}, headers=headers)
    assert error(again, 409)["code"] == "idempotency_reply_not_kept"
    assert len(await server_app.context.storage.list_keys()) == 1


# ------------------------------------------------------------------------------------------------------------
# What was deleted

SAID = "what nobody shall read again"
ITEM: Json = {"type": "message", "role": "user", "content": f"say {SAID}"}
STORED: Json = {**CHAT, "messages": [{"role": "user", "content": f"say {SAID}"}], "store": True}


async def _items(api: Api) -> tuple[str, Json]:
    return f"/v1/conversations/{await api.conversation()}/items", {"items": [ITEM]}


async def _title(api: Api) -> tuple[str, Json]:
    return f"/v1/conversations/{await api.conversation()}", {"title": SAID}


async def _cancel(api: Api) -> tuple[str, Json]:
    waits = {"tools": [WEATHER], "background": True, "await_tool_outputs": True}
    begun = await api.create(call(), metadata={"said": SAID}, **waits)
    await api.waits(begun["id"])
    return f"/v1/responses/{begun['id']}/cancel", {}


async def _fork_of(api: Api, path: str) -> str:
    fork = await api.http.post(path.replace("/items", "/fork"), json={})
    return f"/v1/conversations/{fork.json()['id']}"


async def _deleting_an_item(api: Api, path: str, reply: Json) -> str:
    return f"{path}/{reply['data'][0]['id']}"


async def _deleting_all_items(api: Api, path: str, reply: Json) -> str:
    return path


async def _deleting_an_item_of_a_fork(api: Api, path: str, reply: Json) -> str:
    return f"{await _fork_of(api, path)}/items/{reply['data'][0]['id']}"


async def _deleting_all_items_of_a_fork(api: Api, path: str, reply: Json) -> str:
    return f"{await _fork_of(api, path)}/items"


async def _deleting_what_has_them(api: Api, path: str, reply: Json) -> str:
    return path.removesuffix("/items").removesuffix("/cancel")


async def _deleting_what_was_made(api: Api, path: str, reply: Json) -> str:
    return f"{path}/{reply['id']}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("asking", "deleting"),
    [
        (_items, _deleting_an_item),
        (_items, _deleting_all_items),
        (_items, _deleting_an_item_of_a_fork),
        (_items, _deleting_all_items_of_a_fork),
        (_items, _deleting_what_has_them),
        (_title, _deleting_what_has_them),
        (_cancel, _deleting_what_has_them),
        (("/v1/conversations", {"title": SAID}), _deleting_what_was_made),
        (("/v1/prompts", {"name": SAID, "template": {"instructions": "hi"}}), _deleting_what_was_made),
        (("/v1/chat/completions", STORED), _deleting_what_was_made),
        (("/v1/chat/completions", {**STORED, "stream": True}), _deleting_what_was_made),
    ],
)
async def test_a_repeat_tells_nothing_of_what_was_deleted(
    server_app: Running, client: httpx.AsyncClient, asking: Any, deleting: Any
) -> None:
    api = Api(client)
    path, body = asking if isinstance(asking, tuple) else await asking(api)
    others = await client.post(
        "/v1/conversations", json={"title": SAID}, headers={"idempotency-key": "other"}
    )
    first, again = [await client.post(path, json=body, headers=KEY) for _ in range(2)]
    assert (first.status_code, again.content, replayed(again)) == (200, first.content, True), first.text
    streamed = body.get("stream", False)
    reply = json.loads(first.text.split("\n")[0].removeprefix("data: ")) if streamed else first.json()
    assert all(word in first.text for word in SAID.split())
    gone = await client.delete(await deleting(api, path, reply))
    assert gone.status_code == 200, gone.text
    refused = error(await client.post(path, json=body, headers=KEY), 409)
    assert refused["code"] == "idempotency_reply_not_kept"
    storage = server_app.context.storage
    kept = text_of_sql("SELECT headers, body, num_bytes FROM idempotency WHERE key = 'once'")
    assert await storage._read(lambda conn: conn.execute(kept).all()) == [(None, None, 0)]
    same = await client.post("/v1/conversations", json={"title": SAID}, headers={"idempotency-key": "other"})
    assert (same.content, replayed(same)) == (others.content, True), "others are kept"


# ------------------------------------------------------------------------------------------------------------
# Other processes


REFUSED = b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}'


@asynccontextmanager
async def begun_elsewhere(here: Held, *, alive: bool) -> AsyncIterator[None]:
    """Another process has begun to work on the chat request."""
    storage = here.server.context.storage
    mine, storage.runner = storage.runner, "another"
    if alive:
        await storage.beat()
    asked = _asked(here, "/v1/chat/completions", CHAT)
    assert await storage.begin_request(asked) is None
    storage.runner = mine
    yield
    storage.runner = "another"
    await storage.complete_request(asked, 400, b'[["content-type","application/json"]]', REFUSED)
    storage.runner = mine


def _asked(here: Held, route: str, body: Any) -> KeyedRequest:
    arrived = http_body._Arrived()
    arrived.add(json.dumps(body).encode())
    read = http_body._load(arrived, here.server.life.config, idempotency._digest)
    return KeyedRequest("local", route, "once", read.digest, now_us())


async def test_what_another_server_is_at_is_to_be_asked_again_soon(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here:
        async with begun_elsewhere(here, alive=True):
            busy = await here.post("/v1/chat/completions", CHAT)
            assert error(busy, 409)["code"] == "idempotency_in_progress"
            assert busy.headers["x-should-retry"] == "true"
            assert int(busy.headers["retry-after"]) > 0
            other = await here.post("/v1/chat/completions", {**CHAT, "n": 2})
            assert error(other, 409)["code"] == "idempotency_key_reused"
        assert (await here.post("/v1/chat/completions", CHAT)).content == REFUSED
        assert not here.engine.requests


async def test_what_a_dead_server_was_at_is_done_anew(tmp_path: Path) -> None:
    async with held(tmp_path, open=True) as here, begun_elsewhere(here, alive=False):
        first = await here.post("/v1/chat/completions", CHAT)
        assert (first.status_code, replayed(first)) == (200, False)
        assert (await here.post("/v1/chat/completions", CHAT)).content == first.content


async def test_a_run_is_found_after_a_restart(tmp_path: Path) -> None:
    async with (
        held(tmp_path) as here,
        here.http.stream(
            "POST", "/v1/responses", json={"input": "hi", "stream": True, "store": False}, headers=KEY
        ) as reply,
    ):
        chunks = reply.aiter_raw()
        seen = await anext(chunks)
        await here.gate.reached.wait()
        await here.server.context.runs.drain(0)
        with suppress(httpx.RemoteProtocolError):
            seen += b"".join([chunk async for chunk in chunks])
    async with held(tmp_path, open=True) as here:
        again = await here.respond(stream=True, store=False)
        assert again.content.startswith(seen) and replayed(again)
        done = here.api.whole(again).response
        assert (done["status"], text(done), done["store"]) == ("completed", "one two three four", False)
        assert (await here.respond(stream=True, store=False)).content == again.content
        assert await here.api.pages("/v1/responses") == []


# ------------------------------------------------------------------------------------------------------------
# Two servers on one database


@asynccontextmanager
async def two(folder: Path, postgres: Postgres, *, open: bool = False) -> AsyncIterator[tuple[Held, Held]]:
    url = await postgres.fresh()
    async with (
        held(folder / "one", open=open, db=url) as one,
        held(folder / "two", open=open, db=url) as other,
    ):
        yield one, other
    await postgres.give_back(url)


async def test_fifty_at_two_servers_are_one_generation(tmp_path: Path, postgres: Postgres) -> None:
    async with two(tmp_path, postgres, open=True) as servers:
        posts = [servers[number % 2].respond(store=False) for number in range(50)]
        replies = await asyncio.gather(*posts)
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.content for reply in replies}) == 1
        assert sum(len(server.engine.requests) for server in servers) == 1


async def test_a_repeat_at_another_server_joins_the_stream(tmp_path: Path, postgres: Postgres) -> None:
    async with two(tmp_path, postgres) as (one, other):
        first = asyncio.create_task(one.respond(stream=True))
        await one.gate.reached.wait()
        again = asyncio.create_task(other.respond(stream=True))
        await eventually(lambda: other.server.context.runs.feed.total_readers == 1)
        one.gate.release.set()
        assert (await again).content == (await first).content
        assert replayed(await again) and not other.engine.requests


async def test_another_server_says_what_is_at_work_and_then_gives_the_reply(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with two(tmp_path, postgres) as (one, other):
        first = asyncio.create_task(one.post("/v1/chat/completions", CHAT))
        await one.gate.reached.wait()
        busy = error(await other.post("/v1/chat/completions", CHAT), 409)
        assert busy["code"] == "idempotency_in_progress"
        one.gate.release.set()
        await first
        again = await other.post("/v1/chat/completions", CHAT)
        assert (again.content, replayed(again)) == ((await first).content, True)
        assert not other.engine.requests


# ------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize("key", ["", "a b", "\u00e9", "x" * 256, "a\tb"])
async def test_what_is_no_key_is_refused(client: httpx.AsyncClient, key: str) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    for path in ("/v1/responses", "/v1/conversations"):
        reply = await client.post(path, json={"input": "hi"}, headers=headers)
        refused = error(reply, 400)
        assert (refused["code"], refused["param"]) == ("invalid_idempotency_key", "Idempotency-Key")
    assert (await client.get("/v1/responses", headers=headers)).status_code == 200


async def test_any_visible_ascii_is_a_key(client: httpx.AsyncClient) -> None:
    for key in ("x" * 255, "".join(map(chr, range(0x21, 0x7F)))):
        headers = {"idempotency-key": key}
        replies = [await client.post("/v1/conversations", headers=headers) for _ in range(2)]
        assert replies[0].status_code == 200 and replies[1].content == replies[0].content


# ------------------------------------------------------------------------------------------------------------
# The SDK


async def test_the_sdk_gets_one_response_for_one_key(live_sdk: AsyncOpenAI) -> None:
    first, again = [await live_sdk.responses.create(input="hi", extra_headers=KEY) for _ in range(2)]
    assert first.model_dump() == again.model_dump()
    with pytest.raises(ConflictError):
        await live_sdk.responses.create(input="ho", extra_headers=KEY)


async def test_the_sdk_retries_through_a_kill_and_there_is_one_response(tmp_path: Path) -> None:
    """Its own retry, with nothing but the header, ends at the run that the killed server had begun."""
    port = free_port()
    asked: dict[str, Any] = {"input": "count 300", "extra_headers": KEY}
    async with AsyncOpenAI(api_key="unused", base_url=f"http://127.0.0.1:{port}/v1", max_retries=8) as sdk:
        async with child(tmp_path, port) as (process, url), httpx.AsyncClient(base_url=url) as http:
            asking = asyncio.create_task(sdk.responses.create(**asked))
            begun = await first_response(http)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with child(tmp_path, port) as (_, url), httpx.AsyncClient(base_url=url) as http:
            response = await asking
            assert (response.id, response.status) == (begun, "completed")
            assert len(response.output_text.split()) == 300
            assert (await sdk.responses.create(**asked)).model_dump() == response.model_dump()
            assert len(await Api(http).pages("/v1/responses")) == 1


async def first_response(http: httpx.AsyncClient) -> str:
    """The id of the first response of a server, once it has one that says something."""
    async with asyncio.timeout(20):
        while not (found := (await http.get("/v1/responses")).json()["data"]):
            await asyncio.sleep(0.005)
    response_id: str = found[0]["id"]
    return response_id
