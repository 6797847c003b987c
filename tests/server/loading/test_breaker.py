"""A model that fails again and again is left alone for a while, and then tried by one request."""

from __future__ import annotations

from server.loading.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def test_it_opens_after_failures_in_a_row_and_lets_one_try_after_each_pause() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed()
    before = breaker.is_open
    breaker.failed()
    assert [before, breaker.is_open, breaker.shown_open] == [False, True, True]
    assert breaker.retry_after_s == FIRST_PAUSE_S
    now += FIRST_PAUSE_S
    assert [breaker.is_open, breaker.is_open] == [False, True], "one tries, and nobody beside it"
    breaker.failed()
    assert breaker.retry_after_s == 2 * FIRST_PAUSE_S and breaker.num_opened == 2
    for _ in range(20):
        breaker.failed()
    assert breaker.retry_after_s == LONGEST_PAUSE_S
    now += LONGEST_PAUSE_S
    trial = breaker.is_open
    breaker.succeeded()
    assert [trial, breaker.is_open, breaker.shown_open] == [False, False, False]
