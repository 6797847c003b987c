"""A GPU that is made up, as far as torch tells of it."""

from __future__ import annotations

import pytest
import torch

GPU = torch.device("cuda", 0)


def make_up_a_gpu(monkeypatch: pytest.MonkeyPatch, *, has_nvml: bool = True) -> None:
    """Have torch tell numbers of a GPU; how busy it is only where NVIDIA's package would be installed."""

    def share(percent: int) -> int:
        if not has_nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return percent

    counters = {"num_ooms": 2, "num_alloc_retries": 5}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counters)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: share(80))
    monkeypatch.setattr(torch.cuda, "memory_usage", lambda device: share(25))
