"""Decoder models: one door, two tiers.

Owns: the interface every model has towards the runner, and the choice of tier: a native family (rows of flags
in `families`, computed by `decoder`), or any other transformers decoder through its attention interface
(`general`). Refuses to know: requests, schedules and sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.blocks import LayerGroup
from engine.folder import read_config
from engine.settings import Quantization
from engine.types import LoadError
from engine.weights import Checkpoint


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the engine needs to know of a loaded model.

    `vocab_size` counts rows of the embedding; `max_positions` is where the positions end that it was made
    for; `groups` partition the layers by the kind of KV they keep.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    num_parameters: int
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    fingerprint: bytes


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

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """token_ids [T], positions [T], logits_at [R] (indices into T) -> logits [R, vocab_size]."""
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
    deterministic: bool = False,
) -> Model:
    """Load the decoder of `folder`; `dtype` is auto, float32, bfloat16 or float16.

    `quantization`: none, int8 or int4; of a native family's weights on a CPU, computing in bfloat16.
    `deterministic`: refuse what cannot compute a token apart from those beside it.

    Raises LoadError, in one line, for what cannot be served.
    """
    from engine.models import families

    config = read_config(folder)
    _refuse(config, deterministic)
    checkpoint = Checkpoint(folder)
    compute = _compute_dtype(dtype, checkpoint, quantization)
    if quantization != "none" and (device.type != "cpu" or not families.is_native(config)):
        what = f"on {device.type}" if device.type != "cpu" else f"for {_architecture(config)}"
        raise LoadError(f"quantization {quantization} is not served {what}")
    if families.is_native(config):
        from engine.models.decoder import NativeDecoder

        shape = families.parse(config, max_model_len)
        return NativeDecoder.load(shape, checkpoint, compute, device, quantization)
    from engine.models.general import GeneralDecoder

    return GeneralDecoder.load(folder, checkpoint, compute, device, max_model_len)


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
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"{architecture} is quantized ({method}); load the unquantized checkpoint")
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
