"""Makes of an image what a model takes of it, and of a prompt's placeholders the tokens of its images.

The checkpoint's own image processor computes the pixels, by Pillow. What was computed last is remembered, up
to a number of bytes.
"""

from __future__ import annotations

import io
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from engine.model_folder import read_config
from engine.types import IMAGE_OPTIONS, LoadError, MediaSpan, Picture, Prompt, RenderError
from engine.vision.seeing import Seeing, Stand, seeing

MAX_BYTES = 256 << 20
"""Of processed images that are remembered: five of 2048 x 1536 pixels in tiles."""

STAND_IN = "\0"
"""Stands for the image token until the prompt's tokens are made."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Processed:
    """An image as the vision tower takes it, and what stands for it in a prompt."""

    inputs: Mapping[str, Any]
    stand: Stand

    @property
    def num_bytes(self) -> int:
        return sum(np.asarray(each).nbytes for each in self.inputs.values()) + len(self.stand.text)


class ImageProcessor:
    """The image processor of a checkpoint, with a memory. Safe to use from several threads."""

    def __init__(
        self, row: Seeing, fields: Mapping[str, Any], processor: Any, max_bytes: int = MAX_BYTES
    ) -> None:
        """fields: the config.json. processor: transformers' own."""
        self.row = row
        self._fields = fields
        self._processor = processor
        self.image_token_id: int = fields.get("image_token_id", fields.get("image_token_index", -1))
        self.options = frozenset(IMAGE_OPTIONS) & frozenset(_known_options(processor))
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[bytes, Processed] = OrderedDict()  # the one used last is the last
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, max_bytes: int = MAX_BYTES, max_pixels: int | None = None) -> ImageProcessor:
        """The processor of a model's folder. max_bytes: of processed images that are remembered. max_pixels:
        to which larger images are scaled down, where it scales them by pixels and to no fewer by itself.
        Raises LoadError."""
        from transformers import AutoConfig, AutoImageProcessor

        row = seeing(read_config(folder))
        try:
            # With its defaults, which a config.json may leave out.
            fields = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
            processor = cast(Any, AutoImageProcessor).from_pretrained(
                folder, local_files_only=True, backend="pil"
            )
        except Exception as error:  # transformers raises what it likes; one line says what it was
            line = (str(error).strip().splitlines() or [""])[0]
            raise LoadError(f"{folder} has no image processor that can be used: {line}") from error
        if max_pixels is not None and "max_pixels" in _known_options(processor):
            size = processor.size
            size.longest_edge = max(size.shortest_edge, min(size.longest_edge, max_pixels))
        return cls(row, fields, processor, max_bytes)

    @property
    def max_pixels(self) -> int | None:
        """To which larger images are scaled down; None where it does not scale them by pixels."""
        return self._processor.size.longest_edge if "max_pixels" in self.options else None

    @property
    def fingerprint(self) -> bytes:
        """Of what it computes: the settings of the processor."""
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        return blake2b(settings.encode(), digest_size=16).digest()

    # -- pixels ----------------------------------------------------------------------------------------------

    def process(self, picture: Picture, *, alone: bool, key: bytes | None = None) -> Processed:
        """What the model takes of an image. alone: it is the only one of its prompt. key: of both, where it
        is known. Raises RenderError for an image that the processor refuses."""
        key = key or self.key(picture, alone=alone)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        found = self._process(picture, alone)
        with self._lock:
            if key not in self._known and found.num_bytes <= self._max_bytes // 2:
                self._known[key] = found
                self._num_bytes += found.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._known.popitem(last=False)[1].num_bytes
        return found

    def prepare(self, media: Sequence[MediaSpan]) -> None:
        """Process the images of a prompt, so that whoever needs them soon finds them remembered. Raises
        RenderError."""
        for span in media:
            self.process(span.picture, alone=span.alone, key=span.content_hash)

    def key(self, picture: Picture, *, alone: bool) -> bytes:
        """What tells an image, and how it is processed, from all others."""
        said = repr((picture.options, alone and self.row.alone))
        return blake2b(picture.digest + said.encode(), digest_size=16).digest()

    def _process(self, picture: Picture, alone: bool) -> Processed:
        from PIL import Image

        options = dict(self.row.options or {}) | self._chosen(dict(picture.options))
        with Image.open(io.BytesIO(picture.png), formats=("PNG",)) as opened:
            image = opened.convert("RGB")
        images = [image]
        if self.row.alone and not alone:
            images.append(Image.new("RGB", (1, 1)))  # a neighbour: the processor goes by their number
        try:
            given = [images] if self.row.nested else images
            found = dict(self._processor(given, return_tensors="np", **options))
            if len(images) > 1:
                found = {name: value[:1] for name, value in found.items()}
            stand = self.row.stand(found, self._fields, STAND_IN)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            size = f"{image.width} x {image.height}"
            raise RenderError(f"the model's processor refuses an image of {size} pixels: {line}") from error
        inputs = {name: np.asarray(found[name]) for name in self.row.given if name in found}
        return Processed(inputs, stand)

    def _chosen(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What of the processor's own settings a request has changed: never so that an image costs more than
        the largest one does by these settings."""
        chosen: dict[str, Any] = {}
        if asked.get("do_image_splitting") is False:
            chosen["do_image_splitting"] = False
        if "max_pixels" in self.options and not asked.keys().isdisjoint({"max_pixels", "min_pixels"}):
            size = self._processor.size
            most = min(asked.get("max_pixels", size.longest_edge), size.longest_edge)
            least = min(asked.get("min_pixels", size.shortest_edge), most)
            chosen["size"] = {"longest_edge": most, "shortest_edge": least}
        return chosen

    # -- prompts ---------------------------------------------------------------------------------------------

    def placed(self, prompt: Prompt, pictures: Sequence[Picture], encode: Encode) -> Prompt:
        """A prompt with an image token for every image, in their order, as the model is shown it: with the
        tokens of each image in its place. encode: makes tokens of a text. Raises RenderError."""
        ids = np.asarray(prompt.ids, np.int32)
        at = np.flatnonzero(ids == self.image_token_id).tolist()
        if len(at) != len(pictures):
            raise RenderError(
                f"the prompt has {len(at)} places for images, and the messages have {len(pictures)} images"
            )
        if not pictures:
            return prompt
        whole, media, done = array("i"), [], 0
        for place, picture in zip(at, pictures, strict=True):
            whole.extend(prompt.ids[done:place])
            span, tokens = self._span(len(whole), picture, len(pictures) == 1, encode)
            whole.extend(tokens)
            media.append(span)
            done = place + 1
        whole.extend(prompt.ids[done:])
        return replace(prompt, ids=whole, media=tuple(media))

    def _span(
        self, offset: int, picture: Picture, alone: bool, encode: Encode
    ) -> tuple[MediaSpan, array[int]]:
        """An image's span, and its tokens."""
        key = self.key(picture, alone=alone)
        stand = self.process(picture, alone=alone, key=key).stand
        tokens = array("i")
        for index, text in enumerate(_runs(stand.text)):
            if index % 2:
                tokens.extend([self.image_token_id] * len(text))
            elif text:
                tokens.extend(encode(text))
        places = np.flatnonzero(np.asarray(tokens, np.int32) == self.image_token_id)
        span = MediaSpan(
            offset, len(tokens), key, picture, tuple(places.tolist()), stand.grid, alone and self.row.alone
        )
        return span, tokens


def _runs(text: str) -> list[str]:
    """A text's parts: other text and runs of the stand-in in turn, other text first."""
    return re.split(f"({STAND_IN}+)", text)


def _known_options(processor: Any) -> set[str]:
    """The options of `IMAGE_OPTIONS` that a processor reads."""
    known = {"do_image_splitting"} if hasattr(processor, "do_image_splitting") else set()
    # By squares that are merged, as Qwen's do: the two edges of their size are numbers of pixels.
    return known | ({"max_pixels", "min_pixels"} if hasattr(processor, "merge_size") else set())


def plain_picture(width: int, height: int) -> Picture:
    """An image of one color."""
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 120, 40)).save(data, "PNG")
    return Picture(data.getvalue(), b"plain")
