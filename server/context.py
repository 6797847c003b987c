"""What a route may reach, and how it reads a request's body.

Owns the bundle of long-lived objects and the way from bytes on the wire to a JSON object. Refuses to know
what a body means: fields are `server.schema`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError

if TYPE_CHECKING:
    from server.config import Config
    from server.life import Life
    from server.models import Models
    from server.quota import Quota
    from server.runs import Runs
    from server.sealing import Sealing
    from server.telemetry import Telemetry
    from storage import Storage

T = TypeVar("T")

THREADED_BYTES = 64 * 1024
"""Bodies above this are parsed in the thread pool: on the loop they would delay every stream."""


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that outlives a request. It exists once storage is open and the engine has started."""

    config: Config
    storage: Storage
    models: Models
    sealing: Sealing
    runs: Runs
    telemetry: Telemetry
    quota: Quota


def life(request: Request) -> Life:
    """The process's life: configuration, phase, telemetry; there from the first request on."""
    found: Life = request.app.state.life
    return found


def context(request: Request) -> Context:
    """The context; ApiError 503 `not_ready` before the server can serve."""
    found = life(request).context
    if found is None:
        raise ApiError(503, "The server is starting.", code="not_ready", headers={"retry-after": "1"})
    return found


def owner(request: Request) -> str:
    """Whose request this is: the owner that scopes every row it may see."""
    found: str = request.state.owner
    return found


# ------------------------------------------------------------------------------------------------------------
# Bodies


async def read_body(request: Request, *, allow_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object.

    Refused before it is buffered when larger than `max_body_bytes` (413). Malformed JSON, NaN, infinities,
    lone surrogates, a byte order mark: 400 `invalid_json`. An empty body is `{}` where `allow_empty`. A
    client that sends nothing for `body_timeout_s` gets 408. A key given twice has its last value.
    """
    config = life(request).config
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(
            400, "Compressed request bodies are not supported.", code="unsupported_content_encoding"
        )
    raw = await receive_body(request, config.max_body_bytes, config.body_timeout_s)
    if not raw.strip(b" \t\r\n"):
        if allow_empty:
            return {}
        raise ApiError(400, "The request has no body; a JSON object is needed.", code="invalid_json")
    if len(raw) > THREADED_BYTES:
        return await asyncio.to_thread(parse_object, raw, config.max_json_depth, config.max_json_values)
    return parse_object(raw, config.max_json_depth, config.max_json_values)


async def receive_body(request: Request, limit: int, timeout_s: float) -> bytearray:
    """The whole body, or ApiError 413 as soon as it is known to be too large, 408 when it stalls."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    raw = bytearray()
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout(timeout_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return raw
            if len(raw) + len(chunk) > limit:
                raise _too_large(limit)
            raw += chunk
    except TimeoutError:
        raise ApiError(
            408,
            f"The request's body did not arrive: nothing came for {timeout_s:g} s.",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {limit} bytes.", code="request_too_large")


def parse_object(raw: bytes | bytearray, max_depth: int, max_values: int) -> dict[str, Any]:
    """JSON text to an object; ApiError 400 `invalid_json` for anything else."""
    # The parser holds the interpreter for as long as it works, thread or not, so its work is bounded
    # beforehand. Every value but the first follows a bracket or a comma; those inside of strings count too.
    containers = raw.count(b"{") + raw.count(b"[")
    if containers + raw.count(b",") > max_values:
        message = f"The request's body has more than {max_values} brackets and commas."
        raise ApiError(400, message, code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise ApiError(
            400, f"We could not parse the JSON body of your request: {exc}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        kind = "array" if isinstance(value, list) else "null" if value is None else type(value).__name__
        raise ApiError(400, f"The request's body must be a JSON object, not {kind}.", code="invalid_json")
    # Every level costs an opening bracket, so most bodies are settled by their number.
    if containers > max_depth and _deeper_than(value, max_depth):
        raise ApiError(
            400, f"The request's body is nested more than {max_depth} levels deep.", code="invalid_json"
        )
    return value


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


# ------------------------------------------------------------------------------------------------------------
# Presence


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but only for as long as the client is there: when it leaves, `work` is cancelled.

    For replies that are not streamed; call it after the body was read. Raises ClientDisconnect when it left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
