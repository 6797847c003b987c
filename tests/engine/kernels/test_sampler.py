"""The draw: exact where it is greedy, right in distribution where it is not, and keyed by nothing but its own
row.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch_state import noise_key
from engine.kernels import sampler
from engine.kernels.sampler import draw, draw_keys, gumbel, noise_bits, score
from engine.step import DrawPlan, plain_draws

NONE = np.zeros(0, np.int64)


def plan(rows: int, **fields: Any) -> DrawPlan:
    """A draw plan for so many rows; numbers are repeated for every row. `history` of a row: its prompt's and
    its output's tokens; `bias`: (row, id, value)."""
    history, bias = fields.pop("history", {}), fields.pop("bias", [])
    penalized = np.array(sorted(history), np.int64)
    parts = [
        (i, token, bool(is_output))
        for i, row in enumerate(penalized.tolist())
        for is_output, tokens in enumerate(history[row])
        for token in tokens
    ]
    plain = replace(
        plain_draws(rows),
        noise=np.full(rows, 12345),
        bias_rows=np.array([row for row, _, _ in bias], np.int64),
        bias_ids=np.array([token for _, token, _ in bias], np.int64),
        bias_values=np.array([value for _, _, value in bias], np.float32),
        penalized=penalized,
        repetition=np.ones(len(penalized), np.float32),
        presence=np.zeros(len(penalized), np.float32),
        frequency=np.zeros(len(penalized), np.float32),
        history_rows=np.array([i for i, _, _ in parts], np.int64),
        history_ids=np.array([token for _, token, _ in parts], np.int64),
        history_is_output=np.array([is_output for _, _, is_output in parts], np.bool_),
    )
    columns = {name: np.full_like(getattr(plain, name), value) for name, value in fields.items()}
    return replace(plain, **columns)


def ids(logits: torch.Tensor, made: DrawPlan, **masks: Any) -> list[int]:
    rows = masks.get("mask_rows", NONE)
    return draw(logits, made, rows, masks.get("masks", np.zeros((0, 0), np.int32))).ids.tolist()


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# -- noise ---------------------------------------------------------------------------------------------------


