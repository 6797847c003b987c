"""Tiny random LoRA adapters in PEFT's format, and their oracle: the checkpoint with W + scale * B @ A."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import oracle

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "use_dora": False,
}


@dataclass(frozen=True)
class Recipe:
    """One adapter: which modules it adapts, with which rank and scale, and what its configuration says."""

    seed: int
    config: Mapping[str, Any]
    rank: Callable[[str], int]
    scale: Callable[[str], float]
    adapts: Callable[[str], bool] = lambda path: True


# everything, by a list; attention's queries and values, rank-stabilized, of the last layers; the rest by a
# regex, with ranks and alphas of their own
RECIPES = {
    "sums": Recipe(
        1,
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        rank=lambda path: 4,
        scale=lambda path: 2.0,
    ),
    "rhymes": Recipe(
        2,
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1, 2],
        },
        rank=lambda path: 3,
        scale=lambda path: 5 / 3**0.5,
        adapts=lambda path: path.endswith(("q_proj", "v_proj")) and ".layers.0." not in path,
    ),
    "verbs": Recipe(
        3,
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": r".*\.(mlp\.(gate|down)_proj|self_attn\.o_proj)",
            "exclude_modules": ["layers.2.mlp.down_proj"],
            "rank_pattern": {"down_proj": 5, r"layers\.1\.self_attn\.o_proj": 1},
            "alpha_pattern": {r".*\.mlp\.gate_proj": 3},
        },
        rank=lambda path: 5 if "down_proj" in path else 1 if "layers.1.self_attn" in path else 2,
        scale=lambda path: (
            1.5
            if "gate_proj" in path
            else 1.2
            if "down_proj" in path
            else 6.0
            if "layers.1.self_attn" in path
            else 3.0
        ),
        adapts=lambda path: (
            path.endswith(("gate_proj", "down_proj", "o_proj")) and "layers.2.mlp.down" not in path
        ),
    ),
}


def make_adapter(recipe: Recipe, base: Path, folder: Path) -> Path:
    """Write `folder`/adapter, and `folder`/merged, the model that it makes of `base`; returns `folder`."""
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(recipe.seed)
    model = oracle(base)
    merged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module is head or not recipe.adapts(path):
            continue
        rank = recipe.rank(path)
        a = torch.randn(rank, module.in_features, generator=generator) * 0.15
        b = torch.randn(module.out_features, rank, generator=generator) * 0.15
        merged[f"{path}.weight"] += recipe.scale(path) * b @ a
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    write_adapter(folder / "adapter", tensors, recipe.config)
    write_merged(base, folder / "merged", merged)
    return folder


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def write_merged(base: Path, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """A copy of a checkpoint with other weights."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.load_state_dict(weights)
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
