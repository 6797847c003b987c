"""Sizes the KV cache: how many blocks each layer group gets, and how long a context they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.executor.cpu_attention import unfit
from engine.kernels import FP8, computes_fp8, free_memory, token_bytes
from engine.models import Model, ModelSpec
from engine.types import LoadError, readable_size

MOST_UNASKED = 4 << 30  # bytes that KV takes of a CPU's memory when no size was asked for


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """num_blocks: of each layer group, in the model's order. max_len: tokens of the longest sequence.

    dtype: what keys and values are stored as. shortened: in words, by what `max_len` is less than the model
    would allow, where nobody asked for that; empty where it is not.
    """

    num_blocks: tuple[int, ...]
    max_len: int
    dtype: torch.dtype
    shortened: str = ""


@dataclass(frozen=True, slots=True)
class _Groups:
    """What sequences need of the pools: block sizes in bytes, and the tokens that a window group keeps."""

    spec: ModelSpec
    block_size: int
    max_chunk: int
    block_bytes: tuple[int, ...]

    def blocks_for(self, length: int) -> list[int]:
        """Blocks of each group for one sequence of `length` tokens.

        A window group holds what its window reaches, and a prefill chunk before that is trimmed.
        """
        longest = -(-length // self.block_size)
        return [
            longest
            if group.window is None
            else min(longest, -(-(group.window + self.max_chunk) // self.block_size) + 2)
            for group in self.spec.groups
        ]

    def bytes_for(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens."""
        return sum(
            count * size for count, size in zip(self.blocks_for(length), self.block_bytes, strict=True)
        )


def size_pools(model: Model, config: EngineConfig, device: torch.device) -> PoolSizes:
    """The pools that a configuration gives a model on this device.

    `config.num_blocks` counts the blocks of the first group; the others hold as many sequences. Without
    `config.max_model_len` the context is the model's, or what memory allows; with it, raises LoadError when
    one such sequence would not fit. Raises LoadError, too, for a KV type that the device does not know.
    """
    spec, block_size, max_model_len = model.spec, config.block_size, config.max_model_len
    dtype = _kv_dtype(config, model, device)
    if max_model_len is not None and max_model_len > spec.max_positions:
        raise LoadError(
            f"max_model_len {max_model_len} is beyond the {spec.max_positions} positions of the model"
        )
    block_bytes = tuple(block_size * token_bytes(group, dtype) for group in spec.groups)
    groups = _Groups(spec, block_size, config.max_num_batched_tokens, block_bytes)
    length = max_model_len or spec.max_positions
    if config.num_blocks is not None:
        ratio = config.num_blocks / groups.blocks_for(length)[0]
        fits = ratio >= 1
        most_length = config.num_blocks * block_size
    else:
        available = config.kv_cache_bytes
        if available is None:
            usual, most = _memory_for_kv(device, config.gpu_memory_utilization)
            if model.sight is not None:  # which keeps its features where the KV is
                usual, most = usual - config.image_cache_bytes, most - config.image_cache_bytes
            available = min(most, max(usual, groups.bytes_for(length)))
        fits = available >= groups.bytes_for(length)
        ratio = min(available / groups.bytes_for(length), config.max_num_seqs)
        most_length = _longest(groups, available, length)
    if fits:
        num_blocks = tuple(int(count * ratio) for count in groups.blocks_for(length))
        return PoolSizes(num_blocks, length, dtype, "" if max_model_len is not None else spec.shortened)
    if max_model_len is not None or most_length <= block_size:
        size = readable_size(groups.bytes_for(length))
        raise LoadError(
            f"the KV cache cannot hold one sequence of {length} tokens ({size}): {_bound(config)}"
        )
    return PoolSizes(
        tuple(max(1, count) for count in groups.blocks_for(most_length)),
        most_length,
        dtype,
        f"the context is {most_length} tokens instead of the {length} of the model, which take "
        f"{readable_size(groups.bytes_for(length))} of KV cache: {_bound(config)}",
    )


def _bound(config: EngineConfig) -> str:
    """What bounds the KV cache."""
    if config.num_blocks is not None:
        return f"num_blocks is {config.num_blocks}"
    if config.kv_cache_bytes is not None:
        return f"kv_cache_bytes is {readable_size(config.kv_cache_bytes)}"
    if config.gpu_memory_utilization is not None:
        return f"gpu_memory_utilization is {config.gpu_memory_utilization:g}"
    return "there is no memory for more"


def _longest(groups: _Groups, available: int, length: int) -> int:
    """The longest sequence, up to `length`, that so many bytes hold, to within 2 %; or about one block."""
    while groups.bytes_for(length) > available and length > groups.block_size:
        length -= max(groups.block_size, length // 64)
    return length


def _kv_dtype(config: EngineConfig, model: Model, device: torch.device) -> torch.dtype:
    """What keys and values are stored as; raises LoadError for what the device or the model has not."""
    if config.kv_cache_dtype == "auto":
        return model.spec.dtype
    if config.kv_cache_dtype == "int8":
        if device.type == "cuda":
            raise LoadError("kv_cache_dtype int8 is for a CPU; for a GPU there is fp8")
        why = unfit(model.spec, torch.int8)
        if model.library is None:
            why = "the kernels for a CPU (cpu_kernels) are off or could not be built"
        if why is not None:
            raise LoadError(
                f"kv_cache_dtype int8 cannot be had: {why}; fp8 takes as little memory, and is slower"
            )
        return torch.int8
    if device.type == "cuda" and not computes_fp8(device):
        name = torch.cuda.get_device_name(device)
        raise LoadError(
            f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or more, which {name} is not"
        )
    return FP8


def _memory_for_kv(device: torch.device, share: float | None = None) -> tuple[int, int]:
    """Bytes that KV takes unasked, and the most it may take to hold one whole context.

    CPU: an eighth of what is free up to 4 GiB, at most half; GPU: 85 % of what is free, or what is left of
    this share of all its memory, of which an eighth is kept for activations. Raises LoadError where nothing
    is left of it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if share is not None:
            left = int(share * total) - (total - free)
            if left <= 0:
                taken = (total - free) / total
                raise LoadError(
                    f"gpu_memory_utilization {share:g} leaves nothing for the KV cache: {taken:.0%} of the "
                    "GPU's memory is taken already, the weights included"
                )
            return left * 7 // 8, left * 7 // 8
        return int(free * 0.85), int(free * 0.85)
    available = free_memory()
    return min(MOST_UNASKED, available // 8), available // 2
