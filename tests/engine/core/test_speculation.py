"""Guessing ahead changes how soon tokens come, never which."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Constraint, LocalEngine, RenderInput, Shape
from engine.core.batch_state import Rows, noise_key
from engine.core.draft_model import Assistant
from engine.core.kv_cache import KVCache
from engine.core.speculation import LONGEST_REST, Lookup, Speculation, follows
from engine.step import Ints, LayerGroup
from engine.tiny import CHECKPOINT
from engine.types import Done, GenerateRequest, LoadError, ReaderParams, RequestFailed, SamplingParams, Text
from tests.support.checkpoints import oracle_logits, write_tokenizer
from tests.support.driver import EOS, Driver, greedy

Find = Callable[[str], Path]
Tokens = tuple[int, ...]
COUNT = 20
HEAT = 0.5  # of the random model, at which its likeliest tokens come often enough


def prompts() -> list[Tokens]:
    rng = random.Random(3)
    return [tuple(rng.randrange(256) for _ in range(length)) for length in (1, 2, 15, 16, 17, 40, 61)]


def sampling(index: int) -> SamplingParams:
    """Of every kind in turn; the random models loop when they are cold, so that guesses come true."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 0.2, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.1, "logprobs": 0},
        {"temperature": 0.3, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1},
        {"temperature": 0.0, "logit_bias": ((7, 2.0), (9, -5.0)), "min_tokens": 12},
        {"temperature": 1.0, "stop_token_ids": tuple(range(60, 80)), "min_tokens": 5},
    ]
    return SamplingParams(seed=index, max_tokens=COUNT - index, **fields[index % len(fields)])


class Guessing:
    """What the guessers below have in common."""

    def finds(self, rows: Rows, slots: Ints) -> bool:
        return True


class Prophet(Guessing):
    """Guesses what it was told will come, but errs in every `wrong`-th token."""

    def __init__(self, coming: dict[Tokens, Tokens], wrong: int) -> None:
        self.coming = coming
        self.wrong = wrong

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        for slot, count in zip(slots.tolist(), wanted.tolist(), strict=True):
            known, prompt = int(rows.num_tokens[slot]), int(rows.num_prompt[slot])
            coming = self.coming[tuple(rows.tokens[slot, :prompt].tolist())]
            drafts = [token if at % self.wrong else 299 - token for at, token in enumerate(coming, prompt)]
            drafts = [*drafts, *[5] * count][known - prompt : known - prompt + count]
            rows.tokens[slot, known : known + count] = drafts
            rows.num_drafts[slot] = count


def told(driver: Driver, coming: dict[Tokens, Tokens], wrong: int = 3) -> Driver:
    """Have a prophet guess, as often and as far as there is room."""
    prophet = Prophet(coming, wrong)
    speculation = driver.loop._speculation
    speculation._drafter = prophet
    speculation.learn = lambda *_: None  # type: ignore[method-assign]
    return driver


def run(driver: Driver) -> list[tuple[Tokens, Done | None, list[Any]]]:
    """Tokens, end and log probabilities of all prompts, run at once."""
    handles = [driver.submit(own, sampling(i), owner=str(i)) for i, own in enumerate(prompts())]
    driver.run()
    found = []
    for i, handle in enumerate(handles):
        rows = [row for output in driver.outputs[handle] for row in output.logprobs]
        tops = [(row.token_id, row.top_ids[: sampling(i).logprobs]) for row in rows]
        found.append((driver.tokens(handle), driver.end(handle), tops))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 13},
    "small blocks": {"block_size": 4, "num_blocks": 500},
    "preemption": {"num_blocks": 9, "max_model_len": 112},
    "one by one": {"max_num_seqs": 1},
}


