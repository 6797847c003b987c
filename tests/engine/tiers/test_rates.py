"""Rates: what is learnt of steps and reads is what they cost."""

from __future__ import annotations

import random

import pytest

from engine.tiers.rates import FIXED_READ_S, Rates


def rates(**fields: float) -> Rates:
    return Rates(**{"token_s": 1e-3, "growth": 1e-4, "bytes_per_s": 1e9, **fields})


def test_before_anything_is_measured_arithmetic_counts() -> None:
    known = rates()
    assert known.compute_s(0, 100) == pytest.approx(100e-3 * (1 + 50e-4), rel=0.01)
    assert known.read_s(10**9) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("a", "b"), [(2e-3, 4e-7), (1e-4, 1e-8), (5e-3, 0.0), (1e-3, 1e-6)])
def test_prefill_steps_teach_what_a_token_costs_at_its_position(a: float, b: float) -> None:
    rng, known = random.Random(0), rates()
    for _ in range(400):
        spans = []
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(8000)
            spans.append((begin, begin + rng.randint(64, 1024)))
        seconds = sum((end - begin) * (a + b * (begin + end) / 2) for begin, end in spans)
        known.computed(spans, seconds * rng.uniform(0.9, 1.1))
    for begin, end in ((0, 512), (4000, 4512), (7500, 8000)):
        wanted = (end - begin) * (a + b * (begin + end) / 2)
        assert known.compute_s(begin, end) == pytest.approx(wanted, rel=0.15)


def test_steps_at_one_position_do_not_make_others_absurd() -> None:
    known = rates()
    for _ in range(200):
        known.computed([(0, 512)], 512 * 2e-3)
    assert known.compute_s(0, 512) == pytest.approx(512 * 2e-3, rel=0.05)
    assert 0.9 * 512 * 2e-3 < known.compute_s(8000, 8512) < 4 * 512 * 2e-3


def test_a_tiny_step_or_read_teaches_nothing() -> None:
    known = rates()
    before = known.compute_s(0, 100), known.read_s(10**6)
    known.computed([(0, 3)], 10.0)
    known.read(100, 10.0)
    assert (known.compute_s(0, 100), known.read_s(10**6)) == before


def test_reads_that_become_slow_are_noticed_within_a_few() -> None:
    known = rates()
    for _ in range(3):
        known.read(10**8, 10.0)
    assert known.bytes_per_s == pytest.approx(10**7, rel=0.01)
    for _ in range(12):
        known.read(10**8, 0.1 + FIXED_READ_S)
    assert known.bytes_per_s > 10**8


def test_a_read_that_begins_anew_counts_alone() -> None:
    known = rates()
    known.read(10**8, 1000.0)
    known.read(100, 1e-6, anew=True)
    assert known.bytes_per_s == pytest.approx(10**5, rel=0.01), "one that is tiny teaches nothing"
    known.read(10**8, 0.1 + FIXED_READ_S, anew=True)
    assert known.bytes_per_s == pytest.approx(10**9, rel=0.01)
