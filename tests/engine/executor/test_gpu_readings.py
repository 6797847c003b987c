"""What a GPU does, for metrics: here with a GPU that is made up."""

from __future__ import annotations

import pytest
import torch

from engine.executor import gpu_readings
from tests.support.gpus import GPU, make_up_a_gpu

ALWAYS = {
    "memory_bytes": 100,
    "memory_used_bytes": 70,
    "memory_allocated_bytes": 40,
    "ooms_total": 2,
    "alloc_retries_total": 5,
}


def test_a_cpu_has_none() -> None:
    assert gpu_readings(torch.device("cpu")) == {}


@pytest.mark.parametrize("has_nvml", [False, True])
def test_a_gpu_tells_its_memory_and_where_it_can_how_busy_it_is(
    monkeypatch: pytest.MonkeyPatch, has_nvml: bool
) -> None:
    make_up_a_gpu(monkeypatch, has_nvml=has_nvml)
    shares = {"utilization": 0.8, "memory_utilization": 0.25} if has_nvml else {}
    assert gpu_readings(GPU) == ALWAYS | shares
