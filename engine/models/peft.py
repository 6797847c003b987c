"""Reads LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

An adapter that is more than low-rank products is refused in one line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.model_folder import find_folder, read_json
from engine.models.checkpoint import Checkpoint
from engine.types import LoadError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in the file: PEFT's own wrappers

# fields of the configuration that, when set, mean more than low-rank products
_MORE = {
    "alora_invocation_tokens": "acts from certain tokens on",
    "arrow_config": "is a router of adapters",
    "kasa_config": "is KaSA",
    "layer_replication": "repeats layers",
    "lora_bias": "has biases of its own",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "target_parameters": "adapts parameters that are no linear maps (target_parameters)",
    "trainable_token_indices": "has embeddings of its own (trainable_token_indices)",
    "use_bdlora": "is block-diagonal",
    "use_dora": "is DoRA",
    "use_qalora": "is QA-LoRA",
}
_PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal"})  # others begin by changing the model's weights


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a linear map: scale * up @ down; down [rank, inputs], up [outputs, rank]."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: `maps` by the path of the module whose product it adds to.

    `fingerprint`: 16 bytes that name what it computes, the same for every copy of the folder.
    """

    name: str
    fingerprint: bytes
    maps: Mapping[str, LowRank]


def read_adapter(name: str, where: str | Path, sizes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read an adapter, from a folder or by a hub id, for a model whose linear maps have these (inputs,
    outputs), by path.

    Raises LoadError for what cannot be read, what is no plain LoRA, and what does not fit the model.
    """
    try:
        return _read(name, find_folder(where), sizes)
    except (LoadError, OSError, re.error) as error:
        raise LoadError(f"the adapter {name!r} ({where}) is not served: {error}") from error


def _read(name: str, folder: Path, sizes: Mapping[str, tuple[int, int]]) -> Adapter:
    config = read_json(folder, CONFIG)
    if config is None:
        raise LoadError(f"it has no {CONFIG}")
    _refuse(config)
    if not (folder / WEIGHTS).exists():
        raise LoadError(f"it has no {WEIGHTS}; other formats are not read")
    checkpoint = Checkpoint(folder, [folder / WEIGHTS])
    halves: dict[str, set[str]] = {}
    for stored in checkpoint.unread():
        found = re.fullmatch(rf"({re.escape(PREFIX)})?(.+)\.(lora_A|lora_B)\.weight", stored)
        path = found[2] if found else stored.removeprefix(PREFIX)
        if found is None or path not in sizes:
            raise LoadError(_stranger(path))
        halves.setdefault((found[1] or "") + path, set()).add(found[3])
    maps = {}
    for stored, present in halves.items():
        path = stored.removeprefix(PREFIX)
        if len(present) == 1:
            raise LoadError(f"{path} has {present.pop()} and not the other half")
        down, up = (checkpoint.take(f"{stored}.{half}.weight") for half in ("lora_A", "lora_B"))
        rank, scale = _rank_and_scale(config, path)
        inputs, outputs = sizes[path]
        for half, tensor, expected in (("A", down, [rank, inputs]), ("B", up, [outputs, rank])):
            if list(tensor.shape) != expected:
                raise LoadError(f"lora_{half} of {path} is {list(tensor.shape)}; it must be {expected}")
        maps[path] = LowRank(down, up, scale)
    if not maps:
        raise LoadError("it adapts nothing")
    missing = [path for path in sizes if path not in maps and _targets(config, path)]
    if missing:
        raise LoadError(f"it targets {missing[0]} and has no tensors for it ({len(missing)} such maps)")
    scales = json.dumps({path: own.scale for path, own in sorted(maps.items())})
    digest = hashlib.blake2b(checkpoint.fingerprint() + scales.encode(), digest_size=16)
    return Adapter(name, digest.digest(), maps)


def _refuse(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise LoadError(f"its peft_type is {kind}, only LORA is")
    for field, what in _MORE.items():
        if config.get(field):
            raise LoadError(f"it {what}")
    if config.get("bias", "none") != "none":
        raise LoadError(f"it changes biases (bias is {config['bias']!r})")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        raise LoadError(
            f"it began as {start!r} and may stand on changed weights; save it with "
            "path_initial_model_for_weight_conversion"
        )


def _stranger(path: str) -> str:
    """Why a tensor cannot be taken."""
    if "embed" in path or "lm_head" in path:
        return f"it adapts {path}: embeddings and the head are not adapted, only the layers' linear maps"
    return f"it has {path}, and the model no linear map of that name"


def _rank_and_scale(config: Mapping[str, Any], path: str) -> tuple[int, float]:
    """A module's rank, and what its product is multiplied by."""

    def pick(patterns: str, usual: str) -> Any:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        return config.get(usual, 8)  # PEFT's default for both

    rank, alpha = pick("rank_pattern", "r"), pick("alpha_pattern", "lora_alpha")
    if not isinstance(rank, int) or rank <= 0 or not isinstance(alpha, int | float):
        raise LoadError(f"{CONFIG} has no usable rank or alpha for {path}")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _targets(config: Mapping[str, Any], path: str) -> bool:
    """Whether the configuration names this module, as PEFT reads it (tuners_utils.py)."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    if _names(config.get("exclude_modules") or (), path):
        return False
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return True
    if not _names(targets, path):
        return False
    if layers is None or layers == [] or path in targets:
        return True
    wanted = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path)
        if found:
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _names(modules: str | Iterable[str], path: str) -> bool:
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == module or path.endswith(f".{module}") for module in modules)
