"""The way that steps take on a GPU, by torch bodies and with plain calls for graphs: the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.loop import EngineLoop
from engine.core.messages import Credit
from engine.core.prefill_budget import Pace
from engine.executor import runner
from engine.executor.cuda_graphs import buckets_for
from engine.executor.gpu_launcher import STAND_IN
from engine.models import linear, loader
from engine.tokenizer import Tokenizer
from engine.types import SamplingParams
from tests.support.checkpoints import oracle_greedy
from tests.support.driver import Driver, greedy

Find = Callable[[str], Path]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for the CPU, and weights as a GPU has them."""
    monkeypatch.setattr(runner, "kernels_for", lambda device: STAND_IN)
    monkeypatch.setattr(loader, "open_library", lambda: None)  # whose weights lie as only it reads them
    monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    yield


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 290, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(
    folder: Path, prompts: list[list[int]], sampling: SamplingParams, **settings: Any
) -> list[tuple[int, ...]]:
    driver = Driver(folder, block_size=4, **settings)
    handles = [driver.submit(ids, sampling) for ids in prompts]
    driver.run()
    return [driver.tokens(handle) for handle in handles]


def test_batches_are_filled_up_to_the_next_bucket() -> None:
    assert buckets_for(1) == (1,)
    assert buckets_for(5) == (1, 2, 4, 8)
    assert buckets_for(256)[-1] == 256
    assert buckets_for(1000)[-1] == 256


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["llama31", "mistral", "qwen2-windows", "qwen3-yarn", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    prompts = [prompt(length, length) for length in (3, 30, 9)]
    found = run(folder, prompts, greedy(12, ignore_eos=True), max_num_seqs=3, max_num_batched_tokens=16)
    for ids, own in zip(prompts, found, strict=True):
        expected = oracle_greedy(folder, tuple(ids), 12)
        assert own[: len(expected)] == expected


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("max_num_seqs", [1, 5, 11])
def test_batches_of_every_size_shrink_through_the_buckets(checkpoint: Find, max_num_seqs: int) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(3 + length, length) for length in range(11)]
    found = run(folder, prompts, greedy(8), max_num_seqs=max_num_seqs)
    assert found == [oracle_greedy(folder, tuple(ids), 8) for ids in prompts]


def test_sampled_tokens_are_those_of_the_plain_way(checkpoint: Find, request: pytest.FixtureRequest) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(5, seed) for seed in range(3)]
    sampling = SamplingParams(
        seed=3, max_tokens=20, temperature=0.8, top_p=0.9, frequency_penalty=0.4, logprobs=2
    )
    expected = run(folder, prompts, sampling, max_num_seqs=3)
    request.getfixturevalue("stand_in")
    assert run(folder, prompts, sampling, max_num_seqs=3) == expected


# ------------------------------------------------------------------------------------------------------------
# One step ahead


