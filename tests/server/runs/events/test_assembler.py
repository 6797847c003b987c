"""The assembler: well-formed events from any deltas, and the fold back to the same output."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text
from server.items import Route
from server.runs.events.assembler import Assembler, Draft, derived_id, fold
from tools import ToolResult

SECRET = b"0123456789abcdef"
ROUTES = {"calculator": Route("mcp_call", {"server_label": "antiphon"}), "look_up": Route("function_call")}


def _turn(parts: list[tuple[str, str]], end: Done | None) -> list[Delta]:
    deltas: list[Delta] = []
    for kind, text in parts:
        match kind:
            case "text":
                deltas.append(Text(text))
            case "reasoning":
                deltas.append(Reasoning(text))
            case _:
                deltas += [CallStart(kind), CallArgs(text[:1]), CallArgs(text[1:]), CallEnd(True)]
    return deltas + ([end] if end is not None else [])


turns = st.lists(
    st.tuples(
        st.sampled_from(["text", "reasoning", "look_up", "calculator"]), st.text(min_size=1, max_size=6)
    ),
    max_size=6,
)
ends = st.sampled_from([Done("stop"), Done("length"), None])


def _drafts(deltas: list[Delta], cuts: list[int]) -> tuple[Assembler, list[Draft]]:
    """Feed deltas in chunks that end at `cuts`."""
    assembler = Assembler(SECRET, routes=ROUTES)
    drafts: list[Draft] = []
    start = 0
    for cut in [*sorted(cuts), len(deltas)]:
        drafts += assembler.feed(deltas[start:cut])
        start = max(start, cut)
    return assembler, drafts


@given(turns, ends, st.lists(st.integers(0, 12), max_size=4))
def test_fold_of_the_events_equals_the_snapshot(
    parts: list[tuple[str, str]], end: Done | None, cuts: list[int]
) -> None:
    """Invariant 2, with the run cut short at its end."""
    assembler, drafts = _drafts(_turn(parts, end), cuts)
    drafts += assembler.interrupt()
    output, unfinished = fold(drafts)
    assert output == assembler.output
    assert unfinished == set()


def test_folding_a_long_text_copies_it_once() -> None:
    """Deltas are as many as tokens: copying what came before at each took over a minute here."""
    _, [added, opened, first, *_] = _drafts([Text("a" * 10)], [])
    began = time.process_time()
    output, _ = fold([added, opened, *[{**first, "delta": "a" * 100}] * 40_000])
    assert time.process_time() - began < 2
    assert output[0]["content"][0]["text"] == "a" * 4_000_000


@given(turns, ends, st.integers(0, 40))
def test_an_output_folded_from_a_prefix_can_be_closed(
    parts: list[tuple[str, str]], end: Done | None, length: int
) -> None:
    """What a crash leaves of the events is enough to close every item that was open."""
    _, drafts = _drafts(_turn(parts, end), [])
    seen = drafts[:length]
    # Events come in records, whole: an item's own opening is never split from its first part.
    while seen and seen[-1]["type"] == "response.output_item.added":
        seen = seen[:-1]
    output, unfinished = fold(seen)
    assembler = Assembler(SECRET, routes=ROUTES, output=output, unfinished=unfinished)
    closing = assembler.interrupt()
    again, left = fold([*seen, *closing])
    assert left == set()
    assert again == assembler.output


@given(turns, ends)
def test_added_before_delta_before_done_and_one_id_each(
    parts: list[tuple[str, str]], end: Done | None
) -> None:
    """Invariant 5."""
    assembler, drafts = _drafts(_turn(parts, end), [])
    drafts += assembler.interrupt()
    ids: dict[int, str] = {}
    done: set[int] = set()
    for draft in drafts:
        index = draft["output_index"]
        assert index not in done
        if draft["type"] == "response.output_item.added":
            assert index == len(ids)
            ids[index] = draft["item"]["id"]
        elif draft["type"] == "response.output_item.done":
            assert draft["item"]["id"] == ids[index]
            done.add(index)
        else:
            assert draft["item_id"] == ids[index]
    assert done == set(ids)
    assert len(set(ids.values())) == len(ids)


def test_ids_come_from_the_secret_alone() -> None:
    """A replay of the same deltas makes the same ids; another run's differ."""
    first, _ = _drafts([Text("hi"), Done("stop")], [])
    again, _ = _drafts([Text("hi"), Done("stop")], [1])
    assert first.output[0]["id"] == again.output[0]["id"] == derived_id(SECRET, "message", 0)
    assert derived_id(b"another", "message", 0) != first.output[0]["id"]


