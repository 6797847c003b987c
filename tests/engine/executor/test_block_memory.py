"""Bytes of KV blocks: out of the pool and back, as they are and in eight bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.executor.block_memory import EightBitBlocks, HostBlocks, to_eight_bits
from engine.kernels import FP8, new_pool

SHAPE = (3, 4, 2, 8)  # layers, tokens, heads, dim


def pool(dtype: torch.dtype, num_blocks: int = 6) -> torch.Tensor:
    made = new_pool(num_blocks, *SHAPE, dtype, torch.device("cpu"))
    numbers = torch.randn(made.shape, generator=torch.Generator().manual_seed(0))
    made.copy_(numbers.to(dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_blocks_come_back_bit_by_bit_and_nothing_else_changes(dtype: torch.dtype) -> None:
    pools = [pool(dtype), pool(dtype, 4)]
    memory = HostBlocks(pools)
    size = 2 * 3 * 4 * 2 * 8 * dtype.itemsize
    assert memory.group_bytes == (size, size)
    before = [each.view(torch.uint8).clone() for each in pools]
    wide = np.zeros((3, size + 10), np.uint8)  # rows need not lie close to each other
    memory.read(0, [4, 1, 2], wide[:, 10:], None)
    pools[0].view(torch.uint8)[[4, 1, 2]] = 0
    memory.write(0, [4, 1, 2], wide[:, 10:], None)
    assert torch.equal(pools[0].view(torch.uint8), before[0])
    memory.write(0, [0], wide[1:2, 10:], None)
    assert torch.equal(pools[0][0].view(torch.uint8), before[0][1])
    assert torch.equal(pools[1].view(torch.uint8), before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_err_by_no_more_than_half_a_share(dtype: torch.dtype) -> None:
    pools = [pool(dtype)]
    memory = EightBitBlocks(HostBlocks(pools), dtype, [SHAPE[-1]])
    vectors = 3 * 2 * 4 * 2
    assert memory.group_bytes == (vectors * (8 + 4),)
    before = pools[0].clone().float()
    rows = np.zeros((2, memory.group_bytes[0]), np.uint8)
    memory.read(0, [5, 3], rows, None)
    pools[0][[5, 3]] = 0
    memory.write(0, [5, 3], rows, None)
    after = pools[0].float()
    share = before.abs().amax(dim=-1, keepdim=True) / 127
    rounding = 2**-8 * before.abs() if dtype is torch.bfloat16 else 1e-6
    assert ((after - before).abs() <= share / 2 + rounding + 1e-6).all()
    assert torch.equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert not torch.equal(after[5], before[5])


def test_vectors_of_zeros_and_extremes_are_kept() -> None:
    numbers = np.array([[0, 0, 0], [1e-30, 0, -1e-30], [3e38, -3e38, 0], [127, -127, 1]], np.float32)
    shares, scales = to_eight_bits(numbers)
    again = shares.astype(np.float32) * scales
    assert np.isfinite(again).all() and not again[0].any()
    assert np.allclose(again[2:], numbers[2:], rtol=1e-6) and np.allclose(again[1], numbers[1], rtol=1e-2)
