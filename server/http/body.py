"""A request's body: from bytes on the wire to a JSON object, within limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import Request

from server.config import THREADED_BYTES
from server.errors import ApiError
from server.http.arrivals import MIN_BODY_RATE
from server.http.departure import Eager
from server.http.request import life
from server.schema import shorten
from server.settings import nearest
from server.shapes import json_type
from server.threads import aside, begin_large_request, in_large_request

if TYPE_CHECKING:
    from server.config import Config

T = TypeVar("T")

JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.-]+\+)?json[ \t]*(;.*)?", re.IGNORECASE | re.DOTALL)
"""Media types of JSON: `application/json` and `application/*+json`, with any parameters (JSON is UTF-8)."""

Digest = Callable[[bytes], bytes]

PIECE_BYTES = 1024 * 1024
"""Of a body that arrives."""


MAX_JSON_STRINGS = 150_000
"""Strings of a body, keys included: ten for each of the most items that there may be, and half as many again.
The parser takes 0.3 us for a key that it has not seen before, in which nothing else runs."""


_ESCAPED = re.compile(rb"\\u00(?:[57][bB]|2[cC])")
"""A bracket or a comma in a string, written as an escape."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body, read once. size: in bytes. value: a JSON object, None where there was nothing, or
    what was wrong with it. digest: equal for bodies that say the same, where it was asked for."""

    size: int
    value: dict[str, Any] | ApiError | None
    digest: bytes = b""

    def object(self, *, allow_empty: bool = False) -> dict[str, Any]:
        """The JSON object; `{}` for nothing where `allow_empty`. Raises ApiError 400 `invalid_json`."""
        if isinstance(self.value, ApiError):
            raise self.value
        if self.value is not None:
            return self.value
        if allow_empty:
            return {}
        raise ApiError(400, "The request has no body; a JSON object is needed.", code="invalid_json")


async def read_body(
    request: Request, *, allow_empty: bool = False, only: Collection[str] | None = None
) -> dict[str, Any]:
    """The body as a JSON object; see `read_as`.

    only: its members; another one is a 400 `unknown_parameter`. Elsewhere such a member is ignored and named
    in a header. Of what administrators ask, it may be a misspelt `scopes` or `limits`, and a key without them
    may do more than whoever made it wanted.
    """
    body = await read_as(request, lambda body: body, allow_empty=allow_empty)
    if only is not None:
        for member in body:
            if member not in only:
                raise _unknown(member, only)
    return body


def _unknown(member: str, known: Collection[str]) -> ApiError:
    meant = nearest(member, known)
    there = f"The fields are {', '.join(known)}." if known else "No field is taken here."
    hint = f"Did you mean '{meant}'?" if meant else there
    message = f"There is no field '{shorten(member)}'. {hint}"
    return ApiError(400, message, code="unknown_parameter", param=member)


async def read_as(
    request: Request,
    read: Callable[[dict[str, Any]], T],
    *,
    allow_empty: bool = False,
    first: Callable[[dict[str, Any]], None] = lambda body: None,
    ahead: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] | None = None,
) -> T:
    """What `read` makes of the body, a JSON object, which it must not change; in a thread for a large one.

    first: looks at the object before that, on the event loop, and may refuse the request. ahead: gives what
    is read in its place, with something that it refers to.

    Refused before it is buffered when larger than `max_body_bytes` (413) or not said to be JSON (415).
    Malformed JSON, NaN, infinities, lone surrogates, a byte order mark: 400 `invalid_json`. An empty body is
    `{}` where `allow_empty`. A client that takes too long (`body_timeout_s`) gets 408, and 503 when too much
    is arriving. A key given twice has its last value.
    """
    body = getattr(request.state, "body", None) or await load_body(request)
    if body.size > THREADED_BYTES:
        begin_large_request()
    value = body.object(allow_empty=allow_empty)
    first(value)
    if ahead is not None:
        value = await ahead(value)
    return await aside(in_large_request(), read, value)


async def load_body(request: Request, digest: Digest | None = None) -> Body:
    """Receive the body and parse it. digest: of its canonical JSON, or of what is no JSON object.

    Nothing of what was received is kept. Raises ApiError as `read_as` does, but for what the body says.
    """
    config = life(request).config
    misnamed = _misnamed(request)
    if misnamed is not None and request.headers.get("content-length", "0") != "0":
        raise misnamed
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(
            400, "Compressed request bodies are not supported.", code="unsupported_content_encoding"
        )
    with life(request).arrivals.body() as count:
        arrived = await _receive(request, config, count)
        if misnamed is not None and arrived.num_bytes:
            raise misnamed
        return await aside(arrived.num_bytes > THREADED_BYTES, _load, arrived, config, digest)


def _misnamed(request: Request) -> ApiError | None:
    """The 415 of a request whose body, if it has one, is not said to be JSON.

    A type that is not named does not pass either. A page of any site can have a browser send a body without a
    type, or as a form or plain text, to a server that the browser can reach, and ask nobody before; it cannot
    with the type of JSON.
    """
    media_type = request.headers.get("content-type", "")
    if JSON_TYPE.fullmatch(media_type.strip()):
        return None
    said = f"is said to be '{shorten(media_type)}'" if media_type else "has no content type"
    message = (
        f"The request's body {said}, and must be JSON, with the header 'Content-Type: application/json'. "
        "(curl -d sends a form's type unless told: -H 'Content-Type: application/json'.)"
    )
    return ApiError(415, message, code="unsupported_media_type", param="Content-Type")


class _Arrived:
    """What has come of a body, in pieces: to grow one buffer of 30 MB means to copy it again and again, which
    would hold the event loop. Tiny chunks are gathered, because each has an overhead of its own. Pieces lie
    in pages of their own, which the system has back as soon as a body is done with or its client has left."""

    def __init__(self) -> None:
        self._pieces: list[mmap] = []
        self._newest = bytearray()
        self.num_bytes = 0

    def add(self, chunk: bytes) -> None:
        self.num_bytes += len(chunk)
        self._newest += chunk
        if len(self._newest) >= PIECE_BYTES:
            piece = mmap(-1, len(self._newest), MAP_PRIVATE | MAP_ANONYMOUS)
            piece.write(self._newest)
            self._pieces.append(piece)
            self._newest = bytearray()

    def take(self) -> bytes:
        """All of it; it is not kept here any more."""
        whole = b"".join([*self._pieces, self._newest])
        self._pieces, self._newest = [], bytearray()
        return whole


def _load(arrived: _Arrived, config: Config, digest: Digest | None) -> Body:
    raw = arrived.take()
    value: dict[str, Any] | ApiError | None = None
    if raw.strip(b" \t\r\n"):
        try:
            value = parse_object(raw, config.max_json_depth, config.max_json_values)
        except ApiError as error:
            value = error
    if digest is None:
        return Body(len(raw), value)
    said = raw
    if isinstance(value, dict):
        with suppress(orjson.JSONEncodeError):
            said = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return Body(len(raw), value, digest(said))


async def _receive(request: Request, config: Config, count: Callable[[int], None]) -> _Arrived:
    """The whole body; raises ApiError as `body_chunks` does."""
    arrived = _Arrived()
    async for chunk in body_chunks(request, config.max_body_bytes):
        count(len(chunk))
        arrived.add(chunk)
    return arrived


async def body_chunks(request: Request, limit: int, refusal: ApiError | None = None) -> AsyncGenerator[bytes]:
    """The body as it comes; ApiError 413 as soon as it is known to have more than `limit` bytes, 408 when it
    is too slow. refusal: raised in place of that 413."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise refusal or too_large(limit)
    num_bytes, allowed_s = 0, life(request).config.body_timeout_s
    began = asyncio.get_running_loop().time()
    chunks = request.stream()
    while True:
        until = began + allowed_s + num_bytes / MIN_BODY_RATE
        coming = Eager(anext(chunks, None))
        try:
            if coming.waits:
                async with asyncio.timeout_at(until):
                    await coming
            chunk = await coming
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body did not arrive: {num_bytes} bytes in {until - began:.3g} s.",
                code="request_timeout",
                headers={"connection": "close"},
            ) from None
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise refusal or too_large(limit)
        yield chunk