def test_length_ends_an_open_call_as_incomplete() -> None:
    """A truncated call is closed with what it has, and never looks whole."""
    assembler = Assembler(SECRET)
    drafts = assembler.feed([CallStart("f"), CallArgs('{"a'), CallEnd(False), Done("length")])
    assert [draft["type"] for draft in drafts][-2:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert assembler.output[0] | {"status": "incomplete", "arguments": '{"a'} == assembler.output[0]


def test_a_server_call_is_open_until_its_outcome() -> None:
    """An `mcp_call` shows its arguments, then waits for the tool."""
    assembler = Assembler(SECRET, routes=ROUTES)
    drafts = assembler.feed([CallStart("calculator"), CallArgs("{}"), CallEnd(), Done("stop")])
    assert drafts[-1]["type"] == "response.mcp_call_arguments.done"
    item: dict[str, Any] = assembler.output[0]
    assert (item["status"], item["server_label"]) == ("calling", "antiphon")
    finished = assembler.call_finished(item["id"], ToolResult("4"))
    assert [draft["type"] for draft in finished] == [
        "response.mcp_call.completed",
        "response.output_item.done",
    ]
    assert (assembler.output[0]["status"], assembler.output[0]["output"]) == ("completed", "4")
    assert [index for index, _ in assembler.take_closed()] == [0]


def test_a_call_that_a_crash_cuts_is_that_of_the_tool_that_was_called() -> None:
    """A tool may be shown under another name than its item says, which nobody may call then."""
    desk, office = ({"server_label": label, "name": "read"} for label in ("desk", "office"))
    routes = {"desk__read": Route("mcp_call", desk), "office__read": Route("mcp_call", office)}
    cut = Assembler(SECRET, routes=routes).feed([CallStart("office__read"), CallArgs('{"a"')])
    output, unfinished = fold(cut)
    assembler = Assembler(SECRET, routes=routes, output=output, unfinished=unfinished)
    drafts = assembler.feed([CallArgs(": 1}"), CallEnd(), Done("stop")])
    assert drafts[-1]["type"] == "response.mcp_call_arguments.done"
    [item] = assembler.output
    assert item | office | {"status": "calling", "arguments": '{"a": 1}'} == item


def test_a_generation_that_says_nothing_leaves_an_empty_message() -> None:
    """A completed response always has an output item; reasoning alone does not count."""
    assembler = Assembler(SECRET)
    assembler.feed([Reasoning("hm"), Done("stop")])
    assembler.ensure_output(0, "stop")
    assert [(item["type"], item["status"]) for item in assembler.output] == [
        ("reasoning", "completed"),
        ("message", "completed"),
    ]
    assert assembler.output[1]["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


def test_a_generation_that_was_cut_before_it_said_anything_leaves_an_incomplete_message() -> None:
    assembler = Assembler(SECRET)
    assembler.feed([Done("length")])
    assembler.ensure_output(0, "length")
    assert [(item["type"], item["status"]) for item in assembler.output] == [("message", "incomplete")]


def test_a_preamble_is_a_message_of_its_own() -> None:
    deltas: list[Delta] = [Text("One ", preamble=True), Text("moment.", preamble=True), Text("Done.")]
    assembler, drafts = _drafts([*deltas, Done("stop")], [1])
    first, last = assembler.output
    assert first["phase"] == "commentary" and first["content"][0]["text"] == "One moment."
    assert "phase" not in last and last["content"][0]["text"] == "Done."
    assert fold(drafts) == (assembler.output, set())
