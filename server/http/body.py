"""A request's body: from bytes on the wire to a JSON object, within limits."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request

from server.config import THREADED_BYTES
from server.errors import ApiError
from server.http.request import life


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
