"""Images of a conversation that are changed: how the model names them, what the server of images is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from tests.server.items.test_image_generation import made, painting
from tests.support.loopback_images import PNG, LoopbackImages, encoded, loopback_images, png
from tests.support.talk import Api, loose, prompts, saying, text, wrote
from tests.support.wire import Json

TOOL: Json = {"type": "image_generation"}
EDIT: Json = {**TOOL, "action": "edit"}
FIRST, SECOND = png(2), png(3)


@pytest.fixture
async def images() -> AsyncIterator[LoopbackImages]:
    async with loopback_images() as images:
        yield images


def asks(*numbers: int, prompt: str = "in blue") -> str:
    return wrote("image_generation", prompt=prompt, images=[*numbers])


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def shows(*parts: Json) -> list[Json]:
    """A user's message with these images."""
    images = [{"type": "input_image", **part} for part in parts]
    return [{"role": "user", "content": [*images, {"type": "input_text", "text": "Paint it."}]}]


def sent(form: list[tuple[str, str | bytes]]) -> dict[str, str | bytes]:
    return dict(form)


async def uploaded(api: Api, data: bytes) -> str:
    file = {"file": ("a.png", data, "image/png")}
    reply = await api.http.post("/v1/files", files=file, data={"purpose": "vision"})
    found: str = reply.json()["id"]
    return found


async def test_an_image_is_changed(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(2), "There it is."))
    tool = {**EDIT, "size": "1024x1024", "input_fidelity": "high", "output_compression": 50}
    async with painting(tmp_path, images, engine, model="flux") as (_, api):
        given = shows({"image_url": data_url(FIRST)}, {"image_url": data_url(SECOND), "detail": "high"})
        stream = await api.stream(given, tools=[tool])
        (item,) = (await api.input_items(stream.response["id"]))["data"]
    (call,) = made(stream.response)
    assert (call["status"], call["action"], call["images"], call["result"]) == ("completed", "edit", [2], PNG)
    (form,) = images.edited
    assert images.asked == [] and sent(form) == {
        "prompt": "in blue", "size": "1024x1024", "input_fidelity": "high", "output_compression": "50",
        "n": "1", "model": "flux", "response_format": "b64_json", "image": SECOND,
    }  # fmt: skip
    first, second = prompts(engine)
    assert "[image 1, which you cannot see]\n[image 2, which you cannot see]\nPaint it." in first
    assert encoded(FIRST) not in first
    assert '"images": [2]' in second and "It is image 3 of the conversation." in second
    assert item["content"][0]["image_url"] == data_url(FIRST), "the image is kept with its message"


async def test_images_come_from_everywhere(tmp_path: Path, images: LoopbackImages) -> None:
    """From data, from a file, from an address, and from what was made before, by this server or another one;
    in a chain, in a conversation, and where a client keeps the items itself."""
    images.reply = {"data": [{"b64_json": encoded(png(8))}]}

    def says(request: GenerateRequest, prompt: str) -> list[Say]:
        first = wrote("image_generation", prompt="a cat")
        return [Say("done" if request.generation else asks(1, 2, 3, 4, 5, 5) if "Paint" in prompt else first)]

    engine = ScriptedEngine(says)
    host = f"127.0.0.1:{images.port}"
    async with painting(tmp_path, images, engine, egress_allow=(host,)) as (_, api):
        file_id = await uploaded(api, FIRST)
        other = {
            "type": "image_generation_call",
            "id": "ig_1",
            "result": encoded(SECOND),
            "status": "completed",
        }
        start = [{"role": "user", "content": "A cat."}, other]
        given = shows(
            {"image_url": data_url(png(5))}, {"file_id": file_id}, {"image_url": f"{images.url}/made/1"}
        )
        conversation = await api.conversation()
        first = await api.create(start, tools=[TOOL], conversation=conversation)
        assert made(first)[0]["action"] == "generate" and images.edited == []
        chained = await api.create(given, tools=[TOOL], previous_response_id=first["id"])
        talked = await api.create(given, tools=[TOOL], conversation=conversation)
        resent = await api.create([*start, *first["output"], *given], tools=[TOOL], store=False)
    for response in (chained, talked, resent):
        assert made(response)[0]["status"] == "completed", made(response)
    for form in images.edited:
        assert [value for name, value in form if name == "image[]"] == [SECOND, png(8), png(5), FIRST, png()]
    assert len(images.edited) == 3


async def test_the_latest_image_is_changed_where_none_is_named(
    tmp_path: Path, images: LoopbackImages
) -> None:
    engine = loose(saying(wrote("image_generation", prompt="x"), "done"))
    async with painting(tmp_path, images, engine) as (_, api):
        await api.create(shows({"image_url": data_url(FIRST)}, {"image_url": data_url(SECOND)}), tools=[EDIT])
    assert sent(images.edited[0])["image"] == SECOND


async def test_a_mask_goes_with_them(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(1), "done"))
    async with painting(tmp_path, images, engine) as (_, api):
        file_id = await uploaded(api, SECOND)
        for mask in ({"image_url": encoded(SECOND)}, {"image_url": data_url(SECOND)}, {"file_id": file_id}):
            response = await api.create(
                shows({"image_url": data_url(FIRST)}), tools=[{**EDIT, "input_image_mask": mask}]
            )
            assert made(response)[0]["status"] == "completed"
            assert sent(images.edited[-1])["mask"] == SECOND and sent(images.edited[-1])["image"] == FIRST


