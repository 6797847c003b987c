"""What a child tells of an image is believed only where it can be one."""

from __future__ import annotations

import base64

import pytest

from tools.documents import Document, DocumentPage, UnreadableDocument
from tools.documents.document import Pixels
from tools.documents.image import image_limits, pixels_of

LIMITS = image_limits(8, 64, 1000)


def told(*pages: str) -> Document:
    return Document("image", tuple(DocumentPage(None, page) for page in pages))


def page(width: int, height: int, num_bytes: int) -> str:
    return f"{width} {height}\n{base64.b64encode(bytes(num_bytes)).decode()}"


def test_an_image_is_its_size_and_its_pixels() -> None:
    assert pixels_of(told(page(2, 3, 18)), LIMITS) == Pixels(2, 3, bytes(18))


@pytest.mark.parametrize(
    "pages",
    [
        (),
        (page(1, 1, 3), page(1, 1, 3)),
        ("",),
        ("1 1",),
        ("1\n",),
        ("1 1 1\n",),
        ("a b\nAAAA",),
        ("1 1\n???",),
        (page(1, 1, 4),),
        (page(0, 0, 0),),
        (page(-1, -1, 3),),
        (page(9, 1, 27),),
        (page(1, 9, 27),),
    ],
)
def test_anything_else_is_no_image(pages: tuple[str, ...]) -> None:
    with pytest.raises(UnreadableDocument) as caught:
        pixels_of(told(*pages), LIMITS)
    assert caught.value.code == "invalid_file"