def splitmix(noise: int, index: int) -> int:
    mask = 2**64 - 1
    x = (noise + (index + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def lowbias(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20)), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_the_noise_is_the_integer_function_that_it_says(rows: list[tuple[int, int]]) -> None:
    """Tensor arithmetic wraps and shifts as the plain integers do, in vector bodies and tails alike."""
    keys = draw_keys(torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]))
    wanted = [splitmix(noise, index) for noise, index in rows]
    assert [key % 2**64 for key in keys.tolist()] == wanted
    vocab = [0, 1, 2, 3, 77, 4095, 151935, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    bits = noise_bits(keys, torch.tensor([vocab], dtype=torch.int32))
    for row, key in enumerate(wanted):
        expected = [lowbias(lowbias(i ^ key & 0xFFFFFFFF) ^ key >> 32) for i in vocab]
        assert [value % 2**32 for value in bits[row].tolist()] == expected


def test_the_noise_of_a_row_is_its_own_golden_value() -> None:
    """A change here changes what every stored seed means."""
    key = noise_key(seed=7, choice=1, generation=2)
    assert key == noise_key(7 + 2**64, 1, 2) != noise_key(7, 2, 1)
    bits = noise_bits(
        draw_keys(torch.tensor([key]), torch.tensor([3])), torch.arange(4, dtype=torch.int32)[None]
    )
    assert (key, bits.tolist()) == GOLDEN


GOLDEN = (-8183105442305071397, [[1556903362, 1356057805, 795684642, 64389630]])


def test_the_noise_is_gumbel_noise_and_uncorrelated() -> None:
    keys = draw_keys(torch.full((64,), 99), torch.arange(64))
    noise = gumbel(noise_bits(keys, torch.arange(4096, dtype=torch.int32)[None])).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    uniform = torch.exp(-torch.exp(-noise))  # its own distribution function
    counts = torch.histc(uniform.float(), bins=64, min=0, max=1)
    expected = noise.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum().item() < 120  # chi square with 63 degrees of freedom
    centred = uniform - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(2, 1), centred.roll(64, 1)):
        assert abs((centred * other).mean().item() * 12) < 0.01
    tail = gumbel(torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert tail.max() > 20 and torch.isfinite(tail).all()


# -- distribution --------------------------------------------------------------------------------------------


def frequencies(logits: torch.Tensor, count: int = 8000, **fields: Any) -> Counter[int]:
    made = plan(count, noise=np.arange(count) * 7919 + 3, draw_index=np.arange(count) % 11, **fields)
    return Counter(ids(logits.expand(count, -1), made))


def assert_distribution(found: Counter[int], probabilities: torch.Tensor) -> None:
    total = sum(found.values())
    for token, p in enumerate(probabilities.tolist()):
        assert abs(found[token] - total * p) <= 4.5 * math.sqrt(total * p * (1 - p)) + 1e-9, (token, p)


def test_draws_follow_the_softmax() -> None:
    logits = random_logits(1, 40, seed=5, scale=1.5)
    assert_distribution(frequencies(logits), torch.softmax(logits[0].double(), -1))
    assert_distribution(frequencies(logits, temperature=0.5), torch.softmax(logits[0].double() * 2, -1))


@pytest.mark.parametrize("vocab", [40, 300])
def test_draws_follow_what_the_filters_leave(vocab: int) -> None:
    logits = random_logits(1, vocab, seed=6, scale=2.0)
    p = torch.softmax(logits[0].double(), -1)
    order = p.argsort(descending=True)

    def only(kept: torch.Tensor) -> torch.Tensor:
        left = torch.zeros_like(p)
        left[kept] = p[kept]
        return left / left.sum()

    assert_distribution(frequencies(logits, top_k=5), only(order[:5]))
    nucleus = int((p[order].cumsum(0) < 0.8).sum()) + 1
    assert_distribution(frequencies(logits, top_p=0.8), only(order[:nucleus]))
    assert_distribution(frequencies(logits, min_p=0.2), only((p >= 0.2 * p.max()).nonzero()[:, 0]))
    of_twenty = only(order[:20])[order]
    both = int((of_twenty.cumsum(0) < 0.7).sum()) + 1
    assert_distribution(frequencies(logits, top_k=20, top_p=0.7), only(order[:both]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 1500), st.floats(0.01, 1.0), st.floats(0.1, 30.0))
def test_few_candidates_draw_what_a_full_sort_draws(
    seed: int, top_k: int, top_p: float, scale: float
) -> None:
    logits = random_logits(6, 5000, seed, scale)
    made = plan(6, top_k=top_k, top_p=top_p, noise=np.arange(6) + seed)
    fast = ids(logits, made)
    candidates, sampler._CANDIDATES = sampler._CANDIDATES, ()
    try:
        assert fast == ids(logits, made)
    finally:
        sampler._CANDIDATES = candidates


def test_a_filter_does_not_change_the_noise() -> None:
    """What survives a filter and would have won without it wins with it."""
    logits = random_logits(200, 300)
    free = ids(logits, plan(200, noise=np.arange(200)))
    ranks = logits.argsort(-1, descending=True).argsort(-1)
    for row, token in enumerate(ids(logits, plan(200, noise=np.arange(200), top_k=30))):
        if ranks[row, free[row]] < 30:
            assert token == free[row]


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(9, 400)
    columns = {
        "temperature": [0, 0.7, 1, 1.3, 0.7, 1, 0.2, 1, 1],
        "top_k": [0, 0, 10, 0, 300, 0, 0, 5, 0],
        "top_p": [1, 0.9, 1, 0.5, 0.9, 1, 1, 0.3, 1],
        "min_p": [0, 0, 0.1, 0, 0, 0.05, 0, 0, 0],
        "noise": range(9),
        "draw_index": [5, 4, 3, 2, 1, 0, 7, 8, 9],
    }
    together = ids(logits, plan(9, **{name: list(column) for name, column in columns.items()}))
    for row in range(9):
        own = {name: [list(column)[row]] for name, column in columns.items()}
        assert ids(logits[row : row + 1], plan(1, **own)) == [together[row]]


def test_temperature_zero_is_the_exact_argmax() -> None:
    logits = random_logits(50, 1000)
    made = plan(50, temperature=0.0, top_k=3, top_p=0.1, noise=np.arange(50))
    assert ids(logits, made) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(50, 1000)
    assert ids(logits, plan(50, temperature=1e-6, noise=np.arange(50))) == logits.argmax(-1).tolist()


# -- adjustments ---------------------------------------------------------------------------------------------


def test_penalties_against_a_loop() -> None:
    logits = random_logits(3, 30)
    history = {0: ([1, 2, 2, 3], [3, 3, 4]), 2: ([], [7])}
    made = plan(3, temperature=0.0, history=history, repetition=1.7, presence=0.9, frequency=0.4, logprobs=0)
    scores = sampler._adjust(logits, made, NONE, np.zeros((0, 0), np.int32))
    expected = logits.clone()
    for row, (prompt, output) in history.items():
        for token in set(prompt) | set(output):
            value = expected[row, token]
            expected[row, token] = value / 1.7 if value > 0 else value * 1.7
        for token in set(output):
            expected[row, token] -= 0.9 + 0.4 * output.count(token)
    torch.testing.assert_close(scores, expected)
    drawn = draw(logits, made, NONE, np.zeros((0, 0), np.int32))
    assert drawn.ids.tolist() == expected.argmax(-1).tolist()
    # log probabilities are the model's own, whatever was done to the logits afterwards
    wanted = torch.log_softmax(logits, -1).gather(1, drawn.ids[:, None])[:, 0]
    assert drawn.logprobs is not None
    torch.testing.assert_close(drawn.logprobs, wanted)


def test_bias_adds_up_and_bans() -> None:
    logits = torch.zeros(2, 10)
    made = plan(
        2, temperature=0.0, bias=[(0, 3, 2.0), (0, 3, 2.0), (0, 5, 3.5), (1, 0, 1.0), (1, 0, -math.inf)]
    )
    assert ids(logits, made)[0] == 3
    assert ids(logits, made)[1] != 0


def test_masks_allow_their_bits_only() -> None:
    vocab = 70
    logits = random_logits(40, vocab)
    allowed = {2: [0, 31, 32, 69], 7: [64], 11: [5, 6]}
    masks = np.zeros((3, 3), np.uint32)
    for m, tokens in enumerate(allowed.values()):
        for token in tokens:
            masks[m, token // 32] |= np.uint32(1 << token % 32)
    rows = np.array(list(allowed), np.int64)
    for temperature in (0.0, 1.0):
        free = ids(logits, plan(40, temperature=temperature, noise=np.arange(40)))
        made = plan(40, temperature=temperature, noise=np.arange(40))
        drawn = ids(logits, made, mask_rows=rows, masks=masks.view(np.int32))
        for row in range(40):
            assert drawn[row] in allowed[row] if row in allowed else drawn[row] == free[row]


def test_a_row_without_an_allowed_token_says_so() -> None:
    made = plan(3, temperature=[0.0, 1.0, 1.0])
    drawn = draw(torch.zeros(3, 40), made, np.array([1]), np.zeros((1, 2), np.int32))
    assert drawn.allowed is not None and drawn.allowed.tolist() == [True, False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(bad: float) -> None:
    logits = random_logits(3, 100)
    clean = ids(logits, plan(3))
    logits[1, 50] = bad
    drawn = draw(logits, plan(3, top_p=[1.0, 0.5, 1.0]), NONE, np.zeros((0, 0), np.int32))
    assert torch.isfinite(drawn.peak).tolist() == [True, False, True]
    assert (drawn.ids[0], drawn.ids[2]) == (clean[0], clean[2])


def test_scores_are_log_softmax_and_best_first() -> None:
    logits = random_logits(4, 50)
    logprobs = torch.log_softmax(logits, -1)
    chosen, top_ids, top = score(logits, torch.tensor([3, 0, 49, 7]), 5)
    torch.testing.assert_close(chosen, logprobs[range(4), [3, 0, 49, 7]])
    torch.testing.assert_close(top, logprobs.sort(-1, descending=True).values[:, :5])
    torch.testing.assert_close(logprobs.gather(1, top_ids), top)
    assert score(logits, torch.tensor([3, 0, 49, 7]), 0)[1].shape == (4, 0)
