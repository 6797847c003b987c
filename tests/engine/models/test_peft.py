"""Folders that PEFT wrote: what is read of them, and what is refused, each in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.peft import read_adapter
from engine.types import LoadError
from tests.support.adapters import write_adapter

SIZES = {f"model.layers.{i}.{name}": (8, 12) for i in range(3) for name in ("attn.q_proj", "attn.o_proj")}
WRAPPED = "base_model.model."
Q0, O0, Q1 = "model.layers.0.attn.q_proj", "model.layers.0.attn.o_proj", "model.layers.1.attn.q_proj"
CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": [Q0]}


def halves(*paths: str, rank: int = 2, prefix: str = WRAPPED) -> dict[str, Tensor]:
    """Tensors of adapted maps of `SIZES`."""
    found = {}
    for path in paths:
        inputs, outputs = SIZES.get(path, (8, 12))
        found[f"{prefix}{path}.lora_A.weight"] = torch.ones(rank, inputs)
        found[f"{prefix}{path}.lora_B.weight"] = torch.ones(outputs, rank)
    return found


def read(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Any:
    return read_adapter("x", write_adapter(folder, tensors, {**CONFIG, **config}), SIZES)


def test_scales_and_ranks(tmp_path: Path) -> None:
    tensors = halves(Q0) | halves(O0, rank=4)
    config = {"rank_pattern": {"o_proj": 4}, "alpha_pattern": {r"layers\.0\.attn\.o_proj": 6}}
    targets = [Q0, O0]
    found = read(tmp_path / "a", tensors, **config, target_modules=targets)
    assert {path: (len(own.down), own.scale) for path, own in found.maps.items()} == {
        Q0: (2, 2.0),
        O0: (4, 1.5),
    }
    found = read(tmp_path / "b", tensors, **config, target_modules=targets, use_rslora=True)
    assert {path: own.scale for path, own in found.maps.items()} == {Q0: 4 / 2**0.5, O0: 3.0}


def test_names_stand_with_and_without_the_wrappers(tmp_path: Path) -> None:
    found = [read(tmp_path / prefix, halves(Q0, prefix=prefix)) for prefix in (WRAPPED, "")]
    assert [set(own.maps) for own in found] == [{Q0}, {Q0}]


def test_the_fingerprint_is_of_what_is_computed(tmp_path: Path) -> None:
    plain = read(tmp_path / "a", halves(Q0)).fingerprint
    assert read(tmp_path / "b", halves(Q0), lora_dropout=0.3).fingerprint == plain
    assert read(tmp_path / "c", halves(Q0), lora_alpha=5).fingerprint != plain
    other = {name: tensor + 1 for name, tensor in halves(Q0).items()}
    assert read(tmp_path / "d", other).fingerprint != plain


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({"target_modules": "all-linear"}, list(SIZES)),
        ({"target_modules": ["q_proj"]}, [path for path in SIZES if "q_proj" in path]),
        ({"target_modules": r".*\.0\.attn\..*"}, [Q0, O0]),
        (
            {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["o_proj"]},
            [Q0, Q1, Q1.replace("1", "2")],
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, [Q1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, [Q0, Q1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, [Q1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, [Q0]),
        ({"target_modules": None}, [Q0]),
    ],
)
def test_what_is_targeted_must_be_there(tmp_path: Path, config: dict[str, Any], paths: list[str]) -> None:
    assert set(read(tmp_path / "whole", halves(*paths), **config).maps) == set(paths)
    if len(paths) > 1:
        with pytest.raises(LoadError, match=f"targets {paths[-1]} and has no tensors for it"):
            read(tmp_path / "part", halves(*paths[:-1]), **config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"peft_type": "IA3"}, "its peft_type is IA3, only LORA is"),
        ({"use_dora": True}, "it is DoRA"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
        ({"bias": "all"}, "it changes biases"),
        ({"lora_bias": True}, "biases of its own"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "no linear maps"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"trainable_token_indices": [1, 2]}, "embeddings of its own"),
        ({"alora_invocation_tokens": [5]}, "from certain tokens on"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 3}, r"lora_A of model.layers.0.attn.q_proj is \[2, 8\]; it must be \[3, 8\]"),
        ({"r": 0}, "no usable rank or alpha"),
        ({"lora_alpha": None}, "no usable rank or alpha"),
        ({"target_modules": "("}, "missing \\)"),
    ],
)
def test_what_is_more_than_low_rank_products_is_refused(
    tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        read(tmp_path, halves(Q0), **config)
    message = str(caught.value)
    assert message.startswith(f"the adapter 'x' ({tmp_path}) is not served: ") and "\n" not in message


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (halves(Q0) | halves("lm_head"), "adapts lm_head: embeddings and the head"),
        ({f"{WRAPPED}model.embed_tokens.lora_embedding_A": torch.ones(2, 8)}, "adapts model.embed_tokens"),
        ({f"{WRAPPED}lm_head.weight": torch.ones(2, 8)}, "adapts lm_head"),
        (halves(Q0.replace("0", "7")), "it has model.layers.7.attn.q_proj, and the model no linear map"),
        (halves("model.layers.0.mlp.up_proj"), "no linear map of that name"),
        ({f"{WRAPPED}{Q0}.lora_magnitude_vector": torch.ones(12)}, "lora_magnitude_vector, and"),
        ({f"{Q0}.lora_A.weight": torch.ones(2, 8)}, "has lora_A and not the other half"),
        (halves(Q0) | {f"{WRAPPED}{Q0}.lora_B.weight": torch.ones(9, 2)}, r"\[9, 2\]; it must be \[12, 2\]"),
        ({f"{WRAPPED}x": torch.ones(1)}, "it has x, and"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_named(tmp_path: Path, tensors: dict[str, Tensor], match: str) -> None:
    with pytest.raises(LoadError, match=match):
        read(tmp_path, tensors)


def folder(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def made(at: Path) -> Path:
        at.mkdir()
        (at / "adapter_config.json").write_text(json.dumps({**CONFIG, "peft_type": "LORA"}))
        save_file(halves(Q0), at / "adapter_model.safetensors")
        make(at)
        return at

    return made


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (folder(lambda at: (at / "adapter_config.json").unlink()), "it has no adapter_config.json"),
        (folder(lambda at: (at / "adapter_config.json").write_text("{")), "is not JSON"),
        (folder(lambda at: (at / "adapter_config.json").write_text("[]")), "is not a JSON object"),
        (folder(lambda at: (at / "adapter_model.safetensors").unlink()), "has no adapter_model"),
        (folder(lambda at: (at / "adapter_model.safetensors").write_bytes(b"x" * 40)), "is not served"),
        (folder(lambda at: save_file({}, at / "adapter_model.safetensors")), "it adapts nothing"),
        (lambda at: at, "is not a folder, nor a hub id"),
    ],
)  # fmt: skip
def test_folders_that_are_no_adapters(tmp_path: Path, make: Callable[[Path], Path], match: str) -> None:
    at = make(tmp_path / "adapter")
    with pytest.raises(LoadError, match=match) as caught:
        read_adapter("x", at, SIZES)
    assert str(caught.value).startswith(f"the adapter 'x' ({at})")
