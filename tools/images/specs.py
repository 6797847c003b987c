"""The tool that makes images, as the registry has it. It is no function that a model is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.images.generator import ImageGenerator, Originals
from tools.images.replies import Image, ImageFailed
from tools.spec import ToolResult, ToolSpec

GENERATE = "image.generate"
"""Its name. No function can have it, and no model is shown it."""


def image_tools(generator: ImageGenerator) -> dict[str, ToolSpec]:
    """The tool, by its name. Its arguments are the members of the official request for an image, and `show`,
    a callable that is told an image's earlier forms by their index, and `originals`, where it is made from
    other images. Of an image the result keeps `base64`,
    `facts`, `prompt` and `model`; of a failure `fault`, the members of an official error object."""

    async def generate(
        show: Callable[[int, Image], None], prompt: str, originals: Originals | None = None, **wanted: Any
    ) -> ToolResult:
        try:
            image = await generator.generate({"prompt": prompt, **wanted}, show, originals)
        except ImageFailed as failure:
            return ToolResult(error=str(failure), kept={"fault": failure.told})
        kept = {
            "base64": image.base64,
            "facts": dict(image.facts),
            "prompt": prompt,
            "model": generator.model or "default",
        }
        return ToolResult(output=_told(image, prompt), kept=kept)

    spec = ToolSpec(
        GENERATE,
        "Makes an image.",
        {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
        generate,
        offered_by="image_generation",
        idempotent=generator.idempotent,
        timeout_s=generator.timeout_s + 5,  # the client's own limit tells more
        strict=False,
    )
    return {GENERATE: spec}


def _told(image: Image, prompt: str) -> str:
    """What the model is told of an image, which it cannot see."""
    size = f"{image.facts['size']}, " if "size" in image.facts else ""
    form = f"{size}{image.facts['output_format']}, {image.num_bytes} bytes"
    told = f"The image was made, and the user sees it ({form})."
    revised = image.facts.get("revised_prompt", prompt)
    return told if revised == prompt else f"{told} It was made of this prompt: {revised}"
