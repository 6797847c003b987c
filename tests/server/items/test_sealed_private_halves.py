"""Items that a client keeps itself, with what the model was shown sealed in `antiphon_sealed`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from server.images import ImagesSettings
from tests.server.items.test_web_search import SOURCES, made, searches, searching
from tests.support.loopback_images import loopback_images
from tests.support.loopback_web import LoopbackWeb, loopback_web
from tests.support.running import http_client
from tests.support.talk import Api, prompts, wrote
from tests.support.wire import Json

WEB: Json = {"type": "web_search"}
SEALED = {"include": ["reasoning.encrypted_content"]}
KEPT_BY_CLIENT = {**SEALED, "store": False}
HI = {"role": "user", "content": "hi"}
TURN = {"role": "user", "content": "and now?"}


@pytest.fixture
async def web() -> AsyncIterator[LoopbackWeb]:
    async with loopback_web() as web:
        yield web


def searcher() -> ScriptedEngine:
    """Searches once, answers, and says something else to the next turn."""

    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        if "and now?" in prompt:
            return [Say("so")]
        return [Say("It is high." if request.generation else searches("spring tide"))]

    return ScriptedEngine(says)


async def test_the_next_turn_is_told_the_same_as_with_a_store(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = searcher()
    async with searching(tmp_path, web, engine) as (_, api):
        stored = await api.create("hi", tools=[WEB], **SEALED)
        assert "antiphon_sealed" not in made(stored)[0], "its id is enough"
        await api.create([TURN], tools=[WEB], previous_response_id=stored["id"])
        wanted = prompts(engine)[-1]
        assert "【1】 /p/tides.html" in wanted

        stream = await api.stream("hi", tools=[WEB], **KEPT_BY_CLIENT)
        done = [event["item"] for event in stream.events if event["type"].endswith("output_item.done")]
        assert done == stream.response["output"], "clients that read the stream alone have it too"
        assert made(stream.response)[0]["antiphon_sealed"]
        sent = {"input": [HI, *stream.response["output"], TURN], "tools": [WEB]}
        for more in (KEPT_BY_CLIENT, {"store": False}, {}):
            reply = await api.http.post("/v1/responses", json={**sent, **more})
            assert api.response(reply) and "x-antiphon-ignored" not in reply.headers
            assert prompts(engine)[-1] == wanted
        items = await api.input_items(reply.json()["id"])
        assert "antiphon_sealed" not in str(items), "from here on the server keeps it"
        await api.create([TURN], tools=[WEB], previous_response_id=reply.json()["id"])
        assert "【1】 /p/tides.html" in prompts(engine)[-1]
        shown = await api.http.get(
            f"/v1/responses/{reply.json()['id']}/input_items", params={"include[]": SOURCES}
        )
        assert web.url("/p/tides.html") in shown.text
        counted = await api.http.post("/v1/responses/input_tokens", json=sent)
        assert counted.json()["input_tokens"] == len(engine.requests[-2].prompt_ids)


async def test_sources_keep_their_numbers(tmp_path: Path, web: LoopbackWeb) -> None:
    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        if "and now?" not in prompt:
            return [Say("It is high." if request.generation else searches("spring tide"))]
        return [Say("Yes【1】【2】." if request.generation else searches("horn"))]

    engine = ScriptedEngine(says)
    async with searching(tmp_path, web, engine) as (_, api):
        first = await api.create("hi", tools=[WEB], **KEPT_BY_CLIENT)
        second = await api.create([HI, *first["output"], TURN], tools=[WEB], **KEPT_BY_CLIENT)
        notes = second["output"][-1]["content"][0]["annotations"]
        assert [note["url"] for note in notes] == [web.url("/p/tides.html"), web.url("/p/harbour.html")]


async def test_a_page_that_was_read_is_not_read_again(tmp_path: Path, web: LoopbackWeb) -> None:
    url = web.url("/p/harbour.html")

    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        return [Say("done" if request.generation else wrote("open_page", url=url))]

    async with searching(tmp_path, web, ScriptedEngine(says)) as (_, api):
        start = {"role": "user", "content": f"Read {url}"}
        first = await api.create([start], tools=[WEB], **KEPT_BY_CLIENT)
        await api.create([start, *first["output"], TURN], tools=[WEB], **KEPT_BY_CLIENT)
        assert web.asked == ["/p/harbour.html"]


async def test_without_a_seal_an_item_is_left_out_and_named(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = searcher()
    async with searching(tmp_path, web, engine) as (_, api):
        first = await api.create("hi", tools=[WEB], store=False)
        assert "antiphon_sealed" not in made(first)[0]
        body = {"input": [HI, *first["output"], TURN], "tools": [WEB], "store": False}
        reply = await api.http.post("/v1/responses", json=body)
        assert api.response(reply) and reply.headers["x-antiphon-ignored"] == "input[1]"
        assert "【1】" not in prompts(engine)[-1]
        message = {**first["output"][-1], "antiphon_sealed": "x"}
        reply = await api.http.post("/v1/responses", json={**body, "input": [HI, message, TURN]})
        assert reply.headers["x-antiphon-ignored"] == "input[1].antiphon_sealed", "messages have no such half"


async def test_a_seal_that_does_not_hold_is_refused(tmp_path: Path, web: LoopbackWeb) -> None:
    keys = {"api_key": ("sk-ann", "sk-bob")}
    async with searching(tmp_path, web, searcher(), **keys) as (running, _):
        ann = http_client(running, authorization="Bearer sk-ann")
        bob = http_client(running, authorization="Bearer sk-bob")
        async with ann as of_ann, bob as of_bob:
            api = Api(of_ann)
            search, answer = (await api.create("hi", tools=[WEB], **KEPT_BY_CLIENT))["output"]
            seal: str = search["antiphon_sealed"]
            wrong: list[tuple[Api, Any, str]] = [
                (api, {**search, "antiphon_sealed": f"{seal[:-6]}AAAAAA"}, "changed"),
                (api, {**search, "antiphon_sealed": "hello"}, "did not make it"),
                (api, {**search, "id": "ws_other"}, "made for the item ws_"),
                (Api(of_bob), search, "somebody else"),
            ]
            for whose, item, why in wrong:
                error = await whose.refused(400, [HI, item, answer, TURN], store=False)
                assert (error["code"], error["param"]) == (
                    "invalid_encrypted_content",
                    "input[1].antiphon_sealed",
                )
                assert why in error["message"]
            conversation = await api.conversation()
            path = f"/v1/conversations/{conversation}/items"
            error = await api.fails(400, "POST", path, json={"items": [wrong[0][1]]})
            assert error["param"] == "items[0].antiphon_sealed"
            mistyped = await api.refused(400, [HI, {**search, "antiphon_sealed": 3}])
            assert (mistyped["code"], mistyped["param"]) == ("invalid_type", "input[1].antiphon_sealed")


async def test_a_conversation_takes_sealed_items(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = searcher()
    async with searching(tmp_path, web, engine) as (_, api):
        first = await api.create("hi", tools=[WEB], **KEPT_BY_CLIENT)
        conversation = await api.conversation(HI, *first["output"])
        await api.create([TURN], tools=[WEB], conversation=conversation)
        assert "【1】 /p/tides.html" in prompts(engine)[-1]
        assert "antiphon_sealed" not in str(await api.conversation_items(conversation))


async def test_a_repeat_has_the_same_seal(tmp_path: Path, web: LoopbackWeb) -> None:
    """A response with an Idempotency-Key is stored for its repeats alone."""
    engine = searcher()
    async with searching(tmp_path, web, engine) as (_, api):
        body = {"input": "hi", "tools": [WEB], **KEPT_BY_CLIENT}
        first, again = [
            await api.http.post("/v1/responses", json=body, headers={"idempotency-key": "k"})
            for _ in range(2)
        ]
        assert first.content == again.content and made(first.json())[0]["antiphon_sealed"]
        await api.create([HI, *first.json()["output"], TURN], tools=[WEB], store=False)
        assert "【1】 /p/tides.html" in prompts(engine)[-1]


async def test_an_image_is_told_as_it_was(tmp_path: Path, web: LoopbackWeb) -> None:
    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        done = request.generation or "and now?" in prompt
        return [Say("made" if done else wrote("image_generation", prompt="a cat"))]

    engine = ScriptedEngine(says)
    async with loopback_images() as images:
        table = ImagesSettings(url=images.url)
        images.reply["data"][0]["revised_prompt"] = "a very grey cat"  # type: ignore[index, call-overload]
        async with searching(tmp_path, web, engine, images=table) as (_, api):
            tools = [{"type": "image_generation"}]
            stored = await api.create("hi", tools=tools)
            await api.create([TURN], tools=tools, previous_response_id=stored["id"])
            wanted = prompts(engine)[-1]
            first = await api.create("hi", tools=tools, **KEPT_BY_CLIENT)
            await api.create([HI, *first["output"], TURN], tools=tools, store=False)
            assert prompts(engine)[-1] == wanted and '"a cat"' in wanted
