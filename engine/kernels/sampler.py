"""Draws one token for each row of a batch, by tensor code that runs on any device.

It applies penalties, bias, masks, temperature, top-k, top-p and min-p, and computes log probabilities.

A draw is Gumbel-max: argmax of scaled logits plus noise, where the noise is a counter-based function of (the
row's key, output index, vocabulary id). So a draw never depends on the other rows of the batch, nor on what
was filtered away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import DrawPlan, Ints

_CANDIDATES = (64, 1024)  # sizes tried, in turn, for the set that top-k and top-p leave, before a full sort
Pick = Callable[[Tensor, DrawPlan], Tensor]
Look = Callable[[NDArray[np.float32], DrawPlan, Ints, NDArray[np.int32]], NDArray[np.void]]
"""See `Library.draw` of the CPU's kernels."""
_NOISE_ELEMENTS = 1 << 18  # noise is made for this many candidates at a time, so that it stays in the cache


@dataclass(frozen=True, slots=True)
class Drawn:
    """R tokens, still on the device: ids [R]; `peak` [R], the highest raw logit (not finite: the row has
    failed); `allowed` [R], False where masks and bans left no token; and log probabilities where rows asked
    for them: `logprob_rows` [L], `logprobs` [L], `top_ids` and `top_logprobs` [L, k].
    """

    ids: Tensor
    peak: Tensor
    allowed: Tensor | None
    logprob_rows: NDArray[np.int64]
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def draw(
    logits: Tensor,
    plan: DrawPlan,
    mask_rows: NDArray[np.int64],
    masks: NDArray[np.int32],
    *,
    alone: bool = False,
    pick: Pick | None = None,
) -> Drawn:
    """Draw a token for each row of logits [R, V].

    masks [M, ceil(V / 32)]: bit sets of allowed ids for the rows `mask_rows` [M]. `alone`: what may round in
    another way among another number of rows (sums, logarithms) is done row by row. `pick`: what draws from
    the adjusted scores [R, V] in place of this module, for a device that it would ask too much of; it makes
    the same noise.
    """
    raw = logits.float()
    peak, greedy = _best(raw)
    scores, allowed = _adjust(raw, plan, mask_rows, masks), None
    if scores is not raw:
        best, greedy = _best(scores)
        allowed = best > float("-inf")
    ids = greedy
    sampled = np.flatnonzero(plan.temperature > 0)
    if len(sampled):
        ids = pick(scores, plan) if pick else _sample(scores, plan, sampled, greedy, alone)
    rows = np.flatnonzero(plan.logprobs >= 0)
    if not len(rows):
        return Drawn(ids, peak, allowed, rows)
    at = _tensor(rows, raw)
    chosen, top_ids, top = score(raw[at], ids[at], int(plan.logprobs.max()), alone=alone)
    return Drawn(ids, peak, allowed, rows, chosen, top_ids, top)


def draw_here(
    logits: NDArray[np.float32],
    plan: DrawPlan,
    mask_rows: NDArray[np.int64],
    masks: NDArray[np.int32],
    look: Look,
    *,
    alone: bool = False,
) -> tuple[Ints, NDArray[np.float32], NDArray[np.bool_]]:
    """What `draw` does, and the very tokens, where a CPU's kernels `look` at logits f32 [R, V] first.

    Returns ids, highest scores (finite where those of the logits are) and which rows were allowed any token,
    [R] each. Nearly always that is one call: what remains are sums so close to each other that their noise
    must be exact. Filters may round in another way than with `draw`. The logits are changed during the call,
    and restored before it returns.
    """
    mask_of = np.full(len(logits), -1)
    if len(mask_rows):
        mask_of[mask_rows] = np.arange(len(mask_rows))
    with _penalized(logits, plan):
        found = look(logits, plan, mask_of, masks)
    drawn, count = plan.temperature > 0, found["count"]
    ids = np.where(drawn, found["ids"][:, 0], found["best_id"])
    for row in np.flatnonzero(count > 1).tolist():
        few = slice(int(count[row]))
        ids[row] = _draw_of_few(found["scores"][row, few], plan, row, found["ids"][row, few])
    rest = np.flatnonzero(drawn & (count == 0))
    if len(rest):
        adjusted = _adjust(torch.from_numpy(logits), plan, mask_rows, masks)
        ids = _sample(adjusted, plan, rest, torch.from_numpy(ids), alone).numpy()
    return ids, found["peak"], found["best"] > -np.inf