def too_large(limit: int) -> ApiError:
    """The 413 of a body with more than `limit` bytes."""
    message = f"The request's body is larger than {limit} bytes. Files can be sent to /v1/files, and named."
    return ApiError(413, message, code="request_too_large")


def require_parsable(raw: bytes, max_values: int) -> int:
    """ApiError 400 `invalid_json` for JSON text that would take long to parse; returns how many objects and
    lists it has at most. max_values: brackets and commas."""
    # The parser holds the interpreter for as long as it works, thread or not, so its work is bounded
    # beforehand. Every value but the first follows a bracket or a comma; those inside of strings count too,
    # because a string may be JSON that is parsed later: arguments of a call, a schema. So do their escapes.
    # A string costs most, where it is a key that no other object has.
    containers = raw.count(b"{") + raw.count(b"[")
    left = max_values - containers - raw.count(b",")
    if left < 0 or next(islice(_ESCAPED.finditer(raw), left, None), None) is not None:
        message = f"The request's body has more than {max_values} brackets and commas."
        raise ApiError(400, message, code="invalid_json")
    if raw.count(b'"') - raw.count(b'\\"') > 2 * MAX_JSON_STRINGS:
        message = f"The request's body has more than {MAX_JSON_STRINGS} strings, keys included."
        raise ApiError(400, message, code="invalid_json")
    return containers


def parse_object(raw: bytes, max_depth: int, max_values: int) -> dict[str, Any]:
    """JSON text to an object; ApiError 400 `invalid_json` for anything else."""
    containers = require_parsable(raw, max_values)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        message = f"We could not parse the JSON body of your request: {_not_utf8(raw) or exc}."
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        message = f"The request's body must be a JSON object, not {json_type(value)}."
        raise ApiError(400, message, code="invalid_json")
    # Every level costs an opening bracket, so most bodies are settled by their number.
    if containers > max_depth and _deeper_than(value, max_depth):
        raise ApiError(
            400, f"The request's body is nested more than {max_depth} levels deep.", code="invalid_json"
        )
    return value


def _not_utf8(raw: bytes) -> str | None:
    """Where a text is no UTF-8, which the parser says of the whole text alone; None where it is."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at byte {error.start}"
    return None


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether containers nest more than `limit` deep; level by level, so that no input can exhaust the
    stack."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
