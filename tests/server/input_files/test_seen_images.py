"""Images in messages of models that see: which pixels the model is shown, now, later and after a restart."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.input_files import SeenImages
from server.items import private_of
from tests.support.loopback_web import loopback_web
from tests.support.running import http_client, running_app
from tests.support.seeing import (
    SeeingScript,
    asked,
    base64_source,
    chat,
    color_of,
    data_url,
    encoded,
    messages,
    pictures,
    png,
    size_of,
    uploaded,
)
from tests.support.talk import Api
from tests.support.wire import Json

RED, GREEN = png("red"), png("green")


@pytest.fixture
def engine() -> SeeingScript:
    return SeeingScript()


@pytest.fixture
async def http(tmp_path: Path, engine: SeeingScript) -> AsyncIterator[httpx.AsyncClient]:
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        yield client


async def refused(http: httpx.AsyncClient, image: Json, status: int = 400) -> tuple[str, str]:
    """The code and the field of the error for an image."""
    reply = await http.post("/v1/responses", json={"input": asked(image)})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    return error["code"], error["param"]


async def test_every_endpoint_shows_the_same_pixels(http: httpx.AsyncClient, engine: SeeingScript) -> None:
    api, image = Api(http), {"image_url": data_url(RED)}
    response = await api.create(asked(image))
    (first,) = engine.seen
    assert color_of(first) == (255, 0, 0) and size_of(first) == (30, 20)
    prompt = list(engine.requests[-1].prompt_ids)
    counted = await http.post("/v1/responses/input_tokens", json={"input": asked(image)})
    assert counted.json()["input_tokens"] == len(prompt) == response["usage"]["input_tokens"]
    body = {"messages": chat({"url": data_url(RED), "detail": "high"})}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert list(engine.requests[-1].prompt_ids) == prompt and engine.seen == [first]
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == prompt
    message = {"model": "claude-x", "messages": messages(base64_source(RED))}
    reply = await http.post("/v1/messages", json={**message, "max_tokens": 100})
    assert reply.status_code == 200
    assert engine.seen == [first]
    counted = await http.post("/v1/messages/count_tokens", json=message)
    assert counted.json()["input_tokens"] == len(engine.requests[-1].prompt_ids)
    model = (await http.get("/v1/models")).json()["data"][0]
    assert model["input_modalities"] == ["text", "image"]


async def test_an_image_stays_when_its_file_and_its_server_have_gone(tmp_path: Path) -> None:
    engine = SeeingScript()
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        api, file_id = Api(http), await uploaded(http, RED)
        response = await api.create(asked({"file_id": file_id}))
        (shown,) = engine.seen
        assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200
        items = [{"type": "message", **asked({"image_url": data_url(GREEN)})[0]}]
        conversation = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        api = Api(http)
        await api.create("and now?", previous_response_id=response["id"])
        assert engine.seen == [shown]
        await api.create("and this?", conversation=conversation)
        assert [color_of(picture) for picture in engine.seen] == [(0, 128, 0)]
        # What came without a URL has one where it is asked for.
        path = f"/v1/responses/{response['id']}/input_items"
        include = {"include": ["message.input_image.image_url"]}
        (plain,) = (await http.get(path)).json()["data"]
        reply = await http.get(path, params=include)
        assert "x-antiphon-ignored" not in reply.headers
        (filled,) = reply.json()["data"]
        assert plain["content"][0].get("image_url") is None
        assert filled["content"][0]["image_url"].startswith("data:image/png;base64,")
        # And a client that sends it back sends the same item.
        await api.create([filled, {"role": "user", "content": "again"}])
        assert engine.seen == [shown]


async def test_an_uploaded_image_that_was_read_before_is_not_loaded(
    tmp_path: Path, engine: SeeingScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        api, file_id, opened = Api(http), await uploaded(http, RED), list[str]()
        blobs = running.context.storage.blobs
        real = blobs.open

        def noted(digest: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
            opened.append(digest)
            return real(digest, start, stop)

        monkeypatch.setattr(blobs, "open", noted)
        for _ in range(2):
            await api.create(asked({"file_id": file_id}))
            assert [color_of(picture) for picture in engine.seen] == [(255, 0, 0)]
        assert len(opened) == 1


async def test_outputs_of_tools_and_screens_are_shown_behind_them(
    http: httpx.AsyncClient, engine: SeeingScript
) -> None:
    api = Api(http)
    image = {"type": "input_image", "image_url": data_url(GREEN)}
    items: list[Json] = [
        {"role": "user", "content": "say fine"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [image]},
        {"type": "function_call_output", "call_id": "b", "output": "dark"},
    ]
    await api.create(items)
    prompt = await engine.detokenize(engine.requests[-1].prompt_ids)
    assert prompt.index("shown below") < prompt.index("dark") < prompt.index("(image ")
    assert [color_of(picture) for picture in engine.seen] == [(0, 128, 0)]


ACT = '{"actions": [{"type": "click", "button": "left", "x": 3, "y": 4}, {"type": "screenshot"}]}'


async def test_the_computer_is_operated_by_a_model_that_sees(
    http: httpx.AsyncClient, engine: SeeingScript
) -> None:
    api, tools = Api(http), [{"type": "computer"}]
    response = await api.create(f"call computer {ACT}", tools=tools)
    (call,) = response["output"]
    assert call["type"] == "computer_call" and call["pending_safety_checks"] == []
    assert call["actions"][0] == {"type": "click", "button": "left", "x": 3, "y": 4}
    screen = {"type": "computer_screenshot", "image_url": data_url(RED)}
    output = {"type": "computer_call_output", "call_id": call["call_id"], "output": screen}
    more = await api.create([output], previous_response_id=response["id"], tools=tools)
    assert [color_of(picture) for picture in engine.seen] == [(255, 0, 0)]
    prompt = await engine.detokenize(engine.requests[-1].prompt_ids)
    assert "[a screenshot, shown below]" in prompt and '"button":"left"' in prompt.replace(" ", "")
    assert more["status"] == "completed"
    preview = {
        "type": "computer_use_preview",
        "environment": "linux",
        "display_width": 800,
        "display_height": 600,
    }
    said = 'call computer_use_preview {"action": {"type": "type", "text": "hi"}}'
    (call,) = (await api.create(said, tools=[preview]))["output"]
    assert call["action"] == {"type": "type", "text": "hi"}
    bad = {**output, "output": {**screen, "image_url": data_url(b"no image")}}
    body = {"input": [bad], "previous_response_id": response["id"], "tools": tools}
    error = (await http.post("/v1/responses", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_image_media_type", "input[0].output.image_url")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def turned() -> bytes:
    """A JPEG that says it lies on its side."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x112] = 6
    return encoded("JPEG", exif=exif)