@contextmanager
def _penalized(logits: NDArray[np.float32], plan: DrawPlan) -> Iterator[None]:
    """Penalties are in the logits for as long as the context lasts."""
    if not len(plan.penalized):
        yield
        return
    at = plan.penalized[plan.history_rows], plan.history_ids
    before = logits[at]
    try:
        _penalize_here(logits, plan)
        yield
    finally:
        logits[at] = before


def _penalize_here(scores: NDArray[np.float32], plan: DrawPlan) -> None:
    """What `_penalize` does, only where a row's history is: vocabularies are far longer."""
    ends = np.searchsorted(plan.history_rows, np.arange(len(plan.penalized)), side="right")
    for i, row in enumerate(plan.penalized.tolist()):
        own, at = scores[row], slice(ends[i - 1] if i else 0, ends[i])
        ids, repetition = plan.history_ids[at], plan.repetition[i]
        if repetition != 1:
            seen = np.unique(ids)
            part = own[seen]
            own[seen] = np.where(part > 0, part / repetition, part * repetition)
        said, counts = np.unique(ids[plan.history_is_output[at]], return_counts=True)
        own[said] -= plan.frequency[i] * counts.astype(np.float32)
        own[said] -= plan.presence[i]


def _draw_of_few(scores: NDArray[np.float32], plan: DrawPlan, row: int, few: Ints) -> int:
    """The draw of a row where it is known which ids it can be, and what their scores are."""
    own = slice(row, row + 1)
    scaled = torch.from_numpy(scores / plan.temperature[row])
    keys = draw_keys(torch.from_numpy(plan.noise[own]), torch.from_numpy(plan.draw_index[own]))
    return int(few[gumbel_argmax(scaled[None], torch.from_numpy(few.astype(np.int32))[None], keys)[0]])


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score of each row [R, V], and the first id that has it."""
    if scores.device.type != "cpu":
        return scores.max(dim=-1)
    ids = torch.from_numpy(scores.numpy().argmax(axis=-1))  # some six times as fast as torch's
    return scores.gather(1, ids[:, None])[:, 0], ids


def score(logits: Tensor, targets: Tensor, top: int, *, alone: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of targets [L] under raw logits [L, V], and the `top` best of each row.

    Returns values [L], best ids [L, k], best values [L, k]. `alone` as in `draw`.
    """
    logits = logits.float()
    if alone:
        logprobs = torch.cat([torch.log_softmax(row, dim=-1) for row in torch.split(logits, 1)])
    else:
        logprobs = torch.log_softmax(logits, dim=-1)
    if alone and top:
        # among equals by id: which of them a top-k takes may depend on k, and so on what neighbours want
        values, ids = (best[:, :top] for best in logprobs.sort(dim=-1, descending=True, stable=True))
    else:
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], ids, values


