"""What a server of images is asked, and what is made of its answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.loopback_images import PNG, LoopbackImages, encoded, loopback_images, png
from tools import EgressError, Image, ImageGenerator
from tools.images import ImageFailed


@pytest.fixture
async def images() -> AsyncIterator[LoopbackImages]:
    async with loopback_images() as images:
        yield images


def unseen(index: int, image: Image) -> None:
    raise AssertionError("nothing is shown that was not asked for")


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_the_address_is_the_official_one(url: str) -> None:
    assert ImageGenerator(url).address == "http://host:1/v1/images/generations"


async def test_a_server_is_asked_in_the_official_form(images: LoopbackImages) -> None:
    generator = ImageGenerator(images.url, "flux", "s3cret")
    image = await generator.generate({"prompt": "a cat", "size": "512x512"}, unseen)
    assert images.asked == [
        {"prompt": "a cat", "size": "512x512", "n": 1, "model": "flux", "response_format": "b64_json"}
    ]
    assert images.keys == ["Bearer s3cret"] and "s3cret" not in repr(generator)
    assert image == Image(PNG, len(png()), {"output_format": "png"})
    await replace(generator, model="gpt-image-1", api_key=None).generate({"prompt": "a cat"}, unseen)
    assert images.asked[1] == {"prompt": "a cat", "n": 1, "model": "gpt-image-1"}  # it refuses the other
    assert images.keys[1] is None
    await ImageGenerator(images.url).generate({"prompt": "a cat"}, unseen)
    assert "model" not in images.asked[2]


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        ({"b64_json": PNG, "revised_prompt": "a grey cat"}, {"revised_prompt": "a grey cat"}),
        ({"b64_json": f"data:image/png;base64,{PNG}"}, {}),
        ({"b64_json": "\n".join([PNG[:20], PNG[20:]]), "revised_prompt": ""}, {}),
        ({"url": f"data:image/png;base64,{PNG}"}, {}),
        ({"url": "/made/1.png"}, {}),
    ],
)
async def test_an_image_is_read_however_it_comes(
    images: LoopbackImages, entry: dict[str, str], facts: dict[str, str]
) -> None:
    if entry.get("url", "").startswith("/"):
        entry = {"url": images.url + entry["url"]}
    images.reply = {"created": 1, "size": "1x1", "output_format": "webp", "data": [entry]}
    image = await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert image.base64 == PNG
    assert image.facts == {"size": "1x1", "output_format": "png", **facts}, "the bytes say what they are"


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"\xff\xd8\xff\xe0", "jpeg"), (b"RIFF\0\0\0\0WEBPVP8 ", "webp"), (b"GIF89a", "gif")],
)
async def test_other_kinds_of_images(images: LoopbackImages, data: bytes, kind: str) -> None:
    images.reply = {"data": [{"b64_json": encoded(data)}]}
    image = await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert (base64.b64decode(image.base64), image.facts["output_format"]) == (data, kind)


@pytest.mark.parametrize(
    ("status", "reply", "told"),
    [
        (200, b"<html>", "did not answer with a JSON object"),
        (200, {"data": []}, "made no image"),
        (200, {"data": [{}]}, "made no image"),
        (200, {"data": [{"b64_json": "%%%"}]}, "is no base64"),
        (200, {"data": [{"b64_json": encoded(b"<html>")}]}, "did not answer with a PNG"),
        (200, {"error": "out of memory"}, "failed: out of memory"),
        (500, b"<html>", "answered with status 500."),
        (422, {"detail": "no such size"}, "answered with status 422: no such size"),
        (307, b"", "answered with status 307."),
    ],
)
async def test_a_wrong_answer_is_told(images: LoopbackImages, status: int, reply: Any, told: str) -> None:
    images.status, images.reply = status, reply
    with pytest.raises(ImageFailed) as failed:
        await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert told in str(failed.value)


async def test_an_official_error_is_kept(images: LoopbackImages) -> None:
    fault = {
        "type": "image_generation_user_error",
        "code": "moderation_blocked",
        "message": "no",
        "param": None,
    }
    images.status, images.reply = 400, {"error": fault}
    with pytest.raises(ImageFailed, match="answered with status 400: no") as failed:
        await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert failed.value.told == {name: value for name, value in fault.items() if value is not None}


async def test_an_image_is_bounded_in_bytes_and_time(images: LoopbackImages) -> None:
    large = ImageGenerator(images.url, max_bytes=len(png()) - 1)
    with pytest.raises(ImageFailed, match="at most"):
        await large.generate({"prompt": "x"}, unseen)
    images.reply = b"x" * (2 << 20)
    with pytest.raises(EgressError) as failed:
        await ImageGenerator(images.url, max_bytes=1000).generate({"prompt": "x"}, unseen)
    assert failed.value.kind == "too_large"
    images.hold = True
    with pytest.raises(EgressError) as failed:
        await ImageGenerator(images.url, timeout_s=0.05).generate({"prompt": "x"}, unseen)
    assert failed.value.kind == "too_slow"


async def test_an_image_elsewhere_is_not_fetched(images: LoopbackImages) -> None:
    async with loopback_images() as other:
        images.reply = {"data": [{"url": f"{other.url}/made/1.png"}]}
        with pytest.raises(EgressError) as failed:
            await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert failed.value.kind == "refused"


async def test_a_stream_shows_earlier_forms(images: LoopbackImages) -> None:
    last = encoded(png(9, b"\n" * 100_000))
    images.reply = [
        *({"type": "image_generation.partial_image", "b64_json": PNG, "size": "1x1"} for _ in range(4)),
        {"type": "image_generation.completed", "b64_json": last, "size": "9x1"},
    ]
    seen: list[tuple[int, Image]] = []
    image = await ImageGenerator(images.url).generate(
        {"prompt": "x", "partial_images": 2}, lambda *shown: seen.append(shown)
    )
    assert images.asked[0]["stream"] is True
    assert [index for index, _ in seen] == [0, 1], "no more than were asked for"
    assert {shown.base64 for _, shown in seen} == {PNG}
    assert (image.base64, image.facts["size"]) == (last, "9x1")
    image = await ImageGenerator(images.url).generate({"prompt": "x"}, unseen)
    assert image.base64 == last, "a server may stream unasked"
    images.reply = images.reply[:1]
    with pytest.raises(ImageFailed, match="ended its stream without an image"):
        await ImageGenerator(images.url).generate({"prompt": "x", "partial_images": 1}, lambda *shown: None)
    images.reply = [{"type": "error", "error": {"code": "moderation_blocked", "message": "no"}}]
    with pytest.raises(ImageFailed, match="failed: no") as failed:
        await ImageGenerator(images.url).generate({"prompt": "x", "partial_images": 1}, unseen)
    assert failed.value.told["code"] == "moderation_blocked"
