"""The checker finds what it is for: no history that was tampered with passes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.chaos.checker import (
    check,
    check_foreign,
    check_gone,
    check_once,
    check_seen,
    check_stream,
    check_used,
)
from tests.chaos.disks import _lost
from tests.chaos.history import Json, Read, Seen, frames
from tests.support.running import http_client, running_app
from tests.support.talk import Api


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[tuple[bytes, Json]]:
    """The stream of a response with reasoning and text, and the response."""
    async with running_app(tmp_path) as server, http_client(server) as client:
        stream = await Api(client).stream("think a b c then say one two three")
        yield stream.raw, stream.response


def seen(data: bytes, *, cut: int | None = None) -> Seen:
    """What a client saw: all in one connection, or two, the first of them cut behind `cut` bytes."""
    if cut is None:
        return Seen("resp_1", reads=[Read(-1, bytearray(data))])
    first = Read(-1, bytearray(data[:cut]))
    return Seen(
        "resp_1", reads=[first, Read(first.last, bytearray(b"".join(frames(data)[first.last + 1 :])))]
    )


def test_a_true_history_passes(told: tuple[bytes, Json]) -> None:
    raw, final = told
    assert check(seen(raw), raw, final) == []
    for cut in range(len(raw)):
        assert check_seen(seen(raw, cut=cut), raw) == []
    assert check_seen(seen(raw.replace(b"\n\n", b"\n\n: keep-alive\n\n")), raw) == []
    assert check_seen(seen(raw[:-50]), raw) == [], "who was cut has seen less, and nothing wrong"


def _without(parts: list[bytes], at: int) -> list[bytes]:
    return parts[:at] + parts[at + 1 :]


def _doubled(parts: list[bytes], at: int) -> list[bytes]:
    return parts[: at + 1] + parts[at:]


def _swapped(parts: list[bytes], at: int) -> list[bytes]:
    return [*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]]


def _changed(parts: list[bytes], at: int) -> list[bytes]:
    return [
        *parts[:at],
        parts[at].replace(b"two", b"too").replace(b'"in_progress"', b'"queued"'),
        *parts[at + 1 :],
    ]


@pytest.mark.parametrize("tamper", [_without, _doubled, _swapped])
def test_a_stream_with_a_missing_doubled_or_misplaced_event_is_caught(
    told: tuple[bytes, Json], tamper: Callable[[list[bytes], int], list[bytes]]
) -> None:
    raw, final = told
    parts = frames(raw)
    for at in range(len(parts) - 1):
        other = b"".join(tamper(parts, at))
        assert any("I2" in line for line in check(seen(other), other, final)), (
            "even if it is replayed as it was seen"
        )
        assert check_seen(seen(other), raw), "and against the true one"


def test_a_changed_event_is_caught(told: tuple[bytes, Json]) -> None:
    raw, final = told
    parts = frames(raw)
    for at, part in enumerate(parts):
        other = b"".join(_changed(parts, at))
        if other != raw:
            assert any("I2" in line for line in check(seen(other), raw, final)), part
    delta = next(at for at, part in enumerate(parts) if b'"delta":" two"' in part)
    other = b"".join(_changed(parts, delta))
    assert any("I4" in line for line in check_stream(other)), "in the log as well: the text gives it away"


def test_what_was_seen_and_is_gone_is_caught(told: tuple[bytes, Json]) -> None:
    raw, _ = told
    shorter = b"".join(frames(raw)[:-3])
    assert check_seen(seen(raw), shorter)[0].startswith("I1")
    half = raw[: len(shorter) + 10]  # a frame had begun that is not there any more
    assert check_seen(seen(half), shorter)[0].startswith("I2")


def test_two_terminal_events_are_caught_and_so_is_none(told: tuple[bytes, Json]) -> None:
    raw, final = told
    *_, last = frames(raw)
    number = b'"sequence_number":%d' % (len(frames(raw)) - 1)
    again = last.replace(number, b'"sequence_number":%d' % len(frames(raw)))
    assert [line[:2] for line in check_stream(raw + again)] == ["I3"]
    assert [line[:2] for line in check_stream(b"".join(frames(raw)[:-1]))] == ["I3"]
    failed = {**final, "status": "failed"}
    assert any("I3" in line for line in check(seen(raw), raw, failed)), "GET says something else"


def test_a_broken_acknowledgement_is_caught(told: tuple[bytes, Json]) -> None:
    raw, final = told

    def after(what: str, detail: Any = None, end: Json = final) -> list[str]:
        record = seen(raw)
        record.acknowledge(what, detail)
        return check(record, raw, end)

    assert after("ended", final) == []
    assert "I3" in after("ended", {**final, "status": "incomplete"})[0]
    assert "I1" in after("output", ("call_1", "sunny"))[0]
    assert any("I1" in line for line in after("cancelled", end={**final, "status": "in_progress"}))
    assert check_gone(Seen("resp_1"), 404) == [] and "I1" in check_gone(Seen("resp_1"), 200)[0]


def test_a_foreign_answer_that_tells_something_is_caught() -> None:
    unknown = (404, orjson.dumps({"error": "no resp_0"}))
    assert check_foreign(unknown, (404, orjson.dumps({"error": "no resp_7"})), {"resp_7": "resp_0"}) == []
    for status, body in ((200, b"{}"), (403, b'{"error":"no resp_7"}'), (404, b'{"error":"not yours"}')):
        assert check_foreign(unknown, (status, body), {"resp_7": "resp_0"})
    assert check_foreign((200, b"{}"), (200, b"{}"), {})


def test_a_request_that_was_carried_out_twice_is_caught() -> None:
    assert check_once(["a", "b"]) == []
    assert check_once(["a", "b", "a"]) == ["exactly once: request a has 2 responses"]


async def test_arrivals_are_kept_by_event(told: tuple[bytes, Json]) -> None:
    raw, _ = told
    read = Read()
    for start in range(0, len(raw), 100):
        read.take(raw[start : start + 100])
    numbered = list(read.timed_frames())
    assert [number for number, _, _ in numbered] == list(range(len(frames(raw))))
    assert b"".join(frame for _, _, frame in numbered) == raw
    moments = [at for _, at, _ in numbered]
    assert moments == sorted(moments) and len(_lost(Seen("resp_1", reads=[read]), 3)) == len(moments) - 4


def test_what_is_used_is_the_sum_of_what_responses_say() -> None:
    usage = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4},
        "input_tokens_per_turn": [7],
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    none = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "input_tokens_per_turn": [],
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    used = {
        "num_model_requests": 2,
        "input_tokens": 14,
        "input_cached_tokens": 8,
        "output_tokens": 10,
        "output_reasoning_tokens": 2,
    }
    assert check_used([usage, none, usage], used) == []
    assert check_used([none], {}) == []
    assert check_used([usage, usage], {**used, "output_tokens": 11}) == [
        "usage: 11 output_tokens are counted, and the responses say 10"
    ]
