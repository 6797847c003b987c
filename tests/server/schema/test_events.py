"""The table of events is the official one, and the checker of streams notices whatever is taken out or
swapped."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from engine import CallArgs, CallEnd, CallStart, Done, Reasoning, Text, TokenLogprob
from server.items import COMPACTING, ITEM_TYPES
from server.runs.events.assembler import Assembler
from server.schema import events
from server.schema.responses import echo, parse_create
from tests.support import wire

Json = dict[str, Any]

OURS = {"response.cancelled", COMPACTING}  # the SDKs know the second


def test_every_official_event_is_in_the_table_with_its_fields() -> None:
    official = {}
    for part in wire.schema("ResponseStreamEvent")["anyOf"]:
        (kind,) = wire.tags(part, "type")
        official[kind] = wire.required(part) - {"type", "sequence_number"}
    assert {kind: set(fields) for kind, fields in events.fields().items() if kind not in OURS} == official
    assert set(events.fields()) - set(official) == OURS


def test_the_grammars_speak_of_known_events() -> None:
    known = set(events.fields())
    for row in ITEM_TYPES.values():
        assert {f"response.{name}" for name in re.findall(r"[a-z_.]+", events.order(row.type))} <= known
    assert set(re.findall(r"[a-z_.]+", events.LIFECYCLE)) - {"item"} <= known
    assert set(events.TERMINAL) <= set(re.findall(r"[a-z_.]+", events.LIFECYCLE))


@pytest.mark.parametrize(
    ("names", "legal"),
    [
        ("created in_progress completed", True),
        ("created queued in_progress item item incomplete", True),
        ("created queued cancelled", True),
        ("created failed", True),
        ("queued created in_progress completed", False),
        ("created in_progress in_progress completed", False),
        ("created in_progress completed item", False),
        ("created in_progress completed completed", False),
        ("created item completed", False),
        ("created in_progress", False),
    ],
)
def test_lifecycle(names: str, legal: bool) -> None:
    full = [name if name == "item" else f"response.{name}" for name in names.split()]
    assert events.in_order(events.LIFECYCLE, full) is legal


def stream() -> list[Json]:
    """A whole stream with reasoning, text with log probabilities, and a call."""
    logprob = TokenLogprob(1, "hi", b"hi", -0.5, ((1, "hi", b"hi", -0.5),))
    assembler = Assembler(b"secret", logprobs=True)
    drafts = assembler.feed(
        (
            Reasoning("think"),
            Text("hi", (logprob,)),
            Text(" you"),
            CallStart("f"),
            CallArgs('{"a"'),
            CallArgs(":1}"),
            CallEnd(),
            Done("stop"),
        )
    )
    request = parse_create({"input": "x"})
    start: Json = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "in_progress",
        "output": [],
    }
    start |= dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    start |= echo(request, model="m", temperature=1.0, top_p=1.0)
    usage: Json = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    usage["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
    usage["output_tokens_details"] = {"reasoning_tokens": 1}
    end = {**start, "status": "completed", "completed_at": 2, "usage": usage, "output": assembler.output}
    whole = [
        {"type": "response.created", "response": start},
        {"type": "response.in_progress", "response": start},
        *drafts,
        {"type": "response.completed", "response": end},
    ]
    read: list[Json] = orjson.loads(orjson.dumps(whole))  # log probabilities are encoded
    return read


def numbered(drafts: list[Json]) -> list[Json]:
    return [{**draft, "sequence_number": number} for number, draft in enumerate(drafts)]


def test_a_whole_stream_passes() -> None:
    final = wire.check_stream(numbered(stream()))
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]


def test_an_event_that_is_missing_is_noticed() -> None:
    whole = stream()
    for index in range(len(whole)):
        with pytest.raises(AssertionError):
            wire.check_stream(numbered(whole[:index] + whole[index + 1 :]))


def test_an_event_that_comes_twice_is_noticed() -> None:
    whole = stream()
    for index in range(len(whole)):
        with pytest.raises(AssertionError):
            wire.check_stream(numbered(whole[: index + 1] + whole[index:]))


def test_a_number_that_is_missing_is_noticed() -> None:
    whole = numbered(stream())
    with pytest.raises(AssertionError, match="sequence numbers"):
        wire.check_stream([{**event, "sequence_number": event["sequence_number"] + 1} for event in whole])


@pytest.mark.parametrize(
    "field", ["item_id", "output_index", "content_index", "delta", "logprobs", "item", "part", "text"]
)
def test_a_field_that_is_missing_or_wrong_is_noticed(field: str) -> None:
    whole = numbered(stream())
    index = next(index for index, event in enumerate(whole) if event.get(field) not in (None, "", []))
    for damaged in ({k: v for k, v in whole[index].items() if k != field}, {**whole[index], field: 77}):
        with pytest.raises((AssertionError, KeyError)):
            wire.check_stream([*whole[:index], damaged, *whole[index + 1 :]])


def test_sse_is_split_strictly() -> None:
    raw = b': ping\n\nevent: error\ndata: {"type":"error","sequence_number":3}\n\n'
    assert wire.events(raw) == [{"type": "error", "sequence_number": 3}]
    assert wire.events(raw.replace(b"event:", b"id: 3\nevent:"), ids=True)
    for broken in (
        raw[:-1],
        raw.replace(b"\n", b"\r\n"),
        raw + b"retry: 1\n\n",
        raw.replace(b"event: e", b"event: x"),
    ):
        with pytest.raises(AssertionError):
            wire.events(broken)
