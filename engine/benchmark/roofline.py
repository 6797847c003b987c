"""Computes the shortest time of a decode step: the bytes it reads, over the rate of the device's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from engine.kernels import token_bytes, zeros_in_large_pages
from engine.kernels.cpu import open_library
from engine.models import Mapped, Model, Routed

_ON_CPU = 256 << 20  # bytes that are read: far more than any cache holds
_ON_GPU = 2 << 30
_REPEATS = 7
_UNREAD = {"embedding", "places", "plain", "stack", "workspace"}
"""What a model holds under these names a step does not read: single rows aside (a head that is tied to the
embedding is found as the head), a matrix's order and a second copy of it, adapters that it is not under, and
buffers."""


def read_rate(device: torch.device) -> float:
    """Bytes a second at which `device` reads its memory, by the fastest of some goes over a large tensor: by
    the kernels for a CPU, which read several pages at a time, or by sums of torch.

    Takes some tenths of a second, and 256 MiB (GPU: 2 GiB, or a quarter of what is free). On the CPU it
    leaves the calling thread with as many torch threads as the process has processors.
    """
    if device.type == "cuda":
        size = min(_ON_GPU, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        size = _ON_CPU
        torch.set_num_threads(_processors())
    # as weights lie
    memory = (
        zeros_in_large_pages((size // 4,), torch.float32)
        if device.type == "cpu"
        else torch.empty(size // 4, device=device)
    )
    memory.fill_(1)
    library = open_library() if device.type == "cpu" else None
    fastest = float("inf")
    for _ in range(_REPEATS):
        _wait_for(device)
        began = time.perf_counter()
        if library is None:
            memory.sum()
        else:
            library.read(memory)
        _wait_for(device)
        fastest = min(fastest, time.perf_counter() - began)
    return memory.nbytes / fastest


def _processors() -> int:
    """How many this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no such call
        return os.cpu_count() or 1


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_bytes(model: Model, num_seqs: int, context: int, kv_dtype: torch.dtype | None = None) -> int:
    """Bytes that one decode step of `num_seqs` sequences reads: the weights once, as they lie in memory, and
    the KV of `context` tokens each. Of an embedding only single rows are read; a head tied to it counts.

    `kv_dtype`: what keys and values are kept as; None: what the model computes in.
    """
    kept = kv_dtype or model.spec.dtype
    groups = model.spec.groups
    kv = sum(token_bytes(group, kept) * min(context, group.window or context) for group in groups)
    return weight_bytes(model) + num_seqs * kv


def weight_bytes(model: Any) -> int:
    """Bytes of all weights that every step reads, each counted once however many names it has."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(model, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that a model holds, in modules, dataclasses, lists and tables, but for those of
    `_UNREAD`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        maps = (each.linear for each in value.modules() if isinstance(each, Mapped))
        routed = [each.forward.experts for each in value.modules() if isinstance(each.forward, Routed)]
        experts = (part.panels for each in routed for part in (each.first, each.last))
        inside = chain(_parameters(value), maps, experts)
    elif isinstance(value, dict):
        inside = (each for name, each in value.items() if name not in _UNREAD)
    elif isinstance(value, list | tuple):
        inside = value
    elif is_dataclass(value):
        inside = [getattr(value, field.name) for field in fields(value) if field.name not in _UNREAD]
    elif type(value).__module__.startswith("engine."):
        inside = (each for name, each in vars(value).items() if name not in _UNREAD)
    for each in inside:
        yield from _tensors(each, seen)


def _parameters(module: Any) -> Iterator[Tensor]:
    table, head = (getattr(module, f"get_{end}_embeddings")() for end in ("input", "output"))
    read = head is not None and head.weight is table.weight
    return (each for each in module.parameters() if read or each is not table.weight)
