"""How much memory the KV cache takes of a GPU."""

from __future__ import annotations

import pytest
import torch

from engine import EngineConfig
from engine.executor.kv_sizing import _memory_for_kv
from engine.types import LoadError

GIB = 1 << 30


def test_a_share_of_a_gpu_holds_the_weights_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 10 * GIB))
    gpu = torch.device("cuda")
    assert _memory_for_kv(gpu) == (int(6 * GIB * 0.85),) * 2
    assert _memory_for_kv(gpu, 0.8) == (4 * GIB * 7 // 8,) * 2, "4 of 8 GiB are taken already"
    with pytest.raises(LoadError, match="40% of the GPU's memory is taken already"):
        _memory_for_kv(gpu, 0.4)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_above_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(LoadError, match="gpu_memory_utilization is a share"):
        EngineConfig("model", gpu_memory_utilization=share)
