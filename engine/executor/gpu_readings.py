"""Reads what a GPU does, for metrics, as torch knows it."""

from __future__ import annotations

from contextlib import suppress

import torch


def gpu_readings(device: torch.device) -> dict[str, float]:
    """Numbers of a GPU by name; none of another device. Sizes are bytes, shares 0 to 1.

    memory_bytes, memory_used_bytes: of the whole GPU, all processes. memory_allocated_bytes: tensors of this
    one. ooms_total: allocations that failed; alloc_retries_total: those that took cached memory back first.
    utilization, memory_utilization: shares of the last second in which a kernel ran, and memory was read or
    written; only where NVIDIA's package nvidia-ml-py is installed, which torch asks.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    counters = torch.cuda.memory_stats(device)
    readings: dict[str, float] = {
        "memory_bytes": total,
        "memory_used_bytes": total - free,
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "ooms_total": counters.get("num_ooms", 0),
        "alloc_retries_total": counters.get("num_alloc_retries", 0),
    }
    with suppress(ModuleNotFoundError):
        readings["utilization"] = torch.cuda.utilization(device) / 100
        readings["memory_utilization"] = torch.cuda.memory_usage(device) / 100
    return readings
