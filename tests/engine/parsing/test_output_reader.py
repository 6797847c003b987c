"""The reader: which tokens count, what they say, and that prompts grow by what was said (invariant 10)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects.table import dialect_named
from engine.parsing.output_reader import Reader, Reading
from engine.tokenizer.escapes import BREAK, QUOTE, QUOTED
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import (
    CallArgs,
    CallEnd,
    CallStart,
    Delta,
    Done,
    ReaderParams,
    Reasoning,
    RenderInput,
    SamplingParams,
    Text,
    TokenLogprob,
)

HERMES = dialect_named("hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
STOP = Done("stop")


@lru_cache
def tiny() -> Tokenizer:
    return Tokenizer.load(Path("engine/tiny/checkpoint"))


@lru_cache
def letters() -> Tokenizer:
    """A token a byte, tags aside."""
    return scripted_tokenizer()


def reader(tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0, **params: Any) -> Reader:
    logprobs = params.pop("logprobs", None)
    sampling = SamplingParams(seed=1, max_tokens=99, stop=stop, min_tokens=min_tokens, logprobs=logprobs)
    return Reader(tokenizer, HERMES, ReaderParams(**params), sampling)


def read(
    reader: Reader, ids: Sequence[int], finish: Done | None = STOP, size: int = 1
) -> tuple[int, list[Delta], int]:
    """(tokens that count, deltas with neighbours joined, reasoning tokens) of ids fed `size` at a time."""
    num_tokens = reasoning = 0
    deltas: list[Delta] = []
    for start in range(0, max(1, len(ids)), size):
        part = ids[start : start + size]
        reading = reader.feed(part, finish if start + size >= len(ids) else None)
        num_tokens += reading.num_tokens
        reasoning += reading.reasoning_tokens
        deltas += reading.deltas
        if reading.done:
            break
        assert reading.num_tokens == len(part)
    return num_tokens, joined(deltas), reasoning


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + delta.text, last.logprobs + delta.logprobs)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArgs) and isinstance(last, CallArgs):
            out[-1] = CallArgs(last.text + delta.text)
        else:
            out.append(delta)
    return out


def test_an_end_of_turn_counts_and_says_nothing() -> None:
    ids = letters().encode("Hi<|im_end|>")
    assert read(reader(letters()), ids) == (3, [Text("Hi"), STOP], 0)


def test_an_end_of_turn_that_is_an_ordinary_token_says_nothing() -> None:
    tokenizer = Tokenizer(letters()._backend, eos_token_ids=(ord("!"),))
    ids = tokenizer.encode("Hi!!")
    assert read(reader(tokenizer), ids) == (4, [Text("Hi!"), STOP], 0)
    assert read(reader(tokenizer), ids, Done("length")) == (4, [Text("Hi!!"), Done("length")], 0)


def test_a_stop_token_says_nothing() -> None:
    done = Done("stop", ord("."))
    assert read(reader(letters()), letters().encode("Hi."), done) == (3, [Text("Hi"), done], 0)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stop", "num_tokens", "text"),
    [(("wor",), 9, "Hello "), (("o w", "l"), 3, "He"), (("\n",), 12, "Hello world"), (("nope",), 17, None)],
)
def test_tokens_after_a_stop_string_do_not_count(
    stop: tuple[str, ...], num_tokens: int, text: str | None, size: int
) -> None:
    whole = "Hello world\nmore"
    ids = letters().encode(whole + "<|im_end|>")
    done = STOP if text is None else Done("stop", next(each for each in stop if (text + each) in whole))
    assert read(reader(letters(), stop), ids, size=size) == (num_tokens, [Text(text or whole), done], 0)


def test_a_stop_string_wins_over_an_end_in_the_same_feed() -> None:
    assert read(reader(letters(), ("b",)), letters().encode("abc"), Done("length"), size=9)[0] == 2


def test_stop_strings_apply_to_visible_text_only() -> None:
    ids = letters().encode("<think>\nab\n</think>\n\n" + CALL.replace("1", '"ab"'))
    deltas = [Reasoning("ab"), CallStart("f"), CallArgs('{"a": "ab"}'), CallEnd(), STOP]
    assert read(reader(letters(), ("ab",), calls=True), ids)[1] == deltas
    assert read(reader(letters(), ("ab",), dialect=False), ids)[1] == [Text("<think>\n"), Done("stop", "ab")]


def test_min_tokens_comes_before_stop_strings() -> None:
    ids = letters().encode("a.b.c.d")
    assert [read(reader(letters(), (".",), least), ids)[0] for least in (0, 2, 3, 4, 5, 7)] == [
        2,
        2,
        4,
        4,
        6,
        7,
    ]


def test_plain_reads_everything_as_text() -> None:
    text = "<think>\na</think>" + CALL
    ids = letters().encode(text + "<|im_end|>")
    assert read(reader(letters(), dialect=False, calls=True), ids)[1:] == ([Text(text), STOP], 0)


def test_the_last_allowed_call_ends_the_generation() -> None:
    ids = letters().encode(CALL + "\n" + CALL)
    one = read(reader(letters(), calls=True, max_calls=1), ids, None, size=7)
    assert one == (len(letters().encode(CALL)), [CallStart("f"), CallArgs('{"a": 1}'), CallEnd(), STOP], 0)


@pytest.mark.parametrize("cut", range(12, len(CALL) - 11))
def test_a_call_cut_by_the_limit(cut: int) -> None:
    text = CALL[:cut]
    ids = letters().encode(text)
    deltas = read(reader(letters(), calls=True, max_calls=1), ids, Done("length"))[1]
    assert deltas[-1] == Done("length")
    if '"f"' not in text:
        assert deltas == [Done("length")], "markup that nobody knows the call of is not text"
    else:
        assert deltas[0] == CallStart("f")
        assert deltas[-2] == CallEnd('{"a": 1}' in text)


def test_what_was_said_before_a_call_that_the_limit_cut_stays() -> None:
    ids = letters().encode("Let me see.\n" + CALL + CALL[:20])
    assert read(reader(letters(), calls=True), ids, Done("length"))[1] == [
        Text("Let me see."),
        *(CallStart("f"), CallArgs('{"a": 1}'), CallEnd()),
        Done("length"),
    ]
    # The model itself ended its turn: so it has written of a tag.
    ids = letters().encode("<tool_call>\n<|im_end|>")
    assert read(reader(letters(), calls=True), ids)[1] == [Text("<tool_call>\n"), STOP]


def test_half_a_character_at_the_end() -> None:
    assert read(reader(letters()), [*b"a\xf0\x9f"], Done("length"))[1] == [Text("a\ufffd"), Done("length")]


def test_reasoning_tokens_include_the_tags() -> None:
    for text, starts_in, expected in [
        ("<think>\nabc\n</think>\n\nHi<|im_end|>", "text", 7),
        ("\n\nHi<|im_end|>", "text", 0),
        ("abc\n</think>\n\nHi<|im_end|>", "reasoning", 5),
        ("abc\n", "reasoning", 4),
        ("é</think>é", "reasoning", 3),
    ]:
        ids = letters().encode(text)
        for size in (1, 2, 50):
            assert read(reader(letters(), starts_in=starts_in), ids, size=size)[2] == expected


def test_tags_of_many_tokens_are_counted_when_they_are_known() -> None:
    """Bytes that spell the tags, as a model writes that has no tokens for them."""
    ids = [*b"<think>ab</think>c"]
    readings = [reader_.feed([each]) for reader_ in [reader(letters())] for each in ids]
    assert [reading.reasoning_tokens for reading in readings] == [0] * 6 + [7] + [1] * 10 + [0]


@pytest.mark.parametrize("size", [1, 3, 500])
def test_the_messages_of_one_turn(size: int) -> None:
    """Tokens of a thought's message count as reasoning, its header included; text has its own logprobs."""
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    said = thought + "<|start|>assistant<|channel|>final<|message|>Hé<|return|>"
    ids = letters().encode(said)
    sampling = SamplingParams(seed=1, max_tokens=99, logprobs=0)
    one = Reader(letters(), dialect_named("harmony"), ReaderParams(calls=True), sampling)
    each = [TokenLogprob(token_id, "", letters().token_bytes(token_id), -1.0) for token_id in ids]
    reasoning = 0
    deltas: list[Delta] = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        reading = one.feed(ids[part], STOP if start + size >= len(ids) else None, each[part])
        reasoning += reading.reasoning_tokens
        deltas += reading.deltas
    assert reasoning == len(letters().encode(thought))
    texts = [delta for delta in deltas if isinstance(delta, Text)]
    assert "".join(text.text for text in texts) == "Hé"
    assert b"".join(entry.data for text in texts for entry in text.logprobs).decode() == "Hé"


