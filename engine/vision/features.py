"""The vision tower of a loaded model: features of images, computed once for each content.

What was computed last is remembered, up to a number of bytes. Before each forward it is told what the step
shows (`look`), and the forward takes that.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine.failures import of_memory
from engine.step import StepPlan
from engine.types import LoadError, MediaSpan, RequestError, RequestFailed
from engine.vision.processing import STAND_IN, ImageProcessor, plain_picture
from engine.vision.seeing import Seeing

MAX_BYTES = 256 << 20
"""Of features that are remembered."""

CORE_OPERATIONS_PER_S = 5e10
"""What one core of a CPU computes of a tower, about."""


def largest_image(model: Any, row: Seeing, seconds: float) -> int | None:
    """Pixels of the largest image for which no layer of a tower takes longer, on one core of a CPU: between
    its layers it is seen to make progress, and others wait for all of them. None where every image that comes
    is small enough: on a GPU, and of towers that are shown tiles of one size.

    model: transformers' own, with its vision tower.
    """
    if model.device.type != "cpu" or not row.grids:
        return None
    vision = model.config.vision_config
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    weights = max(sum(each.numel() for each in layer.parameters()) for layer in _layers(model, row.language))
    # n patches: 2 * weights * n operations of the linear maps, and 4 * width * n * n of the attention.
    most = (math.sqrt(weights**2 + 4 * width * seconds * CORE_OPERATIONS_PER_S) - weights) / (4 * width)
    return int(most) * int(vision.patch_size) ** 2


class Sight:
    """What lets a decoder see. The engine thread owns it; its `processor` may be used from any thread."""

    def __init__(
        self, model: Any, processor: ImageProcessor, dtype: torch.dtype, max_bytes: int = MAX_BYTES
    ) -> None:
        """model: transformers' own, with its vision tower. max_bytes: of features that are remembered."""
        self.processor = processor
        self.num_computed = 0
        """How many images have gone through the tower."""
        self._model = model
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()  # the one used last is the last
        self._shown: list[tuple[Tensor, Tensor]] = []
        self._positions: Tensor | None = None
        self._moved: Callable[[], None] = lambda: None
        for layer in _layers(model, processor.row.language):
            layer.register_forward_hook(lambda *_: self._moved())

    def look(self, plan: StepPlan, moved: Callable[[], None] = lambda: None) -> None:
        """Prepare what the next forward is shown. moved: is called whenever a layer of the tower is done,
        which on a CPU may take seconds for a large image."""
        device = self._model.device
        self._shown, self._moved = [], moved
        for image in plan.images:
            features = self._features(image.span)
            rows = torch.from_numpy(image.rows).to(device)
            self._shown.append((rows, features[torch.from_numpy(image.features).to(device)]))
        grids = self.processor.row.grids and plan.grid_positions is not None
        self._positions = torch.from_numpy(plan.grid_positions).to(device) if grids else None

    def embedded(self, token_ids: Tensor) -> Tensor | None:
        """Embeddings [T, hidden] of a step's tokens with what they show; None where that is nothing."""
        if not self._shown:
            return None
        embeddings: Tensor = self._model.get_input_embeddings()(token_ids)
        for rows, features in self._shown:
            embeddings = embeddings.index_copy(0, rows, features)
        self._shown = []
        return embeddings

    def positions(self, positions: Tensor) -> Tensor:
        """Positions as the language model takes them: [1, T], or [3, 1, T] where images count theirs by rows
        and columns."""
        found, self._positions = self._positions, None
        return positions[None] if found is None else found[:, None]

    def try_out(self) -> None:
        """Show the tower a small image; raises LoadError where it does not make as many features of it as
        have places in a prompt."""
        picture = plain_picture(96, 64)
        for alone in (True, False):
            key = self.processor.key(picture, alone=alone)
            stand = self.processor.process(picture, alone=alone, key=key).stand
            count = stand.text.count(STAND_IN)
            span = MediaSpan(0, count, key, picture, tuple(range(count)), stand.grid, alone)
            try:
                self._computed(span)
            except RequestError as error:
                raise LoadError(f"its images are not served: {error}") from None
        self.num_computed = 0

    def _features(self, span: MediaSpan) -> Tensor:
        """The features [N, hidden] of an image; RequestFailed where there is no memory for what the tower
        computes of it: what takes less can still be computed."""
        known = self._known.get(span.content_hash)
        if known is not None:
            self._known.move_to_end(span.content_hash)
            return known
        features = None
        try:
            features = self._computed(span)
        except (MemoryError, RuntimeError) as error:
            if not of_memory(error):
                raise
        if features is None:  # raised out here, without the frames that hold what there was room for
            raise RequestFailed("there is not enough memory for an image as large as one of the prompt")
        self._known[span.content_hash] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes and len(self._known) > 1:
            self._num_bytes -= self._known.popitem(last=False)[1].nbytes
        return features

    def _computed(self, span: MediaSpan) -> Tensor:
        processed = self.processor.process(span.picture, alone=span.alone, key=span.content_hash)
        given: dict[str, Any] = {}
        for name, value in processed.inputs.items():
            tensor = torch.from_numpy(value).to(self._model.device)
            given[name] = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if self.processor.row.alone:
            given["batch_num_images"] = torch.tensor([1 if span.alone else 2])
        output = self._model.get_image_features(**given, return_dict=True).pooler_output
        self.num_computed += 1
        features = torch.cat(list(output)) if isinstance(output, list | tuple) else output
        features = features.reshape(-1, features.shape[-1]).to(self._dtype)
        if len(features) != len(span.places):
            raise RequestError(
                f"an image has {len(features)} features, and {len(span.places)} places in the prompt"
            )
        return features


def _layers(model: Any, language: str) -> Iterator[torch.nn.Module]:
    """The layers of all towers of a model but its language model, which is at this path."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not path.startswith(f"{language}."):
            yield from module
