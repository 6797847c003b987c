"""Writes checkpoints of real sizes with random weights, for measuring speed without a download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models import LAYER_PACKING, MODEL_PACKING, DecoderShape, Packed, parse
from engine.tiny import CHECKPOINT

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _qwen3(hidden: int, middle: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **rest,
    }


SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tie_word_embeddings=False),
}
"""config.json by name, as the models of these names have it."""

_SPREAD = 0.02  # standard deviation of a weight


def write_random_model(size: str, folder: Path, *, seed: int = 0) -> None:
    """Write a bfloat16 checkpoint of a row of `SIZES`, a shard a layer, into `folder`, which is made.

    The tokenizer is the shipped model's, with words that fill the vocabulary up, so that every id decodes.
    The same seed gives the same bytes. Raises KeyError for an unknown name, OSError where it cannot write.
    """
    config = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    shape = parse(config, None)
    where: dict[str, str] = {}
    for shard, names in _shards(shape):
        generator = torch.Generator().manual_seed(seed * 100_003 + len(where))
        tensors = {name: _weight(axes, generator) for name, axes in names.items()}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        where |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    moved = write_tokenizer(folder, shape.vocab_size)
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    eos = [moved[token_id] for token_id in generation["eos_token_id"]]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos[0]}, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def _shards(shape: DecoderShape) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Files, and the sizes of the tensors in each."""
    model = (row for row in MODEL_PACKING if not (shape.tied and row.name == "head"))
    layer = [row for row in LAYER_PACKING if row.name not in shape.absent]
    count = len(shape.windows)  # the names that the hub uses: other loaders take model.safetensors for all
    yield f"model-{0:05}-of-{count:05}.safetensors", _sources(shape, model, "")
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        yield name, _sources(shape, layer, f"model.layers.{i}.")


def _sources(shape: DecoderShape, rows: Iterator[Packed] | list[Packed], prefix: str) -> dict[str, list[int]]:
    return {
        prefix + name: [shape.axes[axis] for axis in axes.split()]
        for row in rows
        for name, axes in row.sources.items()
    }


def _weight(size: list[int], generator: torch.Generator) -> Tensor:
    if len(size) == 1:  # norms: a random one would let the residual stream grow beyond bounds
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, _SPREAD, generator=generator)


def write_tokenizer(folder: Path, vocab_size: int) -> dict[int, int]:
    """The shipped model's, with words up to the tags, which end the vocabulary; old ids of tags to new."""
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, tags = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    moved = {tag["id"]: vocab_size - len(tags) + i for i, tag in enumerate(tags)}
    # "Ġ" is how byte-level vocabularies write a space
    vocab |= {f"Ġw{token_id}": token_id for token_id in range(len(vocab), vocab_size - len(tags))}
    for tag in tags:
        tag["id"] = moved[tag["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        str(moved[int(old)]): tag for old, tag in config["added_tokens_decoder"].items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copyfile(CHECKPOINT / "chat_template.jinja", folder / "chat_template.jinja")
    return moved