PIECES = st.sampled_from(
    ["<think>", "\n", "</think>", "Hello", " wörld", "😀", CALL, "<", "STOP", "<|im_end|>"]
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(PIECES, max_size=10).map("".join),
    size=st.integers(1, 9),
    stop=st.sampled_from([(), ("STOP",), ("\n",)]),
    starts_in=st.sampled_from(["text", "reasoning"]),
    data=st.data(),
)
def test_batches_of_tokens_change_nothing(
    text: str, size: int, stop: tuple[str, ...], starts_in: str, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([tiny(), letters()]))
    ids = tokenizer.encode(text)
    one = read(reader(tokenizer, stop, calls=True, starts_in=starts_in), ids)
    assert read(reader(tokenizer, stop, calls=True, starts_in=starts_in), ids, size=size) == one
    assert one[2] <= one[0] <= max(len(ids), 1)


# -- log probabilities ---------------------------------------------------------------------------------------


def feed_with_logprobs(text: str, size: int, **params: Any) -> tuple[list[Delta], list[int]]:
    ids = letters().encode(text)
    each = [
        TokenLogprob(token_id, "", letters().token_bytes(token_id), -float(at))
        for at, token_id in enumerate(ids)
    ]
    one = reader(letters(), logprobs=0, **params)
    deltas: list[Delta] = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        reading: Reading = one.feed(ids[part], STOP if start + size >= len(ids) else None, each[part])
        deltas += reading.deltas
    seen = [
        int(-logprob.logprob) for delta in deltas if isinstance(delta, Text) for logprob in delta.logprobs
    ]
    return deltas, seen


