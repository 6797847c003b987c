"""Log probabilities are left out of JSON and put back, whatever stands in it."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.event_profiles.logprobs import without_logprobs
from tests.support.wire import Json

TEXT = st.text(st.sampled_from('"\\[]{},:logprobsé\n'), max_size=12)


def entry(token: str, *others: str) -> Json:
    """What is told of one token, and of others in its place."""
    told = {"token": token, "logprob": -1.25, "bytes": [*token.encode()]}
    return {**told, "top_logprobs": [{**told, "token": other} for other in others]}


ENTRIES = st.builds(lambda token, others: entry(token, *others), TEXT, st.lists(TEXT, max_size=3))


def reading(body: bytes) -> tuple[Any, bytes]:
    """What is left of JSON, and what it becomes when the rest is put back."""
    rest, put_back = without_logprobs(body)
    return orjson.loads(rest), put_back(orjson.dumps(orjson.loads(rest)))


@given(st.lists(st.tuples(TEXT, st.lists(ENTRIES, min_size=1, max_size=4)), max_size=4), TEXT)
def test_all_of_them_are_left_out_and_put_back(parts: list[tuple[str, list[Json]]], key: str) -> None:
    body = orjson.dumps({key: [{"text": text, "logprobs": entries} for text, entries in parts]})
    rest, whole = reading(body)
    assert whole == body
    assert [part["text"] for part in rest[key]] == [text for text, _ in parts]
    assert all(isinstance(part["logprobs"], str) for part in rest[key])


@pytest.mark.parametrize(
    "value",
    [
        {"logprobs": []},
        {"logprobs": [{"a": [[[[[1]]]]]}], "more": {"logprobs": [entry("a")]}},
        {"text": orjson.dumps({"logprobs": [entry("a", "b")]}).decode()},
        {'a"logprobs': [{"b": 1}, 2, [3]]},
    ],
)
def test_whatever_else_has_their_name_stays_as_it_is(value: Json) -> None:
    assert reading(orjson.dumps(value))[1] == orjson.dumps(value)


def test_lists_may_be_moved_and_left_out() -> None:
    rest, put_back = without_logprobs(orjson.dumps([{"logprobs": [entry(token)]} for token in "abc"]))
    first, _, last = orjson.loads(rest)
    assert orjson.loads(put_back(orjson.dumps([last, first]))) == [
        {"logprobs": [entry(each)]} for each in "ca"
    ]


def test_the_time_grows_with_the_size_alone() -> None:
    began = time.thread_time()  # of the processor: other threads do not count
    for hostile in (
        b'"logprobs":[{' * 50_000,
        b'"logprobs":[{"a":' + b"[" * 200_000,
        b'{"logprobs":[{"' + b"\\" * 200_001,
    ):
        assert without_logprobs(hostile)[0]
    assert time.thread_time() - began < 2
