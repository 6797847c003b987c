"""Computes texts by a native decoder on the paged KV cache: an embedding is a prefill without a draw.

The scheduler, the KV cache and the kernels are those of generation, so long texts are computed in pieces,
owners get fair shares, and texts that begin alike share what was computed of their beginnings. Where every
token's state is pooled, that is of no use: a state that is not computed cannot be pooled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core import Batch, KVCache, Rows, Scheduler, Sequence, Submit
from engine.executor import Runner, size_pools
from engine.failures import of_device
from engine.kernels import free_memory, token_bytes
from engine.models import Checkpoint, ModelSpec, load_pooled
from engine.pooling.recipe import Recipe
from engine.pooling.step_size import StepSize
from engine.pooling.texts import Texts
from engine.pooling.values import PoolingConfig
from engine.pooling.vectors import Finish, Pooled
from engine.pooling.work import Begin, Item, Outcome
from engine.types import GenerateRequest, RequestFailed, SamplingParams

log = logging.getLogger("antiphon.engine")

MAX_SEQS = 256
"""Texts that one step computes at most."""

KV_TOKENS = 8192
"""The KV cache holds the longest text, this many tokens at least, and as many again for others."""

GPU_KV_BYTES = 4 << 30
"""Of a GPU's memory at most: the rest is for the model that generates."""

_NO_DRAW = SamplingParams(seed=0, max_tokens=0, temperature=0.0)


class PagedWorker:
    """See `work.Worker`."""

    def __init__(self, config: PoolingConfig, recipe: Recipe, texts: Texts, device: torch.device) -> None:
        """Raises LoadError for a checkpoint that cannot be served."""
        hidden = int(recipe.config["hidden_size"])
        lengths = (recipe.max_length, texts.longest, config.max_model_len)
        positions = recipe.config.get("max_position_embeddings")
        known = [each for each in (*lengths, positions) if isinstance(each, int)]
        engine = EngineConfig(
            model=recipe.folder,
            dtype=config.dtype,
            max_num_seqs=min(MAX_SEQS, config.max_num_batched_tokens),
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_threads=config.num_threads,
            cpu_kernels=config.cpu_kernels,
        )
        model = load_pooled(engine, device, _head(recipe, texts, hidden))
        engine = _with_kv(engine, model.spec, min([*known, model.spec.max_positions]), device)
        sizes = size_pools(model, engine, device)
        self.hidden = hidden if recipe.head == "states" else len(recipe.labels)
        outputs = 2 if recipe.head == "yes_no" else self.hidden
        self._runner = Runner(model, engine, sizes, vocab_size=outputs, device=device)
        kv = KVCache(
            model.spec.groups, sizes.num_blocks, engine.block_size, engine.max_num_seqs, sizes.max_len
        )
        rows = Rows(engine.max_num_seqs, sizes.max_len)
        self._whole = recipe.modes != ("lasttoken",)
        self._scheduler = Scheduler(
            kv,
            rows,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=sizes.max_len,
            max_undelivered=1,
            eos_token_ids=(),
            prefix_caching=config.prefix_caching and not self._whole,
        )
        self._size = StepSize(engine.max_num_batched_tokens)
        self._modes = recipe.modes
        self._finish = Finish(recipe, device)
        self._pooled: dict[int, Pooled] = {}
        self.architecture = recipe.architecture
        self.fingerprint = model.spec.fingerprint + self._finish.fingerprint
        self.vocab_size = model.spec.vocab_size
        self.max_len = min([sizes.max_len, *known])

    @property
    def num_waiting(self) -> int:
        """See `Worker.num_waiting`."""
        return self._scheduler.num_waiting

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, slots and queues do not add up."""
        self._scheduler.check_integrity()

    def add(self, item: Item) -> None:
        """See `Worker.add`."""
        request = GenerateRequest(
            id=f"text {item.handle}",
            prompt_ids=tuple(item.text.ids.tolist()),
            sampling=_NO_DRAW,
            owner=item.owner,
            weight=item.weight,
        )
        self._scheduler.add(Submit(item.handle, request))
        self._pooled[item.handle] = Pooled(self._modes, item.text.num_prompt, raw=item.text.raw)

    def drop(self, handle: int) -> None:
        """See `Worker.drop`."""
        sequence = self._scheduler.find(handle)
        if sequence is not None:
            self._scheduler.finish(sequence)
            del self._pooled[handle]

    def step(self, begin: Begin) -> list[Outcome] | None:
        """See `Worker.step`."""
        self._scheduler.limit_step(self._size.tokens)
        batch = self._scheduler.schedule()
        if begun := self._scheduler.take_begun():
            begin(begun)
        if batch is None:
            return None
        began = time.thread_time()
        outcomes = self._compute(batch)
        self._size.took(int(batch.counts.sum()), time.thread_time() - began)
        return outcomes

    def _compute(self, batch: Batch) -> list[Outcome]:
        """Compute a batch; where it raises, its halves are, down to the text that is at fault."""
        try:
            return self._advance(batch)
        except Exception as error:
            if of_device(error):
                raise
            if len(batch.sequences) == 1:
                log.error("a text failed", exc_info=error)
                return [self._failed(batch.sequences[0], f"{type(error).__name__}: {error}")]
        first, last = batch.halves()
        return self._compute(first) + self._compute(last)

    def _advance(self, batch: Batch) -> list[Outcome]:
        """Compute the tokens of a batch; what became of those texts that are whole now."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        starts = rows.num_computed[batch.slots].tolist()
        plan = rows.plan(scheduler.kv, batch.slots, batch.counts)
        if self._whole:
            plan = replace(plan, logits_at=np.arange(len(plan.token_ids)))
        states = self._runner.forward(plan).logits.float()
        done, at = [], 0
        whole = (rows.num_computed[batch.slots] + batch.counts == rows.num_tokens[batch.slots]).tolist()
        for sequence, start, count, is_whole in zip(
            batch.sequences, starts, batch.counts.tolist(), whole, strict=True
        ):
            num_rows = count if self._whole else int(is_whole)
            piece = states[at : at + num_rows]
            at += num_rows
            if num_rows:
                self._pooled[sequence.handle].add(piece, start + count - num_rows)
            if is_whole:
                done.append(sequence)
        booked = dict.fromkeys(sequence.handle for sequence, _ in scheduler.computed(batch))
        return self._outcomes([sequence for sequence in done if sequence.handle not in booked]) + [
            self._failed(scheduler_sequence, "its blocks could not be booked")
            for scheduler_sequence in batch.sequences
            if scheduler_sequence.handle in booked
        ]

    def _outcomes(self, done: list[Sequence]) -> list[Outcome]:
        if not done:
            return []
        pooled = [self._pooled[sequence.handle] for sequence in done]
        rows = torch.stack([each.result() for each in pooled])
        vectors = self._finish(rows, [each.raw for each in pooled]).cpu().numpy()
        outcomes = []
        for sequence, vector in zip(done, vectors, strict=True):
            if not np.isfinite(vector).all():
                outcomes.append(self._failed(sequence, "the model computed numbers that are not finite"))
                continue
            self._scheduler.finish(sequence)
            del self._pooled[sequence.handle]
            outcomes.append(Outcome(sequence.handle, vector, cached=sequence.cached_tokens or 0))
        return outcomes

    def _failed(self, sequence: Sequence, why: str) -> Outcome:
        """End a text that cannot be computed. Its blocks may hold NaN, which must not reach their next
        owner."""
        blocks = self._scheduler.finish(sequence, forget=True)
        if blocks:
            self._runner.clear(blocks)
        del self._pooled[sequence.handle]
        return Outcome(sequence.handle, error=RequestFailed(why))


