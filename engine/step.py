"""A step as plain numpy arrays: what it computes, how it draws, and what comes out of it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.types import Done, EngineError, MediaSpan, Timing

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
TokenIds = NDArray[np.int32]


def token_array(ids: Sequence[int]) -> TokenIds:
    """Token ids as numpy has them, not to be written to: an `array` of C ints is not copied."""
    return np.frombuffer(ids, np.int32) if isinstance(ids, array) else np.array(ids, np.int32)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables; `window` counts the token itself, None is full attention."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """How to draw one token for each of R rows; all arrays are [R] unless said otherwise.

    `noise` is the base key of the row's draws, `draw_index` its output token index. `bias_*` [N] add to
    single logits (minus infinity bans). `penalized` [P] are rows with penalties, `history_*` [H] their
    tokens: row index into P, token id, and whether it is output. `logprobs` is the number of alternatives, -1
    where off.
    """

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    noise: Ints
    draw_index: Ints
    logprobs: Ints
    bias_rows: Ints
    bias_ids: Ints
    bias_values: Floats
    penalized: Ints
    repetition: Floats  # [P]
    presence: Floats  # [P]
    frequency: Floats  # [P]
    history_rows: Ints
    history_ids: Ints
    history_is_output: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepImage:
    """A part of an image that a step computes: the `rows` of the step, [N], have its `features`, [N]."""

    span: MediaSpan
    rows: Ints
    features: Ints


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward and one draw, as plain arrays: B sequences, T tokens in all, R rows that draw.

    A draft is a guessed token, computed after the tokens that are known: the draw at each draft's place tells
    whether the draft was right.

    `block_tables` (one [B, W] a layer group), `slot_blocks` and `slot_offsets` ([T], where each token's KV
    goes). `logits_at` [R + P]: token indices; the first R draw, the others are prompt tokens whose successors
    `prompt_targets` [P] are scored, with `prompt_top` alternatives.
    """

    token_ids: Ints
    positions: Ints
    query_start: Ints  # [B + 1]
    seq_lens: Ints  # [B]: tokens of the sequence that are in the cache after this step
    adapters: Ints  # [B]: which one a sequence is under, from 1; 0: none
    block_tables: tuple[NDArray[np.int32], ...]
    slot_blocks: tuple[Ints, ...]
    slot_offsets: Ints
    num_draws: Ints  # [B]: 1 where a sequence's last token is computed, and 1 more for each draft; else 0
    logits_at: Ints
    draw: DrawPlan
    prompt_targets: Ints
    prompt_counts: tuple[int, ...]  # how many of them belong to each sequence that asked, in turn
    prompt_top: int
    images: tuple[StepImage, ...] = ()  # what its tokens show
    grid_positions: Ints | None = None  # [3, T], where images in it count positions by rows and columns


def plain_draws(rows: int) -> DrawPlan:
    """One draw for each row, at temperature 1 from the whole vocabulary, all with the noise of key 0."""
    none, no_floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    zeros, ones = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    return DrawPlan(
        temperature=ones,
        top_k=zeros,
        top_p=ones,
        min_p=np.zeros(rows, np.float32),
        noise=zeros,
        draw_index=zeros,
        logprobs=np.full(rows, -1),
        bias_rows=none,
        bias_ids=none,
        bias_values=no_floats,
        penalized=none,
        repetition=no_floats,
        presence=no_floats,
        frequency=no_floats,
        history_rows=none,
        history_ids=none,
        history_is_output=np.zeros(0, np.bool_),
    )


def no_draws() -> DrawPlan:
    """The plan of a step that draws nothing."""
    return plain_draws(0)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one position: the token's id and own value, and the best ids with theirs, best
    first.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RowOutput(NamedTuple):
    """What one step did for one request; `finish` or `error` makes it the last. The first carries
    `cached_tokens` and `timing`.
    """

    handle: int
    token_ids: tuple[int, ...] = ()
    finish: Done | None = None
    logprobs: tuple[RowLogprobs, ...] = ()
    error: EngineError | None = None
    cached_tokens: int | None = None
    prompt_logprobs: Collection[RowLogprobs] | None = None
    timing: Timing | None = None
