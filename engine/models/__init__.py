"""Decoder models: one door, two tiers.

Owns: the interface every model has towards the runner, and the choice of tier: a native family (rows of flags
in `families`, computed by `decoder`), or any other transformers decoder through its attention interface
(`general`). Refuses to know: requests, schedules and sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from engine.config import Quantization
from engine.core.kv_cache import LayerGroup
from engine.kernels.cpu.library import open_library
from engine.model_folder import read_config
from engine.models.checkpoint import Checkpoint
from engine.types import LoadError

if TYPE_CHECKING:
    from engine.models.lora import Adapters, Place, Stack

log = logging.getLogger("antiphon.engine")


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the engine needs to know of a loaded model.

    `vocab_size` counts rows of the embedding; `max_positions` is where the positions end that it was made
    for; `groups` partition the layers by the kind of KV they keep; `adapters`: name and fingerprint of those
    beside it, numbered from 1.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    num_parameters: int
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    fingerprint: bytes
    adapters: tuple[tuple[str, bytes], ...] = ()


class Attention(Protocol):
    """What a model calls once a layer: stores `k` and `v` in the paged cache and attends over it."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        ...


class Model(Protocol):
    """A decoder over flattened tokens; it holds weights and no state of any request."""

    spec: ModelSpec
    adapters: Adapters | None  # told before each forward which of its tokens are under which

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """token_ids [T], positions [T], logits_at [R] (indices into T) -> logits [R, vocab_size]."""
        ...

    def places(self) -> dict[str, Place]:
        """The linear maps that adapters can add to, by the paths that transformers gives their modules."""
        ...

    def adapt(self, adapters: Adapters, stacks: Mapping[str, Stack]) -> None:
        """Serve adapters from now on: `stacks` by `Place.map`."""
        ...


# parameters: below, `dtype="auto"` computes in f32, so that a resumed run repeats itself exactly
F32_BELOW = 200_000_000


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int | None,
    quantization: Quantization = "none",
    compile: bool = False,
    deterministic: bool = False,
    lora: Mapping[str, str | Path] | None = None,
    cpu_kernels: bool = False,
) -> Model:
    """Load the decoder of `folder`; `dtype` is auto, float32, bfloat16 or float16.

    `quantization`: none, fp8, or on a CPU int8 or int4; computes in bfloat16. `compile`: by torch.compile,
    where the general tier serves it without adapters. `deterministic`: refuse what cannot compute a token
    apart from those beside it. `lora`: adapters beside it, by name. `cpu_kernels`: by our own, for
    native families on a CPU.

    Raises LoadError, in one line, for what cannot be served.
    """
    from engine.models import families
    from engine.models.fp8 import AS_NUMBERS, how_stored

    config = read_config(folder)
    _refuse(config, deterministic)
    stored = how_stored(config, _architecture(config))
    checkpoint = Checkpoint(folder)
    compute = _compute_dtype(dtype, checkpoint, quantization)
    if quantization in ("int8", "int4") and device.type != "cpu":
        raise LoadError(f"quantization {quantization} is not served on {device.type}; fp8 is")
    if families.is_native(config):
        from engine.models.decoder import NativeDecoder

        shape = families.parse(config, max_model_len)
        library = open_library() if cpu_kernels and device.type == "cpu" else None
        model: Model = NativeDecoder.load(shape, checkpoint, compute, device, quantization, stored, library)
    else:
        from engine.models.general import GeneralDecoder

        if stored is not AS_NUMBERS:
            raise LoadError(
                f"{_architecture(config)} is quantized, and that is read of "
                f"{', '.join(families.FAMILIES)} only; load the unquantized checkpoint"
            )
        if compile and lora:
            log.warning("%s has adapters, so it is not compiled", _architecture(config))
            compile = False
        model = GeneralDecoder.load(
            folder, checkpoint, compute, device, quantization=quantization, compile=compile
        )
    if lora:
        from engine.models.lora import attach

        attach(model, lora, device=device, deterministic=deterministic)
    return model


def _compute_dtype(dtype: str, checkpoint: Checkpoint, quantization: Quantization) -> torch.dtype:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if quantization != "none":
        if dtype not in ("auto", "bfloat16"):
            raise LoadError(f"quantization {quantization} computes in bfloat16, not in {dtype}")
        return torch.bfloat16
    if dtype in named:
        return named[dtype]
    if dtype != "auto":
        raise LoadError(f"dtype {dtype!r} is none of auto, {', '.join(named)}")
    if checkpoint.num_parameters < F32_BELOW or checkpoint.dtype is torch.float64:
        return torch.float32
    return checkpoint.dtype


def _refuse(config: dict[str, Any], deterministic: bool) -> None:
    """Refuse, before anything is read, what no tier serves."""
    architecture = _architecture(config)
    if config.get("is_encoder_decoder"):
        raise LoadError(f"{architecture} is an encoder-decoder; only decoders are served")
    if deterministic and _has_experts(config):
        # each computes as many tokens at once as chose it: a shape that neighbours change
        raise LoadError(f"{architecture} is a mixture of experts, which is not served with deterministic")


def _architecture(config: dict[str, Any]) -> str:
    name: str = (config.get("architectures") or [config.get("model_type", "?")])[0]
    return name


def _has_experts(config: dict[str, Any]) -> bool:
    """Whether a field, also one of the text model's own part, gives a model several experts."""
    for name, value in config.items():
        if isinstance(value, dict) and _has_experts(value):
            return True
        if "expert" in name and isinstance(value, int) and value > 1:
            return True
    return False