def _tensor(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _adjust(raw: Tensor, plan: DrawPlan, mask_rows: NDArray[np.int64], masks: NDArray[np.int32]) -> Tensor:
    """Penalties, then bias and bans, then grammar masks; `raw` itself when there are none."""
    if not (len(plan.penalized) or len(plan.bias_rows) or len(mask_rows)):
        return raw
    scores = raw.clone()
    if len(plan.penalized):
        _penalize(scores, plan)
    if len(plan.bias_rows):
        at = (_tensor(plan.bias_rows, raw), _tensor(plan.bias_ids, raw))
        scores.index_put_(at, _tensor(plan.bias_values, raw), accumulate=True)
    if len(mask_rows):
        banned = _banned(masks, raw)
        if len(mask_rows) == len(scores):  # the commonest: no copies of rows
            scores.masked_fill_(banned, float("-inf"))
        else:
            at_rows = _tensor(mask_rows, raw)
            scores[at_rows] = scores[at_rows].masked_fill(banned, float("-inf"))
    return scores


def _banned(masks: NDArray[np.int32], like: Tensor) -> Tensor:
    """What masks [M, W] forbid of the vocabulary of `like`, [M, V] bool."""
    vocab = like.shape[1]
    if like.device.type == "cpu":
        # NumPy unpacks bits some ten times as fast as shifts on a CPU
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(allowed) == 0
    words = _tensor(masks, like)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=like.device)) & 1
    banned = bits.view(len(words), -1)[:, :vocab] == 0
    return torch.nn.functional.pad(banned, (0, vocab - banned.shape[1]), value=True)


def _penalize(scores: Tensor, plan: DrawPlan) -> None:
    """Repetition (prompt and output; Keskar et al. 2019), frequency and presence (output only; OpenAI)."""
    rows = _tensor(plan.penalized, scores)
    part = scores[rows]
    at = (_tensor(plan.history_rows, scores), _tensor(plan.history_ids, scores))
    is_output = _tensor(plan.history_is_output, scores)
    seen = torch.zeros(part.shape, dtype=torch.bool, device=part.device)
    seen.index_put_(at, torch.ones_like(is_output))
    counts = torch.zeros_like(part).index_put_(at, is_output.to(part.dtype), accumulate=True)
    repetition = _tensor(plan.repetition, scores)[:, None]
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen, repeated, part)
    part -= _tensor(plan.frequency, scores)[:, None] * counts
    part -= _tensor(plan.presence, scores)[:, None] * (counts > 0)
    scores[rows] = part


def _sample(
    scores: Tensor,
    plan: DrawPlan,
    rows: NDArray[np.int64],
    greedy: Tensor,
    alone: bool,
) -> Tensor:
    """Replace the greedy ids of `rows` by keyed draws."""
    ids = greedy.clone()
    keys = draw_keys(_tensor(plan.noise, scores), _tensor(plan.draw_index, scores))
    vocab = scores.shape[1]
    top_k = np.where((plan.top_k == 0) | (plan.top_k > vocab), vocab, plan.top_k)
    filtered = (top_k < vocab) | (plan.top_p < 1)
    groups = [rows[~filtered[rows]], rows[filtered[rows]]]
    if alone:
        rounding = filtered | (plan.min_p > 0)
        groups = [rows[~rounding[rows]], *rows[rounding[rows]][:, None]]
    for own in groups:
        if not len(own):
            continue
        at = _tensor(own, scores)
        # a row without any filter is all of `scores` in the commonest batch: no copy then
        part = scores if len(own) == len(scores) else scores[at]
        scaled = part / _tensor(plan.temperature[own], scores)[:, None]
        min_p = plan.min_p[own]
        if min_p.any():
            floor = scaled.max(dim=-1, keepdim=True).values + _tensor(min_p, scores).log()[:, None]
            scaled = scaled.masked_fill(scaled < floor, float("-inf"))
        if filtered[own[0]]:
            ids[at] = _draw_filtered(scaled, keys[at], top_k[own], plan.top_p[own])
        else:
            ids[at] = gumbel_argmax(scaled, _every(scaled), keys[at], alone)
    return ids


def _every(scaled: Tensor) -> Tensor:
    return torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None]


