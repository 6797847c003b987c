"""The hosted tool `image_generation`, over a server of images on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from server.images import ImagesSettings
from tests.support.loopback_images import PNG, LoopbackImages, encoded, loopback_images, png
from tests.support.running import Running, http_client, running_app
from tests.support.talk import Api, loose, prompts, saying, text, wrote
from tests.support.wire import Json

TOOL: Json = {"type": "image_generation"}
TOLD = f"The image was made, and the user sees it (png, {len(png())} bytes)."


def asks(prompt: Any = "a grey cat") -> str:
    """What the model writes to make a call."""
    return wrote("image_generation", prompt=prompt)


@pytest.fixture
async def images() -> AsyncIterator[LoopbackImages]:
    async with loopback_images() as images:
        yield images


@asynccontextmanager
async def painting(
    folder: Path, images: LoopbackImages, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[Running, Api]]:
    """A server that has its images made there."""
    table = {name: settings.pop(name) for name in ("model", "idempotent", "max_bytes") if name in settings}
    async with (
        running_app(
            folder, engine, registry=None, images=ImagesSettings(url=images.url, **table), **settings
        ) as running,
        http_client(running) as http,
    ):
        yield running, Api(http)


def made(response: Json) -> list[Json]:
    return [item for item in response["output"] if item["type"] == "image_generation_call"]


async def test_an_image_is_offered_made_and_told(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(), "There it is."))
    async with painting(tmp_path, images, engine) as (_, api):
        stream = await api.stream("A cat, please.", tools=[{**TOOL, "size": "1024x1024", "quality": "low"}])
        own = [kind for kind in stream.types if "image" in kind or kind.startswith("output_item")]
        assert own == [
            "output_item.added", "image_generation_call.in_progress", "image_generation_call.generating",
            "image_generation_call.completed", "output_item.done", "output_item.added", "output_item.done",
        ]  # fmt: skip
        call = dict(made(stream.response)[0])
        assert call.pop("id").startswith("ig_")
        assert call == {
            "type": "image_generation_call", "status": "completed", "result": PNG, "action": "generate",
            "revised_prompt": "a grey cat", "output_format": "png",
        }  # fmt: skip
        added = next(event["item"] for event in stream.events if event["type"].endswith("item.added"))
        assert (added["status"], added["result"]) == ("in_progress", None)
        (asked,) = images.asked
        assert (asked["prompt"], asked["size"], asked["quality"]) == ("a grey cat", "1024x1024", "low")
        offered, told = prompts(engine)
        assert "image_generation" in offered
        assert "a grey cat" in told and TOLD in told and PNG not in told

        stored = await api.get(stream.response["id"])
        assert stored["output"] == stream.response["output"]
        again = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert again.content == stream.raw


async def test_earlier_forms_are_shown_and_come_again(tmp_path: Path, images: LoopbackImages) -> None:
    last = encoded(png(7))
    images.reply = [
        {"type": "image_generation.partial_image", "b64_json": PNG, "size": "1x1", "quality": "low"},
        {"type": "image_generation.partial_image", "b64_json": PNG},
        {"type": "image_generation.completed", "b64_json": last, "size": "7x1"},
    ]
    async with painting(tmp_path, images, ScriptedEngine(saying(asks(), "done"))) as (_, api):
        stream = await api.stream("hi", tools=[{**TOOL, "partial_images": 2}])
        assert (images.asked[0]["partial_images"], images.asked[0]["stream"]) == (2, True)
        partial = [event for event in stream.events if event["type"].endswith("partial_image")]
        assert [event["partial_image_index"] for event in partial] == [0, 1]
        assert (partial[0]["partial_image_b64"], partial[0]["size"], partial[0]["quality"]) == (
            PNG,
            "1x1",
            "low",
        )
        assert (made(stream.response)[0]["result"], made(stream.response)[0]["size"]) == (last, "7x1")
        url = f"/v1/responses/{stream.response['id']}"
        again = await api.http.get(url, params={"stream": "true"})
        assert again.content == stream.raw
        after = {"stream": "true", "starting_after": partial[0]["sequence_number"]}
        rest = await api.http.get(url, params=after)
        assert stream.raw.endswith(rest.content) and rest.content.count(b"partial_image_b64") == 1


async def test_a_choice_of_the_tool_demands_an_image(tmp_path: Path, images: LoopbackImages) -> None:
    async with painting(tmp_path, images) as (_, api):
        asked = 'call image_generation {"prompt": "a cat"}'
        response = await api.create(asked, tools=[TOOL], tool_choice=TOOL)
        assert [item["status"] for item in made(response)] == ["completed"]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}
        response = await api.create("hi", tools=[TOOL], tool_choice=choice)
        assert made(response) == []


async def test_later_turns_are_told_the_same(tmp_path: Path, images: LoopbackImages) -> None:
    """By a chain, by a conversation, by items that the client sends back, and after a restart."""
    images.reply = {"data": [{"b64_json": PNG, "revised_prompt": "a very grey cat"}]}

    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        return [Say("so" if "and now?" in prompt else "made" if request.generation else asks())]

    engine = ScriptedEngine(says)
    async with painting(tmp_path, images, engine) as (_, api):
        conversation = (await api.http.post("/v1/conversations", json={})).json()["id"]
        first = await api.create("hi", tools=[TOOL], conversation=conversation)
        call = made(first)[0]
        assert call["revised_prompt"] == "a very grey cat"
        turn = [{"role": "user", "content": "and now?"}]
        await api.create(turn, tools=[TOOL], previous_response_id=first["id"])
        chained = prompts(engine)[-1]
        assert '"a grey cat"' in chained and "made of this prompt: a very grey cat" in chained
        await api.create(turn, tools=[TOOL], conversation=conversation)
        assert prompts(engine)[-1] == chained
        start = {"role": "user", "content": "hi"}
        whole = [start, *first["output"], *turn]
        named = [start, {"type": "image_generation_call", "id": call["id"]}, first["output"][-1], *turn]
        for history in (whole, named):
            reply = await api.http.post("/v1/responses", json={"input": history, "tools": [TOOL]})
            assert api.response(reply) and "x-antiphon-ignored" not in reply.headers
            assert prompts(engine)[-1] == chained
            items = await api.http.get(
                f"/v1/responses/{reply.json()['id']}/input_items", params={"order": "asc"}
            )
            assert items.json()["data"][1] == call, "the stored item is the one that was sent back"
        stranger = {**call, "id": "ig_elsewhere"}
        reply = await api.http.post(
            "/v1/responses", json={"input": [start, stranger, *turn], "tools": [TOOL]}
        )
        assert api.response(reply) and "x-antiphon-ignored" not in reply.headers
        assert '"a very grey cat"' in prompts(engine)[-1], "what an item says itself is told"
        assert "The image was made, and the user sees it." in prompts(engine)[-1]
        bare = {"type": "image_generation_call", "id": "ig_nobody92"}
        for strange in (bare, {**bare, "status": "completed"}, {**bare, "id": first["output"][-1]["id"]}):
            error = await api.refused(404, [start, strange, *turn], tools=[TOOL])
            assert (error["code"], error["param"]) == ("not_found", "input[1].id"), "nothing is made up"
        twice = [start, {**stranger, "id": "ig_here"}, {**bare, "id": "ig_here"}, *turn]
        await api.create(twice, tools=[TOOL])
    async with painting(tmp_path, images, engine) as (_, api):
        await api.create(turn, tools=[TOOL], previous_response_id=first["id"])
        assert prompts(engine)[-1] == chained


async def test_a_large_image_goes_there_and_back(tmp_path: Path, images: LoopbackImages) -> None:
    """Of three megabytes: in the stream, read again, in the next turn, and sent back by a client."""
    large = encoded(png(9, bytes(range(256)) * (12 << 10)))
    images.reply = {"data": [{"b64_json": large}]}
    engine = ScriptedEngine(saying(asks(), "made"))
    async with painting(tmp_path, images, engine) as (running, api):
        stream = await api.stream("hi", tools=[TOOL])
        assert made(stream.response)[0]["result"] == large
        again = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert again.content == stream.raw
        for _ in range(2):
            await api.create("so?", previous_response_id=stream.response["id"])
        pasts = running.context.runs._pasts
        assert len(pasts._pasts) == 1 and pasts._num_bytes < 100_000, "a past holds no images"
        history = [{"role": "user", "content": "hi"}, *stream.response["output"]]
        await api.create([*history, {"role": "user", "content": "so?"}], store=False)
        assert max(map(len, prompts(engine))) < 10_000


@pytest.mark.parametrize(
    ("member", "value", "code"),
    [
        ("input_fidelity", "middle", "invalid_value"),
        ("input_image_mask", {}, "invalid_value"),
        ("input_image_mask", {"image_url": PNG, "file_id": "file_1"}, "invalid_value"),
        ("action", "paint", "invalid_value"),
        ("background", "green", "invalid_value"),
        ("output_format", "bmp", "invalid_value"),
        ("output_compression", 101, "integer_above_max_value"),
        ("moderation", "none", "invalid_value"),
        ("partial_images", 4, "integer_above_max_value"),
        ("size", 3, "invalid_type"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, images: LoopbackImages, member: str, value: Any, code: str
) -> None:
    async with painting(tmp_path, images) as (_, api):
        error = await api.refused(400, "hi", tools=[{**TOOL, member: value}])
        assert (error["code"], error["param"]) == (code, f"tools[0].{member}")


async def test_the_operators_model_is_asked(tmp_path: Path, images: LoopbackImages) -> None:
    async with painting(tmp_path, images, ScriptedEngine(saying(asks(), "x")), model="flux") as (_, api):
        tool = {**TOOL, "model": "gpt-image-1", "action": "auto", "svg": {}, "partial_images": 0}
        tool["output_compression"] = 0
        reply = await api.http.post("/v1/responses", json={"input": "hi", "tools": [tool]})
        assert made(api.response(reply))[0]["status"] == "completed"
        assert set(reply.headers["x-antiphon-ignored"].split(",")) == {"tools[0].model", "tools[0].svg"}
        (asked,) = images.asked
        assert (asked["model"], asked["output_compression"]) == ("flux", 0) and "partial_images" not in asked


async def test_without_a_server_the_tool_is_refused(tmp_path: Path) -> None:
    async with running_app(tmp_path, registry=None) as running, http_client(running) as http:
        error = await Api(http).refused(400, "hi", tools=[TOOL])
        assert (error["code"], error["param"]) == ("unsupported_tool", "tools[0].type")
        assert "[images] of antiphon.toml" in error["message"]


async def test_what_fails_is_told_to_the_model(tmp_path: Path, images: LoopbackImages) -> None:
    fault = {"type": "image_generation_user_error", "code": "moderation_blocked", "message": "not that"}
    images.status, images.reply = 400, {"error": fault}
    engine = ScriptedEngine(saying(asks(), asks("  "), "sorry"))
    async with painting(tmp_path, images, engine) as (_, api):
        stream = await api.stream("hi", tools=[TOOL])
        refused, empty = made(stream.response)
        assert (refused["status"], refused["result"], refused["error"]) == ("failed", None, fault)
        assert (empty["status"], empty["error"]["type"], empty["error"]["code"]) == (
            "failed",
            "server_error",
            None,
        )
        assert "image_generation_call.completed" not in stream.types
        assert (stream.response["status"], text(stream.response)) == ("completed", "sorry")
        last = prompts(engine)[-1]
        assert "error: The image server answered with status 400: not that" in last
        assert "Give a prompt" in last and len(images.asked) == 1
        start = {"role": "user", "content": "hi"}
        named = {"type": "image_generation_call", "id": refused["id"]}
        await api.create([start, named], store=False)
        assert "error: The image server answered with status 400: not that" in prompts(engine)[-1]
        await api.create([start, {**refused, "id": "ig_other"}], store=False)
        assert "error: not that" in prompts(engine)[-1]


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ('{"prompt": "\\ud800 a"}', "? a"),
        ('{"prompt": 3}', None),
        ("[1]", None),
        ('{"prompt": "a', None),
        ('{"prompt": ' + "[" * 5000, None),
    ],
)
async def test_whatever_the_model_writes_becomes_an_item(
    tmp_path: Path, images: LoopbackImages, arguments: str, prompt: str | None
) -> None:
    call = f'<tool_call>\n{{"name": "image_generation", "arguments": {arguments}}}\n</tool_call>'
    async with painting(tmp_path, images, loose(saying(call, "done"))) as (_, api):
        response = (await api.stream("hi", tools=[TOOL])).response
        assert [item["revised_prompt"] for item in made(response)] == [prompt]
        assert made(response)[0]["status"] == ("completed" if prompt else "failed")
        assert (response["status"], text(response)) == ("completed", "done")


async def test_images_are_counted_and_limited(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks("one"), asks("two"), "no more"))
    async with painting(tmp_path, images, engine, model="flux") as (running, api):
        response = await api.create("hi", tools=[TOOL], max_tool_calls=1)
        assert [item["status"] for item in made(response)] == ["completed", "failed"]
        assert len(images.asked) == 1
        meter = running.life._meter
        assert meter is not None
        await meter.flush()
        asked = {"start_time": response["created_at"] - 60, "group_by[]": "model"}
        page = (await api.http.get("/v1/organization/usage/images", params=asked)).json()
        (result,) = [result for bucket in page["data"] for result in bucket["results"]]
        assert (result["images"], result["num_model_requests"], result["model"]) == (1, 1, "flux")


async def test_the_operator_bounds_what_an_image_takes(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(), "sorry"))
    async with painting(tmp_path, images, engine, max_bytes=10) as (_, api):
        assert made(await api.create("hi", tools=[TOOL]))[0]["status"] == "failed"
        assert "at most 10 are taken" in prompts(engine)[-1]


async def test_a_cancelled_response_ends_its_image(tmp_path: Path, images: LoopbackImages) -> None:
    images.hold = True
    async with painting(tmp_path, images, ScriptedEngine(saying(asks(), "x"))) as (_, api):
        body = {"input": "hi", "tools": [TOOL], "background": True}
        begun = (await api.http.post("/v1/responses", json=body)).json()["id"]
        await images.held.wait()
        reply = await api.http.post(f"/v1/responses/{begun}/cancel")
        assert reply.json()["status"] == "cancelled"
        assert [(item["status"], item["result"]) for item in made(reply.json())] == [("failed", None)]
