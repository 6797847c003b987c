"""Fair shares among owners: the counters alone, and what they do to a batch, in steps and tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.fair_share import MAX_KNOWN, FairShare
from engine.types import CACHED_TOKEN
from tests.support.scheduling import Bench

# ------------------------------------------------------------------------------------------------------------
# The counters

WEIGHTS = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]), min_size=2, max_size=6)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 1 << 32))
def test_whoever_always_wants_more_gets_tokens_by_weight(weights: list[float], seed: int) -> None:
    """Each owner's costs are of another size: it is tokens that are shared, not turns."""
    draw, share = random.Random(seed), FairShare()
    owners = {f"o{number}": weight for number, weight in enumerate(weights)}
    sizes = {owner: draw.choice([1, 10, 100]) for owner in owners}
    for owner in owners:
        share.join(owner, ())
    served: Counter[str] = Counter()
    while served.total() < 20_000 * len(owners):
        owner = share.least(owners)
        cost = draw.randint(1, sizes[owner])
        served[owner] += cost
        share.charge(owner, cost, owners[owner])
    for owner, weight in owners.items():
        assert served[owner] / served.total() == pytest.approx(weight / sum(weights), rel=0.05)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 50)), max_size=300))
def test_no_owner_falls_behind_another_by_more_than_one_turn(moves: list[tuple[int, bool, int]]) -> None:
    """While two owners both wait, their counters never lie further apart than the largest cost, however
    often others come and go: nobody starves, and nobody saves up."""
    share, waiting = FairShare(), ["always"]
    share.join("always", ())
    for number, comes, cost in moves:
        owner = f"o{number}"
        if comes and owner not in waiting:
            share.join(owner, list(waiting))
            waiting.append(owner)
        elif not comes and owner in waiting:
            waiting.remove(owner)
        share.charge(share.least(waiting), cost, 1.0)
        counters = [share.served(each) for each in waiting]
        assert max(counters) - min(counters) <= 50


def test_a_newcomer_starts_at_the_lowest_of_those_that_wait_and_keeps_its_debts() -> None:
    share = FairShare()
    for owner, cost in [("a", 500.0), ("b", 300.0)]:
        share.join(owner, ["a", "b"])
        share.charge(owner, cost, 1.0)
    share.join("new", ["a", "b"])
    share.join("a", ["b", "new"])
    assert [share.served(owner) for owner in ("a", "b", "new")] == [500, 300, 300]
    share.join("alone", ())  # nobody waits: nobody was held up
    assert share.served("alone") == 500


def test_counters_that_say_nothing_are_dropped() -> None:
    share = FairShare()
    for number in range(3 * MAX_KNOWN):
        share.join(f"o{number}", ["o0"])
        share.charge("o0", 1.0, 1.0)
    assert len(share._served) <= MAX_KNOWN + 1


# ------------------------------------------------------------------------------------------------------------
# The batch


@dataclass
class Crowd:
    """Owners that always have so many requests at the scheduler, and what each of them got."""

    bench: Bench
    live: dict[int, tuple[str, int]] = field(default_factory=dict)  # handle -> owner, tokens to go
    tokens: Counter[str] = field(default_factory=Counter)
    ended: deque[int] = field(default_factory=deque)

    def add(self, owner: str, prompt: int, output: int, **fields: Any) -> int:
        handle = self.bench.add(prompt, owner=owner, max_tokens=output, **fields)
        self.live[handle] = (owner, output)
        return handle

    def num(self, owner: str) -> int:
        return sum(each == owner for each, _ in self.live.values())

    def step(self) -> dict[int, int]:
        """One step; those that have all their tokens end."""
        before = {h: len(self._tokens(h)) for h in self.live}
        counts = self.bench.step()
        for handle, count in counts.items():
            owner, left = self.live[handle]
            self.tokens[owner] += count
            drawn = len(self._tokens(handle)) - before[handle]
            self.bench.scheduler.credit(handle, drawn)
            self.live[handle] = (owner, left - drawn)
            if left - drawn <= 0:
                self.bench.scheduler.finish(self.bench.sequence(handle))
                self.ended.append(handle)
                del self.live[handle]
        return counts

    def _tokens(self, handle: int) -> Any:
        sequence, rows = self.bench.sequence(handle), self.bench.scheduler.rows
        if sequence.slot < 0:
            return sequence.tokens
        return rows.tokens[sequence.slot, : rows.num_tokens[sequence.slot]]

    def until_over(self, handle: int, limit: int = 2000) -> int:
        """Steps until a request ends."""
        for count in range(1, limit):
            self.step()
            if handle not in self.live:
                return count
        raise AssertionError("it starves")


def crowd(**fields: Any) -> Crowd:
    return Crowd(Bench(**{"num_blocks": 4000, "budget": 64, "max_seqs": 8, "max_len": 512} | fields))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [{"a": (10, 20), "b": (10, 20)}, {"a": (60, 5), "b": (5, 60)}])
