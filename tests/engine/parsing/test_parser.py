"""The parser: what it reads, and that cutting the text anywhere changes nothing (invariant 9)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.dialects.table import dialect_named
from engine.parsing.parser import Parser
from engine.types import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text

THINK = "<think>\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parse(pieces: Iterable[str], dialect: str = "hermes", **options: Any) -> list[Delta]:
    """All deltas of a text in pieces, `Done` last where the parser ended it."""
    parser = Parser(dialect_named(dialect), **options)
    deltas: list[Delta] = []
    for piece in pieces:
        parser.feed(piece)
        deltas += parser.take()[0]
    ended = parser.finish()
    deltas += parser.take()[0]
    return [*deltas, *([ended] if ended else [])]


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of a kind made one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        for kind in (Text, Reasoning, CallArgs):
            if isinstance(delta, kind) and isinstance(last, kind):
                out[-1] = kind(last.text + delta.text)
                break
        else:
            out.append(delta)
    return out


def call(name: str, arguments: str = "{}", complete: bool = True) -> list[Delta]:
    return [CallStart(name), CallArgs(arguments), CallEnd(complete)]


T, E = "<tool_call>", "</tool_call>"
F = '{"name": "f", "arguments": '
NO_CALLS = [
    '{"name": 5}',
    '{"name": ""}',
    '{"name": "\\ud800"}',
    '{"arguments": {}}',
    "{'name': 'f'}",
    "{}",
    "",
]

WHOLE: list[tuple[str, list[Delta]]] = [
    ("Hello there.", [Text("Hello there.")]),
    ("", []),
    ("<think>\nHm.\n</think>\n\nHello", [Reasoning("Hm."), Text("Hello")]),
    ("<think>\n\n</think>\n\nHello", [Text("Hello")]),
    ("  \n<think>a\n\nb</think>c", [Reasoning("a\n\nb"), Text("c")]),
    ("<think>\ncut off\n", [Reasoning("cut off")]),
    ("<think>\ncut off</thi", [Reasoning("cut off</thi")]),
    ("<think>\nHm.\n</think>\n\n", [Reasoning("Hm.")]),
    ("Hello <think>not a thought</think>", [Text("Hello <think>not a thought</think>")]),
    ("a < b and <thi", [Text("a < b and <thi")]),
    ("Hello\n", [Text("Hello\n")]),
    ("\n\n", [Text("\n\n")]),
    (CALL, call("f", '{"a": 1}')),
    ("Let me see.\n" + CALL, [Text("Let me see."), *call("f", '{"a": 1}')]),
    ("Let me see.\n\n" + CALL, [Text("Let me see.\n"), *call("f", '{"a": 1}')]),
    ("\n\n" + CALL + "\n" + CALL + "\n", [*call("f", '{"a": 1}'), *call("f", '{"a": 1}')]),
    (THINK + "x\n</think>\n\n" + CALL, [Reasoning("x"), *call("f", '{"a": 1}')]),
    (THINK + "x\n</think>\n\nSo:\n" + CALL, [Reasoning("x"), Text("So:"), *call("f", '{"a": 1}')]),
    (CALL + "\nDone.", [*call("f", '{"a": 1}'), Text("Done.")]),
    (THINK + CALL + "</think>ok", [Reasoning(CALL), Text("ok")]),
    # any layout and order, unknown keys
    (
        T + '{"id":1,"arguments":{"s":"}</tool_call>\\"{"},"x":[{}],"name":"g"}' + E,
        call("g", '{"s":"}</tool_call>\\"{"}'),
    ),
    (T + '{"name": "f", "parameters": {"a": [1, {"b": null}]}}' + E, call("f", '{"a": [1, {"b": null}]}')),
    (T + '{"name": "f"}' + E, call("f")),
    (T + '{"name": "f", "arguments": "{}"}' + E, call("f")),
    (T + '{"name": "f", "arguments": null}' + E, call("f")),
    (T + '{"name": "f", "arguments": {"a": "b\nc\t"}}' + E, call("f", '{"a": "b\\nc\\t"}')),
    (T + '{"name": "caf\\u00e9", "arguments": {"é": "😀"}}' + E, call("café", '{"é": "😀"}')),
    # forgiven: braces missing or too many, no closing tag
    (T + F + "{}}}\n" + E, call("f")),
    (T + F + "{}\n" + E, call("f")),
    (T + F + "{}}", call("f")),
    (T + F + "{}} So", [*call("f"), Text("So")]),
    (T + F + "{}}\n" + CALL, [*call("f"), *call("f", '{"a": 1}')]),
    # not calls: text, tags and all
    ("Use <tool_call> tags", [Text("Use <tool_call> tags")]),
    ("Use\n<tool_call> tags\n" + CALL, [Text("Use\n<tool_call> tags"), *call("f", '{"a": 1}')]),
    ('<tool_call>\n{"nam', [Text('<tool_call>\n{"nam')]),
    ("<tool_call><tool_call>{}" + CALL, [Text("<tool_call><tool_call>{}"), *call("f", '{"a": 1}')]),
    # broken behind the name: the arguments as written
    (T + F + '{"a": [1}}' + E + "ok", [*call("f", '{"a": [1}}', False), Text("ok")]),
    (T + F + "{'a': 1}}" + E, call("f", "{'a': 1}}", False)),
    (T + F + '{"a": "x', call("f", '{"a": "x', False)),
    (T + '{"name": "f", "argum', [CallStart("f"), CallEnd(False)]),
    (T + '{"name": "f" oops}' + E + ".", [CallStart("f"), CallEnd(False), Text(".")]),
]


@pytest.mark.parametrize("inside", NO_CALLS)
def test_what_is_no_call_is_text(inside: str) -> None:
    assert joined(parse(T + inside + E, calls=True)) == [Text(T + inside + E)]


@pytest.mark.parametrize(("text", "deltas"), WHOLE)
def test_reads(text: str, deltas: list[Delta]) -> None:
    assert joined(parse([text], calls=True)) == deltas
    assert joined(parse(text, calls=True)) == deltas
    for cut in range(1, len(text)):
        assert joined(parse([text[:cut], text[cut:]], calls=True)) == deltas


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": [1, 2,], "b": {},}', '{"a": [1, 2], "b": {}}'),
        ('{"a": True, "b": [None, False]}', '{"a": true, "b": [null, false]}'),
        (r"""{"a": "\d+\u00e9 \' \u12 C:\sub"}""", r"""{"a": "\\d+\u00e9 ' \\u12 C:\\sub"}"""),
        ('{"a": "\\\n"}', r'{"a": "\\\n"}'),
        ('"{\\"a\\": True, \\"b\\": [1,]}"', '{"a": true, "b": [1]}'),
        ('{"a": [-1.5e-3, 0, 10]}', '{"a": [-1.5e-3, 0, 10]}'),
    ],
)
def test_what_nobody_can_mistake_is_written_right(written: str, read: str) -> None:
    text = T + F + written + "}" + E
    assert joined(parse([text], calls=True)) == joined(parse(text, calls=True)) == call("f", read)
    json.loads(read)


@pytest.mark.parametrize(
    "written",
    [
        '{"city" "Oslo"}',
        '{"a": [1,}}',
        '{"a": 1]}',
        '{"a": foo}',
        '{"a": True1}',
        '{"a": 1 2}',
        '{"a": 1.}',
        '{"a": 01}',
        '{"a": NaN}',
        '{"a":}',
        '{"a": 1,, "b": 2}',
        "{,}",
        "{a: 1}",
        '{"a": 1, // one\n "b": 2}',
        '{"a": ' + "[" * 1000 + "]" * 1000 + "}",
        '{"a": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_arguments_that_are_no_json_make_no_whole_call(written: str) -> None:
    text = T + F + written + "}" + E + "ok"
    whole = joined(parse([text], calls=True))
    assert whole == joined(parse(text, calls=True)) == [*call("f", written + "}", False), Text("ok")]


def test_calls_are_text_when_no_tools_were_offered() -> None:
    assert joined(parse(CALL)) == [Text(CALL)]
    assert joined(parse("<think>\na</think>\n\n" + CALL)) == [Reasoning("a"), Text(CALL)]


def test_everything_is_text_in_plain() -> None:
    text = THINK + "a</think>\n" + CALL
    assert joined(parse(text, "plain", calls=True)) == [Text(text)]


def test_starts_in_reasoning() -> None:
    assert joined(parse("\nHm.\n</think>\n\nHi", starts_in="reasoning")) == [Reasoning("Hm."), Text("Hi")]


def test_where_no_call_may_come_the_generation_ends_before_one() -> None:
    assert joined(parse(["Well", "\n" + CALL, "x"], calls=True, max_calls=0)) == [Text("Well"), Done("stop")]
    assert joined(parse([CALL[:4], CALL[4:]], calls=True, max_calls=0)) == [Done("stop")]
    assert joined(parse('[{"a": 1}]', calls=True, max_calls=0)) == [Text('[{"a": 1}]')]


def test_max_calls_ends_the_generation() -> None:
    one = joined(parse([CALL, "\n" + CALL], calls=True, max_calls=1))
    assert one == [*call("f", '{"a": 1}'), Done("stop")]
    two = joined(parse(CALL + "\n" + CALL + "x", calls=True, max_calls=2))
    assert two == [*call("f", '{"a": 1}'), *call("f", '{"a": 1}'), Done("stop")]


def test_a_call_cut_off_is_no_end_of_calls() -> None:
    deltas = parse(['<tool_call>{"name": "f", "arguments": {'], calls=True, max_calls=1)
    assert deltas == call("f", "{", False)


@pytest.mark.parametrize(
    ("text", "stops", "deltas"),
    [
        ("one two three", ("two",), [Text("one "), Done("stop", "two")]),
        ("one\n\ntwo", ("\n\n",), [Text("one"), Done("stop", "\n\n")]),
        ("\none", ("\n",), [Done("stop", "\n")]),
        ("abcd", ("abcd", "bc"), [Text("a"), Done("stop", "bc")]),  # complete first
        ("abc", ("bc", "abc"), [Done("stop", "abc")]),  # the longer of two that end together
        ("abab", ("abc",), [Text("abab")]),
        ("a <tool_call>", ("<tool_call>",), [Text("a "), Done("stop", "<tool_call>")]),
        ("<think>\nstop</think>\n\nstop", ("stop",), [Reasoning("stop"), Done("stop", "stop")]),
        ("<think>\nx\n</think>\n\nHi\nho", ("\n",), [Reasoning("x"), Text("Hi"), Done("stop", "\n")]),
        (CALL.replace("1", '"STOP"'), ("STOP",), call("f", '{"a": "STOP"}')),
        ("a", ("",), [Text("a")]),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], deltas: list[Delta]) -> None:
    assert joined(parse([text], calls=True, stops=stops)) == deltas
    assert joined(parse(text, calls=True, stops=stops)) == deltas


def test_text_is_held_back_no_longer_than_needed() -> None:
    parser = Parser(dialect_named("hermes"), calls=True, stops=("END",))
    pieces = ["Hi ", "<", "b> ", "E", "N", "X", "\n", "<tool", "_call>", '{"name": "f"', ', "arguments": {"a']
    seen = []
    for piece in [*pieces, '": 1']:
        parser.feed(piece)
        seen.append(parser.take()[0])
    assert seen == [
        [Text("Hi ")], [], [Text("<b> ")], [], [], [Text("ENX")],
        [], [], [], [CallStart("f")], [CallArgs('{"a')], [CallArgs('": 1')],
    ]  # fmt: skip


LLAMA: list[tuple[str, list[Delta]]] = [
    ('{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    ('<|python_tag|>{"name": "f", "parameters": {}}', call("f")),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [*call("f"), *call("g")]),
    ('{"answer": 42} is it', [Text('{"answer": 42} is it')]),
    ('Here: {"name": "f", "parameters": {}}', [Text('Here: {"name": "f", "parameters": {}}')]),
    ("{", [Text("{")]),
    ('{"name": "f", "parameters": {]}} ok', [CallStart("f"), CallArgs("{"), CallEnd(False), Text("]}} ok")]),
]


@pytest.mark.parametrize(("text", "deltas"), LLAMA)
def test_llama_reads(text: str, deltas: list[Delta]) -> None:
    assert joined(parse([text], "llama3-json", calls=True)) == deltas
    assert joined(parse(text, "llama3-json", calls=True)) == deltas


# -- invariant 9 ---------------------------------------------------------------------------------------------

BITS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", " ", "{", "}", '{"name": "f"',
     ', "arguments": ', '{"a": 1}', CALL, "Hello", "STOP", "ST", "<", "</", '"', "\\", "[", "]", ",", ":",
     "1", "é", "😀", "name", "end"]
)  # fmt: skip
TEXTS = st.lists(BITS, max_size=14).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=6),
    dialect=st.sampled_from(["hermes", "llama3-json", "plain", "think"]),
    calls=st.booleans(),
    starts_in=st.sampled_from(["text", "reasoning"]),
    stops=st.sampled_from([(), ("STOP",), ("\n",), ("llo", "\n\n", "T"), ("<tool",)]),
    max_calls=st.sampled_from([None, 0, 1]),
)
@example('<tool_call>{"arguments":12"', [29], "hermes", True, "text", (), None)
def test_splitting_changes_nothing(
    text: str,
    cuts: list[int],
    dialect: str,
    calls: bool,
    starts_in: str,
    stops: tuple[str, ...],
    max_calls: int | None,
) -> None:
    options = {"calls": calls, "starts_in": starts_in, "stops": stops, "max_calls": max_calls}
    whole = joined(parse([text], dialect, **options))
    assert joined(parse(text, dialect, **options)) == whole
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert joined(parse(pieces, dialect, **options)) == whole


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(st.text(), VALUES, max_size=3),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    size=st.integers(1, 7),
)
def test_any_arguments_come_out_as_written(
    name: str, arguments: dict[str, Any], ascii_only: bool, indent: int | None, size: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    quoted = json.dumps(name, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": {quoted}, "arguments": {written}}}\n</tool_call>'
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert joined(parse(pieces, calls=True)) == call(name, written)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, starts_in=st.sampled_from(["text", "reasoning"]), stops=st.sampled_from([(), ("STOP",)]))
def test_spans_point_at_the_text(text: str, starts_in: Any, stops: tuple[str, ...]) -> None:
    parser = Parser(dialect_named("hermes"), calls=True, starts_in=starts_in, stops=stops)
    for char in text:
        parser.feed(char)
        deltas, spans = parser.take()
        texts = [delta for delta in deltas if isinstance(delta, Text)]
        for delta, (start, end) in zip(texts, spans, strict=True):
            assert text[start:end] == delta.text
