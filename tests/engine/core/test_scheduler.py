"""Who runs when: no tensors, a step is marked as computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.core.prefill_budget import ENOUGH_S, FRESH, MOST_S, Pace
from engine.core.sequences import Sequence, WaitingQueue
from engine.types import GenerateRequest, SamplingParams
from tests.support.scheduling import Bench, Fixed


def queued(handle: int, owner: str = "", priority: int = 0) -> Any:
    request = GenerateRequest(
        id="", prompt_ids=(1,), sampling=SamplingParams(0, 1), owner=owner, priority=priority
    )
    return Sequence(handle, request, None, np.zeros(1, np.int32), b"", frozenset(), 2, 1)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (sequence := queue.peek()) is not None:
        queue.pop()
        order.append(sequence.handle)
    assert len(queue) == 0
    return order


def test_owners_take_turns_and_priority_goes_first() -> None:
    queue = WaitingQueue()
    for handle, owner in enumerate(["a", "a", "a", "b", "c", "b"]):
        queue.push(queued(handle, owner))
    queue.push(queued(10, "a", priority=-1))
    queue.push(queued(11, "a", priority=1))
    queue.push(queued(12, "b"), front=True)
    assert drain(queue) == [10, 12, 0, 4, 3, 1, 5, 2, 11]


def test_a_waiting_sequence_can_leave() -> None:
    queue = WaitingQueue()
    sequences = [queued(handle, owner) for handle, owner in enumerate("aab")]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[0])
    assert drain(queue) == [1, 2]


def test_one_budget_serves_decodes_first_then_prefills_in_order() -> None:
    bench = Bench(budget=20)
    first, second, third = bench.add(5), bench.add(40), bench.add(9)
    assert bench.step() == {first: 5, second: 15}
    assert bench.step() == {first: 1, second: 19}
    assert bench.step() == {first: 1, second: 6, third: 9}
    assert bench.step() == {first: 1, second: 1, third: 1}


def test_a_long_prompt_leaves_half_of_each_step_to_shorter_ones_behind_it() -> None:
    bench = Bench(budget=20, max_len=200)
    long = bench.add(150)
    assert bench.step() == {long: 20}
    short, other = bench.add(7), bench.add(13)
    assert bench.step() == {long: 10, short: 7, other: 3}
    assert bench.step() == {short: 1, long: 10, other: 9}
    bench.scheduler.finish(bench.sequence(other))
    assert bench.step() == {short: 1, long: 19}  # nobody else wants its half


def test_a_turn_behind_a_history_that_is_in_the_pool_is_short() -> None:
    bench = Bench(budget=16, num_blocks=200, max_len=400)
    history = [7] * 100
    done = bench.add(history)
    while not bench.sequence(done).first_sent:
        bench.step()
    bench.scheduler.finish(bench.sequence(done))
    long, turn = bench.add(200), bench.add([*history, *[8] * 6])
    assert bench.step() == {long: 16}
    assert bench.step() == {long: 10, turn: 6}


def test_a_long_prompt_spares_those_who_came_after_it_and_decode() -> None:
    bench = Bench(budget=20, max_len=200)
    bench.scheduler.pace = Fixed(3)
    first, second = bench.add(50), bench.add(100)
    assert bench.step() == {first: 20}
    assert bench.step() == {first: 20}
    assert bench.step() == {first: 10, second: 10}
    assert bench.step() == {first: 1, second: 19}  # which waits for nobody who came before it
    short = bench.add(6)
    assert bench.step() == {first: 1, second: 13, short: 6}
    assert bench.step() == {first: 1, short: 1, second: 3}


def test_where_steps_are_small_a_prompt_is_long_to_its_end() -> None:
    """Its last part would take whole steps of a second each, and hold up a short request for all of them."""
    bench = Bench(budget=20, max_len=200)
    bench.scheduler.pace.most = 6  # which is what a second is enough for
    long = bench.add(30)
    assert bench.step() == {long: 6}
    short = bench.add(3)
    assert bench.step() == {long: 3, short: 3}
    bench.scheduler.pace = Fixed(2)
    bench.scheduler.pace.most = 6
    assert bench.step() == {long: 2, short: 1}  # and it spares those of them that decode


def test_long_prompts_are_computed_one_after_another() -> None:
    bench = Bench(budget=20, max_len=200)
    first, second = bench.add(70), bench.add(90)
    for _ in range(3):
        assert bench.step() == {first: 20}
    assert bench.step() == {first: 10, second: 10}


def test_long_prompts_that_wait_hold_up_no_shorter_one_behind_them() -> None:
    bench = Bench(budget=20, num_blocks=1000, max_len=200)
    first, second, third = bench.add(150), bench.add(150), bench.add(150)
    assert bench.step() == {first: 20}
    short, fourth, other = bench.add(7), bench.add(150), bench.add(5)
    assert bench.step() == {first: 13, short: 7}
    assert bench.step() == {first: 14, short: 1, other: 5}
    for _ in range(30):
        bench.step()
        for each in (short, other):
            bench.sequence(each).credit = 10
    assert bench.sequence(second).first_sent and not bench.sequence(fourth).first_sent, "in their order"
    assert bench.scheduler.rows.num_computed[bench.sequence(third).slot] > 0


def test_a_long_prompt_leaves_nothing_to_lower_priorities() -> None:
    bench = Bench(budget=20, max_len=200)
    long = bench.add(150)
    assert bench.step() == {long: 20}
    bench.add(7, priority=1)
    assert bench.step() == {long: 20}


def test_a_long_prompt_beside_decodes_shares_what_is_left_for_prompts() -> None:
    bench = Bench(budget=20, max_len=200)
    first = bench.add(5)
    assert bench.step() == {first: 5}
    bench.scheduler.pace = Fixed(4)
    assert bench.step() == {first: 1}
    long = bench.add(150)
    assert bench.step() == {first: 1, long: 4}
    short = bench.add(6)
    assert bench.step() == {first: 1, long: 4, short: 4}  # two prompts: twice the pace
    assert bench.step() == {first: 1, long: 6, short: 2}


def test_a_prompt_that_comes_while_others_decode_goes_at_their_pace() -> None:
    bench = Bench(budget=64)
    first = bench.add(10)
    bench.step()
    bench.scheduler.pace = Fixed(8)
    batch = bench.scheduler.schedule()
    assert batch is not None and batch.num_beside == 0
    bench.book(batch)
    second, third = bench.add(20), bench.add(30)
    batch = bench.scheduler.schedule()
    assert batch is not None and batch.counts.tolist() == [1, 16] and batch.num_beside == 16
    bench.book(batch)
    assert bench.step() == {first: 1, second: 4, third: 12}
    assert bench.step() == {first: 1, second: 1, third: 8}
    bench.scheduler.finish(bench.sequence(first))
    assert bench.step() == {second: 1, third: 10}  # which had come before the second decoded


def test_who_came_before_anybody_decoded_waits_for_nobody() -> None:
    bench = Bench(budget=20)
    bench.scheduler.pace = Fixed(3)
    first, second = bench.add(15), bench.add(30)
    assert bench.step() == {first: 15, second: 5}
    assert bench.step() == {first: 1, second: 19}
    third = bench.add(10)
    assert bench.step() == {first: 1, second: 6, third: 6}
    assert bench.step() == {first: 1, second: 1, third: 3}


def test_who_came_before_anybody_decoded_does_not_make_a_step_longer_than_it_may_be() -> None:
    """Each of those that came together has its first token when its own prompt is done, not that of all."""
    bench = Bench(budget=2048, num_blocks=1000, max_len=2048)
    first, second, third = (bench.add(300, max_tokens=50) for _ in range(3))
    bench.scheduler.pace.took_alone(2048, 2048 / 300.5 * MOST_S)  # a step may have 300 tokens of prompts
    assert bench.step() == {first: 300}
    assert bench.step() == {first: 1, second: 300}
    assert bench.step() == {first: 1, second: 1, third: 300}


def test_a_step_without_prompts_is_without_early_ones_too() -> None:
    """Those would hide the time of the decodes, and late prompts would have nothing until they end."""
    bench = Bench(budget=20, num_blocks=1000, max_len=2048)
    bench.scheduler.pace = Pace(20)
    first, long = bench.add(5), bench.add(1500)
    bench.step()

    def next_step() -> dict[int, int]:
        batch = bench.scheduler.schedule()
        assert batch is not None and batch.num_beside is not None
        bench.book(batch)
        bench.scheduler.pace.took(batch.num_beside, 0.02)
        bench.sequence(first).credit = 10
        return {
            each.handle: count for each, count in zip(batch.sequences, batch.counts.tolist(), strict=True)
        }

    for _ in range(FRESH):
        assert next_step() == {first: 1, long: 19}
    short = bench.add(4)
    assert next_step() == {first: 1}
    assert next_step() == {first: 1, long: 15, short: 4}


def test_a_prompt_that_fills_a_step_has_it_to_itself() -> None:
    bench = Bench(budget=2048, num_blocks=2000, max_len=2048)
    bench.scheduler.pace.took_alone(2048, 2048 * ENOUGH_S / 300)  # 300 tokens are enough
    first, second, third, fourth, fifth = (
        bench.add(length, max_tokens=50) for length in (400, 200, 200, 200, 40)
    )
    assert bench.step() == {first: 400}
    assert bench.step() == {first: 1, second: 200, third: 200}
    assert bench.step() == {first: 1, second: 1, third: 1, fourth: 200, fifth: 40}


def test_one_more_step_is_not_made_for_the_end_of_a_prompt() -> None:
    bench = Bench(budget=2048, num_blocks=2000, max_len=2048)
    bench.scheduler.pace.took_alone(2048, 2048 / 200.5 * MOST_S)  # a step may have 200 tokens of prompts
    first, second, third = (bench.add(length, max_tokens=50) for length in (50, 350, 500))
    assert bench.step() == {first: 50, second: 150}
    assert bench.step() == {first: 1, second: 200}
    assert bench.step() == {first: 1, second: 1, third: 200}, "one that is long is not ended in it"
    assert bench.step() == {first: 1, second: 1, third: 300}


def test_a_step_without_decodes_says_so() -> None:
    bench = Bench()
    bench.add(10)
    batch = bench.scheduler.schedule()
    assert batch is not None and batch.num_beside is None


def test_the_batch_has_a_bound() -> None:
    bench = Bench(max_seqs=2)
    handles = [bench.add(3) for _ in range(3)]
    assert set(bench.step()) == set(handles[:2])
    bench.scheduler.finish(bench.sequence(handles[0]))
    assert bench.step() == {handles[1]: 1, handles[2]: 3}


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    bench = Bench(num_blocks=5, max_len=20)
    first, second, third = bench.add(7), bench.add(7), bench.add(3)
    assert bench.step() == {first: 7, second: 7, third: 3}
    assert bench.step() == {first: 1, second: 1, third: 1}  # 2 + 2 + 1 blocks, all full
    fourth = bench.add(1)
    assert bench.step() == {first: 1, second: 1} or bench.scheduler.counters.preemptions
    assert bench.sequence(third).slot < 0 and bench.scheduler.counters.preemptions >= 1
    bench.scheduler.finish(bench.sequence(first))
    bench.scheduler.finish(bench.sequence(second))
    step = bench.step()
    assert list(step) == [third, fourth]
    assert step[third] == 5  # the first sequence had taken its block


def test_room_is_found_at_the_cost_of_the_lowest_priority() -> None:
    bench = Bench(num_blocks=4, max_len=16)
    flex = bench.add(7, priority=1)
    assert bench.step() == {flex: 7}
    urgent, other = bench.add(3, priority=-1), bench.add(3)
    assert set(bench.step()) == {flex, urgent, other}
    bench.step()
    assert bench.sequence(flex).slot < 0 and bench.scheduler.counters.preemptions == 1
    assert bench.step() == {urgent: 1, other: 1}


def test_prefills_get_the_budget_by_priority() -> None:
    bench = Bench(budget=10)
    flex = bench.add(30, priority=1)
    assert bench.step() == {flex: 10}
    first, urgent = bench.add(8), bench.add(15, priority=-1)
    assert bench.step() == {urgent: 10}
    assert bench.step() == {urgent: 5, first: 5}
    assert bench.step() == {urgent: 1, first: 3, flex: 6}


def test_a_preempted_sequence_keeps_its_tokens() -> None:
    bench = Bench(num_blocks=4, max_len=16)
    first, second = bench.add(6), bench.add(6)
    for _ in range(4):
        bench.step()
    assert bench.sequence(second).slot < 0
    assert bench.sequence(second).tokens.tolist() == [102] * 6 + [1, 1, 1]
    bench.scheduler.finish(bench.sequence(first))
    assert bench.step() == {second: 5}  # one whole block of it was still there
    assert bench.sequence(second).cached_tokens == 0  # what the first prefill found, and no more


def test_a_slow_consumer_pauses_and_is_the_first_to_yield() -> None:
    bench = Bench(num_blocks=12, max_len=32)
    slow, fast = bench.add(4), bench.add(4)
    bench.sequence(fast).credit = 1000
    for _ in range(10):
        bench.step()
    assert bench.sequence(slow).credit == 0
    assert bench.step() == {fast: 1}
    third = bench.add(19)
    step = bench.step()
    assert step == {fast: 1, third: 19}
    assert bench.sequence(slow).slot < 0 and bench.scheduler.num_waiting == 1
    bench.scheduler.finish(bench.sequence(third))
    assert bench.step() == {fast: 1}  # not even with room does it run before its consumer has caught up
    bench.scheduler.credit(slow, 5)
    assert slow in bench.step()


def test_a_slow_consumer_that_pauses_later_yields_to_who_was_held_back() -> None:
    bench = Bench(num_blocks=8, max_len=32)
    slow, other = bench.add(15), bench.add(19)
    for _ in range(10):
        assert list(bench.step()) == [slow]
    assert bench.sequence(slow).credit == 0
    assert bench.step() == {other: 19}


def test_a_slow_consumer_yields_its_place_in_a_full_batch() -> None:
    bench = Bench(max_seqs=1)
    slow, other = bench.add(4), bench.add(4)
    for _ in range(10):
        assert list(bench.step()) == [slow]
    assert bench.step() == {other: 4}
    bench.scheduler.credit(slow, 5)
    bench.scheduler.finish(bench.sequence(other))
    assert slow in bench.step()


def test_drafts_leave_room_for_who_has_yet_to_begin() -> None:
    bench = Bench(budget=8)
    decoding = bench.add(4)
    assert bench.step() == {decoding: 4}
    bench.scheduler.rows.num_drafts[bench.sequence(decoding).slot] = 7
    second = bench.add(20)
    batch = bench.scheduler.schedule()
    assert batch is not None
    assert [own.handle for own in batch.sequences] == [decoding, second]
    assert batch.counts.tolist() == [4, 4]


def test_who_was_preempted_waits_for_its_late_mask() -> None:
    bench = Bench()
    late, other = bench.add(4), bench.add(4)
    assert bench.step() == {late: 4, other: 4}
    own = bench.sequence(late)
    own.unsettled = True
    bench.scheduler.preempt(own)
    assert bench.step() == {other: 1}
    own.unsettled = False
    assert late in bench.step()


def test_a_prompt_waits_for_one_that_computes_its_prefix() -> None:
    bench = Bench(budget=8)
    prompt = list(range(50, 74))
    first = bench.add(prompt)
    second = bench.add([*prompt, 7])
    assert bench.step() == {first: 8}
    assert bench.step() == {first: 8}
    assert bench.step() == {first: 8}
    assert bench.step() == {first: 1, second: 1}
    assert bench.sequence(second).cached_tokens == 24


def test_a_prompt_that_waits_for_another_holds_up_nobody_behind_it() -> None:
    """Such as the second choice of a long prompt."""
    bench = Bench(budget=20, max_len=200)
    prompt = list(range(1, 151))
    long = bench.add(prompt)
    assert bench.step() == {long: 20}
    twin, short = bench.add(prompt), bench.add(7)
    assert bench.step() == {long: 13, short: 7}
    steps = [bench.step() for _ in range(20)]
    assert any(twin in step for step in steps) and sum(step.get(twin, 0) for step in steps) < 40


def test_a_prompt_goes_on_when_the_one_it_waited_for_is_gone() -> None:
    bench = Bench(budget=8)
    prompt = list(range(50, 74))
    first, second = bench.add(prompt), bench.add(prompt)
    bench.step()
    bench.scheduler.finish(bench.sequence(first))
    assert bench.step() == {second: 8}
    assert bench.sequence(second).cached_tokens == 8


@pytest.mark.parametrize("field", ["owner", "cache_salt"])
def test_tenants_and_salts_share_nothing(field: str) -> None:
    bench = Bench()
    prompt = list(range(50, 74))
    own, other = bench.add(prompt, **{field: "x"}), bench.add(prompt, **{field: "y"})
    bench.step()
    again = bench.add(prompt, **{field: "x"})
    bench.step()
    cached = [bench.sequence(handle).cached_tokens for handle in (own, other, again)]
    assert cached == [0, 0, 20]


def test_without_prefix_caching_only_a_preempted_sequence_finds_its_own_blocks() -> None:
    bench = Bench(num_blocks=12, max_len=48, prefix_caching=False)
    prompt = list(range(50, 70))
    first = bench.add(prompt)
    bench.step()
    second = bench.add(prompt)
    bench.step()
    assert [bench.sequence(handle).cached_tokens for handle in (first, second)] == [0, 0]
    assert bench.scheduler.counters.prefix_hits == 0
    while not bench.scheduler.counters.preemptions:
        assert bench.step()
    resumed: dict[int, int] = {}
    bench.scheduler.finish(bench.sequence(first))
    while second not in resumed:
        resumed = bench.step()
    assert 0 < resumed[second] < len(prompt), "it computes only the blocks that were given away"


def test_a_deadline_names_each_late_sequence_once() -> None:
    bench = Bench()
    late, gone, later = bench.add(3, deadline=5.0), bench.add(3, deadline=6.0), bench.add(3, deadline=7.0)
    bench.step()
    bench.scheduler.finish(bench.sequence(gone))
    assert bench.scheduler.expired(4.9) == []
    assert [sequence.handle for sequence in bench.scheduler.expired(6.5)] == [late]
    assert bench.scheduler.expired(6.6) == []
    assert bench.scheduler.next_deadline == 7.0
    assert [sequence.handle for sequence in bench.scheduler.expired(8.0)] == [later]


def test_prompt_logprobs_take_nothing_from_the_cache_and_small_chunks() -> None:
    bench = Bench(budget=250, num_blocks=200)
    prompt = list(range(10, 210))
    bench.add(prompt)
    bench.step()
    scored = bench.add(prompt, sampling={"prompt_logprobs": 0})
    assert bench.step()[scored] == 128
    assert bench.step()[scored] == 72
    assert bench.sequence(scored).cached_tokens == 0


def test_prompts_whose_scores_are_wanted_share_what_a_step_may_score() -> None:
    bench = Bench(budget=500, num_blocks=200)
    scored = [bench.add(100, sampling={"prompt_logprobs": 0}) for _ in range(3)]
    plain = bench.add(50)
    assert bench.step() == {scored[0]: 100, scored[1]: 28, plain: 50}
    assert bench.step() == {scored[0]: 1, scored[1]: 72, scored[2]: 56, plain: 1}


def test_what_does_not_fit_waits_and_holds_back_those_behind_it() -> None:
    bench = Bench(num_blocks=10, max_len=40)
    first, big, small = bench.add(20), bench.add(30), bench.add(2)
    assert bench.step() == {first: 20}
    assert bench.step() == {first: 1}
    bench.scheduler.finish(bench.sequence(first))
    assert bench.step() == {big: 30, small: 2}
