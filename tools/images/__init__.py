"""Images: asked of the server of the operator's choice that makes them.

What the server makes of them (items, events, words for the model) is not known here.
"""

from __future__ import annotations

from tools.images.generator import ImageGenerator, Original, Originals
from tools.images.replies import Image, ImageFailed, image_kind
from tools.images.specs import GENERATE, image_tools

__all__ = [
    "GENERATE",
    "Image",
    "ImageFailed",
    "ImageGenerator",
    "Original",
    "Originals",
    "image_kind",
    "image_tools",
]