async def test_images_and_mask_have_so_many_bytes_together(tmp_path: Path, images: LoopbackImages) -> None:
    """Each of them alone may be as large: the form would have them all."""
    engine = ScriptedEngine(saying(asks(1, 2), "sorry"))
    async with painting(tmp_path, images, engine) as (_, api):
        large = {"file_id": await uploaded(api, png(noise=bytes(20 << 20)))}
        given, told = shows(large, large), "the files of one request may have 52428800 bytes together"
        response = await api.create(given, tools=[{**EDIT, "input_image_mask": large}])
        assert made(response)[0]["status"] == "failed" and told in made(response)[0]["error"]["message"]
        assert images.edited == [] and told in prompts(engine)[-1]
        assert made(await api.create(given, tools=[EDIT]))[0]["status"] == "completed"


async def test_what_was_made_before_counts_among_the_bytes(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(1, 2), "sorry"))
    before = {"type": "image_generation_call", "id": "ig_1", "status": "completed"}
    start = [{"role": "user", "content": "A cat."}, {**before, "result": encoded(png(noise=bytes(8 << 20)))}]
    async with painting(tmp_path, images, engine) as (_, api):
        large = {"file_id": await uploaded(api, png(noise=bytes(45 << 20)))}
        response = await api.create([*start, *shows(large)], tools=[EDIT], store=False)
        assert "may have 52428800 bytes together" in made(response)[0]["error"]["message"]
    assert images.edited == []


async def test_earlier_forms_are_shown(tmp_path: Path, images: LoopbackImages) -> None:
    images.reply = [
        {"type": "image_edit.partial_image", "b64_json": PNG, "partial_image_index": 0},
        {"type": "image_edit.completed", "b64_json": encoded(SECOND)},
    ]
    engine = ScriptedEngine(saying(asks(1), "done"))
    async with painting(tmp_path, images, engine) as (_, api):
        stream = await api.stream(
            shows({"image_url": data_url(FIRST)}), tools=[{**EDIT, "partial_images": 1}]
        )
        again = await api.replay(stream.response["id"])
    assert (sent(images.edited[0])["stream"], sent(images.edited[0])["partial_images"]) == ("true", "1")
    assert "image_generation_call.partial_image" in stream.types and again == stream.raw
    assert made(stream.response)[0]["result"] == encoded(SECOND)


async def test_what_cannot_be_changed_is_told_to_the_model(tmp_path: Path, images: LoopbackImages) -> None:
    engine = ScriptedEngine(saying(asks(7), "sorry"))
    async with painting(tmp_path, images, engine) as (_, api):
        response = await api.create("hi", tools=[TOOL])
        assert made(response)[0]["error"]["message"] == "There is no image in the conversation to be changed."
        response = await api.create(shows({"image_url": data_url(FIRST)}), tools=[TOOL])
        assert "There is no image 7: the conversation has 1." in prompts(engine)[-1]
        assert (made(response)[0]["status"], text(response)) == ("failed", "sorry")
    assert images.edited == []


@pytest.mark.parametrize(
    ("part", "status", "code", "member"),
    [
        ({}, 400, "invalid_value", ""),
        ({"image_url": data_url(FIRST), "file_id": "file_1"}, 400, "invalid_value", ""),
        ({"image_url": "data:image/png;base64,???"}, 400, "invalid_value", ".image_url"),
        ({"image_url": data_url(b"<svg/>")}, 400, "unsupported_file", ".image_url"),
        ({"image_url": "http://127.0.0.1:9/a.png"}, 400, "invalid_file_url", ".image_url"),
        ({"image_url": "http://metadata.internal/"}, 400, "invalid_file_url", ".image_url"),
        ({"file_id": "file_none"}, 404, "not_found", ".file_id"),
    ],
)  # fmt: skip
async def test_an_image_that_is_none_is_refused(
    tmp_path: Path, images: LoopbackImages, part: Json, status: int, code: str, member: str
) -> None:
    async with painting(tmp_path, images) as (_, api):
        error = await api.refused(status, shows(part), tools=[TOOL])
    assert (error["code"], error["param"]) == (code, f"input[0].content[0]{member}")


async def test_without_the_tool_images_are_refused(tmp_path: Path, images: LoopbackImages) -> None:
    """Nobody could do anything with them, and the model would answer as if it had seen them."""
    async with painting(tmp_path, images) as (_, api):
        for tools in ([], [{**TOOL, "action": "generate"}]):
            error = await api.refused(400, shows({"image_url": data_url(FIRST)}), tools=tools)
            assert (error["code"], error["param"]) == ("unsupported_content", "input[0].content[0]")
        tool = {**TOOL, "action": "generate", "input_fidelity": "low", "input_image_mask": {"file_id": "f"}}
        reply = await api.http.post("/v1/responses", json={"input": "say hi", "tools": [tool]})
    names = "tools[0].input_fidelity,tools[0].input_image_mask"
    assert reply.headers["x-antiphon-ignored"] == names
