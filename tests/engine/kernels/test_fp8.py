"""Floats of eight bits: as weights, as stored by other tools, and as what keys and values are kept as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.benchmark.roofline import step_bytes
from engine.config import EngineConfig
from engine.executor import kv_sizing, runner
from engine.executor.gpu_launcher import STAND_IN
from engine.kernels.fp8 import FP8, HIGHEST, quantize_rows, read_into, to_fp8
from engine.kernels.torch_attention import Workspace
from engine.models import fp8, linear, load_model, loader
from engine.models.fp8 import Fp8, make_fp8
from engine.models.linear import make_linear
from engine.tiny import CHECKPOINT
from engine.tiny.dialogue import render
from engine.tiny.evaluate import held_out
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import LoadError
from tests.engine.models.test_linear import check, matrix
from tests.support.driver import Driver, greedy

Find = Callable[[str], Path]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


# ------------------------------------------------------------------------------------------------------------
# In and out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    is_number = codes % 128 != 127
    numbers = codes[is_number].view(FP8)
    found = read_into(torch.empty(254, dtype=dtype), numbers)
    assert torch.equal(found, numbers.to(dtype))
    assert torch.equal(to_fp8(found).view(torch.uint8), numbers.view(torch.uint8))
    for nan in codes[~is_number].view(FP8):
        both = read_into(torch.empty(2, dtype=dtype), torch.stack((nan, numbers[-1])))
        assert both.isnan().tolist() == [True, False]


def test_what_is_too_large_becomes_the_highest() -> None:
    kept = to_fp8(torch.tensor([1e6, -500.0, 448.0, float("inf"), float("nan")])).float()
    assert kept[:4].tolist() == [HIGHEST, -HIGHEST, HIGHEST, HIGHEST]
    assert kept[4].isnan()


# ------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_matrix_is_what_it_says_it_is(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "PIECE", 80 * 40)  # several pieces, the last a part of one
    weight = matrix(96, 80)
    weight[3] = 0
    own = make_linear(weight, weight[:, 0].clone() if with_bias else None, "fp8", Workspace())
    assert isinstance(own, Fp8)
    held = own.weight.float() * own.scale[:, None]
    assert (held - weight).norm() < 0.03 * weight.float().norm()
    assert not held[3].any()
    check(own, held.bfloat16(), 0.05)


def test_rows_are_multiplied_as_eight_bits_too_where_the_device_does() -> None:
    weight = matrix(64, 96)
    own = make_fp8(weight, weight[:, 0].clone(), Workspace())
    scaled = Fp8(own.weight, own.scale, own.bias, own.workspace, quantize_rows)
    x = matrix(7, 96) * torch.logspace(-2, 2, 7)[:, None].bfloat16()
    rows, scale = quantize_rows(x)
    expected = (rows.float() * scale) @ (own.weight.float() * own.scale[:, None]).T + weight[:, 0]
    found = scaled(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(scaled(x, found).float(), 2 * expected, rtol=0.03, atol=0.03)
    assert (expected - own(x)).norm() < 0.05 * expected.norm()


def test_what_is_made_so(checkpoint: Find) -> None:
    plain, model = (load(CHECKPOINT, quantization=kind) for kind in ("none", "fp8"))
    assert all(isinstance(each.down, Fp8) for each in model.layers)
    assert not isinstance(model.head, Fp8) and isinstance(model.embedding, Tensor)
    assert model.spec.dtype is torch.bfloat16
    assert model.spec.fingerprint != plain.spec.fingerprint
    with pytest.raises(LoadError, match="fp8 computes in bfloat16, not in float32"):
        load(CHECKPOINT, quantization="fp8", dtype="float32")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 9])
def test_a_step_of_kernels_says_what_the_plain_one_says(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows by the product that reads eight bits itself, more by the layout's own."""
    prompts = questions(rows)
    settings: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_seqs": rows}
    expected = said(CHECKPOINT, prompts, 8, **settings)
    monkeypatch.setattr(runner, "kernels_for", lambda device: STAND_IN)
    monkeypatch.setattr(loader, "open_library", lambda: None)  # whose weights lie as only it reads them
    monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    assert share(said(CHECKPOINT, prompts, 8, **settings), expected) > 0.8


