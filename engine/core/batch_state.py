"""Holds the running sequences as arrays, and cuts step plans from them.

Each running sequence has a slot, one row of the arrays, with its tokens, counters and sampling numbers.
Building a `StepPlan` is vectorised, so that a step costs no Python per token. Where a step checked drafts,
this module says which of its draws count.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engine.core.kv_cache import KVCache
from engine.step import DrawPlan, Floats, Ints, StepImage, StepPlan
from engine.types import GenerateRequest, SamplingParams
from engine.vision import PromptImages

PROMPT_LOGPROBS_CHUNK = (
    128  # prompt tokens a step whose logits are wanted: bounds rows x vocabulary in memory
)

# Below it the likeliest token is drawn: no other has a chance, and logits divided by so little overflow.
LEAST_TEMPERATURE = 1e-5


class Rows:
    """Arrays with one row a slot."""

    def __init__(self, max_seqs: int, max_len: int) -> None:
        # drafts are stored after a row's `num_tokens`; pages are only touched where tokens are
        self.tokens = np.empty((max_seqs, max_len), np.int32)
        self.num_tokens = np.zeros(max_seqs, np.int64)
        self.num_prompt = np.zeros(max_seqs, np.int64)
        self.num_computed = np.zeros(max_seqs, np.int64)
        self.num_drafts = np.zeros(max_seqs, np.int64)
        self.tenure = np.zeros(max_seqs, np.int64)  # grows whenever a slot changes hands
        self.max_drafts = np.full(max_seqs, -1, np.int64)  # at once; -1: as many as the engine makes
        self.max_ngram = np.full(max_seqs, -1, np.int64)
        self.confidence = np.full(max_seqs, -1, np.float32)
        self.temperature = np.zeros(max_seqs, np.float32)
        self.top_k = np.zeros(max_seqs, np.int64)
        self.top_p = np.ones(max_seqs, np.float32)
        self.min_p = np.zeros(max_seqs, np.float32)
        self.repetition = np.ones(max_seqs, np.float32)
        self.presence = np.zeros(max_seqs, np.float32)
        self.frequency = np.zeros(max_seqs, np.float32)
        self.logprobs = np.full(max_seqs, -1, np.int64)
        self.noise = np.zeros(max_seqs, np.int64)
        self.adapter = np.zeros(max_seqs, np.int64)  # its number; 0: none
        self.is_penalized = np.zeros(max_seqs, np.bool_)
        self.min_tokens = np.zeros(max_seqs, np.int64)
        self.has_bias = np.zeros(max_seqs, np.bool_)
        self.bias: dict[int, tuple[Ints, Floats]] = {}
        self.stops: dict[int, Ints] = {}
        self.images: dict[int, PromptImages] = {}
        self._free = list(range(max_seqs - 1, -1, -1))

    def twin(self) -> Rows:
        """The same sequences as another model sees them: its counts of each are its own, and it knows no
        adapters, and sees no images.
        """
        other = copy.copy(self)
        other.num_tokens = np.zeros_like(self.num_tokens)
        other.num_computed = np.zeros_like(self.num_computed)
        other.num_drafts = np.zeros_like(self.num_drafts)
        other.tenure = self.tenure.copy()
        other.adapter = np.zeros_like(self.adapter)
        other.images = {}
        return other

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(
        self,
        request: GenerateRequest,
        tokens: NDArray[np.int32],
        noise: int,
        stops: Ints,
        constrained: bool,
        adapter: int = 0,
    ) -> int:
        """Give a sequence a slot; `stops` are banned below min_tokens (a grammar says itself when to end)."""
        slot = self._free[-1]
        sampling = request.sampling
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_prompt[slot] = len(request.prompt_ids)
        self.num_computed[slot] = 0
        self.num_drafts[slot] = 0
        self.tenure[slot] += 1
        self.max_drafts[slot] = _or_unset(sampling.num_assistant_tokens)
        self.max_ngram[slot] = _or_unset(sampling.max_ngram_size)
        self.confidence[slot] = _or_unset(sampling.assistant_confidence_threshold)
        cold = sampling.temperature < LEAST_TEMPERATURE
        self.temperature[slot] = 0 if cold else sampling.temperature
        self.top_k[slot] = max(0, sampling.top_k)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition[slot] = sampling.repetition_penalty
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self.noise[slot] = noise
        self.adapter[slot] = adapter
        self.is_penalized[slot] = _is_penalized(sampling)
        self.min_tokens[slot] = 0 if constrained else sampling.min_tokens
        self.has_bias[slot] = bool(sampling.logit_bias)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        self.stops[slot] = stops
        if request.media:
            self.images[slot] = PromptImages.of(request.media, len(request.prompt_ids))
        self._free.pop()  # where anything above raises, the slot is still free
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self.tenure[slot] += 1
        self.bias.pop(slot, None)
        self.stops.pop(slot, None)
        self.images.pop(slot, None)
        self._free.append(slot)

    def append(self, slots: Ints, ids: Ints, num_draws: Ints | None = None) -> Ints:
        """Add to each slot what was drawn for it: one token, and one more for every draft that was right.

        ids: the draws of all slots, `num_draws[i]` (by default 1) of `slots[i]`, in turn. Returns how many of
        each were added: those up to the first that differs from the draft in its place. The others were drawn
        after a token that never came.
        """
        if num_draws is None:
            num_draws = np.ones(len(slots), np.int64)
        if len(ids) == len(slots):  # there are no drafts
            self.tokens.reshape(-1)[self._places(slots, self.num_tokens[slots])] = ids.astype(np.int32)
            self.num_tokens[slots] += 1
            self.num_drafts[slots] = np.zeros_like(slots)
            return num_draws
        row_of, ahead = ragged(num_draws)
        at = self._places(slots[row_of], self.num_tokens[slots][row_of] + ahead)
        tokens = self.tokens.reshape(-1)
        differs = tokens[at] != ids
        ends = np.cumsum(num_draws)
        differs[ends - 1] = True  # no draft stands there
        firsts = ends - num_draws
        breaks = np.flatnonzero(differs)
        added: Ints = breaks[np.searchsorted(breaks, firsts)] - firsts + 1
        kept = ahead < added[row_of]
        tokens[at[kept]] = ids[kept]
        self.num_tokens[slots] += added
        self.num_drafts[slots] = 0
        return added

    def plan(
        self, kv: KVCache, slots: Ints, counts: Ints, prompt_logprobs: Seq[tuple[int, int]] = ()
    ) -> StepPlan:
        """The plan that computes the next `counts[i]` tokens of `slots[i]`.

        prompt_logprobs: (index into slots, alternatives) of sequences whose prompt is to be scored.
        """
        starts = self.num_computed[slots]
        query_start = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        row_of, after = ragged(counts)
        row_slots, positions = slots[row_of], starts[row_of] + after
        seq_lens = starts + counts
        width = -(-int(seq_lens.max()) // kv.block_size)
        tables = tuple(table[slots, :width] for table in kv.tables)
        block_index, offsets = np.divmod(positions, kv.block_size)
        num_draws = np.maximum(0, seq_lens - self.num_tokens[slots] + 1)
        drawing, ahead = ragged(num_draws)
        scored, targets, prompt_counts = self._prompt_targets(slots, query_start, prompt_logprobs)
        return StepPlan(
            token_ids=self.tokens.reshape(-1)[self._places(row_slots, positions)].astype(np.int64),
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            adapters=self.adapter[slots],
            block_tables=tables,
            slot_blocks=tuple(_blocks(table, row_slots, block_index) for table in kv.tables),
            slot_offsets=offsets,
            num_draws=num_draws,
            logits_at=np.concatenate((query_start[1:][drawing] - num_draws[drawing] + ahead, scored)),
            draw=self.draw_plan(slots[drawing], ahead),
            prompt_targets=targets,
            prompt_counts=prompt_counts,
            prompt_top=max((top for _, top in prompt_logprobs), default=0),
            images=self._shown(slots, starts, counts, query_start),
            grid_positions=self._grid_positions(slots, positions, query_start),
        )

    def plan_ahead(self, kv: KVCache, slots: Ints, drawn: Ints) -> StepPlan:
        """The forward that computes one token more for each slot, before the host knows which.

        The token is named by -1 - its row in the draw that makes it, `drawn[i]` for `slots[i]`; blocks for it
        are at hand. The plan has no draws: `plan` makes them once the token is known.
        """
        positions = self.num_tokens[slots]
        width = -(-int(positions.max() + 1) // kv.block_size)
        tables = tuple(table[slots, :width] for table in kv.tables)
        block_index, offsets = np.divmod(positions, kv.block_size)
        rows, none = np.arange(len(slots)), np.zeros(0, np.int64)
        return StepPlan(
            token_ids=-1 - drawn,
            positions=positions,
            query_start=np.arange(len(slots) + 1),
            seq_lens=positions + 1,
            adapters=self.adapter[slots],
            block_tables=tables,
            slot_blocks=tuple(_blocks(table, slots, block_index) for table in kv.tables),
            slot_offsets=offsets,
            num_draws=np.zeros(len(slots), np.int64),
            logits_at=rows,
            draw=self.draw_plan(none, none),
            prompt_targets=none,
            prompt_counts=(),
            prompt_top=0,
            grid_positions=self._grid_positions(slots, positions, np.arange(len(slots) + 1)),
        )

    def _places(self, slots: Ints, at: Ints) -> Ints:
        """Where tokens are in all rows put end to end. NumPy releases the interpreter's lock for an index of
        two arrays, and for an assignment that converts the type; a busy thread has it for a while then. For
        one array of the same type it does not.
        """
        return slots * self.tokens.shape[1] + at

    def _shown(self, slots: Ints, starts: Ints, counts: Ints, query_start: Ints) -> tuple[StepImage, ...]:
        """What the next `counts[i]` tokens of `slots[i]` show."""
        if not self.images:  # as for nearly every step
            return ()
        found: list[StepImage] = []
        for slot, start, count, row in zip(
            slots.tolist(), starts.tolist(), counts.tolist(), query_start[:-1].tolist(), strict=True
        ):
            if (images := self.images.get(slot)) is not None:
                found += images.shown(start, start + count, row)
        return tuple(found)

    def _grid_positions(self, slots: Ints, positions: Ints, query_start: Ints) -> Ints | None:
        """The positions [3, T] of a step's tokens; None where no image among them counts rows and columns."""
        if not self.images:
            return None
        gridded = [
            (i, images)
            for i, slot in enumerate(slots.tolist())
            if (images := self.images.get(slot)) is not None and images.positions is not None
        ]
        if not gridded:
            return None
        found = np.broadcast_to(positions, (3, len(positions))).copy()
        for i, images in gridded:
            own = slice(int(query_start[i]), int(query_start[i + 1]))
            found[:, own] = images.positions_of(positions[own])
        return found

    def _prompt_targets(
        self, slots: Ints, query_start: Ints, wanted: Seq[tuple[int, int]]
    ) -> tuple[Ints, Ints, tuple[int, ...]]:
        """Token indices whose logits score a prompt token, that token, and how many each sequence has."""
        at, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for i, _ in wanted:
            slot, start = slots[i], self.num_computed[slots[i]]
            count = max(0, min(query_start[i + 1] - query_start[i], self.num_prompt[slot] - 1 - start))
            at.append(query_start[i] + np.arange(count))
            targets.append(self.tokens[slot, start + 1 : start + 1 + count].astype(np.int64))
        return np.concatenate(at), np.concatenate(targets), tuple(len(own) for own in targets[1:])

    def draw_plan(self, slots: Ints, ahead: Ints) -> DrawPlan:
        """How to draw for each of `slots`, after `ahead` of its drafts."""
        draw_index = self.num_tokens[slots] + ahead - self.num_prompt[slots]
        bias_rows, bias_ids, bias_values = self._biases(slots, draw_index)
        penalized = np.flatnonzero(self.is_penalized[slots])
        history_rows, history_ids, is_output = self._histories(slots[penalized], ahead[penalized])
        return DrawPlan(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            noise=self.noise[slots],
            draw_index=draw_index,
            logprobs=self.logprobs[slots],
            bias_rows=bias_rows,
            bias_ids=bias_ids,
            bias_values=bias_values,
            penalized=penalized,
            repetition=self.repetition[slots[penalized]],
            presence=self.presence[slots[penalized]],
            frequency=self.frequency[slots[penalized]],
            history_rows=history_rows,
            history_ids=history_ids,
            history_is_output=is_output,
        )

    def _biases(self, slots: Ints, draw_index: Ints) -> tuple[Ints, Ints, Floats]:
        rows, ids, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for i in np.flatnonzero(self.has_bias[slots]).tolist():
            bias_ids, bias_values = self.bias[int(slots[i])]
            rows.append(np.full(len(bias_ids), i))
            ids.append(bias_ids)
            values.append(bias_values)
        for i in np.flatnonzero(draw_index < self.min_tokens[slots]).tolist():
            stops = self.stops[int(slots[i])]
            rows.append(np.full(len(stops), i))
            ids.append(stops)
            values.append(np.full(len(stops), -np.inf, np.float32))
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(values)

    def _histories(self, slots: Ints, ahead: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        lengths = self.num_tokens[slots] + ahead
        rows = np.repeat(np.arange(len(slots)), lengths)
        parts = [
            self.tokens[slot, :length] for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)
        ]
        ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        first = np.cumsum(lengths) - lengths
        is_output = np.arange(len(ids)) - first[rows] >= self.num_prompt[slots][rows]
        return rows, ids, is_output


