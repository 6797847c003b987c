"""How much memory the KV cache takes of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import EngineConfig, LocalEngine
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


async def test_a_context_that_a_small_cache_shortens_is_told(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    told = {}
    for name, value in (("kv_cache_bytes", 100 << 10), ("num_blocks", 3), ("max_model_len", 32), ("", 0)):
        caplog.clear()
        engine = LocalEngine(checkpoint("qwen3"), num_threads=1, **({name: value} if name else {}))
        info = await engine.start()
        await engine.close()
        told[name] = info.shortened
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warned == ([info.shortened] if info.shortened else [])
        assert info.shortened.startswith(f"the context is {info.max_model_len} tokens") or not info.shortened
    assert told["kv_cache_bytes"].endswith("of KV cache: kv_cache_bytes is 100 KiB")
    assert told["num_blocks"].endswith(": num_blocks is 3")
    assert told[""] == told["max_model_len"] == "", "nothing is short of what was asked for"


async def test_a_context_that_longrope_shortens_is_told(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for max_model_len, length in ((None, 32), (16, 16), (32, 32), (512, 512)):
        caplog.clear()
        engine = LocalEngine(checkpoint("llama-longrope"), num_threads=1, max_model_len=max_model_len)
        info = await engine.start()
        await engine.close()
        assert info.max_model_len == length
        assert ("instead of the 512 of the model, which rotates" in info.shortened) is (max_model_len is None)
        warned = [record.getMessage() for record in caplog.records if "longrope" in record.getMessage()]
        assert warned == ([info.shortened] if info.shortened else [])
    with pytest.raises(LoadError, match="513 is beyond the 512 positions"):
        await LocalEngine(checkpoint("llama-longrope"), num_threads=1, max_model_len=513).start()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_above_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(LoadError, match="gpu_memory_utilization is a share"):
        EngineConfig("model", gpu_memory_utilization=share)
