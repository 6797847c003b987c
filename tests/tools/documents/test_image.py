"""An image crosses from the process that decodes it; what that tells is believed only where it can be one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from tools import Pixels, UnreadableDocument, read_image
from tools.documents.image import image_limits
from tools.documents.reader import IMAGES

LIMITS = image_limits(8, 64, 1000)


def hear(told: dict[str, Any], *frames: bytes) -> Pixels:
    """What is heard of a child that tells this."""
    left = list(frames)

    def frame(most: int) -> bytes:
        if not left or len(left[0]) > most:
            raise ValueError("no such frame")
        return left.pop(0)

    return IMAGES.hear(told, frame, LIMITS)


def test_an_image_is_its_size_and_its_pixels() -> None:
    assert hear({"width": 2, "height": 3}, bytes(10), bytes(8)) == Pixels(2, 3, bytes(18))


@pytest.mark.parametrize(
    ("told", "frames"),
    [
        ({}, (bytes(3),)),
        ({"width": 1}, (bytes(3),)),
        ({"width": "1", "height": 1}, (bytes(3),)),
        ({"width": 1.0, "height": 1}, (bytes(3),)),
        ({"width": 0, "height": 0}, ()),
        ({"width": -1, "height": -1}, (bytes(3),)),
        ({"width": 9, "height": 1}, (bytes(27),)),
        ({"width": 1, "height": 9}, (bytes(27),)),
        ({"width": 1, "height": 1}, ()),
        ({"width": 1, "height": 1}, (bytes(4),)),
        ({"width": 1, "height": 1}, (b"",)),
    ],
)
def test_anything_else_is_no_image(told: dict[str, Any], frames: tuple[bytes, ...]) -> None:
    with pytest.raises((ValueError, KeyError)):
        hear(told, *frames)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp", "gif"])
async def test_every_format_is_seen(form: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 20), "white").save(file, form)
    seen = await read_image(file.getvalue(), side=10, max_pixels=800, max_bytes=100_000)
    assert seen == Pixels(10, 5, b"\xff" * 150)


@pytest.mark.parametrize(
    ("size", "max_pixels", "code"), [((40, 21), 800, "too_large"), (None, 800, "unsupported_file")]
)
async def test_what_cannot_be_seen_is_refused(
    size: tuple[int, int] | None, max_pixels: int, code: str
) -> None:
    file = io.BytesIO(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    if size is not None:
        Image.new("RGB", size).save(file, "png")
    with pytest.raises(UnreadableDocument) as caught:
        await read_image(file.getvalue(), side=10, max_pixels=max_pixels, max_bytes=100_000)
    assert caught.value.code == code