def _with_kv(engine: EngineConfig, spec: ModelSpec, longest: int, device: torch.device) -> EngineConfig:
    """The configuration with a KV cache for texts up to `longest` tokens, or for as long ones as half of the
    memory holds."""
    of_token = sum(token_bytes(group, spec.dtype) for group in spec.groups)
    wanted = (max(longest, KV_TOKENS) + KV_TOKENS) * of_token
    most = GPU_KV_BYTES if device.type == "cuda" else free_memory() // 2
    if wanted <= most:
        return replace(engine, max_model_len=longest, kv_cache_bytes=wanted)
    return replace(engine, kv_cache_bytes=most)


def _head(recipe: Recipe, texts: Texts, hidden: int) -> Callable[[Checkpoint], Tensor]:
    """What is computed in the place of the language head [outputs, hidden]: the states themselves, a
    classifier's own map, or the rows of two tokens."""
    if recipe.head == "states":
        return lambda _: torch.eye(hidden)
    if recipe.head == "classes":
        return lambda checkpoint: checkpoint.take("score.weight")

    def of_two_tokens(checkpoint: Checkpoint) -> Tensor:
        tied = recipe.config.get("tie_word_embeddings") or "lm_head.weight" not in checkpoint
        rows = checkpoint.take("model.embed_tokens.weight" if tied else "lm_head.weight")
        return rows[list(texts.yes_no)].clone()

    return of_two_tokens
