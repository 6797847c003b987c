"""Draws tokens on a GPU without sorting, and without waiting for the host.

The draw is Gumbel-max over what temperature, min-p, top-k and top-p leave; each row has its own values of
these. Penalties, bias and masks are in the scores already.

With a token, every better one passes the filters too. So the token with the best noisy score is tried first;
if it does not pass, no worse token does, and the best noisy score among the better ones is tried next.
Whether a token passes follows from the count and the mass of the better ones; one pass over the row finds
both, and the next token to try. Most rows end after one pass, and a pass skips every piece of the row whose
best token is not better. Among equal scores the lower id is better.

The noise of a token is that of `engine.kernels.sampler`, bit for bit; logarithms and sums may round
differently.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampler import draw_keys
from engine.step import DrawPlan

PIECE = 2048  # ids of one program
FIELDS = 6  # int32 of one row's numbers: temperature, top_p, min_p, top_k, and the key's halves


@triton.jit
def _order_of(scores):
    """An integer that sorts by score, with 31 bits of 0 below it."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 31


@triton.jit
def _order(scores, ids):
    """One integer that sorts by score, and among equal scores the lower id higher."""
    return _order_of(scores) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    return x


@triton.jit
def _gumbel(ids, low, high):
    """`sampler.gumbel(sampler.noise_bits(...))` of these ids."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ low) ^ high)
    u = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 0.99999994)
    # -log1p(-u): a series where 1 - u would lose what matters
    series = tl.full(u.shape, 1.0 / 13.0, tl.float32)
    for i in tl.static_range(12):
        series = series * u + 1.0 / (12 - i)
    return -tl.log(tl.where(u < 0.25, series * u, -tl.log(1.0 - u)))


@triton.jit
def _field(rows, row, at: tl.constexpr):
    return tl.load(rows + row * 6 + at)


@triton.jit
def _piece(scores, row_stride, row, piece, heat, VOCAB: tl.constexpr, PIECE: tl.constexpr):
    """Ids, scaled scores and their order of one piece of a row; beyond the row minus infinity."""
    ids = piece * PIECE + tl.arange(0, PIECE)
    raw = tl.load(scores + row.to(tl.int64) * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    scaled = tl.div_rn(raw.to(tl.float32), heat)
    return ids, scaled, _order(scaled, ids)


@triton.jit
def _scan(
    tops,
    sums,
    nexts,
    noisy,
    scores,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Of one piece of a row: its best token, its mass relative to that one's, and its best noisy token."""
    piece = tl.program_id(0)
    row = tl.program_id(1)
    temperature = _field(rows, row, 0).to(tl.float32, bitcast=True)
    heat = tl.where(temperature > 0.0, temperature, 1.0)
    ids, scaled, order = _piece(scores, row_stride, row, piece, heat, VOCAB, PIECE)
    to = row * PIECES + piece
    top = tl.max(order, 0)
    peak = tl.max(scaled, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(tops + to, top)
    tl.store(sums + to, tl.sum(tl.exp(scaled - level), 0))
    if temperature > 0.0:
        low = _field(rows, row, 4).to(tl.uint32, bitcast=True)
        high = _field(rows, row, 5).to(tl.uint32, bitcast=True)
        value = tl.where(ids < VOCAB, scaled + _gumbel(ids, low, high), float("-inf"))
        best = tl.max(value, 0)
        tl.store(noisy + to, best)
        tl.store(nexts + to, tl.max(tl.where(value == best, order, -0x7FFFFFFFFFFFFFFF), 0))
    else:
        tl.store(noisy + to, peak)
        tl.store(nexts + to, top)


@triton.jit
def _score_of(order):
    """The score that an order stands for."""
    ordered = (order >> 31).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    scores,
    tops,
    row_stride,
    row,
    pivot,
    peak,
    heat,
    low,
    high,
    NOISE: tl.constexpr,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Of the tokens above `pivot`: how many, their mass relative to the peak's, and the best noisy one."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for piece in range(PIECES):
        if tl.load(tops + row * PIECES + piece) > pivot:
            ids, scaled, order = _piece(scores, row_stride, row, piece, heat, VOCAB, PIECE)
            better = (order > pivot) & (ids < VOCAB)
            count += tl.sum(better.to(tl.int32), 0)
            mass += tl.sum(tl.where(better, tl.exp(scaled - peak), 0.0), 0)
            if NOISE:
                value = tl.where(better, scaled + _gumbel(ids, low, high), float("-inf"))
                own = tl.max(value, 0)
                own_order = tl.max(tl.where(value == own, order, -0x7FFFFFFFFFFFFFFF), 0)
                wins = own > best
                chosen = tl.where(wins, own_order, chosen)
                best = tl.where(wins, own, best)
    return count, mass, chosen


@triton.jit
def _cut_top_k(
    scores,
    tops,
    row_stride,
    row,
    top,
    limit,
    peak,
    heat,
    top_k,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Where more than `top_k` tokens are better than `limit`: what the best `top_k` are better than, and
    their mass relative to the peak's. top: the best order of each piece.
    """
    # more than top_k are better than `under`, not more than top_k better than `over`
    under = limit
    over = tl.max(top, 0)
    if top_k < PIECES:
        # so many pieces have a token as good as the top_k-th best of the pieces' best
        worst = under
        good = over
        while good - worst > 1:
            middle = worst + (good - worst) // 2
            enough = tl.sum((top > middle).to(tl.int32), 0) > top_k
            worst = tl.where(enough, middle, worst)
            good = tl.where(enough, good, middle)
        under = worst
    while over - under > 1:
        middle = under + (over - under) // 2
        count, _mass, _best = _above(
            scores, tops, row_stride, row, middle, peak, heat, 0, 0, False, VOCAB, PIECES, PIECE
        )
        if count == top_k:
            under = middle
            over = middle
        elif count > top_k:
            under = middle
        else:
            over = middle
    _count, whole, _best = _above(
        scores, tops, row_stride, row, over, peak, heat, 0, 0, False, VOCAB, PIECES, PIECE
    )
    return over, whole


@triton.jit
def _choose(
    out,
    tops,
    sums,
    nexts,
    noisy,
    scores,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0)
    piece = tl.arange(0, PADDED_PIECES)
    is_piece = piece < PIECES
    own = row * PIECES + piece
    lowest = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    top = tl.load(tops + own, mask=is_piece, other=-0x7FFFFFFFFFFFFFFF)
    value = tl.load(noisy + own, mask=is_piece, other=float("-inf"))
    nexts_of = tl.load(nexts + own, mask=is_piece, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(value, 0)
    chosen = tl.max(tl.where(value == best, nexts_of, -0x7FFFFFFFFFFFFFFF), 0)

    temperature = _field(rows, row, 0).to(tl.float32, bitcast=True)
    top_p = _field(rows, row, 1).to(tl.float32, bitcast=True)
    floor = _field(rows, row, 2).to(tl.float32, bitcast=True)  # the log of min_p
    top_k = _field(rows, row, 3)
    low = _field(rows, row, 4).to(tl.uint32, bitcast=True)
    high = _field(rows, row, 5).to(tl.uint32, bitcast=True)
    heat = tl.where(temperature > 0.0, temperature, 1.0)
    highest = tl.max(top, 0)
    peak = _score_of(highest)

    if (temperature > 0.0) & (peak > float("-inf")) & (peak < float("inf")):
        # whatever is not better than `limit` is out
        is_floored = floor > float("-inf")
        limit = _order_of(tl.where(is_floored, peak + floor, float("-inf"))) - 1
        limit = tl.where(is_floored, limit, limit + 0x80000000)  # minus infinity itself is out
        whole = tl.full([], 0.0, tl.float32)
        if top_p < 1.0:
            if is_floored | (top_k < VOCAB):
                count, whole, _ = _above(
                    scores, tops, row_stride, row, limit, peak, heat, low, high, False, VOCAB, PIECES, PIECE
                )
                if count > top_k:
                    limit, whole = _cut_top_k(
                        scores, tops, row_stride, row, top, limit, peak, heat, top_k, VOCAB, PIECES, PIECE
                    )
            else:
                of_piece = tl.load(sums + own, mask=is_piece, other=0.0)
                level = _score_of(top)
                whole = tl.sum(tl.where(level > float("-inf"), of_piece * tl.exp(level - peak), 0.0), 0)

        if (top_p < 1.0) | (top_k < VOCAB) | is_floored:
            going = chosen != lowest
            while going:
                pivot = tl.maximum(chosen, limit)
                count, mass, following = _above(
                    scores, tops, row_stride, row, pivot, peak, heat, low, high, True, VOCAB, PIECES, PIECE
                )
                is_in = (chosen > limit) & (count < top_k) & ((top_p >= 1.0) | (mass < top_p * whole))
                if is_in | (count == 0):
                    going = False
                else:
                    limit = pivot
                    chosen = following
    # a row of NaN fails, but its id may be looked up before that is known
    tl.store(out + row, tl.minimum(0x7FFFFFFF - (chosen & 0x7FFFFFFF), VOCAB - 1))


def pack(plan: DrawPlan, vocab: int) -> NDArray[np.int32]:
    """A row's numbers as the kernels read them: [R, FIELDS] int32."""
    packed = np.empty((len(plan.temperature), FIELDS), np.int32)
    packed[:, 0] = plan.temperature.astype(np.float32).view(np.int32)
    packed[:, 1] = plan.top_p.astype(np.float32).view(np.int32)
    with np.errstate(divide="ignore"):
        packed[:, 2] = np.log(plan.min_p.astype(np.float32)).view(np.int32)
    packed[:, 3] = np.where((plan.top_k == 0) | (plan.top_k > vocab), vocab, plan.top_k)
    keys = draw_keys(torch.from_numpy(plan.noise), torch.from_numpy(plan.draw_index)).numpy()
    packed[:, 4:] = keys.view(np.int32).reshape(-1, 2)  # the low half comes first
    return packed


def draw(scores: Tensor, rows: Tensor) -> Tensor:
    """Draw an id for each row of scores [R, V] by the numbers in rows [R, FIELDS] int32; -> ids [R] int64."""
    num_rows, vocab = scores.shape
    assert scores.stride(1) == 1 and rows.is_contiguous()
    size = min(PIECE, triton.next_power_of_2(vocab))
    pieces = triton.cdiv(vocab, size)

    def each(dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, pieces), dtype=dtype, device=scores.device)

    tops, sums, nexts, noisy = each(torch.int64), each(torch.float32), each(torch.int64), each(torch.float32)
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _scan[(pieces, num_rows)](
        tops, sums, nexts, noisy, scores, rows, scores.stride(0), vocab, pieces, size, num_warps=4
    )
    _choose[(num_rows,)](
        out,
        tops,
        sums,
        nexts,
        noisy,
        scores,
        rows,
        scores.stride(0),
        vocab,
        pieces,
        triton.next_power_of_2(pieces),
        size,
        num_warps=4,
    )
    return out


def pick(scores: Tensor, plan: DrawPlan) -> Tensor:
    """Draw an id for each row of scores [R, V]; -> ids [R], on the device."""
    return draw(scores, torch.from_numpy(pack(plan, scores.shape[1])).to(scores.device, non_blocking=True))
