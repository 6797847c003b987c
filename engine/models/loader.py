"""Loads a model from its folder, with its adapters, by the tier that serves it.

A native family (`families`) is computed by `decoder`; any other transformers decoder by `general`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import EngineConfig, Quantization
from engine.kernels.cpu import Library, open_library
from engine.model_folder import read_config
from engine.models import families
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import NativeDecoder
from engine.models.fp8 import AS_NUMBERS, Stored, how_stored
from engine.models.interface import Model
from engine.models.lora import Adapters, Parts, Stack, make_stack
from engine.models.peft import read_adapter
from engine.types import LoadError
from engine.vision import SEEING, Seeing, seeing, sees

if TYPE_CHECKING:
    from engine.models.general import GeneralDecoder

log = logging.getLogger("antiphon.engine")


# parameters: below, `dtype="auto"` computes in f32, so that a resumed run repeats itself exactly
F32_BELOW = 200_000_000

ARITHMETIC = 2
"""To be raised with every change by which a model's keys and values come out otherwise than before, with the
same weights, config.json and tokens: what was saved on disk until then is not read any more."""

INERT = frozenset({"_name_or_path", "transformers_version"})
"""Members of config.json that nothing is computed by."""


def load_model(config: EngineConfig, device: torch.device) -> Model:
    """Load the decoder of the folder `config.model`, with its adapters.

    Of the configuration it reads `dtype`, `max_model_len`, `quantization`, `compile` (of the general tier,
    without adapters), `deterministic` (which refuses what cannot compute a token apart from its neighbours),
    `lora` and `cpu_kernels`. Raises LoadError, in one line, for what cannot be served.
    """
    folder = Path(config.model)
    fields = read_config(folder)
    library = open_library() if config.cpu_kernels and device.type == "cpu" else None
    _refuse(fields, config.deterministic and library is None)
    checkpoint = Checkpoint(folder)
    stored = how_stored(fields, _architecture(fields))
    compute = _compute_dtype(config.dtype, checkpoint, config.quantization)
    if config.quantization in ("int8", "int4") and device.type != "cpu":
        raise LoadError(f"quantization {config.quantization} is not served on {device.type}; fp8 is")
    model: Model
    if families.is_native(fields):
        shape = families.parse(fields, config.max_model_len)
        model = NativeDecoder.load(shape, checkpoint, compute, device, config.quantization, stored, library)
    else:
        row = seeing(fields) if sees(fields) and not config.text_only else SEEING.get(_architecture(fields))
        if row is not None and not config.text_only:
            _refuse_with_images(config, _architecture(fields))
        model = _load_general(
            config, checkpoint, compute, device, _architecture(fields), stored, row, library
        )
        if config.deterministic and not model.has_experts_in_panels:
            _refuse(fields, apart=True)
    if config.lora:
        attach(
            model,
            config.lora,
            device=device,
            deterministic=config.deterministic,
            max_rank=config.max_lora_rank,
        )
    model.spec = replace(model.spec, arithmetic=_arithmetic(fields, model.spec.max_positions))
    return model


def _arithmetic(fields: dict[str, Any], max_positions: int) -> bytes:
    """16 bytes that name what is computed with a model's weights; see `ModelSpec`. The positions are those
    that are served: longrope rotates all tokens by other factors where they are more."""
    code = "" if families.is_native(fields) else version("transformers")  # which computes all other models
    told = {name: value for name, value in fields.items() if name not in INERT}
    told["max_position_embeddings"] = max_positions
    whole = json.dumps([ARITHMETIC, code, told], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=16).digest()


def is_pooled_natively(fields: dict[str, Any]) -> bool:
    """Whether a native decoder computes the hidden states of this config.json: one of a family that is served
    natively, with or without a head, whose tokens see those before them alone."""
    named = _as_decoder(fields)
    causal = fields.get("is_causal", True) is not False and not fields.get("use_bidirectional_attention")
    return causal and families.is_native(named)


def load_pooled(config: EngineConfig, device: torch.device, head: Callable[[Checkpoint], Tensor]) -> Model:
    """Load the decoder of the folder `config.model` with another head [outputs, hidden_size] than that of its
    language, read by `head`; `is_pooled_natively` was asked before.

    Of the configuration it reads `dtype`, `max_model_len`, `quantization` and `cpu_kernels`. Raises
    LoadError, in one line, for what cannot be served.
    """
    fields = _as_decoder(read_config(Path(config.model)))
    checkpoint = Checkpoint(Path(config.model), within="model.")
    compute = _compute_dtype(config.dtype, checkpoint, config.quantization)
    library = open_library() if config.cpu_kernels and device.type == "cpu" else None
    return NativeDecoder.load(
        families.parse(fields, config.max_model_len),
        checkpoint,
        compute,
        device,
        config.quantization,
        how_stored(fields, _architecture(fields)),
        library,
        head(checkpoint),
    )


def _as_decoder(fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json as the decoder with a language head would have it: of its architecture only the end
    differs where the checkpoint has another head, or none."""
    name = re.sub(r"(Model|ForSequenceClassification)$", "ForCausalLM", _architecture(fields))
    return fields | {"architectures": [name]}


