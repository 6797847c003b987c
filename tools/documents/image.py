"""Images as pixels. What is here runs in a confined process: no byte of the file that a stranger sent reaches
the server's own decoders.
"""

from __future__ import annotations

import gc
import importlib
import io
from typing import TYPE_CHECKING

from tools.documents.document import Pixels, ReadingLimits, UnreadableDocument

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is read, by Pillow's names: what the official API takes."""

PLUGINS = ("PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin")
"""The modules of Pillow that read them, which it loads by itself only where it may open files."""


def prepare() -> None:
    """Load what decodes, so that whoever is forked has it. ModuleNotFoundError where it is not installed."""
    for name in ("Image", "ImageOps", *PLUGINS):
        importlib.import_module(f"PIL.{name}")
    gc.collect()
    gc.freeze()


def parse(data: bytes, filename: str, url: str | None, limits: ReadingLimits) -> Pixels:
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
    side = limits.max_side
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
    return Pixels(image.width, image.height, image.tobytes())


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


def image_limits(side: int, max_pixels: int, max_bytes: int) -> ReadingLimits:
    """What the reading of one image may take."""
    return ReadingLimits(max_bytes=max_bytes, max_pixels=max_pixels, max_side=side, cpu_s=20, wall_s=30.0)
