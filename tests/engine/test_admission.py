"""Places in an engine's queue: how many there are, who gives them back, how long a refusal says to wait."""

from __future__ import annotations

import pickle
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Admission, Place, QueueFull


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_as_many_wait_as_may_and_the_next_is_refused() -> None:
    admission = Admission(max_running=2, max_waiting=3)
    places = [admission.enter() for _ in range(5)]
    with pytest.raises(QueueFull):
        admission.enter()
    promised = admission.enter(promised=True)
    assert admission.num_places == 6
    for place in places[:2]:
        place.begin()
    assert admission.is_full and admission.num_waiting == 4
    promised.leave()
    assert admission.is_full
    places[0].leave()
    with admission.enter():
        assert admission.is_full
    assert not admission.is_full


def test_where_nobody_knows_how_many_run_those_that_wait_count() -> None:
    admission = Admission(max_running=0, max_waiting=1)
    admission.enter().begin()
    with admission.enter(), pytest.raises(QueueFull):
        admission.enter()


def test_a_place_is_given_back_once() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first, second = admission.enter(), admission.enter()
    first.begin()
    first.begin()
    first.leave()
    first.leave()
    first.begin()
    assert (admission.num_places, admission.num_waiting) == (1, 1)
    second.leave()
    assert (admission.num_places, admission.num_waiting) == (0, 0)


@pytest.mark.parametrize(("lanes", "service_s", "waiting"), [(1, 3.0, 5), (4, 2.0, 40), (16, 0.1, 32)])
def test_the_wait_is_that_of_the_queue_at_the_rate_at_which_requests_end(
    lanes: int, service_s: float, waiting: int
) -> None:
    clock = Clock()
    admission = Admission(max_running=lanes, max_waiting=waiting, clock=clock)
    queue = [admission.enter() for _ in range(lanes + waiting)]
    for place in queue[:lanes]:
        place.begin()
    ends = [(clock.now + service_s * (at + 1) / lanes, at) for at in range(lanes)]
    for _ in range(50 * lanes):
        now, at = min(ends)
        ends.remove((now, at))
        clock.now = now
        queue.pop(0).leave()
        queue.append(admission.enter())
        queue[lanes - 1].begin()
        ends.append((now + service_s, at))
    with pytest.raises(QueueFull) as refused:
        admission.enter()
    expected = waiting * service_s / lanes
    assert expected * 0.8 <= refused.value.retry_after_s <= expected * 1.2 + 1
    assert pickle.loads(pickle.dumps(refused.value)).retry_after_s == refused.value.retry_after_s


def test_what_has_not_ended_takes_at_least_as_long_as_it_has() -> None:
    clock = Clock()
    admission = Admission(max_running=2, max_waiting=6, clock=clock)
    for place in [admission.enter() for _ in range(8)][:2]:
        place.begin()
    assert admission.wait_s() == 1
    clock.now += 5.0
    assert admission.wait_s() == 15
    clock.now += 500.0
    assert admission.wait_s() == 120, "SDKs do not come back from a longer wait"


def test_an_idle_hour_says_nothing_about_the_rate() -> None:
    clock = Clock()
    admission = Admission(max_running=1, max_waiting=4, clock=clock)

    def serve(num: int) -> None:
        places = [admission.enter() for _ in range(num)]
        for place in places:
            place.begin()
            clock.now += 1.0
            place.leave()

    serve(5)
    clock.now += 3600.0
    first, *_ = [admission.enter() for _ in range(5)]
    first.begin()
    assert admission.wait_s() == 4


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_places_always_return_to_none(max_running: int, max_waiting: int, seed: int) -> None:
    clock, drawn = Clock(), random.Random(seed)
    admission = Admission(
        max_running=max_running, max_waiting=max_waiting, max_waiting_tokens=20, clock=clock
    )
    held: list[Place] = []
    for _ in range(100):
        clock.now += drawn.random()
        match drawn.randrange(5):
            case 3 if held:
                with suppress(QueueFull):
                    drawn.choice(held).bring(drawn.randrange(1, 12))
            case 0:
                try:
                    held.append(admission.enter(promised=drawn.random() < 0.1))
                except QueueFull as full:
                    assert held and 1 <= full.retry_after_s <= 120
            case 1 if held:
                drawn.choice(held).begin()
            case 2 if held:
                held.pop(drawn.randrange(len(held))).leave()
        assert admission.num_places == len(held) and 0 <= admission.num_waiting <= len(held)
    for place in held:
        place.leave()
    assert (admission.num_places, admission.num_waiting, admission.num_waiting_tokens) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------------------
