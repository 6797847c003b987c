"""Layouts of a linear map's weights: each multiplies as the plain one does, to its precision."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, Quantization
from engine.kernels.torch_attention import Workspace
from engine.models import load_model
from engine.models.decoder import NativeDecoder
from engine.models.linear import (
    GROUP,
    INT4_ROWS,
    INT8_ROWS,
    Blocked,
    Int4,
    Int8,
    Plain,
    int4_width,
    make_linear,
)
from engine.tiny import CHECKPOINT
from engine.types import LoadError
from tests.support.driver import Driver, greedy

Find = Callable[[str], Path]
CPU = torch.device("cpu")
ROWS = (0, 1, 2, 16, INT8_ROWS, INT4_ROWS)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def check(linear: Any, weight: Tensor, tolerance: float) -> None:
    """Products of `linear`, for every number of rows, are those with `weight`, a bias and a residual."""
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
        residual = torch.randn(rows, weight.shape[0], generator=generator).to(weight.dtype)
        before = residual.clone()
        expected = x.double() @ weight.double().T
        if linear.bias is not None:
            expected += linear.bias.double()
        for found, whole in ((linear(x), expected), (linear(x, residual), expected + residual.double())):
            assert found.dtype is weight.dtype
            error = (found.double() - whole).abs()
            assert rows == 0 or error.max() <= tolerance * expected.std(), (rows, error.max())
        assert torch.equal(residual, before)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 80), (1024, 768)])
def test_blocks_multiply_as_rows_do(shape: tuple[int, int], dtype: torch.dtype, with_bias: bool) -> None:
    weight = matrix(*shape, dtype)
    bias = weight[:, 0].clone() if with_bias else None
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    check(Plain(weight, bias), weight, tolerance)
    check(make_linear(weight, bias, "none", Workspace()), weight, tolerance)


def test_a_processor_without_blocks_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(make_linear(matrix(16, 32), None, "none", Workspace()), Plain)


@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_is_the_matrix_it_says_it_is(with_bias: bool) -> None:
    weight = matrix(96, 80)
    weight[3] = 0
    linear = make_linear(weight, weight[:, 0].clone() if with_bias else None, "int8", Workspace())
    assert isinstance(linear, Int8)
    held = linear.rows(torch.arange(96))
    assert (held - weight).float().norm() < 0.01 * weight.float().norm()
    assert not held[3].any()
    check(linear, held, 0.05)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("outputs", [128, 48])  # 48: packed in no whole strip, so never unpacked
def test_int4_is_the_matrix_it_says_it_is(outputs: int, with_bias: bool) -> None:
    weight = matrix(outputs, 96)
    weight[1] = 0
    weight[2, :GROUP] = 0.75
    linear = make_linear(weight, weight[:, 0].clone() if with_bias else None, "int4", Workspace())
    assert isinstance(linear, Int4)
    # a row of the identity reads a column of the matrix
    held = Int4(linear.weight, linear.scales, None, Workspace())(torch.eye(96).bfloat16()).T
    groups = weight.float().view(outputs, -1, GROUP)
    half_a_step = (groups.amax(-1) - groups.amin(-1)) / 30
    error = (held.float() - weight.float()).abs().view(groups.shape).amax(-1)
    assert (error <= 1.1 * half_a_step + 0.02).all()
    assert not held[1].any()
    assert (held[2, :GROUP] == 0.75).all()
    check(linear, held, 0.05)


def test_what_torch_packs_is_unpacked_again() -> None:
    width = int4_width()
    assert width in (32, 64), "or torch packs in a way that is not known, and long prompts are slow"
    linear = make_linear(matrix(128, 64), None, "int4", Workspace())
    assert isinstance(linear, Int4)
    columns = linear(torch.eye(64).bfloat16())
    assert (linear.transposed(width) - columns).abs().max() < 0.02


def test_a_shape_that_groups_do_not_fit_becomes_int8() -> None:
    assert isinstance(make_linear(matrix(64, 48), None, "int4", Workspace()), Int8)
    assert isinstance(make_linear(matrix(40, 64), None, "int4", Workspace()), Int8)


# ------------------------------------------------------------------------------------------------------------
# In a model


def load(folder: Path, quantization: Quantization, dtype: str = "auto") -> Any:
    return load_model(EngineConfig(folder, dtype=dtype, quantization=quantization, cpu_kernels=False), CPU)


def test_what_is_quantized(checkpoint: Find) -> None:
    plain, int8, int4 = (load(CHECKPOINT, kind) for kind in ("none", "int8", "int4"))
    assert isinstance(int4, NativeDecoder) and isinstance(int4.layers[0].down, Int4)
    assert isinstance(int8.layers[5].qkv, Int8)
    for model in (int8, int4):
        assert model.embedding is model.head  # tied in the checkpoint, so held once
        assert model.spec.dtype is torch.bfloat16
    assert len({model.spec.fingerprint for model in (plain, int8, int4)}) == 3
    untied = load(checkpoint("llama"), "int8")
    assert isinstance(untied.embedding, Tensor) and isinstance(untied.head, Int8)


def test_a_head_that_is_held_twice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.engine")
    model = load(CHECKPOINT, "none")
    assert isinstance(model.head, Blocked) == ("held twice" in caplog.text)


def test_shapes_that_int4_does_not_fit_are_said(checkpoint: Find, caplog: pytest.LogCaptureFixture) -> None:
    model = load(checkpoint("qwen3"), "int4")  # its widths are 48 and 80
    assert isinstance(model.layers[0].down, Int8)
    assert "int8 instead of int4" in caplog.text


def test_refusals(checkpoint: Find) -> None:
    with pytest.raises(LoadError, match="quantization int8 computes in bfloat16, not in float32"):
        load(checkpoint("qwen3"), "int8", "float32")
    with pytest.raises(LoadError, match="quantization int8 is not served on cuda; fp8 is"):
        load_model(EngineConfig(checkpoint("qwen3"), quantization="int8"), torch.device("cuda"))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantized_model_says_the_same_alone_and_in_a_batch(quantization: str) -> None:
    """By rows that are unpacked as they are used, and by a matrix that is unpacked first."""
    settings = {"quantization": quantization, "kv_cache_bytes": 16 << 20, "vocab_size": 3072}
    prompts = [tuple(range(5 + i, 45 + i)) for i in range(5)]
    alone = Driver(CHECKPOINT, deterministic=True, **settings)
    expected = [alone.generate(prompt, greedy(12)) for prompt in prompts]
    together = Driver(CHECKPOINT, deterministic=True, **settings)
    handles = [together.submit(prompt, greedy(12)) for prompt in prompts]
    together.run()
    assert [together.tokens(handle) for handle in handles] == expected


def test_a_copy_of_the_folder_is_the_same_model(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "copy")
    assert load(tmp_path / "copy", "int4").spec.fingerprint == load(CHECKPOINT, "int4").spec.fingerprint