@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0}])
def test_tokens_go_by_weight(sizes: dict[str, tuple[int, int]], weights: dict[str, float]) -> None:
    load = crowd()
    for _ in range(1500):
        for owner, (prompt, output) in sizes.items():
            while load.num(owner) < 16:
                load.add(owner, prompt, output, weight=weights[owner])
        load.step()
    expected = weights["a"] / sum(weights.values())
    assert load.tokens["a"] / load.tokens.total() == pytest.approx(expected, rel=0.05)


def test_what_one_does_not_use_goes_to_the_others() -> None:
    alone, beside = crowd(), crowd()
    for _ in range(300):
        for load in (alone, beside):
            while load.num("a") < 16:
                load.add("a", 10, 20, weight=1.0)
            load.step()
        if beside.num("quiet") == 0 and not beside.tokens["quiet"]:
            beside.add("quiet", 10, 20, weight=100.0)
    assert beside.tokens["a"] > 0.97 * alone.tokens["a"]
    assert beside.tokens.total() > 0.99 * alone.tokens.total()


@pytest.mark.parametrize("output", [20, 200])
def test_a_quiet_owner_does_not_feel_a_flood(output: int) -> None:
    """64 requests of one owner at once, while another sends one at a time."""
    alone = crowd()
    expected = alone.until_over(alone.add("quiet", 30, 20))
    load = crowd()
    took = []
    for _ in range(30):
        while load.num("flood") < 64:
            load.add("flood", 50, output)
        took.append(load.until_over(load.add("quiet", 30, 20)))
    assert max(took) <= 1.5 * expected
    assert load.bench.scheduler.counters.preemptions <= len(took)


def test_no_owner_starves_where_there_are_more_than_places() -> None:
    load = crowd(max_seqs=4)
    waited = {f"o{number}": load.add(f"o{number}", 10, 30) for number in range(12)}
    for _ in range(20):
        load.add("flood", 10, 200)
    for handle in waited.values():
        if handle in load.live:
            load.until_over(handle)


def test_one_long_prompt_does_not_hold_back_anothers() -> None:
    load = crowd(max_len=2048)
    for _ in range(4):
        load.add("flood", 1500, 5)
    for _ in range(5):
        load.step()
    assert load.until_over(load.add("quiet", 60, 1)) <= 3


def test_what_is_computed_again_or_was_cached_costs_little() -> None:
    load = crowd()
    prompt = list(range(1, 101))
    first = load.bench.add(prompt, owner="a", max_tokens=1)
    load.live[first] = ("a", 1)
    load.add("b", 5, 400)
    load.until_over(first)
    share = load.bench.scheduler.waiting.share(load.bench.sequence(first + 1))
    before = share.served("a")
    again = load.bench.add(prompt, owner="a", max_tokens=50)
    load.live[again] = ("a", 50)
    load.step()
    num_cached = load.bench.sequence(again).cached_tokens or 0
    assert num_cached == 96
    spent = share.served("a") - before
    assert spent <= 4 + num_cached * CACHED_TOKEN + 1
    load.bench.scheduler.preempt(load.bench.sequence(again))
    load.step()
    assert share.served("a") - before - spent <= 1


# ------------------------------------------------------------------------------------------------------------
# Tiers


def test_an_urgent_request_takes_a_slot_from_a_flex_one_which_goes_on_later() -> None:
    load = crowd(max_seqs=2)
    flex = [load.add("a", 10, 40, priority=1) for _ in range(2)]
    for _ in range(10):
        load.step()
    tokens = [load._tokens(handle).tolist() for handle in flex]
    urgent = load.add("b", 10, 5)
    assert list(load.step()) == [flex[0], urgent]
    assert load.bench.sequence(flex[1]).tokens.tolist() == tokens[1]
    load.until_over(urgent)
    counts = load.step()
    assert flex[1] in counts and counts[flex[1]] <= 4  # the rest was in the cache
    for handle in flex:
        load.until_over(handle)
    assert load.bench.scheduler.counters.preemptions == 1


def test_an_urgent_request_takes_no_slot_from_a_default_one() -> None:
    load = crowd(max_seqs=1)
    first = load.add("a", 10, 20)
    load.step()
    urgent, flex = load.add("b", 10, 5, priority=-1), load.add("b", 10, 5, priority=1)
    assert list(load.step()) == [first]
    load.until_over(first)
    assert list(load.step()) == [urgent]
    load.until_over(flex)


def test_an_urgent_request_takes_blocks_from_flex_ones() -> None:
    load = crowd(num_blocks=20, max_len=80)
    flex = [load.add("a", 30, 8, priority=1) for _ in range(2)]
    load.step()
    urgent = load.add("b", 60, 2, priority=-1)
    assert urgent in load.step()
    for handle in flex:
        load.until_over(handle)