# Shares of owners


def fill(admission: Admission, owner: str, weight: float = 1.0) -> list[Place]:
    """As many places as an owner gets."""
    places: list[Place] = []
    while len(places) < 1000:
        try:
            places.append(admission.enter(owner, weight))
        except QueueFull:
            break
    return places


def test_one_owner_cannot_keep_another_out() -> None:
    admission = Admission(max_running=2, max_waiting=8)
    flood = fill(admission, "flood")
    assert len(flood) == 10
    for place in flood[:2]:
        place.begin()
    quiet = fill(admission, "quiet")
    assert len(quiet) == 4  # half of the places in which requests wait
    assert fill(admission, "flood") == []
    for place in quiet:
        place.begin()
        place.leave()
    assert fill(admission, "flood") == []
    with admission.enter("quiet"), pytest.raises(QueueFull):
        admission.require_room("flood")


def test_shares_of_places_go_by_weight() -> None:
    admission = Admission(max_running=0, max_waiting=8)
    assert len(fill(admission, "flood")) == 8
    assert len(fill(admission, "heavy", 3.0)) == 6
    assert len(fill(admission, "light")) == 2


def test_there_is_an_end_to_places_however_many_owners_there_are() -> None:
    admission = Admission(max_running=0, max_waiting=8)
    places = [place for number in range(100) for place in fill(admission, f"o{number}")]
    assert admission.num_waiting == len(places) == 16
    for place in places:
        place.leave()
    assert len(fill(admission, "again")) == 8


def test_what_was_promised_gets_a_place_beyond_every_share() -> None:
    admission = Admission(max_running=0, max_waiting=1)
    fill(admission, "flood")
    promised = [admission.enter("flood", promised=True) for _ in range(5)]
    assert admission.num_waiting == 6
    with pytest.raises(QueueFull):
        admission.require_room("quiet")  # twice as many as may, and more
    for place in promised:
        place.leave()
    admission.require_room("quiet")


# ------------------------------------------------------------------------------------------------------------
# Tokens of the prompts that wait


def busy(max_waiting_tokens: int, max_waiting: int = 100) -> Admission:
    """An admission whose engine has its hands full."""
    admission = Admission(max_running=1, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens)
    admission.enter("at work").begin()
    return admission


def test_as_many_tokens_wait_as_may_and_the_next_prompt_is_refused() -> None:
    admission = busy(100)
    first, second = admission.enter(), admission.enter()
    first.bring(60)
    with pytest.raises(QueueFull, match="60 tokens"):
        second.bring(41)
    second.bring(40)
    assert admission.num_waiting_tokens == 100
    first.begin()
    assert admission.num_waiting_tokens == 40
    second.leave()
    assert admission.num_waiting_tokens == 0


def test_a_prompt_counts_once_and_not_behind_its_begin() -> None:
    admission = busy(100)
    place = admission.enter()
    place.bring(90)
    place.bring(90)
    assert admission.num_waiting_tokens == 90
    place.begin()
    place.bring(90)
    assert admission.num_waiting_tokens == 0


def test_a_prompt_of_any_length_may_wait_alone_and_none_waits_for_an_idle_engine() -> None:
    admission = busy(100)
    admission.enter().bring(5000)
    with pytest.raises(QueueFull):
        admission.enter().bring(1)
    idle = Admission(max_running=3, max_waiting=1, max_waiting_tokens=100)
    for _ in range(3):
        idle.enter().bring(5000)
    with pytest.raises(QueueFull):
        idle.enter().bring(1)


def test_one_owner_s_tokens_cannot_keep_another_out() -> None:
    admission = busy(100)
    for _ in range(10):
        admission.enter("flood").bring(10)
    with pytest.raises(QueueFull):
        admission.enter("flood").bring(10)
    quiet = admission.enter("quiet")
    quiet.bring(50)  # half of the tokens that wait
    with pytest.raises(QueueFull):
        admission.enter("quiet").bring(10)


def test_the_tokens_of_what_was_promised_are_never_too_many() -> None:
    admission = busy(100)
    admission.enter().bring(100)
    promised = admission.enter(promised=True)
    promised.bring(100)
    assert admission.num_waiting_tokens == 200
