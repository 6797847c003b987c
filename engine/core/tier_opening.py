"""Opens the tier of saved KV for a loaded model: what its blocks depend on, and what a token costs here."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.core.tiering import Tiering
from engine.executor import Runner, block_memory
from engine.step import LayerGroup
from engine.tiers import DiskTier, Folder, ForeignFolder, Rates
from engine.types import GenerateRequest, SamplingParams, TierState, TierStats, readable_size

log = logging.getLogger("antiphon.engine")

OPENING_S = 5.0
"""How long a start waits for what is on disk to be found; what is found later is of use later."""

BYTES_PER_S = 5e8
"""What a disk is taken to read until that is measured."""

TRIAL = 64
"""Prompt tokens that are computed at start, to know what one takes."""


def identity(runner: Runner, *, deterministic: bool, kind: str) -> bytes:
    """16 bytes that name what a saved block's numbers depend on, beside its tokens: KV of another identity is
    never read. kind: what is saved, `auto` or `int8`."""
    spec = runner.model.spec
    parts = [
        spec.fingerprint.hex(),
        spec.arithmetic.hex(),
        str(runner.kv_dtype),
        kind,
        str(runner.block_size),
        str(spec.groups),
        str(runner.device.type),
        str(deterministic),
        str(runner.fused is not None),
        torch.__version__,
        _processor() if runner.device.type == "cpu" else torch.cuda.get_device_name(runner.device),
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _processor() -> str:
    """What the processor can do: others round differently, and may have the same folder."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        found = next((line for line in file if line.startswith(("flags", "Features"))), "")
        return " ".join(sorted(found.split()))
    return torch.backends.cpu.get_cpu_capability()


def growth_of(spec_groups: Seq[LayerGroup], num_parameters: int) -> float:
    """How much longer a token takes for each before it, as a share of the first, by arithmetic: attention has
    4 operations a number of queries, of which most models have twice as many as of keys; weights have 2."""
    numbers = sum(len(group.layers) * group.num_kv_heads * group.head_dim for group in spec_groups)
    return 4 * 2 * numbers / (2 * num_parameters)


class OpenedTier(NamedTuple):
    """What saves KV on disk, and the secret of its digests; or `untiered`, why nothing does."""

    secret: bytes | None = None
    tiering: Tiering | None = None
    untiered: TierStats = TierStats()


NO_TIER = OpenedTier()


def open_tier(
    config: EngineConfig,
    runner: Runner,
    kv: KVCache,
    rows: Rows,
    *,
    tell: Callable[[Callable[[], None]], None],
) -> OpenedTier:
    """The tier of a configuration. That its folder cannot be used, or is another database's, is logged."""
    if config.kv_disk_folder is None or not config.kv_disk_bytes:
        return OpenedTier(untiered=TierStats(why="kv_disk_bytes is 0"))
    if not config.prefix_caching:
        return OpenedTier(untiered=TierStats(why="prefix_caching is false"))
    spec = runner.model.spec
    named = identity(runner, deterministic=config.deterministic, kind=config.kv_tier_dtype)
    try:
        folder = Folder(Path(config.kv_disk_folder), named, config.kv_disk_database)
    except OSError as error:
        log.warning("KV is not saved on disk: %s", error)
        state: TierState = "foreign" if isinstance(error, ForeignFolder) else "failed"
        return OpenedTier(untiered=TierStats(state, str(error)))
    rates = Rates(
        token_s=token_seconds(runner, kv, rows),
        growth=growth_of(spec.groups, spec.num_parameters),
        bytes_per_s=BYTES_PER_S,
    )
    memory = block_memory(runner, eight_bits=config.kv_tier_dtype == "int8")
    disk = DiskTier(folder, memory, rates, limit=config.kv_disk_bytes, block_size=config.block_size)
    disk.opened.wait(OPENING_S)
    stats, room = disk.stats(), disk.room
    least = disk.bytes_of((1 << len(spec.groups)) - 1)
    log.log(
        logging.INFO if room >= least else logging.WARNING,
        "saved KV on disk: %d blocks, %s, in %s; %s",
        stats.blocks,
        readable_size(stats.disk_bytes),
        folder.path,
        f"there may be {readable_size(room)}"
        if room == disk.limit
        else f"its disk has room for {readable_size(room)} of the {readable_size(disk.limit)} that "
        "kv_disk_bytes allows, because half of what is free there is left free",
    )
    return OpenedTier(folder.secret, Tiering(kv, disk, tell))


@torch.inference_mode()
def token_seconds(runner: Runner, kv: KVCache, rows: Rows) -> float:
    """Seconds of a prompt token at the beginning, measured; leaves no trace."""
    count = min(TRIAL, rows.tokens.shape[1] - 1)
    ids = tuple(np.random.default_rng(0).integers(runner.vocab_size, size=count + 1).tolist())
    request = GenerateRequest("trial", ids, SamplingParams(seed=0, max_tokens=1))
    slot = rows.take(request, np.array(ids, np.int32), 0, np.zeros(0, np.int64), False)
    try:
        if not kv.grow(slot, count):
            return 1e-3
        seconds = []
        for _ in range(2):  # the first is slow for other reasons
            plan = rows.plan(kv, np.array([slot]), np.array([count]), [(0, 0)])
            began = time.perf_counter()
            runner.forward(plan).logits[-1:].float().cpu()
            seconds.append(time.perf_counter() - began)
        return min(seconds) / count
    finally:
        runner.clear(kv.release(slot, forget=True))
        rows.give_back(slot)
