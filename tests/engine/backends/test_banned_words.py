"""Words that a generation must not say: never said, whoever else is in the batch, and whatever is guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine import LocalEngine
from engine.types import Constraint, GenerateRequest, RequestError, Shape
from tests.engine.backends.test_local import Find, collect, request, sampled, text, tokens
from tests.support.driver import greedy


@pytest.fixture
def folder(checkpoint: Find) -> Path:
    return checkpoint("qwen3")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(folder, num_blocks=300, max_num_batched_tokens=64, num_threads=1)
    await engine.start()
    yield engine
    await engine.settled()
    engine.check_integrity()
    await engine.close()


def pairs_of(said: str) -> tuple[str, ...]:
    """Some of the pairs of letters that stand in a text; halves of characters are none."""
    pairs = (said[at : at + 2] for at in range(len(said) - 1))
    return tuple(dict.fromkeys(pair for pair in pairs if "\N{REPLACEMENT CHARACTER}" not in pair))[::3]


async def test_words_are_never_said(engine: LocalEngine) -> None:
    plain = await collect(engine, request(sampled(60, temperature=1.5)))
    words = pairs_of(text(plain))
    assert words
    banned = request(sampled(60, temperature=1.5, bad_words=words))
    several = [banned, *(replace(banned, choice=choice) for choice in (1, 2))]
    neighbour = request(sampled(60, temperature=1.5))
    *found, beside = await asyncio.gather(*(collect(engine, each) for each in (*several, neighbour)))
    for chunks in found:
        assert not [word for word in words if word in text(chunks)]
    assert len({text(chunks) for chunks in found}) == len(found)
    assert tokens(beside) == tokens(plain), "what others must not say is nothing to a neighbour"


async def test_drafts_do_not_bring_them_in(engine: LocalEngine) -> None:
    """A greedy text repeats itself, so that guesses from it are right until the word is banned."""
    plain = await collect(engine, request(greedy(80, ignore_eos=True)))
    pairs = pairs_of(text(plain))
    for words in (pairs[:1], pairs[-1:], (pairs[-1][0],)):
        asked = greedy(80, ignore_eos=True, bad_words=words)
        guessed = await collect(engine, request(asked))
        slow = await collect(engine, request(replace(asked, num_assistant_tokens=0)))
        assert words[0] not in text(guessed)
        assert tokens(guessed) == tokens(slow)


async def test_what_was_said_before_a_crash_counts(engine: LocalEngine) -> None:
    words = pairs_of(text(await collect(engine, request(greedy(30, ignore_eos=True)))))
    asked = request(greedy(30, ignore_eos=True, bad_words=words))
    whole = tokens(await collect(engine, asked))
    for cut in (1, 7, 29):
        again = await collect(engine, replace(asked, prefix=(whole[:cut],)))
        assert tokens(again) == whole


async def test_a_request_that_leaves_itself_no_token_fails_alone(engine: LocalEngine) -> None:
    everything = tuple(map(chr, range(33, 127)))
    shaped = replace(
        request(greedy(20, bad_words=everything)), constraint=Constraint(answer=Shape("regex", "[a-z]{8}"))
    )
    neighbour = request(sampled(40))
    alone = tokens(await collect(engine, neighbour))
    beside = asyncio.create_task(collect(engine, neighbour))
    with pytest.raises(RequestError) as caught:
        await collect(engine, shaped)
    assert caught.value.param == "bad_words"
    assert tokens(await beside) == alone


async def test_under_a_grammar_too(engine: LocalEngine) -> None:
    asked: GenerateRequest = replace(
        request(greedy(20, bad_words=("a", "b", "cc"))),
        constraint=Constraint(answer=Shape("regex", "[abcd]{12}")),
    )
    said = text(await collect(engine, asked))
    assert len(said) == 12 and set(said) <= {"c", "d"} and "cc" not in said