def questions(count: int) -> list[tuple[int, ...]]:
    """Prompts that the shipped model is sure how to answer: rounding changes none of its choices."""
    tokenizer = Tokenizer.load(CHECKPOINT)
    found = []
    for dialogue in held_out("repeat", count):
        pieces = render(dialogue)
        last = max(i for i, (_, learned) in enumerate(pieces) if learned)
        found.append(tuple(tokenizer.encode("".join(text for text, _ in pieces[:last]))))
    return found


def load(folder: Path, **given: Any) -> Any:
    return load_model(EngineConfig(folder, **{"cpu_kernels": False, **given}), CPU)


def said(folder: Path, prompts: list[tuple[int, ...]], count: int, **settings: Any) -> list[tuple[int, ...]]:
    """What a model says greedily to all prompts at once; the shipped one to the end of its turn."""
    shipped = folder == CHECKPOINT
    known = {"vocab_size": 3072, "kv_cache_bytes": 16 << 20} if shipped else {"num_blocks": 300}
    ends = Tokenizer.load(folder).eos_token_ids if shipped else ()
    driver = Driver(folder, **{**known, **settings})
    sampling = greedy(count, ignore_eos=True, stop_token_ids=ends)
    handles = [driver.submit(prompt, sampling) for prompt in prompts]
    driver.run()
    return [driver.tokens(handle) for handle in handles]


def share(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> float:
    """How much of what was expected came before the first token that differs."""
    same = 0
    for own, other in zip(found, expected, strict=True):
        pairs = enumerate(zip(own, other, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), min(len(own), len(other)))
    return same / sum(map(len, expected))


# ------------------------------------------------------------------------------------------------------------
# Checkpoints that are stored so


def write_stored(folder: Path, to: Path, scheme: str) -> tuple[Path, Path]:
    """Two copies of a checkpoint: its layers' matrices in eight bits, and the same as numbers."""
    config = json.loads((folder / "config.json").read_text())
    kept, numbers = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, weight in list(kept.items()):
        if not name.endswith("proj.weight"):
            continue
        high, wide = {"block": (32, 32), "channel": (1, weight.shape[1]), "tensor": tuple(weight.shape)}[
            scheme
        ]
        scale = torch.zeros(-(-weight.shape[0] // high), -(-weight.shape[1] // wide))
        kept[name], numbers[name] = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scale[i, j] = weight[at].abs().max() / HIGHEST
                kept[name][at] = to_fp8(weight[at] / scale[i, j])
                numbers[name][at] = kept[name][at].float() * scale[i, j]
        kept[f"{name}_scale_inv" if scheme == "block" else f"{name}_scale"] = (
            scale[0, 0].clone() if scheme == "tensor" else scale
        )
        kept[name.replace("weight", "input_scale")] = torch.ones(1)
    own = {
        "block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
        "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
        "channel": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
            },
        },
    }[scheme]
    for copy, tensors, fields in (
        (to / "kept", kept, {"quantization_config": own}),
        (to / "wide", numbers, {}),
    ):
        shutil.copytree(folder, copy)
        save_file(tensors, copy / "model.safetensors")
        (copy / "config.json").write_text(json.dumps({**config, **fields}))
    return to / "kept", to / "wide"


@pytest.mark.parametrize("scheme", ["block", "channel", "tensor"])
def test_a_folder_that_is_fp8_already_just_works(checkpoint: Find, tmp_path: Path, scheme: str) -> None:
    kept, wide = write_stored(checkpoint("qwen3"), tmp_path, scheme)
    prompts = [tuple(range(9, 30)), tuple(range(100, 104))]
    expected = said(wide, prompts, 10, dtype="float32")
    assert said(kept, prompts, 10, dtype="float32") == expected
    assert said(kept, prompts, 10) == expected  # too small for bfloat16
    again = load(kept, quantization="fp8")
    assert all(isinstance(each.qkv, Fp8) for each in again.layers)
    if scheme == "channel":  # what was kept is kept to the bit
        raw = load_file(kept / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(again.layers[1].down.weight.float(), raw.float())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized by gptq, which is not read"),
        ({"quant_method": "awq", "bits": 4}, "quantized by awq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantized by fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
            },
            "quantized by compressed-tensors pack-quantized",
        ),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "has shape .*, and scales of shape"),
    ],
)
def test_other_quantizations_are_refused_by_name(
    checkpoint: Find, tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    kept, _ = write_stored(checkpoint("qwen3"), tmp_path, "block")
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    with pytest.raises(LoadError, match=match) as caught:
        load(kept)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["olmo2", "qwen3_moe-32"])