# the native decoder, windows, and the general tier
CASES = [("qwen3", kind) for kind in SETTINGS] + [("mistral", "preemption"), ("gemma2", "small chunks")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_text_is_that_of_no_speculation(checkpoint: Find, name: str, kind: str) -> None:
    folder = checkpoint(name)
    plain = Driver(folder, num_blocks=300, num_assistant_tokens=0)
    expected = run(plain)
    assert plain.loop.scheduler.counters.drafts == 0
    coming = {prompt: tokens for prompt, (tokens, _, _) in zip(prompts(), expected, strict=True)}
    for guided in (False, True):
        driver = Driver(folder, **{"num_blocks": 300, "num_assistant_tokens": 6, **SETTINGS[kind]})
        assert run(told(driver, coming) if guided else driver) == expected
        counters = driver.loop.scheduler.counters
        if guided:
            assert 0 < counters.drafts_accepted < counters.drafts
        assert (counters.preemptions > 0) == (kind == "preemption")


def test_fewer_steps_where_guesses_hold(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    plain, guessing = (Driver(folder, num_blocks=300, num_assistant_tokens=count) for count in (0, 8))
    prompt = tuple(range(40, 60)) * 3
    assert plain.generate(prompt, greedy(60)) == guessing.generate(prompt, greedy(60))
    assert guessing.loop.scheduler.counters.steps < 0.8 * plain.loop.scheduler.counters.steps
    accepted = guessing.loop.scheduler.counters.drafts_accepted
    assert accepted == plain.loop.scheduler.counters.steps - guessing.loop.scheduler.counters.steps


@pytest.mark.parametrize("draft", ["qwen3", "mistral"])
@pytest.mark.parametrize("kind", ["plain", "preemption"])
def test_a_draft_model_changes_nothing_either(checkpoint: Find, draft: str, kind: str) -> None:
    folder = checkpoint("qwen3")
    expected = run(Driver(folder, num_blocks=300, num_assistant_tokens=0))
    settings = {"num_blocks": 300, "assistant_confidence_threshold": 0.0, **SETTINGS[kind]}
    driver = Driver(folder, checkpoint(draft), **settings)
    assert run(driver) == expected
    counters = driver.loop.scheduler.counters
    assert counters.drafts > 0
    if draft == "qwen3":  # of one mind, at any temperature: it draws with the same noise
        assert counters.drafts_accepted == counters.drafts
    helper = driver.loop._speculation._drafter
    assert isinstance(helper, Assistant)
    helper.check_integrity()


def test_a_draft_model_guesses_several_tokens_a_step(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    driver = Driver(folder, folder, num_blocks=300, assistant_confidence_threshold=0.0)
    expected = Driver(folder, num_blocks=300, num_assistant_tokens=0).generate(prompts()[4], greedy(30))
    assert driver.generate(prompts()[4], greedy(30)) == expected
    counters = driver.loop.scheduler.counters
    # the prompt and one token, then one token more than the 3, 6, 8 and 8 that were guessed
    assert (counters.drafts, counters.drafts_accepted, counters.steps) == (25, 25, 5)


def test_a_draft_model_reads_long_prompts_beside_the_steps(checkpoint: Find) -> None:
    driver = Driver(
        checkpoint("qwen3"), checkpoint("qwen3"), num_blocks=300, assistant_confidence_threshold=0.0
    )
    helper = driver.loop._speculation._drafter
    assert isinstance(helper, Assistant)
    prompt = tuple(random.Random(1).randrange(256) for _ in range(300))
    expected = Driver(checkpoint("qwen3"), num_blocks=300, num_assistant_tokens=0).generate(
        prompt, greedy(30)
    )
    assert driver.generate(prompt, greedy(30)) == expected
    assert helper._kv.num_blocks.any()
    driver.generate((1, 2, 3), greedy(5))  # what was held for the first is freed
    assert helper._kv.num_blocks.sum() == 1
    # beyond what the draft model can read nobody guesses
    helper._max_len = 100
    before = driver.loop.scheduler.counters.drafts
    assert driver.generate(prompt, greedy(30)) == expected
    assert driver.loop.scheduler.counters.drafts == before


def test_an_unsure_draft_model_stays_silent(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    driver = Driver(folder, folder, num_blocks=300, assistant_confidence_threshold=1.0)
    prompt = prompts()[4]
    tokens = driver.generate(prompt, greedy(20))
    assert driver.loop.scheduler.counters.drafts == 0
    own = SamplingParams(
        seed=0, max_tokens=20, temperature=0.0, assistant_confidence_threshold=0.0, num_assistant_tokens=2
    )
    assert driver.generate(prompt, own) == tokens
    counters = driver.loop.scheduler.counters
    assert counters.drafts == counters.drafts_accepted > 0


def test_nothing_changes_to_the_bit_when_deterministic(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    found = []
    for count in (0, 8):
        driver = Driver(
            folder, num_blocks=300, deterministic=True, dtype="bfloat16", num_assistant_tokens=count
        )
        handles = [
            driver.submit(prompt, SamplingParams(seed=i, max_tokens=30, temperature=0.2 * i, logprobs=2))
            for i, prompt in enumerate(prompts())
        ]
        driver.run()
        rows = [[row for o in driver.outputs[handle] for row in o.logprobs] for handle in handles]
        found.append([[(r.token_id, r.logprob, r.top_logprobs[:2]) for r in own] for own in rows])
        assert (driver.loop.scheduler.counters.drafts_accepted > 0) == (count > 0)
    assert found[0] == found[1]


def test_draws_behind_drafts_follow_the_distribution(checkpoint: Find) -> None:
    """Tokens that a draft was held against, and those behind a draft that came true (chi-square)."""
    folder, prompt = checkpoint("qwen3"), prompts()[5]
    path: Tokens = ()
    for _ in range(3):
        path = (*path, int(oracle_logits(folder, (*prompt, *path))[-1].argmax()))
    driver = Driver(folder, num_blocks=300, max_num_seqs=8, num_assistant_tokens=2)
    told(driver, {prompt: path}, wrong=100)
    heated = [SamplingParams(seed=i, max_tokens=4, temperature=HEAT, ignore_eos=True) for i in range(500)]
    handles = [driver.submit(prompt, params) for params in heated]
    driver.run()
    counters = driver.loop.scheduler.counters
    assert 50 < counters.drafts_accepted < counters.drafts - 50
    said = [driver.tokens(handle) for handle in handles]
    for known in (1, 2):
        chances = torch.softmax(oracle_logits(folder, (*prompt, *path[:known]))[-1] / HEAT, dim=-1).numpy()
        drawn = Counter(tokens[known] for tokens in said if tokens[:known] == path[:known])
        num = drawn.total()
        likely = np.flatnonzero(chances * num >= 5)
        expected = chances[likely] * num
        observed = np.array([drawn[int(token)] for token in likely])
        chi = ((observed - expected) ** 2 / expected).sum()
        chi += (observed.sum() - expected.sum()) ** 2 / max(num - expected.sum(), 1.0)
        assert num > 50 and len(likely) > 1
        assert chi < len(likely) + 4 * (2 * len(likely)) ** 0.5


# -- what fails ----------------------------------------------------------------------------------------------


def spoiled(driver: Driver, bad: Callable[[int, int], bool]) -> None:
    """Have the model produce what is no number at tokens (position, id) that are `bad`."""
    runner, forward = driver.loop.runner, driver.loop.runner.model.forward

    def spoil(token_ids: Any, positions: Any, attention: Any, logits_at: Any) -> Any:
        logits = forward(token_ids, positions, attention, logits_at).clone()
        for row, at in enumerate(logits_at.tolist()):
            if bad(int(positions[at]), int(token_ids[at])):
                logits[row] = float("nan")
        return logits

    runner.model.forward = spoil  # type: ignore[method-assign]


def test_a_wrong_draft_that_breaks_the_model_hurts_nobody(checkpoint: Find) -> None:
    folder, prompt = checkpoint("qwen3"), prompts()[3]
    expected = Driver(folder, num_blocks=300, num_assistant_tokens=0).generate(prompt, greedy(20))
    driver = told(Driver(folder, num_blocks=300), {prompt: expected})
    right = dict(enumerate((*prompt, *expected)))
    spoiled(driver, lambda position, token: position in right and token != right[position])
    assert driver.generate(prompt, greedy(20)) == expected
    assert driver.loop.scheduler.counters.preemptions > 0  # what it left behind is computed anew


def test_a_draft_that_came_true_and_breaks_the_model_fails_its_request(checkpoint: Find) -> None:
    folder, (other, prompt) = checkpoint("qwen3"), prompts()[3:5]
    plain = Driver(folder, num_blocks=300, num_assistant_tokens=0)
    coming = {each: plain.generate(each, greedy(20)) for each in (other, prompt)}
    driver = told(Driver(folder, num_blocks=300), coming)
    at, token = len(prompt) + 9, coming[prompt][9]
    spoiled(driver, lambda position, own: (position, own) == (at, token) and len(prompt) == 17)
    handles = [driver.submit(each, greedy(20)) for each in (prompt, other)]
    driver.run()
    assert driver.tokens(handles[0]) == coming[prompt][:10]
    with pytest.raises(RequestFailed, match="not finite"):
        driver.end(handles[0])
    assert driver.tokens(handles[1]) == coming[other]


def test_a_draft_behind_the_end_leaves_nothing_that_is_no_number(checkpoint: Find) -> None:
    folder, prompt, poison = checkpoint("qwen3"), prompts()[3], 290
    expected = Driver(folder, num_blocks=300, num_assistant_tokens=0).generate(prompt, greedy(20))
    # the first token comes with the prompt, then four a step, three of them guessed
    at = next(i for i in range(1, 20) if i % 4 in (1, 2) and expected[i] not in expected[:i])
    coming = (*expected[: at + 1], *[poison] * 20)
    driver = told(Driver(folder, num_blocks=300), {prompt: coming}, wrong=1000)
    spoiled(driver, lambda position, token: token == poison)
    cleared: list[Any] = []
    driver.loop.runner.clear = cleared.append  # type: ignore[method-assign]
    ended = driver.generate(prompt, greedy(20, stop_token_ids=(expected[at],)))
    assert ended == expected[: at + 1]
    assert len(cleared) == 1 and all(cleared[0])


def test_a_slow_consumer_is_given_no_more_than_its_credit(checkpoint: Find) -> None:
    folder, prompt = checkpoint("qwen3"), prompts()[3]
    expected = Driver(folder, num_blocks=300, num_assistant_tokens=0).generate(prompt, greedy(COUNT))
    driver = told(Driver(folder, num_blocks=300, max_undelivered=10), {prompt: expected})
    handle = driver.submit(prompt, greedy(COUNT))
    driver.run()
    assert driver.tokens(handle) == expected[:10]


# -- when it pays --------------------------------------------------------------------------------------------


class Running:
    """As much of a sequence as `Speculation` looks at."""

    def __init__(self, slot: int, limit: int = 1000, credit: int = 256) -> None:
        self.slot, self.limit, self.credit = slot, limit, credit
        self.slow = False


class Ones(Guessing):
    """Guesses ones."""

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        rows.num_drafts[slots] = wanted


def decoding(rows: Rows, count: int, **fields: Any) -> list[Any]:
    params = SamplingParams(seed=0, max_tokens=900, **fields)
    running = []
    for _ in range(count):
        request = GenerateRequest("", (1, 2, 3), params)
        slot = rows.take(
            request, np.array([1, 2, 3], np.int32), noise_key(0, 0, 0), np.zeros(0, np.int64), False
        )
        rows.num_computed[slot] = 2
        running.append(Running(slot))
    return running


def test_the_room_of_a_step_is_shared_and_a_full_batch_does_not_guess() -> None:
    for count, drafts in ((1, 3), (4, 3), (8, 3), (10, 2), (16, 1), (17, 0), (64, 0)):
        rows = Rows(64, 1000)
        speculation = Speculation(rows, Ones(), num_assistant_tokens=8, room=32)
        speculation.propose(decoding(rows, count))
        assert rows.num_drafts.sum() == drafts * count, count


def test_a_sequence_that_errs_rests_longer_and_longer_and_comes_back_when_it_pays() -> None:
    rows = Rows(4, 1000)
    speculation = Speculation(rows, Ones(), num_assistant_tokens=8, room=32)
    running = decoding(rows, 1)
    slots = np.array([running[0].slot])

    def attempts(steps: int, right: bool) -> list[int]:
        made = []
        for step in range(steps):
            speculation.propose(running)
            drafts = rows.num_drafts[slots].copy()
            if drafts[0]:
                made.append(step)
            speculation.learn(slots, drafts, drafts if right else 0 * drafts)
        return made

    made = attempts(400, False)
    gaps = np.diff(made)
    assert len(made) < 14 and gaps[-1] == LONGEST_REST + 1 and (np.diff(gaps) >= 0).all()
    assert len(attempts(100, True)) > 100 - LONGEST_REST - 2
    assert rows.num_drafts[slots[0]] == 8


def test_limits_credit_and_the_request_bound_the_drafts() -> None:
    rows = Rows(8, 1000)
    speculation = Speculation(rows, Ones(), num_assistant_tokens=3, room=32)
    near, poor, free = decoding(rows, 3)
    (silent,), (few,) = decoding(rows, 1, num_assistant_tokens=0), decoding(rows, 1, num_assistant_tokens=1)
    (prefilling,) = decoding(rows, 1)
    near.limit, poor.credit, rows.num_computed[prefilling.slot] = 5, 2, 0
    running = [near, poor, free, silent, few, prefilling]
    speculation.propose(running)
    assert rows.num_drafts[[each.slot for each in running]].tolist() == [1, 1, 3, 0, 1, 0]


def test_a_long_row_of_right_guesses_has_no_end() -> None:
    rows = Rows(1, 1000)
    speculation = Speculation(rows, Ones(), num_assistant_tokens=8, room=32)
    running, slots = decoding(rows, 1), np.zeros(1, np.int64)
    for _ in range(100):
        speculation.propose(running)
        speculation.learn(slots, rows.num_drafts.copy(), rows.num_drafts.copy())
    assert rows.num_drafts[0] == 8


def test_whose_masks_take_long_does_not_guess() -> None:
    rows = Rows(2, 1000)
    speculation = Speculation(rows, Ones(), num_assistant_tokens=8, room=32)
    slow, other = running = decoding(rows, 2)
    slow.slow = True
    speculation.propose(running)
    assert rows.num_drafts[[slow.slot, other.slot]].tolist() == [0, 3]


def test_a_new_owner_of_a_slot_begins_anew() -> None:
    rows = Rows(1, 1000)
    speculation = Speculation(rows, Ones(), num_assistant_tokens=8, room=32)
    running = decoding(rows, 1)
    slots = np.array([running[0].slot])
    for _ in range(3):
        speculation.propose(running)
        speculation.learn(slots, rows.num_drafts[slots].copy(), np.array([0]))
    rows.give_back(running[0].slot)
    speculation.propose(decoding(rows, 1))
    assert rows.num_drafts[slots[0]] == 3


class Stumbling(Guessing):
    """Raises for one slot, and guesses a token for the others."""

    def __init__(self, stumbles: int) -> None:
        self.stumbles = stumbles

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        rows.num_drafts[slots] = 1
        if self.stumbles in slots:
            raise ValueError("injected")

    def finds(self, rows: Rows, slots: Ints) -> bool:
        rows.num_drafts[slots] = 0
        self.draft(rows, slots, slots)
        return True


def test_whom_guessing_fails_for_goes_on_without() -> None:
    rows = Rows(3, 1000)
    speculation = Speculation(rows, Stumbling(1), num_assistant_tokens=8, room=64)
    running = decoding(rows, 3)
    assert not speculation.rests(running)  # whose fault it is, is found before the next step
    for _ in range(2):
        speculation.propose(running)
        assert rows.num_drafts.tolist() == [1, 0, 1]
    assert not speculation.rests(running)


# -- guesses out of the text ---------------------------------------------------------------------------------


def test_the_latest_place_of_the_longest_end_is_found() -> None:
    rng = random.Random(0)
    for _ in range(60):
        longest = rng.choice((1, 2, 5, 30))  # shorter than what is looked for, too
        lengths = [rng.randint(1, longest) for _ in range(5)]
        texts = [[rng.randrange(3) for _ in range(length)] for length in lengths]
        sizes = [rng.randrange(1, rng.choice((5, 17))) for _ in texts]
        tokens = np.full((5, max(lengths)), 9, np.int32)
        for row, own in enumerate(texts):
            tokens[row, : len(own)] = own
        expected = []
        for own, most in zip(texts, sizes, strict=True):
            found = 0
            for size in range(1 if most == 1 else 2, most + 1):
                places = [p for p in range(size, len(own)) if own[p - size : p] == own[-size:]]
                found = max(places) if places else found
            expected.append(found)
        assert follows(tokens, np.array(lengths), np.array(sizes)).tolist() == expected


def test_a_loop_goes_on_as_it_began() -> None:
    rows = Rows(3, 64)
    texts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 6, 7], [8, 9, 5, 6, 8, 9]]
    for text in texts:
        request = GenerateRequest("", (1,), SamplingParams(seed=0, max_tokens=50))
        rows.take(request, np.array(text, np.int32), 0, np.zeros(0, np.int64), False)
    slots = np.array([int(np.flatnonzero(rows.num_tokens == len(text))[0]) for text in texts])
    Lookup(3).draft(rows, slots, np.array([5, 5, 2]))
    assert rows.num_drafts[slots].tolist() == [5, 0, 2]
    assert rows.tokens[slots[0], 8:13].tolist() == [3, 1, 2, 3, 1]
    assert rows.tokens[slots[2], 6:8].tolist() == [5, 6]


# -- rows ----------------------------------------------------------------------------------------------------


def test_drafts_are_drawn_for_each_and_kept_up_to_the_first_that_errs() -> None:
    rows, kv = Rows(4, 64), KVCache((LayerGroup((0,), 1, 8),), (60,), 4, 4, 64)
    texts = {"a": [1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9]}
    slots = []
    for text in texts.values():
        request = GenerateRequest(
            "", tuple(text[:2]), SamplingParams(seed=0, max_tokens=50, presence_penalty=0.5, min_tokens=2)
        )
        slots.append(rows.take(request, np.array(text, np.int32), 0, np.array([0]), False))
        rows.num_computed[slots[-1]] = len(text) - 1
        assert kv.grow(slots[-1], 12)
    rows.num_computed[slots[2]] = 0
    rows.tokens[slots[0], 3:5] = [30, 31]
    rows.tokens[slots[1], 4:7] = [40, 41, 42]
    at = np.array(slots)
    plan = rows.plan(kv, at, np.array([3, 4, 1]))
    assert plan.token_ids.tolist() == [3, 30, 31, 7, 40, 41, 42, 8]
    assert plan.num_draws.tolist() == [3, 4, 0]
    assert plan.logits_at.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert plan.draw.draw_index.tolist() == [1, 2, 3, 2, 3, 4, 5]
    assert plan.draw.bias_rows.tolist() == [0]  # min_tokens counts what stands before
    histories = [
        plan.draw.history_ids[plan.draw.history_rows == row].tolist() for row in range(len(plan.draw.noise))
    ]
    assert histories[:3] == [[1, 2, 3], [1, 2, 3, 30], [1, 2, 3, 30, 31]]
    assert histories[6] == [4, 5, 6, 7, 40, 41, 42]
    added = rows.append(at[:2], np.array([30, 99, 98, 40, 41, 42, 43]), plan.num_draws[:2])
    assert added.tolist() == [2, 4]
    assert rows.tokens[slots[0], : rows.num_tokens[slots[0]]].tolist() == [1, 2, 3, 30, 99]
    assert rows.tokens[slots[1], : rows.num_tokens[slots[1]]].tolist() == [4, 5, 6, 7, 40, 41, 42, 43]
    rows.num_drafts[at[:2]] = 3  # that were never computed
    assert rows.append(at[:2], np.array([50, 51])).tolist() == [1, 1]
    assert [rows.tokens[slot, rows.num_tokens[slot] - 1] for slot in slots[:2]] == [50, 51]
    assert rows.num_drafts[at].tolist() == [0, 0, 0]


# -- behind the door -----------------------------------------------------------------------------------------


@pytest.fixture
async def shipped() -> AsyncIterator[Callable[..., Any]]:
    """A function that asks the shipped model, with drafts or without, and returns text, tokens and end."""
    engines = {}
    for count in (0, 8):
        engines[count] = LocalEngine(CHECKPOINT, num_assistant_tokens=count, kv_cache_bytes=64 << 20)
        await engines[count].start()

    async def ask(count: int, text: str, params: SamplingParams, **fields: Any) -> Any:
        engine = engines[count]
        prompt = await engine.render(RenderInput([{"role": "user", "content": text}]))
        request = GenerateRequest(f"{text}/{count}", prompt.ids, params, **fields)
        chunks = [chunk async for chunk in engine.generate(request)]
        said = "".join(d.text for chunk in chunks for d in chunk.deltas if isinstance(d, Text))
        logprobs = [entry.token_id for chunk in chunks for entry in chunk.logprobs]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return said, tokens, logprobs, chunks[-1].deltas[-1]

    yield ask
    stats = engines[8].stats()
    assert 0 < stats.drafts_accepted_total <= stats.drafts_total
    assert engines[0].stats().drafts_total == 0
    for engine in engines.values():
        await engine.settled()
        engine.check_integrity()
        await engine.close()


SAY = "Say alpha river stone green window paper seven lamp garden bread silver chair."
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "minItems": 3,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2]}},
                    "required": ["name", "n"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    }
)


