"""A client of the Responses API for tests: it checks every reply before the test sees it.

Bodies and streams go through `tests.support.wire`. Streams can be read event by event, and scripts hold the
engine at the place where a test wants it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from engine import GenerateRequest, Say, ScriptedEngine, Wait
from engine.backends.script import Step, obey
from tests.support import wire
from tests.support.wire import Json

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME: Json = {**WEATHER, "name": "get_time", "description": "Time in a city"}
BUILTIN: Json = {"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}


def loose(*script: Any, **settings: Any) -> ScriptedEngine:
    """A scripted engine that holds no call to a grammar, as an upstream may: strict tools can be called
    wrongly."""
    engine = ScriptedEngine(*script, **settings)
    engine._info = replace(engine._info, capabilities=engine._info.capabilities - {"grammar"})
    return engine


def call(name: str = "get_weather", city: str = "Paris") -> str:
    """The directive that makes the scripted engine call a function."""
    return f"call {name} {json.dumps({'city': city})}"


def wrote(name: str, **arguments: Any) -> str:
    """A call as the scripted engine's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(call_id: str, output: Any = "sunny") -> Json:
    """A tool's output as an input item."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def text(response: Json) -> str:
    """What a response says, as SDKs compute it."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    )


def calls(response: Json) -> list[Json]:
    """The function calls of a response."""
    return [item for item in response["output"] if item["type"] == "function_call"]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A whole stream: its bytes, its events, and the Response of its terminal event."""

    raw: bytes
    events: list[Json]
    response: Json

    @property
    def types(self) -> list[str]:
        """The event types without their `response.`."""
        return [event["type"].removeprefix("response.") for event in self.events]


class Api:
    """A checked client."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def create(self, input: Any, **body: Any) -> Json:
        """POST /responses, not streamed."""
        return self.response(await self.http.post("/v1/responses", json={"input": input, **body}))

    @staticmethod
    def response(reply: httpx.Response) -> Json:
        """A reply that must be a Response object."""
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"]
        body: Json = reply.json()
        wire.validate_response(body)
        return body

    async def stream(self, input: Any, **body: Any) -> Streamed:
        """POST /responses, streamed to its end."""
        reply = await self.http.post("/v1/responses", json={"input": input, "stream": True, **body})
        return self.whole(reply)

    @staticmethod
    def whole(reply: httpx.Response) -> Streamed:
        """A reply that must be a whole stream."""
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-request-id"]
        events = wire.events(reply.content)
        return Streamed(reply.content, events, wire.check_stream(events))

    @asynccontextmanager
    async def open(self, input: Any, **body: Any) -> AsyncIterator[Live]:
        """POST /responses as a stream that is read bit by bit; leaving the block leaves the server."""
        request = {"input": input, "stream": True, **body}
        async with self.http.stream("POST", "/v1/responses", json=request) as reply:
            yield await _live(reply)

    @asynccontextmanager
    async def follow(self, response_id: str, after: int | None = None) -> AsyncIterator[Live]:
        """GET the stream of a response, read bit by bit."""
        params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        async with self.http.stream("GET", f"/v1/responses/{response_id}", params=params) as reply:
            yield await _live(reply)

    async def get(self, response_id: str) -> Json:
        """GET a response."""
        return self.response(await self.http.get(f"/v1/responses/{response_id}"))

    async def waits(self, response_id: str, calls: int = 1) -> Json:
        """The response, once it waits for the outputs of so many calls."""
        async with asyncio.timeout(20):
            while len((now := await self.get(response_id)).get("pending_tool_calls") or ()) < calls:
                await asyncio.sleep(0.001)
        return now

    async def replay(self, response_id: str, after: int | None = None, **headers: str) -> bytes:
        """GET a response's stream to its end."""
        params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        reply = await self.http.get(f"/v1/responses/{response_id}", params=params, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.content

    async def ended(self, response_id: str) -> Json:
        """The response once it has ended; its stream is checked on the way."""
        events = wire.events(await self.replay(response_id))
        final = wire.check_stream(events)
        assert await self.get(response_id) == final
        return final

    async def cancel(self, response_id: str) -> Json:
        """POST /cancel, as SDKs do: without a body."""
        return self.response(await self.http.post(f"/v1/responses/{response_id}/cancel"))

    async def delete(self, response_id: str) -> None:
        """DELETE a response."""
        reply = await self.http.delete(f"/v1/responses/{response_id}")
        assert reply.status_code == 200, reply.text
        assert reply.json() == {"id": response_id, "object": "response", "deleted": True}

    async def outputs(self, response_id: str, outputs: dict[str, Any], **body: Any) -> Json:
        """POST tool outputs, by call id."""
        listed = [{"call_id": call_id, "output": output} for call_id, output in outputs.items()]
        path = f"/v1/responses/{response_id}/tool_outputs"
        return self.response(await self.http.post(path, json={"tool_outputs": listed, **body}))

    async def input_items(self, response_id: str, **params: str | int) -> Json:
        """One page of input items."""
        return await self.page(f"/v1/responses/{response_id}/input_items", "ItemResource", **params)

    async def page(self, path: str, union: str = "", **params: str | int) -> Json:
        """One page of any list."""
        reply = await self.http.get(path, params=params)
        assert reply.status_code == 200, reply.text
        page: Json = reply.json()
        assert page["object"] == "list"
        ids = [one["id"] for one in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        for item in page["data"] if union else ():
            wire.validate_item(item, union)
        return page

    async def pages(self, path: str, **params: str | int) -> list[Json]:
        """A whole list, page by page, each continued after the last id of the one before."""
        found: list[Json] = []
        while True:
            page = await self.page(path, "", **params)
            found += page["data"]
            if not page["has_more"]:
                return found
            assert page["data"]
            params["after"] = page["last_id"]

    async def conversation(self, *items: Json) -> str:
        """A new conversation's id."""
        reply = await self.http.post("/v1/conversations", json={"items": list(items)})
        assert reply.status_code == 200, reply.text
        found: str = reply.json()["id"]
        return found

    async def conversation_items(self, conversation_id: str) -> list[Json]:
        """All items of a conversation, oldest first, as responses have them: without when they came."""
        path = f"/v1/conversations/{conversation_id}/items"
        return await self.pages(path, order="asc", limit=100, timestamps="false")

    async def fails(self, status: int, method: str, path: str, **request: Any) -> Json:
        """A request that must fail: the error, with its headers under `headers`."""
        reply = await self.http.request(method, path, **request)
        assert reply.status_code == status, f"{reply.status_code}: {reply.text}"
        return wire.validate_error(reply.json()) | {"headers": reply.headers}

    async def refused(self, status: int, input: Any = None, **body: Any) -> Json:
        """A POST /responses that must fail."""
        request = ({} if input is None else {"input": input}) | body
        return await self.fails(status, "POST", "/v1/responses", json=request)


# ------------------------------------------------------------------------------------------------------------
# Streams under way


class Live:
    """A stream that is read event by event; `raw` and `events` are what came so far."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self.chunks = chunks
        self.raw = b""
        self.events: list[Json] = []

    @property
    def id(self) -> str:
        """The response's id."""
        found: str = self.events[0]["response"]["id"]
        return found

    async def next(self) -> Json | None:
        """The next event; None at the end of the stream."""
        while True:
            known = wire.events(self.raw[: self.raw.rfind(b"\n\n") + 2])
            if len(known) > len(self.events):
                self.events.append(known[len(self.events)])
                return self.events[-1]
            chunk = await anext(self.chunks, None)
            if chunk is None:
                return None
            self.raw += chunk

    async def until(self, kind: str) -> Json:
        """Read up to an event of this type (without its `response.`)."""
        while (event := await self.next()) is not None:
            if event["type"] == f"response.{kind}":
                return event
        raise AssertionError(f"no {kind} in {[event['type'] for event in self.events]}")

    async def done(self) -> Json:
        """Read to the end and check the whole stream; returns its last Response."""
        while await self.next() is not None:
            pass
        return wire.check_stream(self.events)

    async def cut(self) -> list[Json]:
        """Read to where the connection is dropped, which it must be; returns the events."""
        try:
            while await self.next() is not None:
                pass
        except httpx.RemoteProtocolError:
            return self.events
        raise AssertionError("the stream ended as if it were whole")


async def _live(reply: httpx.Response) -> Live:
    if reply.status_code != 200:
        raise AssertionError(f"{reply.status_code}: {(await reply.aread()).decode()}")
    return Live(reply.aiter_raw())


# ------------------------------------------------------------------------------------------------------------
# Scripts


@dataclass(slots=True)
class Gate:
    """A place in a script: `reached` once the engine is there, `release` lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def wait(self) -> Wait:
        """The step that holds the engine."""
        return Wait(self.release, self.reached)


Script = Callable[[GenerateRequest, str], Iterable[Step]]


def gated(gate: Gate, before: str = "one two", after: str = " three four") -> Script:
    """Every generation says `before`, waits at the gate, says `after`."""

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield Say(before)
        yield gate.wait()
        yield Say(after)

    return script


def gated_at(gate: Gate, word: str) -> Script:
    """The default script, held before it begins wherever the last turn's text holds `word`."""

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if word in prompt.rsplit("<|im_start|>user", 1)[-1]:
            yield gate.wait()
        yield from obey(request, prompt)

    return script


def saying(*texts: str) -> Script:
    """Generation n of every run says the n-th text (the last one from then on)."""

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield Say(texts[min(request.generation, len(texts) - 1)])

    return script


def prompts(engine: ScriptedEngine) -> list[str]:
    """What the engine was shown, oldest first."""
    return [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
