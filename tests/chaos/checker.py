"""The checker: compares what clients saw with what the server says afterwards, and with its database.

Every function checks one invariant and returns what is broken, one line each; an empty list means that all
holds.

    I1  nothing acknowledged is missing
    I2  numbers are gap-free, and a replay is byte-equal to what was seen
    I3  exactly one terminal event, last
    I4  concatenated deltas equal the final text
    I5  nobody reads another tenant's data

I6 (every piece of work ends) is a matter of time, so the clients' loop checks it (`tests.chaos.scene`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from tests.chaos.history import Ack, Json, Read, Seen, frames

TERMINAL = frozenset(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))
ENDED = frozenset(name.removeprefix("response.") for name in TERMINAL)

# delta event -> where its closing item or part keeps the whole
_DELTAS = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
}


def check(seen: Seen, replay: bytes, final: Json) -> list[str]:
    """One response that has ended: what was seen, its stream read once more from the start, and its GET."""
    broken = [*check_stream(replay), *check_seen(seen, replay)]
    ended = _ended(replay)
    if ended is not None and ended != final:
        broken.append("I3 GET differs from the terminal event's response")
    broken += [line for ack in seen.acks if (line := _check_ack(ack, final)) is not None]
    return [f"{seen.id}: {line}" for line in broken]


def check_seen(seen: Seen, replay: bytes) -> list[str]:
    """I2 of what clients hold, against a replay or a log (as frames) that may go on behind it."""
    whole = frames(replay)
    return [line for read in seen.reads for line in _check_read(read, whole)]


def check_stream(data: bytes) -> list[str]:
    """I2, I3 and I4 of one whole stream in itself."""
    broken = []
    events = [_event(frame) for frame in frames(data)]
    numbers = [event.get("sequence_number") for event in events]
    if numbers != list(range(len(events))):
        broken.append(f"I2 numbers are not 0, 1, 2, ...: {_excerpt(numbers)}")
    ends = [index for index, event in enumerate(events) if event["type"] in TERMINAL]
    if ends != [len(events) - 1]:
        broken.append(f"I3 terminal events at {ends} of {len(events)} events")
    elif events:
        broken += _check_text(events[:-1], events[-1]["response"])
    return broken


def check_gone(seen: Seen, status: int) -> list[str]:
    """A response that no read shows: deleted, or never stored."""
    if status != 404:
        return [f"{seen.id}: I1 it was deleted or never stored, and reads answer {status}"]
    return []


def check_foreign(own: tuple[int, bytes], foreign: tuple[int, bytes], names: Mapping[str, str]) -> list[str]:
    """I5: another tenant's answer for an id is that for an unknown one. names: id -> unknown id."""
    status, body = foreign
    for there, unknown in names.items():
        body = body.replace(there.encode(), unknown.encode())
    if (status, body) != own or (status != 404 and status != 400):
        return [f"I5 a foreign id answers {foreign}, an unknown one {own}"]
    return []


def check_once(marks: Iterable[str]) -> list[str]:
    """Of requests that carried a key, each has one response. marks: the mark of each response there is."""
    counted: dict[str, int] = {}
    for mark in marks:
        counted[mark] = counted.get(mark, 0) + 1
    return [f"exactly once: request {mark} has {n} responses" for mark, n in counted.items() if n > 1]


def check_used(usages: Sequence[Json], used: Json) -> list[str]:
    """What an owner has used is the sum of the usage of its responses, all of which have ended."""

    def sum_of(*path: str) -> int:
        return sum(value(usage, path) for usage in usages)

    def value(usage: Any, path: Sequence[str]) -> int:
        for name in path:
            usage = usage[name]
        return int(usage)

    begun = [usage for usage in usages if usage["input_tokens_per_turn"]]
    expected = {
        "num_model_requests": len(begun),
        "input_tokens": sum_of("input_tokens"),
        "input_cached_tokens": sum_of("input_tokens_details", "cached_tokens"),
        "output_tokens": sum_of("output_tokens"),
        "output_reasoning_tokens": sum_of("output_tokens_details", "reasoning_tokens"),
    }
    return [
        f"usage: {used.get(name, 0)} {name} are counted, and the responses say {number}"
        for name, number in expected.items()
        if used.get(name, 0) != number
    ]


# ------------------------------------------------------------------------------------------------------------


def _event(frame: bytes) -> Json:
    head, _, data = frame.rstrip(b"\n").partition(b"\ndata: ")
    event: Json = orjson.loads(data)
    assert head == b"event: " + event["type"].encode(), f"a frame that names another event: {frame[:80]!r}"
    return event


def _ended(replay: bytes) -> Json | None:
    last = _event(frames(replay)[-1])
    return last["response"] if last["type"] in TERMINAL else None


def _check_read(read: Read, whole: Sequence[bytes]) -> list[str]:
    got = frames(read.data)
    want = whole[read.after + 1 : read.after + 1 + len(got)]
    if got != want:
        for offset, frame in enumerate(got):
            if offset >= len(want):
                return [f"I1 events from {read.after + 1 + offset} on were seen and are gone"]
            if frame != want[offset]:
                number, is_now = read.after + 1 + offset, want[offset]
                return [f"I2 event {number} was seen as {frame[:300]!r}, is {is_now[:300]!r}"]
    # A cut may leave the beginning of one more frame, or of a comment.
    rest = bytes(read.data).rpartition(b"\n\n")[2]
    if rest and not rest.startswith(b":"):
        following = whole[read.after + 1 + len(got) :][:1]
        if not following or not following[0].startswith(rest):
            return [f"I2 event {read.after + 1 + len(got)} had begun as {rest[:200]!r}"]
    return []


def _check_text(events: Sequence[Json], final: Json) -> list[str]:
    said: dict[tuple[int, int], str] = {}
    for event in events:
        if event["type"] in _DELTAS:
            place = (event["output_index"], event.get("content_index", 0))
            said[place] = said.get(place, "") + event["delta"]
    broken = []
    for (index, part), text in said.items():
        item: Json = final["output"][index] if index < len(final["output"]) else {}
        whole = item.get("arguments") if "arguments" in item else _part(item, part)
        if whole != text:
            broken.append(f"I4 deltas of item {index} say {text[:120]!r}, the end says {str(whole)[:120]!r}")
    return broken


def _part(item: Json, index: int) -> Any:
    parts = item.get("content") or []
    return parts[index].get("text", parts[index].get("refusal")) if index < len(parts) else None


def _check_ack(ack: Ack, final: Json) -> str | None:
    match ack.what:
        case "output":
            call_id, output = ack.detail
            there = [
                i for i in final["output"] if i["type"] == "function_call_output" and i["call_id"] == call_id
            ]
            # Accepted for a run that was ended before it could take it: it is kept, and in no item.
            if not there and final["status"] in ("completed", "incomplete"):
                return f"I1 the output of {call_id} was acknowledged and is gone"
            if there and (len(there) > 1 or there[0]["output"] != output):
                return f"I1 the output of {call_id} is not the one that was acknowledged"
        case "cancelled" if final["status"] not in ENDED:
            return "I1 a cancel was acknowledged, and the run is not over"
        case "ended" if ack.detail != final:
            return "I3 it had ended otherwise"
        case _:
            pass
    return None


def _excerpt(numbers: Sequence[object]) -> str:
    at = next((index for index, number in enumerate(numbers) if number != index), 0)
    return f"... {numbers[max(0, at - 2) : at + 3]} at place {at}"