def _load_general(
    config: EngineConfig,
    checkpoint: Checkpoint,
    compute: torch.dtype,
    device: torch.device,
    architecture: str,
    stored: Stored,
    row: Seeing | None,
    library: Library | None,
) -> GeneralDecoder:
    from engine.models.general import GeneralDecoder  # imports transformers, which native families do without

    compile = config.compile
    for why in (config.lora and "has adapters", row is not None and "sees images"):
        if compile and why:
            log.warning("%s %s, so it is not compiled", architecture, why)
            compile = False
    return GeneralDecoder.load(
        config,
        checkpoint,
        compute,
        device,
        weights=None if stored is AS_NUMBERS else partial(stored.take_all, checkpoint, compute),
        library=library,
        compile=compile,
        row=row,
    )


def attach(
    model: Model,
    lora: Mapping[str, str | Path],
    *,
    device: torch.device,
    deterministic: bool,
    max_rank: int | None = None,
) -> None:
    """Read these adapters, by name, and have the model serve them.

    Raises LoadError for one that cannot be read or does not fit.
    """
    places = model.places()
    sizes = {path: (place.inputs, place.outputs) for path, place in places.items()}
    adapters = [read_adapter(name, where, sizes) for name, where in lora.items()]
    for adapter in adapters:
        rank = max(own.down.shape[0] for own in adapter.maps.values())
        if max_rank is not None and rank > max_rank:
            raise LoadError(
                f"the adapter {adapter.name!r} has the rank {rank}, and max_lora_rank is {max_rank}"
            )
    parts: dict[str, list[Parts]] = {}
    for i, adapter in enumerate(adapters):
        for path, of_map in adapter.maps.items():
            parts.setdefault(places[path].map, [{} for _ in adapters])[i][places[path]] = of_map
    # a product of its own for each part of a map; on a GPU one more launch costs more than adding zeros
    apart = device.type == "cpu"
    stacks = {
        name: make_stack(of_map, model.spec.dtype, device, apart=apart) for name, of_map in parts.items()
    }
    for i, adapter in enumerate(adapters):
        if not all(_is_finite(stack, i, len(adapters)) for stack in stacks.values()):
            # its product would be NaN even for tokens that do not use it
            dtype = str(model.spec.dtype).removeprefix("torch.")
            raise LoadError(f"the adapter {adapter.name!r} has weights that are not finite in {dtype}")
    model.adapt(Adapters(len(adapters), device, fixed=deterministic), stacks)
    model.spec = replace(model.spec, adapters=tuple((of_map.name, of_map.fingerprint) for of_map in adapters))
    held = sum(weight.nbytes for stack in stacks.values() for weight in _weights(stack)) / 2**20
    log.info("adapters: %s (%.0f MiB)", ", ".join(lora), held)


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


def _refuse(config: dict[str, Any], apart: bool) -> None:
    """Refuse what no tier serves. apart: tokens are to be computed apart from their neighbours, and experts
    are not by the kernels for a CPU."""
    architecture = _architecture(config)
    if config.get("is_encoder_decoder"):
        raise LoadError(f"{architecture} is an encoder-decoder; only decoders are served")
    if apart and _has_experts(config):
        # each computes as many tokens at once as chose it: a shape that neighbours change
        raise LoadError(
            f"{architecture} is a mixture of experts, which is not served with deterministic but by the "
            "kernels for a CPU (cpu_kernels)"
        )


def _refuse_with_images(config: EngineConfig, architecture: str) -> None:
    """Refuse, before anything is read, what is not served of a model that sees."""
    for asked, what in (
        (config.deterministic, "deterministic, which computes tokens one by one"),
        (config.lora, "adapters"),
    ):
        if asked:
            raise LoadError(
                f"{architecture} sees images, and is not served with {what}; text_only is without"
            )


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


def _weights(stack: Stack) -> list[Tensor]:
    return [stack.down, *(up.weight for up in stack.ups)]


def _is_finite(stack: Stack, i: int, count: int) -> bool:
    return all(bool(weight.view(count, -1)[i].isfinite().all()) for weight in _weights(stack))
