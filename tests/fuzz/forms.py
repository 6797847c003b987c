"""Forms: thousands of uploads that say what no client should, against the application in this process.

`python -m tests.fuzz.forms --requests 20000 --seed 7`. A seed fixes what is sent and where it is split.
Checked of every reply: no 5xx, errors in the official form with the field at fault. Checked afterwards: no
file is left open, and the disk has the contents that rows name and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from storage.files import blob_columns
from tests.support.making import query
from tests.support.running import http_client, running_app
from tests.support.wire import validate_error

AT_ONCE = 8
MAX_FILE = 4000
BOUNDARIES = (b"b", b"--b", b"x" * 70, b"a b", b"b" * 71, b"", b'"q"', b"\xff", b"b;c=d", b"'()+_,-./:=?")
NAMES = (
    b"file", b"data", b"purpose", b"file_id", b"expires_after[anchor]", b"expires_after[seconds]", b"x", b"",
    b"\xff\xfe", b"a" * 5000, b"file\x00", b"%22", b"\xe2\x80\xae", b"fi\\\"le",
)  # fmt: skip
VALUES = (
    b"user_data", b"batch", b"nothing", b"", b"\xff", b"created_at", b"3600", b"-1", b"9" * 30, b"1e9",
    b"a" * 20_000, b"\x00", b"file-none", b"\r\n", b"--b", b"\r\n--b", "\u0661".encode(),
)  # fmt: skip
FILENAMES = (
    b"a.txt", b"", b"../../etc/passwd", b"C:\\x\\y", b"\\\\", b"\x00", b"a" * 2000, b"\xff", b"%0d%0a",
    b'a"b', b"\xe2\x80\xae.txt", b".", b"/",
)  # fmt: skip
DISPOSITIONS = (
    b"form-data", b"attachment", b"", b"form-data;", b"FORM-DATA", b"form-data; name", b"form-data; =x",
    b"form-data; name*=utf-8''file", b";" * 500, b"form-data; name=\"" + b"\\" * 200,
)  # fmt: skip
HEADERS = (
    b"Content-Type: text/plain", b"Content-Transfer-Encoding: base64", b"X: " + b"y" * 5000, b": x", b"X",
    b"X:", b"X\x00: y", b"Content-Disposition: form-data; name=\"x\"", b"\xff: \xff", b"Content-Length: -1",
)  # fmt: skip
WITHOUT_FIELD = {"insufficient_quota"}


@dataclass(slots=True)
class Found:
    """What came of all requests. wrong: one line each."""

    replies: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def form(draw: random.Random, boundary: bytes) -> bytes:
    """A body: often a form, sometimes with one thing wrong, sometimes with many."""
    parts = [b'form-data; name="purpose"', b'form-data; name="file"; filename="a"']
    contents = [b"user_data", draw.randbytes(draw.choice((0, 1, 100, MAX_FILE, MAX_FILE + 1, 3 * MAX_FILE)))]
    if draw.random() < 0.3:
        parts, contents = parts[1:], contents[1:]
        parts[0] = parts[0].replace(b'"file"', b'"data"')
    for _ in range(draw.choice((0, 0, 1, 1, 2, 40))):
        said = b'%s; name="%s"' % (draw.choice(DISPOSITIONS[:1] * 5 + DISPOSITIONS), draw.choice(NAMES))
        if draw.random() < 0.4:
            said += b'; filename="%s"' % draw.choice(FILENAMES)
        at = draw.randrange(len(parts) + 1)
        parts.insert(at, said)
        contents.insert(at, draw.choice(VALUES))
    body = b""
    for said, content in zip(parts, contents, strict=True):
        more = draw.choices(HEADERS, k=draw.choice((0, 0, 0, 1, 12)))
        head = b"\r\n".join([b"Content-Disposition: " + said, *more])
        body += b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n"
    body += b"--" + boundary + b"--\r\n"
    for _ in range(draw.choice((0, 0, 0, 1, 5))):
        at = draw.randrange(len(body))
        body = (
            draw.choice(
                (
                    body[:at],
                    body[:at] + draw.randbytes(draw.randrange(1, 9)) + body[at:],
                    body[:at] + body[at + draw.randrange(1, 60) :],
                    body + body[:at],
                    body.replace(b"\r\n", b"\n"),
                )
            )
            or b"x"
        )
    return body


async def _pieces(draw: random.Random, body: bytes) -> AsyncIterator[bytes]:
    while body:
        size = draw.choice((1, 7, 100, 5000))
        yield body[:size]
        body = body[size:]


async def fuzz(folder: Path, seed: int, num_requests: int) -> Found:
    """Send so many requests to an application of our own."""
    found = Found()
    settings = {"max_file_bytes": MAX_FILE, "owner_limit": ("stored_bytes=400000",)}
    async with running_app(folder, **settings) as running, http_client(running) as client:
        begun = {"filename": "u", "purpose": "user_data", "bytes": 100, "mime_type": "text/plain"}
        upload = (await client.post("/v1/uploads", json=begun)).json()["id"]
        paths = ("/v1/files", "/v1/files", f"/v1/uploads/{upload}/parts", "/v1/uploads/upload_no/parts")
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

        async def one(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            boundary = draw.choice(BOUNDARIES[:1] * 20 + BOUNDARIES)
            body, path = form(draw, boundary or b"b"), draw.choice(paths)
            kind = draw.choice((b"multipart/form-data",) * 20 + (b"text/plain", b"", b"multipart/mixed"))
            headers = {"content-type": kind + b"; boundary=" + boundary}
            if draw.random() < 0.1:
                headers["idempotency-key"] = f"key-{draw.randrange(9)}".encode()
            content = _pieces(draw, body) if draw.random() < 0.5 else body
            reply = await client.post(path, content=content, headers=headers)
            found.replies[reply.status_code] += 1
            if fault := _fault(reply, found):
                found.wrong.append(f"{seed} {number} {path}: {fault}: {reply.status_code} {reply.text[:300]}")
            elif reply.status_code == 200 and path == "/v1/files" and draw.random() < 0.7:
                await client.delete(f"/v1/files/{reply.json()['id']}")

        for first in range(0, num_requests, AT_ONCE):
            await asyncio.gather(
                *(one(number) for number in range(first, min(first + AT_ONCE, num_requests)))
            )
        if before and len(os.listdir("/proc/self/fd")) > before + AT_ONCE:
            found.wrong.append(f"{before} descriptors have become {len(os.listdir('/proc/self/fd'))}")
    named = {
        digest
        for column in blob_columns()
        for (digest,) in query(folder / "antiphon.db", f"SELECT {column.name} FROM {column.table.name}")
    }
    there = {path.name for path in (folder / "antiphon.db.blobs").iterdir()}
    if there != named:
        found.wrong.append(f"{len(there - named)} contents without a row, {len(named - there)} are missing")
    return found


def _fault(reply: httpx.Response, found: Found) -> str | None:
    if reply.status_code >= 500:
        return "a failure"
    if reply.status_code == 200:
        return None
    try:
        error = validate_error(reply.json())
    except (ValueError, AssertionError) as why:
        return f"not the official form ({why})"
    found.codes[error["code"]] += 1
    return None if error["param"] or error["code"] in WITHOUT_FIELD else "without its field"


def main() -> int:
    """Print what was sent and what was wrong with the replies."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.forms", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(fuzz(Path(folder), options.seed, options.requests))
    print(f"seed {options.seed}: {dict(found.replies)}, {dict(found.codes)}, {len(found.wrong)} wrong")
    print("\n".join(found.wrong[:20]))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
