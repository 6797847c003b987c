"""The families of models that see, as rows: where their language model is, and the tokens of an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.types import LoadError

Fields = Mapping[str, Any]
"""A config.json."""

Inputs = Mapping[str, Any]
"""What an image processor makes of one image: numpy arrays by name, a batch of one."""


@dataclass(frozen=True, slots=True)
class Stand:
    """What stands in a prompt for an image.

    text: with the image token in every place that takes a feature. grid: rows and columns of the features,
    where the model counts positions by them.
    """

    text: str
    grid: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Seeing:
    """One row. language: the path of the language model within transformers' own. stand: what stands for an
    image, for what the processor made of it, the config.json and the text of the image token. given: the
    names of the inputs that the vision tower takes. nested: the processor takes lists of a prompt's images.
    options: of the processor, always. alone: whether a prompt's only image is cut into tiles, and one of
    several is not. grids: whether positions of an image count its rows and columns.
    """

    language: str
    stand: Callable[[Inputs, Fields, str], Stand]
    given: tuple[str, ...]
    nested: bool = False
    options: Mapping[str, Any] | None = None
    alone: bool = False
    grids: bool = False


def _framed_tiles(inputs: Inputs, fields: Fields, token: str) -> Stand:
    """Tiles row by row, each framed and named by its place, and the whole image behind them."""
    vision = fields["vision_config"]
    side = vision.get("image_size", 364) // vision.get("patch_size", 14)
    one = token * int(side**2 / fields.get("scale_factor", 2) ** 2)
    frame = "<fake_token_around_image>"
    (rows,), (cols,) = inputs["rows"][0], inputs["cols"][0]
    lines = [
        "".join(f"{frame}<row_{row + 1}_col_{col + 1}>{one}" for col in range(cols)) + "\n"
        for row in range(rows)
    ]
    whole = f"{frame}<global-img>{one}{frame}"
    return Stand("".join(lines) + ("\n" if lines else "") + whole)


def _unpadded_tiles(inputs: Inputs, fields: Fields, token: str) -> Stand:
    """The whole image, and the part of its tiles that is no border, row by row, each with an end of its own;
    one of several images is whole alone."""
    vision = fields["vision_config"]
    tile, side = vision["image_size"], vision["image_size"] // vision["patch_size"]
    count = side**2
    if inputs["pixel_values"].shape[1] == 1:
        return Stand(token * (count + 1))
    from transformers.image_processing_utils import select_best_resolution

    height, width = (int(length) for length in inputs["image_sizes"][0])
    best = select_best_resolution((height, width), fields["image_grid_pinpoints"])
    rows, cols = (side * (length // tile) for length in best)
    # The tiles hold the image in its own proportions; what is left at two sides is border.
    if width / height > cols / rows:
        rows -= (rows - int(round(height * (cols / width), 7))) // 2 * 2
    else:
        cols -= (cols - int(round(width * (rows / height), 7))) // 2 * 2
    most = int(fields.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    if (ratio := math.sqrt(rows * cols / (most * count))) > 1.1:
        rows, cols = int(rows // ratio), int(cols // ratio)
    return Stand(token * (count + rows * (cols + 1)))


def _grid(inputs: Inputs, fields: Fields, token: str) -> Stand:
    """A feature for every square of patches."""
    merged = fields["vision_config"].get("spatial_merge_size", 2)
    _, height, width = (int(length) for length in inputs["image_grid_thw"][0])
    rows, cols = height // merged, width // merged
    return Stand(token * (rows * cols), (rows, cols))


_FRAMED = Seeing(
    "model.text_model",
    _framed_tiles,
    ("pixel_values", "pixel_attention_mask"),
    nested=True,
    options={"return_row_col_info": True},
)
_GRID = Seeing("model.language_model", _grid, ("pixel_values", "image_grid_thw"), grids=True)
SEEING: Mapping[str, Seeing] = {
    "Idefics3ForConditionalGeneration": _FRAMED,
    "SmolVLMForConditionalGeneration": _FRAMED,
    "LlavaOnevisionForConditionalGeneration": Seeing(
        "model.language_model", _unpadded_tiles, ("pixel_values", "image_sizes"), nested=True, alone=True
    ),
    "Qwen2VLForConditionalGeneration": _GRID,
    "Qwen2_5_VLForConditionalGeneration": _GRID,
}
"""By the architecture that a config.json names."""


def sees(fields: Fields) -> bool:
    """Whether a config.json is that of a model with a part for images, whether or not it is served."""
    return "vision_config" in fields


def seeing(fields: Fields) -> Seeing:
    """The row of a config.json; raises LoadError where images of such a model are not served."""
    name = (fields.get("architectures") or [fields.get("model_type", "?")])[0]
    row = SEEING.get(name)
    if row is None:
        raise LoadError(
            f"{name} sees images in a way that is not served; with text_only it is served for text alone, "
            f"where that can be. Images are served of {', '.join(SEEING)}"
        )
    return row
