"""Images as pixels. What is here runs in a confined process (see `child_process`), but for `pixels_of`.

An image crosses to the server as a document with one page: its size is the page's first line, and its pixels
are the rest, in base64. No byte of the file that a stranger sent reaches the server's own decoders.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING

from tools.documents.document import Document, DocumentPage, Pixels, ReadingLimits, UnreadableDocument

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is read, by Pillow's names: what the official API takes."""


def read_image(data: bytes, limits: ReadingLimits) -> Document:
    """The pixels of an image file; of an animation, those of its first frame. Raises UnreadableDocument, and
    what Pillow raises on what is broken."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the limit is our own
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        message = "It is no PNG, JPEG, WebP or GIF image."
        raise UnreadableDocument("unsupported_file", message) from None
    if image.width * image.height > limits.max_pixels:
        message = f"It has {image.width} x {image.height} pixels; {limits.max_pixels} are read."
        raise UnreadableDocument("too_large", message)
    side = limits.image_side
    try:
        image.draft("RGB", (side, side))  # of a JPEG that is much larger, no more than is needed is decoded
        image.load()
    except (OSError, SyntaxError):  # as Pillow says that a file ends too soon, or is broken
        raise UnreadableDocument("invalid_file", "It is damaged, or not whole.") from None
    image = _opaque(ImageOps.exif_transpose(image))
    if max(image.size) > side:
        scale = side / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    text = f"{image.width} {image.height}\n{base64.b64encode(image.tobytes()).decode()}"
    return Document("image", (DocumentPage(None, text),))


def _opaque(image: Image.Image) -> Image.Image:
    """The same in three colours, upon white where it is transparent."""
    from PIL import Image

    if image.mode.startswith("I"):  # sixteen bits of grey, which a plain conversion would cut off
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


def pixels_of(document: Document, limits: ReadingLimits) -> Pixels:
    """The image that a child has told. Raises UnreadableDocument for what no child of ours tells."""
    try:
        (page,) = document.pages
        size, _, text = page.text.partition("\n")
        width, height = (int(number) for number in size.split(" "))
        rgb = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise UnreadableDocument("invalid_file", "It cannot be read.") from None
    if not (0 < width <= limits.image_side and 0 < height <= limits.image_side):
        raise UnreadableDocument("invalid_file", "It cannot be read.")
    if len(rgb) != 3 * width * height:
        raise UnreadableDocument("invalid_file", "It cannot be read.")
    return Pixels(width, height, rgb)


def image_limits(side: int, max_pixels: int, max_bytes: int) -> ReadingLimits:
    """What the reading of one image may take."""
    return ReadingLimits(
        max_bytes=max_bytes,
        max_pages=1,
        max_chars=4 * side * side + 100,
        cpu_s=20,
        wall_s=30.0,
        image_side=side,
        max_pixels=max_pixels,
    )
