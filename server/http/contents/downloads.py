"""The content of a file as a reply: streamed, whole or in one range, and never run by a browser.

Whatever a client has uploaded, a browser is told to save it: were it shown, a page among the files would act
in this server's name. Pixels cannot: where a route says so, they are shown, by what their first bytes are.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.errors import ApiError
from server.http.request import context

_RANGE = re.compile(r"bytes=([0-9]{0,4000})-([0-9]{0,4000})")  # Python reads no number of 4,301 digits

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What a browser may show. An SVG is none: it is a document, which can have scripts."""
_IMAGE = re.compile(
    rb"(\x89PNG\r\n\x1a\n)|(\xff\xd8\xff)|(GIF8[79]a)|(RIFF.{4}WEBP)", re.DOTALL
)  # in the order of IMAGES
_HEAD_BYTES = 12


async def content_reply(
    request: Request, digest: str, num_bytes: int, filename: str, *, shows_images: bool = False
) -> Response:
    """The blob `digest`, which has `num_bytes`, as a download under `filename`. shows_images: what begins as
    one of IMAGES does is said to be that, and a browser may show it.

    206 where the request has a `Range` of the present content; ApiError 416 where that lies behind its end.
    Storage's errors, of the first bytes at least.
    """
    start, stop, partial = _range(request, digest, num_bytes)
    kind = await _image(request, digest, num_bytes) if shows_images else None
    content = context(request).storage.blobs.open(digest, start, stop)
    first = await anext(content, b"")  # what cannot be read is an error reply, not a broken one
    headers = {
        "content-length": str(stop - start),
        "content-disposition": _disposition("attachment" if kind is None else "inline", filename),
        "accept-ranges": "bytes",
        "etag": f'"{digest}"',
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; sandbox",
    }
    if partial:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{num_bytes}"
    return StreamingResponse(
        _all(first, content), 206 if partial else 200, headers, media_type=kind or "application/octet-stream"
    )


async def _image(request: Request, digest: str, num_bytes: int) -> str | None:
    """The kind of image that a blob is by its first bytes, which a range may not have."""
    async with aclosing(context(request).storage.blobs.open(digest, 0, min(num_bytes, _HEAD_BYTES))) as head:
        found = _IMAGE.match(b"".join([piece async for piece in head]))
    return None if found is None or found.lastindex is None else IMAGES[found.lastindex - 1]


async def _all(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()


def _range(request: Request, digest: str, num_bytes: int) -> tuple[int, int, bool]:
    """The first byte that is asked for, the one behind the last, and whether that is a part only. A range
    that this server does not know, such as several at once, asks for everything (RFC 9110, 14.2)."""
    asked = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if asked is None or request.headers.get("if-range", f'"{digest}"') != f'"{digest}"':
        return 0, num_bytes, False
    first, last = asked.groups()
    if not first and not last:
        return 0, num_bytes, False
    if not first:  # the last bytes
        start, stop = max(0, num_bytes - int(last)), num_bytes
    else:
        start, stop = int(first), min(num_bytes, int(last) + 1) if last else num_bytes
        if last and int(last) < start:
            return 0, num_bytes, False
    if start >= stop:
        raise ApiError(
            416,
            f"The range is behind the end of the file, which has {num_bytes} bytes.",
            code="range_not_satisfiable",
            param="Range",
            headers={"content-range": f"bytes */{num_bytes}"},
        )
    return start, stop, True


def _disposition(kind: str, filename: str) -> str:
    """RFC 6266: a name of plain characters, and the whole one in percent-encoding."""
    plain = re.sub(r"[^A-Za-z0-9 ._()+-]", "_", filename)
    return f"{kind}; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