async def test_the_shipped_model_says_the_same(shipped: Callable[..., Any]) -> None:
    for i in range(6):
        params = SamplingParams(seed=i, max_tokens=48, temperature=0.25 * i, logprobs=1)
        found = [await shipped(count, SAY, params, choice=i) for count in (0, 8)]
        assert found[0] == found[1]


async def test_stop_strings_cut_where_they_did(shipped: Callable[..., Any]) -> None:
    for stop in ("green", " pap", "r", "stone green window"):
        params = SamplingParams(seed=0, max_tokens=48, temperature=0.0, stop=(stop,))
        found = [await shipped(count, SAY, params) for count in (0, 8)]
        assert found[0] == found[1]
        assert found[1][3] == Done("stop", stop) and stop not in found[1][0]


async def test_a_shape_is_held_along_the_drafts(shipped: Callable[..., Any]) -> None:
    constraint = Constraint(answer=Shape("json", SCHEMA))
    for i in range(2):
        params = SamplingParams(seed=i, max_tokens=200, temperature=0.7 * i, logprobs=0)
        found = [await shipped(count, SAY, params, constraint=constraint) for count in (0, 8)]
        assert found[0] == found[1]
        assert len(json.loads(found[1][0])["items"]) == 3


async def test_a_stream_resumes_the_same_from_any_token(shipped: Callable[..., Any]) -> None:
    params = SamplingParams(seed=4, max_tokens=40, temperature=0.4)
    said, tokens, _, _ = await shipped(0, SAY, params)
    for cut in range(1, len(tokens), 5):
        again = await shipped(8, SAY, params, prefix=(tuple(tokens[:cut]),))
        assert again[:2] == (said, tokens)


async def test_a_draft_model_must_have_the_same_tokens(checkpoint: Find, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    spelled = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(spelled.replace('" w7"', '" v7"'))
    engine = LocalEngine(folder, draft_model=other, num_blocks=100)
    with pytest.raises(LoadError, match="has another tokenizer"):
        await engine.start()
    await engine.close()
    write_tokenizer(other)
    engine = LocalEngine(folder, draft_model=other, num_blocks=100, assistant_confidence_threshold=0.0)
    await engine.start()
    request = GenerateRequest("r", (1, 2, 3, 4), greedy(30), ReaderParams(dialect=False))
    tokens = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
    assert len(tokens) == 30 or tokens[-1] == EOS
    assert engine.stats().drafts_accepted_total == engine.stats().drafts_total > 0
    await engine.close()
