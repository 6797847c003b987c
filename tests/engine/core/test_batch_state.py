"""The step plan, array by array, against loops."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np

from engine.core.batch_state import Rows, noise_key
from engine.core.kv_cache import KVCache
from engine.step import LayerGroup
from engine.types import GenerateRequest, SamplingParams

GROUPS = (LayerGroup((0,), 1, 8), LayerGroup((1,), 1, 8, window=6))
STOPS = np.array([7, 9], np.int64)


def take(rows: Rows, tokens: list[int], num_prompt: int, constrained: bool = False, **sampling: Any) -> int:
    params = SamplingParams(**{"seed": 3, "max_tokens": 50, **sampling})
    request = GenerateRequest(id="", prompt_ids=tuple(tokens[:num_prompt]), sampling=params)
    return rows.take(request, np.array(tokens, np.int32), noise_key(params.seed, 0, 0), STOPS, constrained)


def test_a_plan_says_where_every_token_goes() -> None:
    rng = random.Random(0)
    rows, kv = Rows(6, 64), KVCache(GROUPS, (60, 60), 4, 6, 64)
    tokens = {
        take(rows, own, 3): own for own in ([rng.randrange(99) for _ in range(n)] for n in (9, 5, 30, 4))
    }
    computed = dict(zip(tokens, (8, 0, 12, 2), strict=True))
    counts = dict(zip(tokens, (1, 5, 7, 1), strict=True))
    for slot in tokens:
        assert kv.grow(slot, computed[slot] + counts[slot])
        rows.num_computed[slot] = computed[slot]
    slots = np.array(list(tokens))
    plan = rows.plan(kv, slots, np.array(list(counts.values())))
    expected = [
        (tokens[slot][at], at, int(kv.tables[0][slot, at // 4]), int(kv.tables[1][slot, at // 4]), at % 4)
        for slot in tokens
        for at in range(computed[slot], computed[slot] + counts[slot])
    ]
    columns = (plan.token_ids, plan.positions, *plan.slot_blocks, plan.slot_offsets)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert plan.query_start.tolist() == [0, 1, 6, 13, 14]
    assert plan.seq_lens.tolist() == [9, 5, 19, 3]
    assert plan.num_draws.tolist() == [1, 1, 0, 0]
    assert plan.logits_at.tolist() == [0, 5]
    assert plan.draw.draw_index.tolist() == [6, 2]
    assert [table.shape for table in plan.block_tables] == [(4, 5), (4, 5)]
    again = pickle.loads(pickle.dumps(plan))  # one plan can be sent to other ranks
    assert again.token_ids.tolist() == plan.token_ids.tolist()


def test_prompt_tokens_are_scored_by_the_logits_before_them() -> None:
    rows, kv = Rows(4, 64), KVCache(GROUPS[:1], (60,), 4, 4, 64)
    slots = np.array([take(rows, list(range(10, 20)), 8), take(rows, list(range(30, 35)), 5)])
    for slot in slots:
        assert kv.grow(int(slot), 10)
    rows.num_computed[slots[0]] = 4
    plan = rows.plan(kv, slots, np.array([6, 5]), [(0, 2), (1, 5)])
    # the first goes on from its fifth token, and its last two are output, not prompt
    assert plan.prompt_targets.tolist() == [15, 16, 17, 31, 32, 33, 34]
    assert plan.logits_at.tolist() == [5, 10, 0, 1, 2, 6, 7, 8, 9]
    assert (plan.prompt_counts, plan.prompt_top) == ((3, 4), 5)
    rows.num_computed[slots[0]] = 8
    assert rows.plan(kv, slots[:1], np.array([2]), [(0, 2)]).prompt_counts == (0,)


def test_bias_bans_and_histories_of_the_rows_that_have_them() -> None:
    rows, kv = Rows(6, 64), KVCache(GROUPS[:1], (60,), 4, 6, 64)
    slots = [
        take(rows, [1, 2, 3], 3),
        take(rows, [1, 2, 3, 4], 3, logit_bias=((5, 1.5), (6, -2.0)), min_tokens=2),
        take(rows, [4, 4, 5], 2, presence_penalty=0.5, min_tokens=1),
        take(rows, [1], 1, constrained=True, min_tokens=9),
        take(rows, [8], 1, repetition_penalty=1.5, frequency_penalty=0.25),
    ]
    for slot in slots:
        assert kv.grow(slot, 4)
        rows.num_computed[slot] = rows.num_tokens[slot] - 1
    draw = rows.plan(kv, np.array(slots), np.ones(5, np.int64)).draw
    bias = list(zip(draw.bias_rows.tolist(), draw.bias_ids.tolist(), draw.bias_values.tolist(), strict=True))
    assert bias == [(1, 5, 1.5), (1, 6, -2.0), (1, 7, -math.inf), (1, 9, -math.inf)]
    assert draw.penalized.tolist() == [2, 4]
    assert (draw.repetition.tolist(), draw.presence.tolist()) == ([1.0, 1.5], [0.5, 0.0])
    assert draw.frequency.tolist() == [0.0, 0.25]
    history = zip(draw.history_rows, draw.history_ids, draw.history_is_output, strict=True)
    assert [tuple(map(int, entry)) for entry in history] == [(0, 4, 0), (0, 4, 0), (0, 5, 1), (1, 8, 0)]


def test_slots_are_used_again_and_leave_nothing_behind() -> None:
    rows, kv = Rows(1, 64), KVCache(GROUPS[:1], (60,), 4, 1, 64)
    slot = take(rows, [1, 2], 2, logit_bias=((5, 1.5),), min_tokens=4, presence_penalty=1.0, logprobs=3)
    rows.give_back(slot)
    assert take(rows, [3], 1) == slot and rows.num_free == 0
    assert kv.grow(slot, 1)
    draw = rows.plan(kv, np.array([slot]), np.array([1])).draw
    assert len(draw.bias_rows) == len(draw.penalized) == 0 and draw.logprobs.tolist() == [-1]
