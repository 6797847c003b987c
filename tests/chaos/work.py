"""The work of the clients while faults happen: a catalogue of requests and the ways through them.

Each piece of work has turns, tool outputs or cancels, and an outcome: a value that must be the same whatever
happened on the way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tests.chaos.checker import ENDED
from tests.chaos.driver import Client
from tests.chaos.history import Json, Seen, frames
from tests.support.talk import BUILTIN, WEATHER, answer, call

Outcome = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One piece: `do` carries it through and returns its outcome.

    kept: what it leaves is stored, so its outcome must equal that of a run without faults. Work that is not
    kept may end with its connection. stays: all that it makes is stored and not deleted.
    """

    name: str
    do: Callable[[Client, str], Awaitable[Outcome]]
    kept: bool = True
    stays: bool = True


def outcome(response: Json) -> Outcome:
    """What of a response does not depend on when and where it was made: ids and times are left out."""
    items = tuple(
        orjson.dumps({k: v for k, v in item.items() if k not in _OWN}) for item in response["output"]
    )
    usage = response["usage"] or {}
    tokens = (usage.get("input_tokens"), usage.get("output_tokens"))
    failure = (response["error"] or {}).get("message")
    return (response["status"], items, tokens, *([failure] if failure else []))


_OWN = ("id", "call_id", "approval_request_id")


def final(seen: Seen) -> Json:
    """The response of the terminal event that a client saw, or that it was answered with."""
    for ack in reversed(seen.acks):
        if ack.what == "ended":
            found: Json = ack.detail
            return found
    for read in reversed(seen.reads):
        for frame in reversed(frames(read.data)):
            event = orjson.loads(frame.partition(b"\ndata: ")[2])
            if event["type"].removeprefix("response.") in ENDED:
                response: Json = event["response"]
                return response
    raise AssertionError(f"{seen.id} has no end")


# ------------------------------------------------------------------------------------------------------------
# Kinds of work. `mark` is unique: it is the request's Idempotency-Key, and its metadata tells duplicates.


def streamed(body: Json) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One response, read as a stream."""

    async def do(client: Client, mark: str) -> Outcome:
        seen = await client.stream({**body, "metadata": {"mark": mark}}, key=mark)
        return outcome(final(seen))

    return do


def plain(body: Json) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One response, waited for without a stream."""

    async def do(client: Client, mark: str) -> Outcome:
        return outcome(final(await client.create({**body, "metadata": {"mark": mark}}, key=mark)))

    return do


def polled(body: Json) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One background response, asked for until it has ended."""

    async def do(client: Client, mark: str) -> Outcome:
        asked = {**body, "background": True, "metadata": {"mark": mark}}
        seen = await client.create(asked, key=mark)
        while (found := await client.get(seen.id))["status"] not in ENDED:
            await asyncio.sleep(0.1)
        return outcome(found)

    return do


def chained(bodies: Sequence[Json]) -> Callable[[Client, str], Awaitable[Outcome]]:
    """Turns, each behind the one before."""

    async def do(client: Client, mark: str) -> Outcome:
        before: Json = {}
        outcomes = []
        for turn, body in enumerate(bodies):
            asked = {**body, **before, "metadata": {"mark": f"{mark}.{turn}"}}
            seen = await client.stream(asked, key=f"{mark}.{turn}")
            outcomes.append(outcome(final(seen)))
            before = {"previous_response_id": seen.id}
        return tuple(outcomes)

    return do


def conversing(bodies: Sequence[Json]) -> Callable[[Client, str], Awaitable[Outcome]]:
    """Turns of one conversation, which then holds each of them once, whole and in order."""

    async def do(client: Client, mark: str) -> Outcome:
        made = (await client.sure("POST", "/v1/conversations", {}, key=f"{mark}.c")).json["id"]
        outcomes = []
        for turn, body in enumerate(bodies):
            asked = {**body, "conversation": made, "metadata": {"mark": f"{mark}.{turn}"}}
            seen = await client.stream(asked, key=f"{mark}.{turn}")
            outcomes.append(outcome(final(seen)))
        page = (await client.sure("GET", f"/v1/conversations/{made}/items?order=asc&limit=100")).json
        held = tuple((item["role"], orjson.dumps(item["content"])) for item in page["data"])
        return (*outcomes, held)

    return do


def feeding(body: Json, output: str) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One response that waits for the outputs of its calls in its own stream."""

    async def do(client: Client, mark: str) -> Outcome:
        asked = {**body, "await_tool_outputs": True, "background": True, "metadata": {"mark": mark}}
        seen = await client.create(asked, key=mark)
        reading = asyncio.create_task(client.resume(seen))
        try:
            while (found := await client.get(seen.id))["status"] not in ENDED:
                if pending := found.get("pending_tool_calls"):
                    await client.outputs(seen.id, {each["call_id"]: output for each in pending})
                await asyncio.sleep(0.05)
            await reading
        finally:
            reading.cancel()
        return outcome(found)

    return do


