"""What a pooling engine is started with, and what it says of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.config import Device, Dtype

PoolingKind = Literal["embedding", "rerank", "classification"]
"""What a model is for: vectors of texts, scores of pairs of texts, or labels of texts."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a pooling engine loads its model and fills its steps.

    kind: what the model is to be used for; the checkpoint must be made for it.
    """

    model: str | Path  # a folder, or a hub id
    kind: PoolingKind
    name: str | None = None  # what the model is called; None: the last part of `model`
    dtype: Dtype = "auto"  # auto: as EngineConfig has it; an encoder on a CPU never computes in float16
    device: Device = "auto"
    max_model_len: int | None = None  # tokens of the longest text; None: as the checkpoint says
    max_waiting: int = 512  # requests that wait; more are refused
    max_waiting_tokens: int | None = None  # tokens of the texts of these
    max_num_batched_tokens: int = 2048  # tokens of one step
    num_threads: int | None = None  # of torch, within one operation
    cpu_kernels: bool = True  # as EngineConfig has it
    prefix_caching: bool = True  # where the pooling allows it


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """What a served model is, as its checkpoint says it.

    fingerprint: names weights, tokenizer and pooling; vectors of different fingerprints do not compare.
    max_model_len: tokens of the longest text, special ones included; of a pair, of both texts together.
    dimensions: of a vector; 0 where the model makes none. cuts: shorter lengths that vectors may be cut to;
    None: any, and empty: none. pooling: how a text's hidden states become one, and pooling_source: which file
    says so. engine: what computes; `table`: nothing does, each token has a vector. causal: each token sees
    only those before it. prompts: texts that can stand before a text, by name. labels: of the scores, in
    order. activation: what makes scores of the model's numbers. instructed: a reranker is told what is
    searched for.
    """

    name: str
    kind: PoolingKind
    architecture: str
    engine: Literal["paged", "transformers", "table"]
    fingerprint: str
    max_model_len: int
    vocab_size: int
    pooling: tuple[str, ...]
    pooling_source: str
    causal: bool
    normalized: bool = False
    dimensions: int = 0
    cuts: tuple[int, ...] | None = ()
    default_dimensions: int = 0  # what a request gets that names none; `dimensions` in most cases
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: str | None = None
    instructed: bool = False


@dataclass(frozen=True, slots=True)
class PoolingStats:
    """A snapshot; totals grow, the rest are gauges."""

    texts_waiting: int = 0  # texts that were asked for and are not done
    texts_total: int = 0
    tokens_total: int = 0  # of these texts, as they were asked for
    cached_tokens_total: int = 0  # of those, found in the prefix cache
    steps_total: int = 0
    failures_total: int = 0
