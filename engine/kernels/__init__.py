"""Arithmetic on tensors: attention, drawing tokens, eight-bit floats, large pages of memory, threads.

Owns the torch bodies. A GPU's kernels are in `triton`, a CPU's own in `cpu`.
"""

from __future__ import annotations

from engine.kernels import sampler
from engine.kernels.fp8 import FP8, computes_fp8, quantize_rows, raw, read_into
from engine.kernels.large_pages import Reserve, free_memory
from engine.kernels.large_pages import large_pages as zeros_in_large_pages
from engine.kernels.threads import own_threads, set_threads
from engine.kernels.torch_attention import (
    GroupStep,
    Tile,
    Workspace,
    gather,
    make_tiles,
    memory_of,
    multiplies_bfloat16,
    new_pool,
    paged_attention,
    pieces_of,
    token_bytes,
    write_kv,
)

__all__ = [
    "FP8",
    "GroupStep",
    "Reserve",
    "Tile",
    "Workspace",
    "computes_fp8",
    "free_memory",
    "gather",
    "make_tiles",
    "memory_of",
    "multiplies_bfloat16",
    "new_pool",
    "own_threads",
    "paged_attention",
    "pieces_of",
    "quantize_rows",
    "raw",
    "read_into",
    "sampler",
    "set_threads",
    "token_bytes",
    "write_kv",
    "zeros_in_large_pages",
]