@pytest.fixture
def flights(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each forward had that was launched before the tokens that it reads were known."""
    seen: list[int] = []
    take_off = EngineLoop._launch_ahead

    def noted(self: EngineLoop, *args: Any) -> Any:
        flight = take_off(self, *args)
        if flight is not None:
            seen.append(len(flight.sequences))
        return flight

    monkeypatch.setattr(EngineLoop, "_launch_ahead", noted)
    return seen


def test_steady_decoding_is_one_step_ahead(checkpoint: Find, flights: list[int]) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(5, seed) for seed in range(3)]
    found = run(folder, prompts, greedy(12, ignore_eos=True), num_assistant_tokens=0)
    assert found == [oracle_long(folder, ids, 12) for ids in prompts]
    assert flights == [3] * 11


def oracle_long(folder: Path, ids: list[int], count: int) -> tuple[int, ...]:
    """`oracle_greedy` beyond ends of turn."""
    out: tuple[int, ...] = ()
    while len(out) < count:
        out += oracle_greedy(folder, (*ids, *out), count - len(out))
    return out


def test_an_end_that_was_not_foreseen_costs_its_neighbours_nothing(
    checkpoint: Find, flights: list[int]
) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(5, seed) for seed in range(3)]
    whole = [oracle_long(folder, ids, 16) for ids in prompts]
    driver = Driver(folder, block_size=4, num_assistant_tokens=0)
    handles = [
        driver.submit(ids, greedy(16, ignore_eos=True, stop_token_ids=(own[at],)))
        for ids, own, at in zip(prompts, whole, (4, 9, 15), strict=True)
    ]
    driver.run()
    for handle, own in zip(handles, whole, strict=True):
        told = driver.tokens(handle)
        stop = own.index(told[-1])
        assert told == own[: stop + 1]
    assert flights
    driver.loop.scheduler.check_integrity()


def test_who_comes_while_a_step_is_ahead_is_next(checkpoint: Find, flights: list[int]) -> None:
    folder = checkpoint("qwen3")
    driver = Driver(folder, block_size=4, num_assistant_tokens=0)
    first = driver.submit(prompt(5), greedy(12, ignore_eos=True))
    for _ in range(4):
        driver.step()
    second = driver.submit(prompt(9, 1), greedy(6, ignore_eos=True))
    driver.step()
    assert not driver.tokens(second)
    driver.step()
    assert len(driver.tokens(second)) == 1
    driver.run()
    assert driver.tokens(first) == oracle_long(folder, prompt(5), 12)
    assert driver.tokens(second) == oracle_long(folder, prompt(9, 1), 6)


def test_who_comes_while_a_step_is_ahead_spares_those_that_decode(
    checkpoint: Find, flights: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "allowance", lambda self, num_prompts, num_decodes: 8)
    driver = Driver(checkpoint("qwen3"), block_size=4, num_assistant_tokens=0)
    driver.submit(prompt(5), greedy(30, ignore_eos=True))
    for _ in range(4):
        driver.step()
    assert flights
    second = driver.submit(prompt(40, 1), greedy(6, ignore_eos=True))
    driver.step()
    driver.step()
    late = driver.loop.scheduler.find(second)
    assert late is not None
    assert driver.loop.scheduler.rows.num_computed[late.slot] == 8


def test_who_leaves_while_a_step_is_ahead_is_forgotten(checkpoint: Find, flights: list[int]) -> None:
    folder = checkpoint("qwen3")
    driver = Driver(folder, block_size=4, num_assistant_tokens=0)
    gone = driver.submit(prompt(5), greedy(30, ignore_eos=True))
    stays = driver.submit(prompt(7, 1), greedy(12, ignore_eos=True))
    for _ in range(4):
        driver.step()
    told = driver.tokens(gone)
    driver.abort(gone)
    newcomer = driver.submit(prompt(6, 2), greedy(8, ignore_eos=True))
    driver.run()
    assert driver.tokens(gone) == told
    assert driver.tokens(stays) == oracle_long(folder, prompt(7, 1), 12)
    assert driver.tokens(newcomer) == oracle_long(folder, prompt(6, 2), 8)
    assert flights


def test_without_blocks_for_it_no_step_is_ahead(checkpoint: Find, flights: list[int]) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(6, seed) for seed in range(3)]
    found = run(
        folder, prompts, greedy(20, ignore_eos=True), num_blocks=12, max_model_len=40, num_assistant_tokens=0
    )
    assert found == [oracle_long(folder, ids, 20) for ids in prompts]


def test_penalties_and_noise_see_every_token(checkpoint: Find, request: pytest.FixtureRequest) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(5, seed) for seed in range(3)]
    sampling = SamplingParams(
        seed=3, max_tokens=24, temperature=1.2, top_k=40, presence_penalty=1.0, repetition_penalty=1.3
    )
    expected = run(folder, prompts, sampling, num_assistant_tokens=0)
    flights = request.getfixturevalue("flights")
    assert run(folder, prompts, sampling, num_assistant_tokens=0) == expected
    assert flights


def test_texts_that_repeat_themselves_are_guessed_and_others_go_ahead(
    checkpoint: Find, flights: list[int]
) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(6, 1) * 3, prompt(9, 2)]
    driver = Driver(folder, block_size=4, num_assistant_tokens=4)
    handles = [driver.submit(ids, greedy(30, ignore_eos=True)) for ids in prompts]
    driver.run()
    for handle, ids in zip(handles, prompts, strict=True):
        assert driver.tokens(handle) == oracle_long(folder, ids, 30)
    assert driver.loop.scheduler.counters.drafts
    assert flights


def test_who_waits_for_a_place_or_a_consumer_holds_nobody_back(checkpoint: Find, flights: list[int]) -> None:
    folder = checkpoint("qwen3")
    prompts = [prompt(5, seed) for seed in range(3)]
    settings: dict[str, Any] = {"max_num_seqs": 2, "num_assistant_tokens": 0, "max_undelivered": 8}
    driver = Driver(folder, block_size=4, **settings)
    unread, read, waits = (driver.submit(ids, greedy(20, ignore_eos=True)) for ids in prompts)
    driver.inbox.put(Credit(read, 100))
    driver.inbox.put(Credit(waits, 100))
    driver.run()
    # a flight ends where one yields its place to the third, whose own are the last
    assert flights == [2] * 7 + [1] + [2] * 10 + [1] * 9
    assert len(driver.tokens(unread)) == 8
    driver.inbox.put(Credit(unread, 100))
    driver.run()
    expected = [oracle_long(folder, ids, 20) for ids in prompts]
    assert [driver.tokens(handle) for handle in (unread, read, waits)] == expected


def test_what_must_not_be_said_is_not_said_a_step_ahead(checkpoint: Find, flights: list[int]) -> None:
    """A word of two letters: whether its second one is banned depends on the draw that a step launched ahead
    has not seen when its forward begins."""
    folder = checkpoint("qwen3")
    tokenizer = Tokenizer.load(folder)
    ids = prompt(5)
    plain = oracle_long(folder, ids, 24)
    said = tokenizer.decode(plain)
    word = next(said[at : at + 2] for at in range(4, len(said) - 1) if said[at : at + 2].isascii())
    driver = Driver(folder, block_size=4, num_assistant_tokens=0)
    handle = driver.submit(ids, greedy(24, ignore_eos=True), banned=tokenizer.banning((word,)))
    beside = driver.submit(prompt(5, 1), greedy(24, ignore_eos=True))
    driver.run()
    assert flights
    assert word in said and word not in tokenizer.decode(driver.tokens(handle))
    assert driver.tokens(handle)[:1] == plain[:1]
    assert driver.tokens(beside) == oracle_long(folder, prompt(5, 1), 24)
