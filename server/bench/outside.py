"""Measured requests over HTTP, to any server that speaks Responses, Chat Completions or Completions.

It also finds out how many words make how many tokens there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from server.bench.figures import Sample

Event = dict[str, Any]

_SPOKEN = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house friend father power hour game line end member law car city name team "
    "minute idea body back face level office door health art war history party result change morning "
    "reason research girl guy moment air teacher force "
)
WORDS = _SPOKEN.split()
"""A token each, with the space before it, in most vocabularies."""

SHORTEST = 16  # tokens: the least that may be asked of Responses
_PROBES = (64, 192)  # words
_LONGEST = 160  # characters of an error


class ServerRefused(Exception):
    """The server cannot be measured; the message says why."""


@dataclass
class Reply:
    """What has been read of one stream."""

    events: int = 0  # that held text
    usage: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Api:
    """One way to ask: its path, what a body says, how an event is read (True: it held text), and the fewest
    tokens that may be asked for."""

    path: str
    body: Callable[[str, int, bool], dict[str, Any]]
    read: Callable[[Event, Reply], bool]
    min_output: int = 1


def _responses_body(text: str, num_output: int, store: bool) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": num_output, "store": store}


def _chat_body(text: str, num_output: int, store: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **_counted(num_output)}


def _completions_body(text: str, num_output: int, store: bool) -> dict[str, Any]:
    return {"prompt": text, **_counted(num_output)}


def _counted(num_output: int) -> dict[str, Any]:
    return {"max_tokens": num_output, "stream_options": {"include_usage": True}}


def _read_response(event: Event, reply: Reply) -> bool:
    kind = event.get("type", "")
    if kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
        response = event["response"]
        reply.ended, reply.usage = True, response.get("usage") or {}
        if kind in ("response.failed", "response.cancelled"):
            reply.error = _words(response.get("error")) or kind
    elif kind == "error":
        reply.error = _words(event.get("error") or event)
    return str(kind).endswith(".delta")


def _read_chunk(event: Event, reply: Reply) -> bool:
    if "error" in event:
        reply.error = _words(event["error"])
    reply.usage = event.get("usage") or reply.usage
    parts = [choice.get("delta") or choice for choice in event.get("choices") or ()]
    return any(part.get(name) for part in parts for name in _SAID)


_SAID = ("text", "content", "reasoning", "reasoning_content", "refusal", "tool_calls")

APIS: Mapping[str, Api] = {
    "responses": Api("/responses", _responses_body, _read_response, min_output=16),
    "chat": Api("/chat/completions", _chat_body, _read_chunk),
    "completions": Api("/completions", _completions_body, _read_chunk),
}


def base_url(url: str) -> str:
    """The address that paths are appended to: it ends with /v1, given or not."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class Outside:
    """A model of a server. `extra` is merged into every body."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        api: str,
        model: str,
        num_output: int,
        *,
        store: bool,
        timeout_s: float,
        extra: Mapping[str, Any],
    ) -> None:
        self._http = http
        self._api = APIS[api]
        self.model = model
        self._num_output = num_output
        self._store = store
        self._timeout_s = timeout_s
        self._extra = extra

    async def ask(self, prompt: Sequence[int], due: float) -> Sample:
        """See `load.Ask`."""
        return await self._ask(prompt, due, self._num_output)

    async def words(self, num_tokens: int) -> tuple[int, float | None]:
        """How many words make a prompt of so many tokens, template included, and the tokens of a word; as
        many words, and None, where the server does not count. Raises ServerRefused."""
        counts = []
        for i, size in enumerate(_PROBES):
            prompt = [time.time_ns() + 7919 * (i + place) for place in range(size)]
            sample = await self._ask(prompt, time.perf_counter(), SHORTEST)
            if sample.error is not None:
                raise ServerRefused(f"{self._http.base_url}: {sample.error}")
            counts.append(sample.num_input)
        few, many = counts
        if few is None or many is None or many <= few:
            return num_tokens, None
        per_word = (many - few) / (_PROBES[1] - _PROBES[0])
        around = few - _PROBES[0] * per_word
        return max(1, round((num_tokens - around) / per_word)), per_word

    async def _ask(self, prompt: Sequence[int], due: float, num_output: int) -> Sample:
        text = " ".join(WORDS[value % len(WORDS)] for value in prompt)
        body = {"model": self.model, "stream": True, **self._api.body(text, num_output, self._store)}
        reply, arrivals = Reply(), list[float]()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(body | dict(self._extra), reply, arrivals)
        except TimeoutError:
            reply.error = f"no end after {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            reply.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except (ValueError, KeyError, AttributeError, TypeError):
            reply.error = "an event that is none of this API"
        usage = reply.usage
        num_input = usage.get("input_tokens", usage.get("prompt_tokens"))
        counted = usage.get("output_tokens", usage.get("completion_tokens"))
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        return Sample(
            due,
            time.perf_counter(),
            tuple(arrivals),
            reply.events if counted is None else counted,
            num_input,
            details.get("cached_tokens") or 0,
            "events" if counted is None else "usage",
            reply.error,
        )

    async def _read(self, body: dict[str, Any], reply: Reply, arrivals: list[float]) -> None:
        content = orjson.dumps(body)
        async with self._http.stream("POST", self._api.path, content=content, headers=_JSON) as stream:
            if stream.status_code != 200:
                reply.error = _refusal(stream.status_code, await stream.aread())
                return
            rest = b""
            async for data in stream.aiter_raw():
                now = time.perf_counter()
                *lines, rest = (rest + data).split(b"\n")
                before = reply.events
                for line in lines:
                    if line.startswith(b"data:"):
                        self._take(line[5:].strip(), reply)
                if reply.events > before:
                    arrivals.append(now)
        if not reply.ended and reply.error is None:
            reply.error = "the stream broke off"

    def _take(self, data: bytes, reply: Reply) -> None:
        if data == b"[DONE]":
            reply.ended = True
        else:
            reply.events += self._api.read(orjson.loads(data), reply)


_JSON = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that a server lists. Raises ServerRefused."""
    try:
        reply = await http.get("/models")
        reply.raise_for_status()
        return str(orjson.loads(reply.content)["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ServerRefused(f"{http.base_url} cannot be asked for its models: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ServerRefused(f"{http.base_url}models lists no model; name one") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        said = _words(orjson.loads(body).get("error"))
    except (ValueError, AttributeError):
        said = body[:_LONGEST].decode(errors="replace")
    return f"{status} {said}".rstrip()


def _words(error: Any) -> str:
    """What an error is called and what it says, short."""
    if isinstance(error, dict):
        error = ": ".join(str(error[name]) for name in ("code", "message") if error.get(name))
    return str(error or "")[:_LONGEST]
