"""Every row of the table against what its models write: read whole, in pieces, cut off and garbled.

The transcripts are data (`transcripts/ROW.toml`); a row without a file fails, and so does one without the
four that every row must have.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dialects.spec import Dialect
from engine.dialects.table import DIALECTS, dialect_named
from engine.parsing.parser import Parser
from engine.types import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text, ToolShape

FOLDER = Path(__file__).parents[1] / "transcripts"
TYPES: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"type": "string"}, "unit": {"enum": ["celsius"]}, "days": {"type": "integer"}},
    "search": {
        "query": {"type": "string"},
        "limit": {"type": "number"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
    },
    "now": {},
}
TOOLS = tuple(ToolShape(name, json.dumps({"properties": types})) for name, types in TYPES.items())
ROWS = [row.name for row in DIALECTS]


class Case(NamedTuple):
    """One transcript: a row, what its model said, and what that reads as."""

    row: Dialect
    what: str
    said: str
    starts_in: Any
    reads: list[Delta]


def cases() -> Iterator[Case]:
    for name in ROWS:
        for each in tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))["case"]:
            row = dialect_named(name)
            if "reasoning" in each:
                row = row.thinking_as(dialect_named(each["reasoning"]))
            reads = [delta for entry in each["reads"] for delta in deltas_of(*entry)]
            yield Case(row, each["what"], each["said"], each.get("starts_in", "text"), reads)


def deltas_of(kind: str, text: str, arguments: str = "") -> list[Delta]:
    match kind:
        case "text" | "preamble":
            return [Text(text, preamble=kind == "preamble")]
        case "think":
            return [Reasoning(text)]
        case _:
            return [CallStart(text), CallArgs(arguments), CallEnd(kind == "call")]


CASES = list(cases())


def read(pieces: Iterable[str], row: Dialect, **options: Any) -> list[Delta]:
    """All deltas of a text in pieces, neighbours joined."""
    parser = Parser(row, **{"calls": True, "tools": TOOLS, **options})
    deltas: list[Delta] = []
    for piece in pieces:
        parser.feed(piece)
        deltas += parser.take()[0]
    ended = parser.finish()
    deltas += parser.take()[0]
    return joined([*deltas, *([ended] if ended else [])])


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, _JOINED) and isinstance(last, _JOINED) and _bare(delta) == _bare(last):
            out[-1] = replace(last, text=last.text + delta.text)
        else:
            out.append(delta)
    return out


_JOINED = (Text, Reasoning, CallArgs)


def _bare(delta: Text | Reasoning | CallArgs) -> Delta:
    return replace(delta, text="")


def ids(case: Case) -> str:
    return f"{case.row.name}: {case.what}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_reads(case: Case) -> None:
    assert read([case.said], case.row, starts_in=case.starts_in) == case.reads


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_streamed_equals_whole(case: Case) -> None:
    assert read(case.said, case.row, starts_in=case.starts_in) == case.reads
    for cut in range(1, len(case.said)):
        pieces = [case.said[:cut], case.said[cut:]]
        assert read(pieces, case.row, starts_in=case.starts_in) == case.reads, pieces


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_arguments_of_whole_calls_are_json(case: Case) -> None:
    for arguments, end in pairwise(case.reads):
        if isinstance(arguments, CallArgs) and end == CallEnd(True):
            assert isinstance(json.loads(arguments.text), dict)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cut_off_anywhere(case: Case) -> None:
    """What is read of a beginning is a beginning of what is read; only what came last may be text yet."""
    for end in range(len(case.said)):
        part = read([case.said[:end]], case.row, starts_in=case.starts_in)
        assert read(case.said[:end], case.row, starts_in=case.starts_in) == part
        check(part)
        calls = [delta for delta in part if isinstance(delta, CallStart)]
        assert calls == [delta for delta in case.reads if isinstance(delta, CallStart)][: len(calls)]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_calls_are_no_calls_when_no_tools_were_offered(case: Case) -> None:
    deltas = read([case.said], case.row, starts_in=case.starts_in, calls=False, tools=())
    assert all(isinstance(delta, Text | Reasoning) for delta in deltas)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_one_call_at_most(case: Case) -> None:
    ends = [index for index, delta in enumerate(case.reads) if isinstance(delta, CallEnd)]
    for size in (1, len(case.said)):
        pieces = [case.said[at : at + size] for at in range(0, len(case.said), size)]
        deltas = read(pieces, case.row, starts_in=case.starts_in, max_calls=1)
        expected = case.reads[: ends[0] + 1] if ends else case.reads
        assert [delta for delta in deltas if not isinstance(delta, Done)] == expected
        assert len(ends) < 2 or deltas[-1] == Done("stop")


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_its_transcripts(name: str) -> None:
    own = [case for case in CASES if case.row.name.split("+")[0] == name]
    row = dialect_named(name)
    kinds = [[type(delta) for delta in case.reads] for case in own]
    assert len(own) >= 4
    assert [Text] in kinds
    if row.layouts:
        assert any(each.count(CallStart) == 1 for each in kinds)
        assert any(each[0] is not CallStart and each.count(CallStart) == 2 for each in kinds)
        assert any(each[0] is Reasoning and CallStart in each for each in kinds)


def check(deltas: Sequence[Delta]) -> None:
    """Calls are opened, filled and closed in order, and whole ones hold an object."""
    inside: CallStart | None = None
    arguments = ""
    for delta in deltas:
        match delta:
            case CallStart():
                assert inside is None and delta.name
                inside, arguments = delta, ""
            case CallArgs():
                assert inside is not None
                arguments += delta.text
            case CallEnd():
                assert inside is not None
                inside = None
            case _:
                assert inside is None
    assert inside is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "half a'),
        ("qwen3-coder", "<tool_call><function=search><parameter=query>half a"),
        ("glm", "<tool_call>search<arg_key>query</arg_key><arg_value>half a"),
        ("minimax-m2", '<minimax:tool_call><invoke name="search"><parameter name="query">half a'),
        ("llama4-pythonic", "[search(query='half a"),
        ("kimi-k2", '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "half a'),
        ("harmony", '<|channel|>commentary to=functions.search<|message|>{"query": "half a'),
    ],
)
def test_strings_come_out_as_they_are_written(name: str, said: str) -> None:
    deltas = read(said, dialect_named(name))
    assert deltas == [CallStart("search"), CallArgs('{"query": "half a'), CallEnd(False)]


# -- garbage -------------------------------------------------------------------------------------------------


@lru_cache
def bits(name: str) -> tuple[str, ...]:
    """What garbage is made of: the row's tags, twice as often as pieces of what stands between them."""
    said = [case.said for case in CASES if case.row.name.split("+")[0] == name]
    cuts = random.Random(name)
    parts = [text[at : at + cuts.randint(1, 12)] for text in said for at in range(0, len(text), 7)]
    return (*said, *sorted(dialect_named(name).tags) * 8, *parts, *'{}[]()",:= \n', "STOP", "é", "😀", "\\")


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_garbage_in_any_pieces(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(bits(name)), max_size=10)))
    options = {
        "starts_in": data.draw(st.sampled_from(["text", "reasoning"])),
        "stops": data.draw(st.sampled_from([(), ("STOP",), ("\n",)])),
        "max_calls": data.draw(st.sampled_from([None, 0, 1, 2])),
        "tools": data.draw(st.sampled_from([TOOLS, ()])),
    }
    whole = read([text], dialect_named(name), **options)
    assert read(text, dialect_named(name), **options) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert read(pieces, dialect_named(name), **options) == whole
    check([delta for delta in whole if not isinstance(delta, Done)])


@pytest.mark.parametrize("value", ["The weather is fine.", "Truest,", "tru}", "9" * 5000, "-x"])
def test_what_is_no_word_and_no_number_ends_a_call_at_the_same_place_in_any_pieces(value: str) -> None:
    text = f'[TOOL_CALLS]search {{"query":{value}'
    dialect = dialect_named("mistral")
    whole = read([text], dialect, tools=TOOLS)
    assert any(isinstance(delta, CallArgs) for delta in whole)
    assert read(text, dialect, tools=TOOLS) == whole
