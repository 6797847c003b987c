"""Moves the bytes of KV blocks between the pools and memory of the host, for tiers below the pool.

A block's bytes are those of a layer group, in the order [layer, K or V, head, token, dim], or, on a GPU,
[layer, K or V, token, head, dim]: as they lie, so that most copies are of long stretches.

Reading and writing may be done on threads of their own, one each: other blocks may be computed meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.executor.runner import Runner
from engine.kernels import raw

Bytes = NDArray[np.uint8]

STAGING = 16 << 20
"""Bytes of pinned memory in each direction; a block that is larger gets its own size."""


class HostBlocks:
    """Blocks of a CPU's pools, which lie layer by layer: [layers, 2, blocks, heads, tokens, dim]."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: [blocks, layers, 2, tokens, heads, dim], see `kernels.new_pool`."""
        self._pools = [_bytes_of(pool.permute(1, 2, 0, 4, 3, 5)) for pool in pools]

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of one block of each group."""
        return tuple(pool.nbytes // pool.shape[2] for pool in self._pools)

    def mark(self) -> None:
        """A CPU computes what it is asked before it returns."""

    def read(self, group: int, blocks: Sequence[int], into: Bytes, mark: object) -> None:
        """Copy blocks into rows of memory [blocks, bytes]."""
        pool = self._pools[group]
        for row, block in zip(into, blocks, strict=True):
            np.copyto(row.reshape(_shape(pool)), pool[:, :, block])

    def write(self, group: int, blocks: Sequence[int], data: Bytes, mark: object) -> None:
        """Copy rows of memory [blocks, bytes] into blocks."""
        pool = self._pools[group]
        for row, block in zip(data, blocks, strict=True):
            np.copyto(pool[:, :, block], row.reshape(_shape(pool)))


def _bytes_of(pool: Tensor) -> Bytes:
    """A pool's memory [layers, 2, blocks, heads, tokens, bytes of a head]."""
    return raw(pool).view(torch.uint8).numpy()


def _shape(pool: Bytes) -> tuple[int, ...]:
    """Of one of its blocks."""
    return (*pool.shape[:2], *pool.shape[3:])


class DeviceBlocks:
    """Blocks of a GPU's pools, each one stretch of its memory, by a copy stream and pinned memory for each
    direction.
    """

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: [blocks, layers, 2, tokens, heads, dim], see `kernels.new_pool`."""
        self._pools = [raw(pool).view(torch.uint8).flatten(1) for pool in pools]
        self._device = pools[0].device
        self._ways = threading.local()

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of one block of each group."""
        return tuple(pool.shape[1] for pool in self._pools)

    def mark(self) -> torch.cuda.Event:
        """What the device was asked on this thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, group: int, blocks: Sequence[int], into: Bytes, mark: object) -> None:
        """Copy blocks into rows of memory [blocks, bytes]."""
        pool, (stream, staging) = self._pools[group], self._way()
        size = pool.shape[1]
        with torch.inference_mode(), torch.cuda.stream(stream):
            _wait_for(stream, mark)
            for begin, end in self._steps(len(blocks), size, staging):
                piece = staging[: (end - begin) * size].view(-1, size)
                for row, block in zip(piece, blocks[begin:end], strict=True):
                    row.copy_(pool[block], non_blocking=True)
                stream.synchronize()
                np.copyto(into[begin:end], piece.numpy())

    def write(self, group: int, blocks: Sequence[int], data: Bytes, mark: object) -> None:
        """Copy rows of memory [blocks, bytes] into blocks; they are there when it returns."""
        pool, (stream, staging) = self._pools[group], self._way()
        size = pool.shape[1]
        with torch.inference_mode(), torch.cuda.stream(stream):
            _wait_for(stream, mark)
            for begin, end in self._steps(len(blocks), size, staging):
                piece = staging[: (end - begin) * size].view(-1, size)
                np.copyto(piece.numpy(), data[begin:end])
                for row, block in zip(piece, blocks[begin:end], strict=True):
                    pool[block].copy_(row, non_blocking=True)
                stream.synchronize()

    def _way(self) -> tuple[torch.cuda.Stream, Tensor]:
        """This thread's stream and pinned memory."""
        if not hasattr(self._ways, "way"):
            torch.cuda.set_device(self._device)
            size = max(STAGING, *self.group_bytes)
            staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._ways.way = torch.cuda.Stream(self._device), staging  # type: ignore[no-untyped-call]
        way: tuple[torch.cuda.Stream, Tensor] = self._ways.way
        return way

    def _steps(self, count: int, size: int, staging: Tensor) -> list[tuple[int, int]]:
        step = len(staging) // size
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _wait_for(stream: torch.cuda.Stream, mark: object) -> None:
    if isinstance(mark, torch.cuda.Event):
        stream.wait_event(mark)