def _blocks(table: NDArray[np.int32], slots: Ints, at: Ints) -> Ints:
    """The blocks [T] that a table [slots, blocks] has at these places of these slots."""
    found: NDArray[np.int32] = table.reshape(-1)[slots * table.shape[1] + at]
    return found.astype(np.int64)


def _numbers(end: int) -> Ints:
    """The integers below `end`, not to be written to. NumPy's `arange` releases the interpreter's lock, see
    `Rows._places`."""
    return _NUMBERS[:end] if end <= len(_NUMBERS) else np.arange(end)


_NUMBERS = np.arange(4096)
_NUMBERS.setflags(write=False)


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Rows of `counts` entries each, flattened: for every entry its row, and its place in it."""
    if (counts == 1).all():  # as for nearly every step
        return _numbers(len(counts)), np.zeros_like(counts)
    row_of = np.repeat(np.arange(len(counts)), counts)
    return row_of, np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]


def noise_key(seed: int, choice: int, generation: int) -> int:
    """The 64-bit base key of one generation's draws, as a signed integer."""
    data = struct.pack("<QQQ", seed & (2**64 - 1), choice & (2**64 - 1), generation & (2**64 - 1))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _or_unset(value: float | None) -> float:
    return -1 if value is None else value


def _is_penalized(sampling: SamplingParams) -> bool:
    off = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return off != (1.0, 0.0, 0.0)