async def test_hostile_images_harm_nothing(http: httpx.AsyncClient, engine: SeeingScript) -> None:
    api = Api(http)
    hostile = {
        "image_too_large": (bomb(60_000, 60_000), encoded("PNG", 0, 10_000, 10_000, "1")),
        "image_parse_error": (png(width=300, height=300)[:200], bomb(3000, 3000)),
        "unsupported_image_media_type": (
            b'<svg xmlns="http://www.w3.org/2000/svg" onload="x"/>',
            b"%PDF-1.7\n",
            encoded("TIFF"),
            RED[:8],
        ),
        "empty_image_file": (b"",),
    }
    for code, files in hostile.items():
        for data in files:
            found = await refused(http, {"image_url": data_url(data)})
            assert found == (code, "input[0].content[0].image_url"), data[:20]
    from PIL import Image

    frames = [Image.new("P", (30, 20), color) for color in (1, 2)]
    harmless: list[tuple[bytes, tuple[int, int]]] = [
        (png(width=1, height=1), (1, 1)),
        (turned(), (20, 30)),
        (encoded("GIF", 1, mode="P", save_all=True, append_images=frames), (30, 20)),
        (encoded("WEBP", (0, 0, 0, 0), mode="RGBA"), (30, 20)),
        (encoded("PNG", 40_000, mode="I;16"), (30, 20)),
        (encoded("JPEG", mode="CMYK"), (30, 20)),
        (png(width=4000, height=1000), (2048, 512)),
    ]
    for data, size in harmless:
        await api.create(asked({"image_url": data_url(data)}))
        assert [size_of(picture) for picture in engine.seen] == [size]
    await api.create(asked({"image_url": data_url(png(width=4000, height=1000)), "detail": "low"}))
    assert [size_of(picture) for picture in engine.seen] == [(512, 128)]


def noise() -> bytes:
    """A small file whose pixels make a PNG of some megabytes."""
    from PIL import Image

    side, data = 1200, io.BytesIO()
    Image.frombytes("RGB", (side, side), os.urandom(3 * side * side)).save(data, "JPEG", quality=5)
    return data.getvalue()


async def test_a_small_request_cannot_hold_pixels_without_end(
    http: httpx.AsyncClient, engine: SeeingScript
) -> None:
    file_id = await uploaded(http, noise())
    await Api(http).create(asked({"file_id": file_id}))
    (picture,) = engine.seen
    fit = (64 << 20) // len(picture.png)
    assert 10 < fit < 99
    body = {"input": asked(*[{"file_id": file_id}] * 100)}
    reply = await http.post("/v1/responses/input_tokens", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "image_file_too_large")
    assert error["param"] == f"input[0].content[{fit}]" and "67108864 bytes together" in error["message"]


