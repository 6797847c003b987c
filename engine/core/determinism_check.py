"""Checks at load that a token's logits do not depend on what else is in its step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.executor import ROWS, Runner
from engine.types import GenerateRequest, LoadError, ReaderParams, SamplingParams


def prove(runner: Runner, kv: KVCache, rows: Rows) -> None:
    """See that a token's logits do not depend on its place and neighbours, before anything is served.

    A CPU's threads share an operation by its size, and where a share ends another loop may compute a few
    elements: then fewer threads are tried, down to one. Raises LoadError when none will do.
    """
    threads = runner.num_threads or runner.threads_for(ROWS)
    while True:
        runner.num_threads = threads
        whole, parts = _trial(runner, kv, rows, ROWS), _trial(runner, kv, rows, 5)
        if torch.equal(whole, parts):
            return
        if threads == 1 or runner.device.type != "cpu":
            name = runner.model.spec.architecture
            raise LoadError(f"{name} cannot be deterministic here: a token's logits depend on its neighbours")
        threads //= 2


@torch.inference_mode()
def _trial(runner: Runner, kv: KVCache, rows: Rows, chunk: int) -> Tensor:
    """Logits of a short text computed `chunk` tokens at a time; leaves no trace."""
    count = min(ROWS, rows.tokens.shape[1] - 1)
    ids = np.random.default_rng(0).integers(runner.vocab_size, size=count + 1)
    sampling = SamplingParams(seed=0, max_tokens=1)
    request = GenerateRequest("trial", tuple(ids.tolist()), sampling, ReaderParams(dialect=False))
    adapters = runner.model.adapters  # their products are among what must not vary
    adapter = 0 if adapters is None else adapters.count
    slot = rows.take(request, ids.astype(np.int32), 0, np.zeros(0, np.int64), False, adapter)
    grown = kv.grow(slot, count)
    assert grown, "the cache holds at least one sequence"
    logits = []
    for start in range(0, count, chunk):
        rows.num_computed[slot] = start
        counts = np.array([min(chunk, count - start)])
        plan = rows.plan(kv, np.array([slot]), counts, [(0, 0)])
        logits.append(runner.forward(plan).logits)
    runner.clear(kv.release(slot, forget=True))
    rows.give_back(slot)
    return torch.cat(logits)