def test_the_general_tier_reads_what_is_stored_so(checkpoint: Find, tmp_path: Path, name: str) -> None:
    """Experts too, which are stored one by one, and are one tensor in the model."""
    kept, plain = write_stored(checkpoint(name), tmp_path, "block")
    drivers = [Driver(folder, dtype="float32", num_blocks=100) for folder in (kept, plain)]
    found, expected = ([driver.generate(prompt, greedy(10)) for prompt in PROMPTS] for driver in drivers)
    assert found == expected


def write_mxfp4(folder: Path, kept: Path, plain: Path) -> None:
    """A checkpoint with experts of four-bit floats, and the same as numbers."""
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    generator = np.random.default_rng(0)
    packed, numbers = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        whole = np.zeros((experts, outputs, inputs))
        blocks = generator.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = generator.integers(122, 127, (experts, outputs, inputs // 32), dtype=np.uint8)
        for at in np.ndindex(*whole.shape):
            bits = int(blocks[at[0], at[1], at[2] // 32, at[2] % 32 // 2]) >> 4 * (at[2] % 2) & 15
            exponent, mantissa = bits >> 1 & 3, bits & 1
            magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            power = 2.0 ** (int(scales[at[0], at[1], at[2] // 32]) - 127)
            whole[at] = magnitude * power * (-1 if bits & 8 else 1)
        numbers[name] = torch.from_numpy(whole).float().transpose(1, 2).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    for to, own, fields in (
        (kept, packed, {"quantization_config": {"quant_method": "mxfp4"}}),
        (plain, numbers, {}),
    ):
        shutil.copytree(folder, to)
        save_file(own, to / "model.safetensors", {"format": "pt"})
        (to / "config.json").write_text(json.dumps({**config, **fields}))


def test_experts_of_four_bit_floats_are_read(checkpoint: Find, tmp_path: Path) -> None:
    """As gpt-oss stores its own."""
    write_mxfp4(checkpoint("gpt_oss-mxfp4"), tmp_path / "kept", tmp_path / "plain")
    drivers = [Driver(tmp_path / each, dtype="float32", num_blocks=100) for each in ("kept", "plain")]
    found, expected = ([driver.generate(prompt, greedy(10)) for prompt in PROMPTS] for driver in drivers)
    assert found == expected
    tensors = load_file(tmp_path / "kept" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, tmp_path / "kept" / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"has blocks of shape .*, and scales of shape"):
        load(tmp_path / "kept")


# ------------------------------------------------------------------------------------------------------------
# Keys and values

KEPT: dict[str, Any] = {"kv_cache_dtype": "fp8"}
PROMPTS = [tuple(range(5 + 3 * i, 45 + 2 * i)) for i in range(6)]


def test_the_shipped_model_says_mostly_the_same() -> None:
    expected = said(CHECKPOINT, questions(6), 20)
    found = said(CHECKPOINT, questions(6), 20, **KEPT)
    assert share(found, expected) > 0.8
    assert said(CHECKPOINT, questions(6), 20, **KEPT) == found


@pytest.mark.parametrize("name", ["mistral", "qwen2-windows", "gemma2", "gpt_oss"])
def test_windows_and_the_general_tier_keep_them_too(checkpoint: Find, name: str) -> None:
    """By what a prompt's own tokens score: the texts of random weights part at the first near tie."""

    def scores(**settings: Any) -> Tensor:
        driver = Driver(checkpoint(name), num_blocks=100, max_num_batched_tokens=32, **settings)
        assert all((pool.dtype is FP8) == bool(settings) for pool in driver.loop.runner.pools)
        handle = driver.submit(tuple(range(3, 80)), greedy(8, ignore_eos=True, prompt_logprobs=0))
        driver.run()
        assert len(driver.tokens(handle)) == 8
        found = [row for output in driver.outputs[handle] for row in output.prompt_logprobs or ()]
        return torch.tensor([row.logprob for row in found])

    both = torch.stack((scores(), scores(**KEPT)))
    assert both.shape == (2, 76)
    assert torch.corrcoef(both)[0, 1] > 0.8, torch.corrcoef(both)


def test_a_prefix_that_is_cached_reads_as_it_was_written() -> None:
    driver = Driver(CHECKPOINT, vocab_size=3072, kv_cache_bytes=16 << 20, **KEPT)
    prompt = tuple(range(5, 85))
    first = driver.generate(prompt, greedy(12))
    assert driver.generate(prompt, greedy(12)) == first
    assert driver.loop.scheduler.counters.prefix_hits > 50


def test_the_same_memory_keeps_more_tokens() -> None:
    wide, narrow = (
        Driver(CHECKPOINT, vocab_size=3072, kv_cache_bytes=4 << 20, max_model_len=256, **given).loop
        for given in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", **KEPT})
    )
    blocks = [loop.scheduler.kv.pools[0].num_blocks for loop in (wide, narrow)]
    assert blocks[1] == pytest.approx(2 * blocks[0], rel=0.01)
    own = narrow.runner
    read = [step_bytes(own.model, 1, context, own.kv_dtype) for context in (0, 100)]
    full = [step_bytes(own.model, 1, context) for context in (0, 100)]
    assert full[1] - full[0] == 2 * (read[1] - read[0])


def test_with_deterministic_neighbours_change_nothing() -> None:
    settings = {"deterministic": True, **KEPT}
    alone = [said(CHECKPOINT, [prompt], 10, **settings)[0] for prompt in PROMPTS[:3]]
    assert said(CHECKPOINT, PROMPTS[:3], 10, **settings) == alone


def test_a_draft_model_keeps_them_so_too(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    settings: dict[str, Any] = {"num_blocks": 300, "assistant_confidence_threshold": 0.0, **KEPT}
    driver = Driver(folder, folder, **settings)
    own = driver.loop._speculation._drafter._runner  # type: ignore[attr-defined]
    assert own.kv_dtype is FP8
    found = driver.generate(tuple(range(8, 20)), greedy(16, ignore_eos=True))
    assert len(found) == 16
    assert driver.loop.scheduler.counters.drafts_accepted > 0


def test_a_gpu_without_eight_bits_is_named(checkpoint: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sizing, "computes_fp8", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    model = load(checkpoint("qwen3"))
    with pytest.raises(
        LoadError, match=r"needs a GPU of compute capability 8\.9 or more, which an A100 is not"
    ):
        kv_sizing.size_pools(model, EngineConfig("qwen3", kv_cache_dtype="fp8"), torch.device("cuda"))
    with pytest.raises(LoadError, match="int8 is for a CPU; for a GPU there is fp8"):
        kv_sizing.size_pools(model, EngineConfig("qwen3", kv_cache_dtype="int8"), torch.device("cuda"))
    sizes = kv_sizing.size_pools(model, EngineConfig("qwen3", num_blocks=64), torch.device("cuda"))
    assert sizes.dtype is torch.float32