async def test_parts_that_name_one_image_share_its_text(tmp_path: Path, engine: SeeingScript) -> None:
    part = {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}
    message = {"type": "message", "role": "user", "content": [part] * 3}
    async with running_app(tmp_path, engine) as running:
        seen = SeenImages(running.context.storage, running.context.config)
        (item,) = await seen.read("owner", [message])
    texts = [form["png"] for form in (private_of(item) or {})["images"].values()]
    assert len(texts) == 3 and all(text is texts[0] for text in texts)
    assert base64.b64decode(texts[0]).startswith(b"\x89PNG")


async def test_an_image_is_named_in_one_way_that_there_is(http: httpx.AsyncClient) -> None:
    at = "input[0].content[0]"
    cases: list[tuple[Json, str, str, int]] = [
        ({}, "invalid_value", at, 400),
        ({"image_url": data_url(RED), "file_id": "file-1"}, "invalid_value", at, 400),
        ({"file_id": "file-1"}, "image_file_not_found", f"{at}.file_id", 404),
        ({"image_url": "data:image/png;base64,???"}, "invalid_base64_image", f"{at}.image_url", 400),
        ({"image_url": "http://127.0.0.1:9/a.png"}, "invalid_image_url", f"{at}.image_url", 400),
        ({"image_url": "ftp://a/b.png"}, "invalid_image_url", f"{at}.image_url", 400),
        ({"image_url": "/etc/passwd"}, "invalid_image_url", f"{at}.image_url", 400),
        ({"image_url": "file://["}, "invalid_image_url", f"{at}.image_url", 400),
    ]
    for image, code, param, status in cases:
        assert await refused(http, image, status) == (code, param), image
    body = {"messages": chat({"url": "data:image/png;base64,???"})}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_base64_image", "messages[0].content[0].image_url")


async def test_images_come_from_folders_and_hosts_that_the_operator_names(tmp_path: Path) -> None:
    engine = SeeingScript()
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "zebra.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(GREEN)
    (folder / "way-out.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    async with pictures({"/a.png": GREEN}) as url:
        settings: dict[str, Any] = {"egress": "any", "allowed_local_media_path": folder}
        async with running_app(tmp_path, engine, **settings) as running, http_client(running) as http:
            api = Api(http)
            for named in (str(folder / "zebra.png"), f"file://{folder}/zebra.png"):
                await api.create(asked({"image_url": named}))
                assert [color_of(picture) for picture in engine.seen] == [(255, 0, 0)]
            for path in ("way-out.png", "../secret.png", "none.png", "", "loop.png", "a" * 300):
                code, _ = await refused(http, {"image_url": f"{folder}/{path}"})
                assert code == "invalid_image_url"
            await api.create(asked({"image_url": f"{url}/a.png"}))
            assert [color_of(picture) for picture in engine.seen] == [(0, 128, 0)]
            code, _ = await refused(http, {"image_url": f"{url}/gone.png"})
            assert code == "failed_to_download_image"
        settings["allowed_media_domains"] = ("*.example.org",)
        async with running_app(tmp_path, engine, **settings) as running, http_client(running) as http:
            code, _ = await refused(http, {"image_url": f"{url}/a.png"})
            assert code == "invalid_image_url"


async def test_a_file_that_the_server_may_not_read_is_refused(
    tmp_path: Path, engine: SeeingScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zebra.png").write_bytes(RED)

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    async with (
        running_app(tmp_path / "data", engine, allowed_local_media_path=tmp_path) as running,
        http_client(running) as http,
    ):
        monkeypatch.setattr(Path, "read_bytes", forbidden)  # whoever runs the tests may read anything
        code, _ = await refused(http, {"image_url": str(tmp_path / "zebra.png")})
    assert code == "invalid_image_url"


async def test_an_address_that_leads_to_what_is_no_url_is_refused(
    tmp_path: Path, engine: SeeingScript
) -> None:
    async with (
        loopback_web() as web,
        running_app(tmp_path, engine, egress_allow=(web.host,)) as running,
        http_client(running) as http,
    ):
        found = await refused(http, {"image_url": web.url("/p/nowhere")})
    assert found == ("failed_to_download_image", "input[0].content[0].image_url")


async def test_a_request_chooses_how_its_images_are_processed_as_far_as_that_is_safe(
    http: httpx.AsyncClient, engine: SeeingScript
) -> None:
    image = asked({"image_url": data_url(RED)})
    asking = {"do_image_splitting": False, "size": {"longest_edge": 1 << 20}}
    reply = await http.post("/v1/responses", json={"input": image, "mm_processor_kwargs": asking})
    assert reply.headers["x-antiphon-ignored"] == "mm_processor_kwargs.size"
    assert engine.options == {"do_image_splitting": False}
    body = {"messages": chat({"url": data_url(RED)}), "mm_processor_kwargs": {"do_image_splitting": 1}}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_type", "mm_processor_kwargs.do_image_splitting")