def cancelled(body: Json, after_s: float) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One background response that is cancelled on its way, or at its end."""

    async def do(client: Client, mark: str) -> Outcome:
        asked = {**body, "background": True, "metadata": {"mark": mark}}
        seen = await client.create(asked, key=mark)
        await asyncio.sleep(after_s)
        await client.sure("POST", f"/v1/responses/{seen.id}/cancel")
        seen.acknowledge("cancelled")
        while (found := await client.get(seen.id))["status"] not in ENDED:
            await asyncio.sleep(0.05)  # a server that is stopping leaves it to the next
        assert found["status"] in ("cancelled", "completed"), found["status"]
        return ()

    return do


def deleted(body: Json, after_s: float) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One background response that is deleted on its way, or at its end."""

    async def do(client: Client, mark: str) -> Outcome:
        seen = await client.create({**body, "background": True, "metadata": {"mark": mark}}, key=mark)
        await asyncio.sleep(after_s)
        seen.stored = False  # from here on it may be gone, whether or not the answer arrives
        await client.sure("DELETE", f"/v1/responses/{seen.id}", ok=(200, 404))
        return ()

    return do


def unstored(body: Json) -> Callable[[Client, str], Awaitable[Outcome]]:
    """One stream that no server keeps."""

    async def do(client: Client, mark: str) -> Outcome:
        seen = await client.stream({**body, "store": False, "metadata": {"mark": mark}})
        try:
            return outcome(final(seen))
        except AssertionError:
            return ("cut",)

    return do


# ------------------------------------------------------------------------------------------------------------
# Catalogues

FORCED: Json = {"tools": [WEATHER], "tool_choice": "required"}
"""A grammar decides what can be said."""


def scripted(draw: random.Random) -> list[Work]:
    """Work for the scripted engine, whose text follows from the prompt; `draw` decides lengths and seeds."""

    def count(low: int = 10, high: int = 90) -> Json:
        return {"input": f"count {draw.randrange(low, high)}"}

    def words() -> Json:
        return {"input": f"random {draw.randrange(10, 80)}", "seed": draw.randrange(1 << 31)}

    def thinking() -> Json:
        return {
            "input": f"think {'hm ' * draw.randrange(2, 20)}then random 30",
            "seed": draw.randrange(1 << 31),
        }

    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    sums = 'call calculator {"expression": "6*7"}'
    note = 'call save_note {"note": "milk"}'
    kinds: list[tuple[str, Callable[[], Callable[[Client, str], Awaitable[Outcome]]]]] = [
        ("stream", lambda: streamed(words())),
        ("stream", lambda: streamed(count())),
        ("reasoning", lambda: streamed(thinking())),
        ("logprobs", lambda: streamed({**words(), **logprobs})),
        ("limit", lambda: streamed({**count(60, 90), "max_output_tokens": draw.randrange(16, 100)})),
        ("stop string", lambda: streamed({"input": "count 60", "stop": [f" {draw.randrange(20, 60)}"]})),
        ("forced call", lambda: streamed({**words(), **FORCED})),
        ("plain", lambda: plain(words())),
        ("background stream", lambda: streamed({**words(), "background": True})),
        ("background", lambda: polled(words())),
        ("background", lambda: polled(thinking())),
        ("chain", lambda: chained([words(), count(5, 30), words()])),
        ("conversation", lambda: conversing([words(), count(5, 30)])),
        ("calls", lambda: streamed({"input": f"think hm then {call()}", "tools": [WEATHER]})),
        (
            "tool outputs",
            lambda: feeding({"input": call(), "tools": [WEATHER]}, "sunny " * draw.randrange(1, 30)),
        ),
        ("server tool", lambda: streamed({"input": f"count 10\n{sums}", "tools": [BUILTIN]})),
        ("server tool, once", lambda: streamed({"input": f"count 10\n{note}", "tools": [BUILTIN]})),
        ("cancel", lambda: cancelled(count(30, 90), draw.random())),
        ("delete", lambda: deleted(count(30, 90), draw.random())),
    ]
    made = [Work(f"{name} {n}", make(), stays=name != "delete") for n, (name, make) in enumerate(kinds * 3)]
    gone = [Work(f"unstored {n}", unstored(words()), kept=False, stays=False) for n in range(3)]
    return [*made, *gone]


PROMPTS = (
    "Hello, who are you?",
    "Tell me a short story about a river.",
    "What is the capital of France?",
    "My name is Ada and I live in Oslo. What can you do?",
    "Write three sentences on the sea.",
    "How do I make tea?",
)


def spoken(draw: random.Random) -> list[Work]:
    """Work for a model, sampled with seeds."""

    def asked(tokens: int = 160) -> Json:
        return {
            "input": draw.choice(PROMPTS),
            "seed": draw.randrange(1 << 31),
            "temperature": draw.choice((0.0, 0.8, 1.0, 1.3)),
            "max_output_tokens": draw.randrange(tokens // 2, tokens),
            "ignore_eos": draw.random() < 0.7,  # long enough to be hit
        }

    made = []
    for n in range(4):
        made += [
            Work(f"stream {n}", streamed(asked())),
            Work(f"background {n}", polled(asked())),
            Work(f"background stream {n}", streamed({**asked(), "background": True})),
            Work(f"plain {n}", plain(asked())),
            Work(f"chain {n}", chained([asked(60), asked(60)])),
            Work(f"forced call {n}", streamed({**asked(200), **FORCED, "ignore_eos": False})),
            Work(
                f"penalties {n}", streamed({**asked(), "frequency_penalty": 0.5, "repetition_penalty": 1.1})
            ),
        ]
    made.append(
        Work("tool outputs", feeding({**asked(200), **FORCED, "ignore_eos": False}, answer("x")["output"]))
    )
    return made
