"""How much of a prompt goes beside those that decode: made-up machines, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from operator import mul

import pytest

from engine.core.prefill_budget import (
    ENOUGH_S,
    FIRST,
    GROWTH,
    LEAST,
    LEAST_WHOLE,
    MOST_S,
    NUM_WHOLE,
    READS,
    SOON_S,
    UNFELT,
    UNFELT_S,
    Pace,
)

Extra = Callable[[int], float]
Step = tuple[int, float]


def gone_on(pace: Pace, plain: float, extra: Extra, *, noise: float = 0.05, steps: int = 400) -> list[Step]:
    """Sizes and seconds of steps beside decodes on such a machine, prompt after prompt; each takes `plain`
    and `extra(size)` seconds."""
    draw, made, left = random.Random(1), [], 0
    for _ in range(steps):
        if not left:
            left = draw.randint(1000, 8000)
            for _ in range(20):
                pace.took(0, plain * (1 + draw.gauss(0, noise)))
        count = min(left, pace.allowance(1, 8))
        seconds = (plain + (extra(count) if count else 0)) * (1 + draw.gauss(0, noise))
        pace.took(count, seconds)
        if count:  # a decode step is looked at now and then
            made.append((count, seconds))
        left -= count
    return made


def quantile(values: list[float] | list[int], share: float) -> float:
    """Of the later half."""
    later = sorted(values[len(values) // 2 :])
    return later[int(share * len(later))]


def linear(count: int) -> float:
    return 0.13e-3 * count


def test_a_step_takes_less_than_two_decode_steps() -> None:
    sizes, times = zip(*gone_on(Pace(2048), 6e-3, linear), strict=True)
    assert quantile(list(times), 0.5) < 11e-3 and quantile(list(times), 0.97) < 13e-3
    assert quantile(list(sizes), 0.5) >= LEAST


def test_where_a_piece_costs_by_itself_pieces_are_large() -> None:
    """Launches that no graph repeats: more and smaller pieces would hold everybody up for longer."""
    nothing_else = gone_on(Pace(2048), 0.6e-3, lambda count: 6e-3 + 2.5e-6 * count, steps=2000)
    assert quantile([count for count, _ in nothing_else], 0.5) > 1000
    half = gone_on(Pace(2048), 6.6e-3, lambda count: 10e-3 + 25e-6 * count, steps=2000)
    assert 150 <= quantile([count for count, _ in half], 0.5) <= 600  # what takes as long as its launches


def test_what_costs_nothing_is_not_held_back() -> None:
    pace = Pace(2048)
    gone_on(pace, 6e-3, lambda count: 0.0, noise=0.0)
    assert max(pace.allowance(1, 8), pace.allowance(1, 8)) > 1000


@pytest.mark.parametrize("most", [4, 2048])
def test_a_prompt_goes_on_however_slow(most: int) -> None:
    sizes = [count for count, _ in gone_on(Pace(most), 1e-3, lambda count: 0.1 * count)]
    assert sizes[0] == min(FIRST, most)
    assert set(sizes[1:]) <= {min(LEAST, most), *range(1, LEAST)}


def test_pieces_shrink_where_a_token_takes_long_beside_the_decodes() -> None:
    """A large model on a CPU: 3 ms a token beside decode steps of 60 ms, and late in a prompt twice that."""
    for cost, most in ((3e-3, 20), (6e-3, 10)):
        sizes, times = zip(*gone_on(Pace(2048), 60e-3, partial(mul, cost)), strict=True)
        assert LEAST <= quantile(list(sizes), 0.97) <= 1.2 * most
        assert quantile(list(times), 0.97) < 2.2 * 60e-3


def test_a_wait_that_nobody_feels_is_no_reason_for_small_pieces() -> None:
    """A small model: its decode step is short, and so is everything that a piece could add to it."""
    sizes = [count for count, _ in gone_on(Pace(2048), 2e-3, lambda n: 0.15e-3 * n)]
    assert quantile(sizes, 0.03) == UNFELT and UNFELT * 0.15e-3 < UNFELT_S


def test_prompts_that_pile_up_get_more() -> None:
    pace = Pace(2048)
    gone_on(pace, 20e-3, linear, noise=0.0)
    alone = pace.allowance(1, 8)
    assert alone < pace.allowance(3, 8) <= GROWTH * 2 * 3 * alone + 1
    for _ in range(8):
        count = pace.allowance(3, 8)
        pace.took(count, 20e-3 + linear(count))
    assert pace.allowance(3, 8) > 4 * alone, "each of them waits for all of them"


def test_a_step_that_something_held_up_changes_little() -> None:
    pace = Pace(2048)
    gone_on(pace, 20e-3, linear, noise=0.0)
    before = pace.allowance(1, 8)
    pace.took(before, 5.0)
    pace.took(pace.allowance(1, 8), 20e-3 + linear(before))
    assert before / 3 <= pace.allowance(1, 8) <= 3 * before


def test_it_follows_the_decode_steps() -> None:
    pace = Pace(2048)
    small = quantile([count for count, _ in gone_on(pace, 10e-3, linear)], 0.5)
    large = quantile([count for count, _ in gone_on(pace, 100e-3, linear)], 0.5)
    assert large > 5 * small
    assert quantile([count for count, _ in gone_on(pace, 10e-3, linear)], 0.5) < 2 * small


def test_decodes_beside_a_long_prompt_are_held_up_little_though_no_step_is_without_it() -> None:
    pace, times = Pace(2048), []
    for _ in range(200):
        count = pace.allowance(1, 1)
        times.append(6e-3 + linear(count))
        pace.took(count, times[-1])
    assert quantile(times, 0.5) < 14e-3 and max(times) < 30e-3


def test_a_step_of_prompts_alone_ends_soon() -> None:
    """Behind many tokens, and on a machine that others use, a token may take milliseconds."""
    pace = Pace(2048)
    assert pace.most == 2048
    pace.took_alone(2048, 5 * MOST_S)
    assert pace.most == 409
    pace.took_alone(LEAST_WHOLE - 1, 60.0)  # too few to tell
    assert pace.most == 409
    for _ in range(NUM_WHOLE):
        pace.took_alone(409, 100 * MOST_S)
    assert pace.most == LEAST_WHOLE
    for _ in range(NUM_WHOLE):
        pace.took_alone(LEAST_WHOLE, 0.01)
    assert pace.most == 2048
    assert Pace(64).most == 64


def test_a_step_has_enough_of_prompts_soon() -> None:
    pace = Pace(2048)
    assert pace.enough == 2048
    pace.took_alone(2048, 2048 * ENOUGH_S / 500)
    assert pace.enough == 500
    for _ in range(NUM_WHOLE):
        pace.took_alone(2048, 5 * MOST_S)
    assert pace.enough == LEAST_WHOLE
    assert Pace(64).enough == 64


def test_what_prompts_beside_decodes_take_is_known_of_those_alone_too() -> None:
    pace = Pace(2048)
    pace.took(0, 0.05)
    for _ in range(NUM_WHOLE):
        pace.took(2000, 0.05 + 4 * READS * 0.05)
    assert pace.most == 500


def test_a_step_of_a_model_that_is_quick_to_read_ends_sooner() -> None:
    """Where a decode step, which reads all weights, takes little, so does reading them more often."""
    for plain, most_s in ((0.002, SOON_S), (0.05, READS * 0.05), (0.5, MOST_S)):
        pace = Pace(2048)
        pace.took(0, plain)
        for _ in range(NUM_WHOLE):
            pace.took_alone(1000, 2.0)
        assert pace.most == int(500 * most_s)


def test_prompts_that_take_no_time_beside_decodes_may_fill_a_step() -> None:
    """A step with them may even be the quicker one."""
    pace = Pace(2048)
    pace.took(0, 0.05)
    for _ in range(NUM_WHOLE):
        pace.took(2000, 0.04)
    assert pace.most == 2048


def test_many_prompts_do_not_wait_for_the_sake_of_few_decodes() -> None:
    pace = Pace(1 << 20)
    gone_on(pace, 6e-3, linear)
    beside_many, beside_one = pace.allowance(15, 16), pace.allowance(15, 1)
    assert pace.allowance(1, 1) == pace.allowance(1, 64), (
        "as many decodes as prompts, or more, are held up as little"
    )
    assert beside_one > 8 * beside_many
    assert Pace(2048).allowance(15, 1) > 8 * FIRST, "also where nothing is known"
