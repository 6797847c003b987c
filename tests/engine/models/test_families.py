"""Configurations, rotary embeddings, packing and weights of the native families; refusals in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.models import load_model
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import NativeDecoder
from engine.models.families import parse
from engine.models.rope import inverse_frequencies
from engine.types import LoadError
from tests.support.checkpoints import oracle_logits
from tests.support.driver import Driver, greedy

Find = Callable[[str], Path]
CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> Any:
    with torch.inference_mode():
        return load_model(
            EngineConfig(folder, dtype=dtype, max_model_len=max_model_len, cpu_kernels=False), CPU
        )


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changed(folder: Path, tmp_path: Path, **fields: Any) -> Path:
    """A copy of a checkpoint whose config.json differs; None drops a field."""
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    config = {key: value for key, value in {**config_of(folder), **fields}.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    "name", ["llama", "llama31", "mistral", "qwen3", "qwen3-yarn", "qwen3-linear", "llama-dynamic"]
)
def test_frequencies_are_those_of_transformers(checkpoint: Find, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint(name)
    shape = parse(config_of(folder), None)
    found, scale = inverse_frequencies(shape.rope, shape.head_dim)
    rotary = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model.rotary_emb
    torch.testing.assert_close(found, rotary.inv_freq)
    assert scale == pytest.approx(rotary.attention_scaling)


def test_both_forms_of_a_rope_config_read_alike(checkpoint: Find) -> None:
    config = config_of(checkpoint("llama31"))
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = dict(config["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    new_rope, old_rope = parse(config, None).rope, parse(old, None).rope
    assert inverse_frequencies(new_rope, 8)[0].tolist() == inverse_frequencies(old_rope, 8)[0].tolist()


def test_windows_become_layer_groups(checkpoint: Find) -> None:
    groups = {name: load(checkpoint(name)).spec.groups for name in ("qwen2", "qwen2-windows", "mistral")}
    shown = {name: [(group.layers, group.window) for group in found] for name, found in groups.items()}
    assert shown == {
        "qwen2": [((0, 1, 2), None)],
        "qwen2-windows": [((0,), None), ((1, 2), 20)],
        "mistral": [((0, 1, 2), 24)],
    }


def test_sharded_files_load_like_one(checkpoint: Find, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    copy = tmp_path / "sharded"
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, copy / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    one, several = load(folder), load(copy)
    x = torch.randn(2, 48)
    assert torch.equal(one.layers[2].qkv(x), several.layers[2].qkv(x))
    (copy / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"b\.safetensors"):
        load(copy)


@pytest.mark.parametrize(
    ("name", "dtype", "number"),
    [
        ("model.embed_tokens.weight", "auto", torch.nan),
        ("model.layers.1.mlp.up_proj.weight", "auto", -torch.inf),
        ("model.norm.weight", "float16", 1e5),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    checkpoint: Find, tmp_path: Path, name: str, dtype: str, number: float
) -> None:
    copy = changed(checkpoint("qwen3"), tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors[name].view(-1)[7] = number
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(LoadError, match=f"^{re.escape(name)} has weights that are not finite in float"):
        load(copy, dtype)


def test_dtypes(checkpoint: Find, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    assert load(folder).spec.dtype is torch.float32  # small, so f32 whatever is stored
    copy = tmp_path / "bf16"
    shutil.copytree(folder, copy)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    assert load(copy).spec.dtype is torch.float32
    assert load(copy, "bfloat16").layers[0].down(torch.ones(2, 80).bfloat16()).dtype is torch.bfloat16
    assert Checkpoint(copy).dtype is torch.bfloat16
    assert load(copy).spec.fingerprint != load(folder).spec.fingerprint


def test_a_fingerprint_of_large_files_samples_them(
    checkpoint: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models import checkpoint as weights

    monkeypatch.setattr(weights, "_WHOLE", 1000)
    monkeypatch.setattr(weights, "_SAMPLE", 64)
    folder = checkpoint("qwen3")
    shutil.copytree(folder, tmp_path / "copy")
    assert Checkpoint(folder).fingerprint() == Checkpoint(tmp_path / "copy").fingerprint()
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "copy" / "model.safetensors")
    assert Checkpoint(folder).fingerprint() != Checkpoint(tmp_path / "copy").fingerprint()


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
        ("qwen3", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("qwen3", {"vocab_size": 999}, "embed_tokens.weight has shape"),
        ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 3}, "evenly"),
        ("qwen3", {"head_dim": 8}, "q_proj"),
        ("qwen3", {"num_hidden_layers": 2}, "does not use"),
        ("qwen3", {"num_hidden_layers": 4}, "no tensor"),
        ("llama31", {"attention_bias": False}, "does not use"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("llama31", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "factor"),
        ("llama31", {"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}}, "'rope_theta'"),
        ("llama31", {"rope_parameters": "x"}, "'rope_parameters'"),
        ("qwen3", {"rms_norm_eps": "x"}, "'rms_norm_eps'"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(
    checkpoint: Find, tmp_path: Path, name: str, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        load(changed(checkpoint(name), tmp_path, **fields))
    assert "\n" not in str(caught.value)


def test_dynamic_rope_ends_where_it_would_begin_to_depend_on_the_batch(checkpoint: Find) -> None:
    with pytest.raises(LoadError, match="dynamic rope"):
        load(checkpoint("llama-dynamic"), max_model_len=513)


def test_bfloat16_is_as_close_to_f32_as_the_oracle_in_bfloat16(checkpoint: Find) -> None:
    from transformers import AutoModelForCausalLM

    folder = checkpoint("qwen3")
    driver = Driver(folder, dtype="bfloat16", num_blocks=64)
    prompt = tuple(range(40, 100))
    handle = driver.submit(prompt, greedy(1, prompt_logprobs=0))
    driver.run()
    scored = driver.outputs[handle][0].prompt_logprobs
    assert scored is not None
    ids = torch.tensor(prompt)
    exact = torch.log_softmax(oracle_logits(folder, prompt), -1)[range(59), ids[1:]]
    rounded_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        logits = rounded_model(ids[None], use_cache=False).logits[0].float()
    rounded = torch.log_softmax(logits, -1)[range(59), ids[1:]]
    error = (torch.tensor([row.logprob for row in scored]) - exact).abs().mean()
    assert error <= 1.5 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file(checkpoint: Find, tmp_path: Path, missing: str) -> None:
    copy = changed(checkpoint("qwen3"), tmp_path)
    (copy / missing).unlink()
    with pytest.raises(LoadError):
        load(copy)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("model.safetensors", "", "model.safetensors cannot be read"),
        ("model.safetensors.index.json", "{", "index.json is not JSON"),
        ("model.safetensors.index.json", "{}", "index.json has no usable 'weight_map'"),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}', "index.json has no usable 'weight_map'"),
    ],
)
def test_a_file_of_the_weights_that_cannot_be_read_is_named(
    checkpoint: Find, tmp_path: Path, file: str, content: str, match: str
) -> None:
    copy = changed(checkpoint("qwen3"), tmp_path)
    (copy / file).write_text(content)
    with pytest.raises(LoadError, match=match):
        load(copy)


def test_weights_in_another_format_are_named_with_what_helps(checkpoint: Find, tmp_path: Path) -> None:
    copy = changed(checkpoint("qwen3"), tmp_path)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"but pytorch_model\.bin, which is not read: .*save_pretrained"):
        load(copy)


def test_an_activation_that_no_row_knows_goes_to_the_general_tier(checkpoint: Find, tmp_path: Path) -> None:
    model = load(changed(checkpoint("llama"), tmp_path, hidden_act="gelu"))
    assert not isinstance(model, NativeDecoder)
    assert isinstance(load(checkpoint("llama")), NativeDecoder)