@pytest.mark.parametrize("size", [1, 3, 100])
def test_logprobs_go_with_their_text(size: int) -> None:
    deltas, seen = feed_with_logprobs(
        "<think>\na\n</think>\n\nHé <b>\n" + CALL + "<|im_end|>", size, calls=True
    )
    texts = [delta for delta in deltas if isinstance(delta, Text)]
    assert "".join(text.text for text in texts) == "Hé <b>"
    assert seen == list(range(7, 7 + len("Hé <b>".encode())))
    for text in texts:
        assert b"".join(logprob.data for logprob in text.logprobs).decode() == text.text


def test_logprobs_of_plain_text() -> None:
    deltas, seen = feed_with_logprobs("ab<|im_end|>", 1, dialect=False)
    assert seen == [0, 1]
    assert [delta.text for delta in deltas if isinstance(delta, Text)] == ["a", "b"]


# -- invariant 10 --------------------------------------------------------------------------------------------

WORDS = st.text(alphabet="ab <é😀\n", min_size=1, max_size=12)
# What the template cannot give back: line breaks where a block's own stand, and text that is only white
# space.
THOUGHTS = st.none() | WORDS.filter(lambda text: text == text.strip("\n"))
CONTENTS = st.just("") | WORDS.filter(lambda text: text.strip() != "" and not text.startswith("\n"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(WORDS, JSON, max_size=2)), max_size=2
)