def _draw_filtered(
    scaled: Tensor, keys: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> Tensor:
    """Draw from what top-k leaves, and of that from the smallest set that holds `top_p` of the probability.

    Rows whose set certainly lies within the few best candidates never sort the vocabulary.
    """
    vocab = scaled.shape[1]
    ids = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    left = np.arange(len(scaled))
    k_on, p_on = _tensor(top_k, scaled)[:, None], _tensor(top_p, scaled)[:, None]
    whole = scaled.logsumexp(dim=-1, keepdim=True)
    for size in (*(size for size in _CANDIDATES if size < vocab), vocab):
        if not len(left):
            break
        if size < vocab < 4 * size:
            continue  # sorting all costs no more than choosing that many
        at = _tensor(left, scaled)
        values, candidates = (
            scaled[at].sort(-1, descending=True) if size == vocab else scaled[at].topk(size, -1)
        )
        k, p = k_on[at], p_on[at]
        rank = torch.arange(size, device=scaled.device)[None]
        values = values.masked_fill(rank >= k, float("-inf"))
        # top-p is of what top-k left; where top-k reaches beyond the candidates their own sum will not do
        total = torch.where(k <= size, values.logsumexp(dim=-1, keepdim=True), whole[at])
        mass = (values - total).exp().cumsum(dim=-1)
        before = mass - (values - total).exp()
        values = values.masked_fill((before >= p) & (rank > 0), float("-inf"))
        chosen = candidates.gather(1, gumbel_argmax(values, candidates.int(), keys[at])[:, None])[:, 0]
        ids[at] = chosen
        if size == vocab:
            break
        # k <= size: top-k ends among the candidates; else top-k must be off and the mass reached
        sure = (top_k[left] <= size) | ((top_k[left] == vocab) & ((mass[:, -1:] >= p)[:, 0].cpu().numpy()))
        left = left[~sure]
    return ids


# ------------------------------------------------------------------------------------------------------------
# The noise


def _int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _int64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _int64(0xBF58476D1CE4E5B9), _int64(0x94D049BB133111EB)


def draw_keys(noise: Tensor, draw_index: Tensor) -> Tensor:
    """The key of each row's draw, [R] int64: its base key's SplitMix64 (Steele et al. 2014) at the index."""
    x = noise + (draw_index + 1) * _GOLDEN  # int64 arithmetic wraps
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """32 bits of noise [R, K] int32 for keys [R] int64 and vocabulary ids [R or 1, K] int32."""
    low = (keys & 0xFFFFFFFF).to(torch.int64)
    low = torch.where(low >= 1 << 31, low - (1 << 32), low).int()[:, None]
    high = (keys >> 32).int()[:, None]
    return _mix_(_mix_(ids ^ low).bitwise_xor_(high))


def _mix_(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser (`lowbias32`, found with C. Wellons' hash-prospector), in place; int32
    products wrap.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x735A2D97
    x ^= (x >> 15) & 0x1FFFF
    return x


def gumbel_argmax(values: Tensor, ids: Tensor, keys: Tensor, alone: bool = False) -> Tensor:
    """argmax over K of values [R, K] plus the Gumbel noise of ids [R or 1, K]; -> [R] indices into K."""
    rows = max(1, _NOISE_ELEMENTS // values.shape[1])
    best = []
    for at in range(0, len(values), rows):
        own = slice(at, at + rows)
        noise = gumbel(noise_bits(keys[own], ids if len(ids) == 1 else ids[own]), alone)
        best.append((values[own] + noise).argmax(dim=-1))
    return best[0] if len(best) == 1 else torch.cat(best)


def gumbel(bits: Tensor, alone: bool = False) -> Tensor:
    """Standard Gumbel noise in f32 from 32 random bits, of which 31 are used; in place where it can.

    -log(-log1p(-u)): u is exact where it is small, so the upper tail reaches 22 and rare tokens keep their
    chance.
    """
    u = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    for part in torch.split(u, 1) if alone else (u,):
        part.neg_().log1p_().neg_().log_().neg_()
    return u
