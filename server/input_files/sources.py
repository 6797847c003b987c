"""A file that an item names: uploaded before, sent along, or at an address."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from server.clock import now_us
from server.config import THREADED_BYTES
from server.errors import ApiError
from server.items import MAX_FILENAME
from server.schema import refuse, shorten
from server.threads import aside
from storage import NotFound, Storage
from tools import Caps, Egress, EgressError, guarded_client

MAX_BYTES = 50 << 20
"""Of all files of one request together: the official limit."""

MAX_REDIRECTS = 5
FETCH_S = 30.0

TOTAL_S = 240.0
"""For all files of one request: to come, to wait for their turns, and to be read. What was read is known when
the client tries again."""

SOON = {"retry-after": "1"}

FIELDS = ("file_id", "file_data", "file_url")


T = TypeVar("T")


async def in_time(reading: Coroutine[Any, Any, T], what: str, path: str) -> T:
    """What is read of all files or images of a request, by the words for them in `what`. Raises ApiError 503
    where that takes longer than TOTAL_S, and what the reading raises."""
    try:
        async with asyncio.timeout(TOTAL_S):
            return await reading
    except TimeoutError:
        raise not_read(
            f"The {what} of this request could not be read in {TOTAL_S:g} s. Try again.", path
        ) from None


def not_read(message: str, path: str) -> ApiError:
    """503 for what could not be read at this moment."""
    return ApiError(503, message, code="file_not_read", param=path, headers=SOON)


class Load(Protocol):
    """Loads the bytes of a file, or those before `stop`. Raises ApiError 404 where they are gone."""

    async def __call__(self, stop: int | None = None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file: its content, how many bytes that has, the name to show, and their SHA-256 in hexadecimal.

    content: the bytes, or, of an uploaded file, what loads them: a small request can name a large file, so
    the files of many may wait to be read. url: where they come from.
    """

    content: bytes | Load
    num_bytes: int
    filename: str
    digest: str
    url: str | None = None

    async def read(self, stop: int | None = None) -> bytes:
        """Its bytes, or those before `stop`. Raises ApiError 404 where they are gone."""
        return self.content[:stop] if isinstance(self.content, bytes) else await self.content(stop)


class RequestFiles:
    """Finds the files of one request, and counts their bytes."""

    def __init__(self, storage: Storage, egress: Egress, owner: str, *, hosts: Sequence[str] = ()) -> None:
        """hosts: the only ones that files are fetched from, as names or `*.NAME`; none: all that may be
        reached."""
        self._storage, self._egress, self._owner = storage, egress, owner
        self._hosts = hosts
        self._left = MAX_BYTES

    async def find(self, part: Mapping[str, Any], path: str) -> FoundFile:
        """The file that a part names. path: of the part. Raises ApiError 400, and 404 for an unknown id."""
        given = [name for name in FIELDS if part.get(name) is not None]
        if len(given) != 1:
            message = f"Invalid '{path}': give exactly one of 'file_id', 'file_data' and 'file_url'."
            refuse(path, message)
        (field,) = given
        at = f"{path}.{field}"
        name = part.get("filename")
        if field == "file_id":
            source = await self._uploaded(part["file_id"], name, at)
        elif field == "file_data":
            # It is as long as the request's body lets it be.
            source = await aside(
                len(part["file_data"]) > THREADED_BYTES, _decoded, part["file_data"], name, at
            )
        else:
            source = await self._fetched(part["file_url"], name, at)
        self._count(source.num_bytes, at)
        return source

    def _count(self, num_bytes: int, at: str) -> None:
        if num_bytes > self._left:
            raise _too_large(at)
        self._left -= num_bytes

    async def _uploaded(self, id: str, name: str | None, at: str) -> FoundFile:
        unknown = ApiError(404, f"File with id '{shorten(id)}' not found.", code="not_found", param=at)
        try:
            file = await self._storage.files.get(self._owner, id, now_us())
        except NotFound:
            raise unknown from None

        async def load(stop: int | None = None) -> bytes:
            try:
                async with aclosing(self._storage.blobs.open(file.digest, stop=stop)) as content:
                    return b"".join([piece async for piece in content])
            except NotFound:  # it was deleted meanwhile
                raise unknown from None

        return FoundFile(load, file.num_bytes, name or file.filename, file.digest)

    def _check(self, url: str, at: str) -> None:
        """Raise EgressError, or ApiError for a host that is not among those to be asked."""
        self._egress.check(url)
        host = (urlsplit(url).hostname or "").rstrip(".")
        if self._hosts and not any(_is_of(host, pattern) for pattern in self._hosts):
            raise NotAllowed(at, f"{host} is not among the hosts that this server fetches images from.")

    async def _fetched(self, url: str, name: str | None, at: str) -> FoundFile:
        caps = Caps(max_bytes=self._left, total_s=FETCH_S)
        asked = url
        try:
            self._check(url, at)
            async with asyncio.timeout(FETCH_S), guarded_client(self._egress, caps) as client:
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await client.get(url)
                    if not answer.is_redirect:
                        break
                    try:
                        url = urljoin(url, answer.headers.get("location", ""))
                    except ValueError:
                        raise Unreached(at, "It leads to what is no URL.") from None
                    self._check(url, at)
        except EgressError as why:
            if why.kind == "too_large":
                raise _too_large(at) from None
            may = why.kind == "refused" and why.allowable
            hint = " The operator may allow it by --egress or --egress-allow." if may else ""
            refused = NotAllowed if why.kind == "refused" else Unreached
            raise refused(at, f"{why}{hint}") from None
        except TimeoutError:
            raise Unreached(at, f"It took longer than {FETCH_S:g} s.") from None
        if answer.status_code != 200:
            raise Unreached(at, f"The answer has status {answer.status_code}.")
        name = name or unquote(urlsplit(asked).path.rpartition("/")[2])[-MAX_FILENAME:] or "file"
        digest = await asyncio.to_thread(lambda: sha256(answer.content).hexdigest())
        return FoundFile(answer.content, len(answer.content), name, digest, url)


def found_file(data: bytes, filename: str) -> FoundFile:
    """A file that is there already."""
    return FoundFile(data, len(data), filename, sha256(data).hexdigest())


def _decoded(text: str, name: str | None, at: str) -> FoundFile:
    """Base64, as it is or as a data URL."""
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            refuse(at, f"Invalid '{at}': a data URL must be 'data:TYPE;base64,...'.")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        refuse(at, f"Invalid '{at}': expected base64, or a data URL with base64.")
    return found_file(data, name or "file")


def _too_large(at: str) -> ApiError:
    message = f"Invalid '{at}': the files of one request may have {MAX_BYTES} bytes together."
    return ApiError(400, message, code="file_too_large", param=at)


def _is_of(host: str, pattern: str) -> bool:
    return pattern == "*" or host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:]))


class Unreached(ApiError):
    """A file at an address was not got."""

    def __init__(self, at: str, why: str) -> None:
        super().__init__(400, f"Error while downloading '{at}'. {why}", code="invalid_file_url", param=at)


class NotAllowed(Unreached):
    """A file at an address was not asked for, because that is not allowed."""