@settings(max_examples=150, deadline=None)
@given(thought=THOUGHTS, content=CONTENTS, calls=CALLS, size=st.integers(1, 5))
@example(thought=None, content="", calls=[("f", {"<": {BREAK: [QUOTE, QUOTE + "0"]}})], size=1)
def test_the_next_prompt_begins_with_this_turn_s_tokens(
    thought: str | None, content: str, calls: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    """What the model writes in the template's layout is read into a message that renders to the same
    tokens."""
    tokenizer = tiny()
    said = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    written = []
    for name, arguments in calls:
        inside = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
        written.append(f"<tool_call>\n{inside}\n</tool_call>")
    said += "\n".join([content, *written] if content else written)
    user = {"role": "user", "content": "go"}
    prompt = tokenizer.render(RenderInput([user]))
    turn = tokenizer.encode(prompt) + tokenizer.encode(said + "<|im_end|>")

    ids = turn[len(tokenizer.encode(prompt)) :]
    deltas = read(reader(tokenizer, calls=True), ids, size=size)[1]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in deltas:
        if isinstance(delta, Reasoning):
            message["reasoning_content"] = delta.text
        elif isinstance(delta, Text):
            message["content"] += delta.text
        elif isinstance(delta, CallStart):
            message.setdefault("tool_calls", []).append({"function": {"name": delta.name}})
        elif isinstance(delta, CallArgs):
            message["tool_calls"][-1]["function"]["arguments"] = delta.text
    again = tokenizer.render(RenderInput([user, message, {"role": "user", "content": "more"}]))
    # The text that the model wrote is escaped where it could be taken for a part of a control token, and so
    # are the characters of escapes.
    seen = again.replace(BREAK, "")
    for quoted, char in QUOTED.items():
        seen = seen.replace(quoted, char)
    assert seen.startswith(prompt + said + "<|im_end|>\n")
    assert tokenizer.encode_rendered([again])[0][: len(turn)] == turn


def test_plain_text_stays_within_its_budget() -> None:
    """Guards against an accidental O(n); the measured cost is 2 us a token, the design's budget 5 us."""
    tokenizer = tiny()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 150)
    one = reader(tokenizer, ("\n\nUser:",), calls=True)
    start = time.perf_counter()
    for token_id in ids:
        one.feed((token_id,))
    assert (time.perf_counter() - start) / len(ids) < 50e-6


def test_a_stop_string_is_kept_where_it_is_asked_for() -> None:
    def read_with(stop: str, text: str, size: int, **fields: Any) -> tuple[int, list[Delta]]:
        sampling = SamplingParams(seed=1, max_tokens=99, stop=(stop,), include_stop=True)
        num_tokens, deltas, _ = read(
            Reader(letters(), HERMES, ReaderParams(**fields), sampling), letters().encode(text), size=size
        )
        return num_tokens, deltas

    for size in (1, 2, 100):
        assert read_with("END", "one END two", size) == (7, [Text("one END"), Done("stop", "END")])
        assert read_with("END", "END", size, dialect=False) == (3, [Text("END"), Done("stop", "END")])
        thought = read_with("END", "<think>END</think>so END", size)
        assert thought[1] == [Reasoning("END"), Text("so END"), Done("stop", "END")]


def test_a_stop_token_is_shown_where_it_is_asked_for() -> None:
    ids = letters().encode("ab")
    for include, said in ((False, "a"), (True, "ab")):
        sampling = SamplingParams(seed=1, max_tokens=99, stop_token_ids=(ids[1],), include_stop=include)
        found = Reader(letters(), HERMES, ReaderParams(), sampling)
        assert read(found, ids, Done("stop", ids[1]))[1] == [Text(said), Done("stop", ids[1])]


def test_special_tokens_are_written_out_where_they_are_asked_for() -> None:
    eos = letters().eos_token_ids[0]
    ids = [*letters().encode("<think>x</think><|im_start|>y"), eos]
    for include, end in ((False, ""), (True, "<|im_end|>")):
        sampling = SamplingParams(seed=1, max_tokens=99, include_stop=include)
        found = Reader(letters(), HERMES, ReaderParams(calls=True, special_tokens=True), sampling)
        said = f"<think>x</think><|im_start|>y{end}"
        assert read(found, ids)[1] == [Text(said), Done("stop")]
        assert letters().decode(ids) == f"{said.removesuffix('<|im_end|>')}<|im_end|>"