class EightBitBlocks:
    """Blocks in eight bits outside the pool: for each token and head the largest number and a share of it."""

    def __init__(
        self, inner: HostBlocks | DeviceBlocks, dtype: torch.dtype, head_dims: Sequence[int]
    ) -> None:
        """dtype: of the pools. head_dims: of each group."""
        self._inner = inner
        self._dtype = dtype
        self._dims = tuple(head_dims)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of one block of each group: a byte a number, and four bytes a head for its scale."""
        return tuple(self._vectors(group) * (dim + 4) for group, dim in enumerate(self._dims))

    def _vectors(self, group: int) -> int:
        """Vectors of a block: of each layer, K or V, token and head."""
        return self._inner.group_bytes[group] // self._dtype.itemsize // self._dims[group]

    def mark(self) -> object:
        """See the blocks that it wraps."""
        return self._inner.mark()

    def read(self, group: int, blocks: Sequence[int], into: Bytes, mark: object) -> None:
        """Copy blocks into rows of memory [blocks, bytes]."""
        whole: Bytes = np.empty((len(blocks), self._inner.group_bytes[group]), np.uint8)
        self._inner.read(group, blocks, whole, mark)
        for row, block in zip(into, whole, strict=True):
            numbers = torch.from_numpy(block).view(self._dtype).view(-1, self._dims[group]).float().numpy()
            row[:] = np.concatenate([part.view(np.uint8).ravel() for part in to_eight_bits(numbers)])

    def write(self, group: int, blocks: Sequence[int], data: Bytes, mark: object) -> None:
        """Copy rows of memory [blocks, bytes] into blocks."""
        num, dim = self._vectors(group), self._dims[group]
        whole: Bytes = np.empty((len(blocks), self._inner.group_bytes[group]), np.uint8)
        for row, block in zip(data, whole, strict=True):
            shares = np.ascontiguousarray(row[: num * dim]).view(np.int8).reshape(num, dim)
            scales = np.ascontiguousarray(row[num * dim :]).view(np.float32).reshape(num, 1)
            numbers = torch.from_numpy(shares.astype(np.float32) * scales).to(self._dtype)
            block[:] = numbers.view(torch.uint8).numpy().ravel()
        self._inner.write(group, blocks, whole, mark)


def to_eight_bits(numbers: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Vectors [N, dim] as whole shares of -127 to 127, and what one share of each is worth [N, 1]."""
    scales = (np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))  # zeros stay zeros
    return np.rint(numbers / divisors).astype(np.int8), scales


Blocks = HostBlocks | DeviceBlocks | EightBitBlocks


def block_memory(runner: Runner, *, eight_bits: bool) -> Blocks:
    """The blocks of a runner's pools, as they are, or in eight bits where they are not in any case."""
    inner = HostBlocks(runner.pools) if runner.device.type == "cpu" else DeviceBlocks(runner.pools)
    if not eight_bits or runner.kv_dtype is torch.int8:
        return inner
    return EightBitBlocks(inner, runner.kv_dtype, [group.head_dim for group in runner.model.spec.groups])
