"""Computes one step on a device.

This is the runner, CUDA graphs, the fused forward of a GPU, the native forward of a CPU, and steps whose
numbers do not depend on the batch.
"""

from __future__ import annotations

from engine.executor.block_memory import block_memory
from engine.executor.deterministic import ROWS
from engine.executor.gpu_readings import gpu_readings
from engine.executor.kv_sizing import PoolSizes, size_pools
from engine.executor.runner import NO_TOKEN, Forwarded, Runner, StepResult

__all__ = [
    "NO_TOKEN",
    "ROWS",
    "Forwarded",
    "PoolSizes",
    "Runner",
    "StepResult",
    "block_memory",
    "gpu_readings",
    "size_pools",
]
