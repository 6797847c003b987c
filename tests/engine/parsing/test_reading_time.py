"""How long reading takes: next to nothing a piece, whatever a model writes.

It is done on the event loop, with Python's lock, so one long match would hold up all requests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator

import pytest

from engine.dialects.spec import CallMarks, Dialect
from engine.dialects.table import DIALECTS, dialect_named
from engine.parsing.json_call import MAX_HEADER
from engine.parsing.parser import Parser
from engine.types import CallArgs, CallEnd, CallStart, Text, ToolShape

TOOLS = (
    ToolShape("f", '{"properties": {"x": {"type": "array"}, "y": {"type": "string"}}}'),
    ToolShape("g", "{}"),
)
LIMIT_S = 0.05  # of the thread's time: some hundred times what a piece takes
SIZE = MAX_HEADER - 20
BLANKS, LETTERS = " " * SIZE, "a" * SIZE
# What stands where a name, a key or a value is looked for.
HOSTILE = (
    BLANKS + '"x"y"',
    "a" + BLANKS + '"b"',
    " " * (SIZE // 8) + "a" + " " * (SIZE // 2),
    " " * (SIZE // 3) + '"a' + " " * (SIZE // 3) + 'b"c',
    LETTERS + "*",
    LETTERS[: SIZE // 2] + BLANKS[: SIZE // 2] + "((",
    "print(" + BLANKS[: SIZE // 2] + LETTERS[: SIZE // 2],
    "a " * (SIZE // 2) + '"',
    "a a=" * (SIZE // 4) + '"<',
    "a:" * (SIZE // 2) + "(",
    "function" + BLANKS + "```json",
    "1" * SIZE + "a",
    BLANKS * 3 + "x",
    LETTERS * 3 + '"',
)
ROWS = [row for row in DIALECTS if row.layouts]


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Other tests' garbage is not collected in the time that is measured here."""
    gc.disable()
    yield
    gc.enable()


def longest_feed(row: Dialect, pieces: Iterable[str]) -> float:
    """Seconds of the thread's time that the longest piece took; the end counts as one."""
    parser = Parser(row, calls=True, tools=TOOLS)
    worst = 0.0
    for piece in pieces:
        began = time.thread_time()
        parser.feed(piece)
        worst = max(worst, time.thread_time() - began)
    began = time.thread_time()
    parser.finish()
    return max(worst, time.thread_time() - began)


def fronts(row: Dialect, layout: CallMarks) -> Iterator[str]:
    """A call up to its name, its arguments, its first key and that one's value."""
    channels = row.channels
    front = f"{layout.open}{layout.front}{layout.before_name}"
    yield front if channels is None else channels.channel
    if layout.each_open and layout.before_name != layout.each_open:
        yield layout.open + layout.each_open
    front += f'"f"{layout.before_arguments}' if layout.quoted else f"f{layout.before_arguments}"
    yield front
    if (marks := layout.parameters) is not None:
        yield front + marks.open
        yield f"{front}{marks.open}x{marks.key_close}{marks.gap}{marks.value_open}{marks.pad}["
    elif layout.kind in ("python", "keyed"):
        yield f"{front}x{'=' if layout.kind == 'python' else ':'}"


def backs(layout: CallMarks) -> Iterator[str]:
    """What may be looked for behind that."""
    yield '({">\n'
    yield f"{layout.each_close}{layout.close}"
    if (marks := layout.parameters) is not None:
        yield f"{marks.key_close}{marks.close}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_piece_takes_long_however_blanks_quotes_and_letters_stand(row: Dialect) -> None:
    for layout in row.layouts:
        for front in fronts(row, layout):
            for hostile in HOSTILE:
                for back in backs(layout):
                    pieces = [front, *(hostile[at : at + 40] for at in range(0, len(hostile), 40)), back]
                    assert longest_feed(row, pieces) < LIMIT_S, pieces


@pytest.mark.parametrize(
    ("name", "front", "piece"),
    [
        ("qwen3-coder", '<tool_call>\n<function=f>\n<parameter=x>\n["</parameter> ', "abcdefg "),
        ("glm", '<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>["</tool_call>', "abc\\\\def"),
        ("lfm2", "<|tool_call_start|>[f(", "abcdefgh"),
        ("lfm2", "<|tool_call_start|>[f(y", "        "),
        ("lfm2", "<|tool_call_start|>[f(y=", "        "),
        ("llama4-pythonic", "[unknown(", "abcdefgh"),
        ("llama4-pythonic", "[unknown(y", "        "),
    ],
)
def test_what_is_held_is_not_walked_through_again_with_every_piece(name: str, front: str, piece: str) -> None:
    parser = Parser(dialect_named(name), calls=True, tools=TOOLS)
    parser.feed(front)
    began = time.thread_time()
    for _ in range(6000):
        parser.feed(piece)
    assert time.thread_time() - began < 0.8


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ('["</parameter> and \\" on", "b"]\n</parameter>', '["</parameter> and \\" on", "b"]'),
        ('["</parameter> and on\n</parameter>', '"[\\""'),
        ('["</parameter> and on</param\\\\", "b"]\n</parameter>', '["</parameter> and on</param\\\\", "b"]'),
    ],
)
def test_a_tag_in_a_string_is_told_by_the_string_s_end(said: str, value: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{said}\n</function>\n</tool_call>"
    for size in (1, 3, len(text)):
        parser = Parser(dialect_named("qwen3-coder"), calls=True, tools=TOOLS)
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        parser.finish()
        start, arguments, end = parser.take()[0]
        assert (start, arguments, end) == (CallStart("f"), CallArgs(f'{{"x": {value}}}'), CallEnd(True))


@pytest.mark.parametrize("key", ["k" * (MAX_HEADER - 2), "k" * MAX_HEADER, " " * MAX_HEADER + "k"])
@pytest.mark.parametrize("front", ["[f(", "[unknown("])
def test_a_front_that_is_too_long_to_wait_for_is_too_long_in_any_pieces(front: str, key: str) -> None:
    text = f"{front}{key}='a')]"
    found = []
    for size in (1, 7, len(text)):
        parser = Parser(dialect_named("llama4-pythonic"), calls=True, tools=TOOLS)
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        parser.finish()
        deltas = parser.take()[0]
        found.append([type(delta) for delta in deltas])
        said = "".join(delta.text for delta in deltas if isinstance(delta, Text | CallArgs))
        assert said in (text, f'{{"{key.strip()}": "a"}}')
    assert found[0] == found[1] == found[2]
