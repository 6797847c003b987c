"""The arithmetic of rates, against a model that counts every unit by itself."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from server.limits.gcra import SECOND, Rate

MINUTE = 60 * SECOND
STEPS = st.lists(
    st.tuples(st.integers(0, 90 * SECOND), st.sampled_from(["take", "settle"]), st.integers(-40, 60)),
    max_size=60,
)


class Bucket:
    """A bucket that leaks: the same limit, written down as plainly as possible, in exact fractions."""

    def __init__(self, limit: int) -> None:
        self.limit, self.level, self.at = limit, Fraction(0), 0

    def drain(self, now: int) -> None:
        self.level = max(Fraction(0), self.level - Fraction((now - self.at) * self.limit, MINUTE))
        self.at = now

    def fits(self, units: int) -> bool:
        return self.level + units <= self.limit


@given(st.sampled_from([1, 2, 5, 60, 1000]), STEPS)
@settings(max_examples=200, deadline=None)
def test_it_decides_as_a_bucket_that_counts_every_unit(limit: int, steps: list[tuple[int, str, int]]) -> None:
    rate, arrival, now, bucket = Rate(limit, MINUTE), 0, 0, Bucket(limit)
    for passed, what, units in steps:
        now += passed
        bucket.drain(now)
        wait = rate.wait(arrival, abs(units), now)
        if what == "settle":
            arrival = rate.charge(arrival, units, now)
            bucket.level += units  # below nothing it is nothing, at the next look
            bucket.drain(now)
        elif abs(units) > limit:
            assert wait is None
        else:
            assert (wait == 0) == bucket.fits(abs(units))
            if wait == 0:
                arrival = rate.charge(arrival, abs(units), now)
                bucket.level += abs(units)
            elif wait is not None:
                assert rate.wait(arrival, abs(units), now + wait) == 0, "what it tells to wait is enough"
                assert rate.wait(arrival, abs(units), now + wait - 1) != 0, "and not more than is needed"
        assert rate.remaining(arrival, now) == max(0, int((limit - bucket.level) // 1))
        assert rate.reset(arrival, now) == bucket.level * MINUTE / limit


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(0, SECOND), st.integers(1, 10**6)), max_size=80))
@settings(max_examples=200, deadline=None)
def test_no_stretch_of_time_lets_more_through_than_its_limit(
    limit: int, steps: list[tuple[int, int]]
) -> None:
    rate, arrival, now, taken = Rate(limit, MINUTE), 0, 0, 0
    for passed, units in steps:
        now += passed
        if rate.wait(arrival, units, now) == 0:
            arrival = rate.charge(arrival, units, now)
            taken += units
    assert taken <= limit + Fraction(now * limit, MINUTE) + Fraction(len(steps) * limit, MINUTE)


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(0, 10**6))
def test_what_is_given_back_was_never_taken(limit: int, arrival: int, units: int) -> None:
    rate, now = Rate(limit, MINUTE), 10**9
    taken = rate.charge(arrival, units, now)
    assert rate.charge(taken, -units, now) == max(arrival, now)
