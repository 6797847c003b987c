"""A form with a file (`multipart/form-data`): its file goes from the wire into storage as it comes in.

Nothing of the file is kept in memory, and `max_body_bytes` does not bound it: `max_file_bytes` does. Its
bytes are a blob before the request is judged; where it is refused no row names the blob, and a sweep removes
it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from server.config import Config
from server.errors import ApiError
from server.http.body import body_chunks, too_large
from server.http.request import context, require_stored_bytes
from server.schema import missing, refuse, shorten
from storage import Blob

MAX_PART_BYTES = 64 << 20
"""Of one part of an upload: the official limit."""

MAX_FIELD_BYTES = 16 << 10
MAX_FIELDS = 32
ENVELOPE_BYTES = 1 << 20
"""What a form may have besides its file: fields, headers, boundaries."""

MAX_FILENAME = 255

_FORMS = re.compile(r"/v1/(files|uploads/[^/]+/parts)")
_MAY_BE_FORMS = re.compile(r"/v1/containers/[^/]+/files")
"""Where a body may be a form or JSON."""

Part = tuple[str, bytes]
"""A step of a form: what began, came or ended (`begin`, `data`, `end`), and its bytes; of `begin`, the value
of the part's `Content-Disposition`."""


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """A file of a form: the name that the client gave it, made harmless, and its content in storage."""

    filename: str
    blob: Blob


@dataclass(frozen=True, slots=True)
class Form:
    """A form: its fields and its files, by their names. digest: equal for forms that say the same."""

    fields: Mapping[str, str]
    files: Mapping[str, ReceivedFile]
    digest: bytes

    def file(self, name: str) -> ReceivedFile:
        """The file of this name. ApiError 400 where there is none."""
        if name in self.fields:
            refuse(name, f"Invalid '{name}': expected a file, with a filename in its Content-Disposition.")
        return self.files.get(name) or missing(name)


def takes_form(request: Request) -> bool:
    """Whether a POST to this path brings a form."""
    path = request.scope["path"]
    if _MAY_BE_FORMS.fullmatch(path):
        return request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    return _FORMS.fullmatch(path) is not None


async def load_form(request: Request) -> Form:
    """The form that a request brings, read once; its file is in storage when this returns.

    ApiError 415 for a body of another type, 400 `invalid_form` for one that is no whole form, 413 for a file
    that is too large, 408 for one that comes too slowly, 429 where the owner may not store so much.
    """
    known: Form | None = getattr(request.state, "form", None)
    if known is None:
        known = request.state.form = await _receive(request)
    return known


async def _receive(request: Request) -> Form:
    limit = _limit(request.scope["path"], context(request).config)
    boundary = _boundary(request)
    length = request.headers.get("content-length")
    if length is not None and int(length) > limit + ENVELOPE_BYTES:
        raise too_large(limit)
    await require_stored_bytes(request, int(length or 0))
    fields: dict[str, str] = {}
    files: dict[str, ReceivedFile] = {}
    async with aclosing(_parts(request, boundary, limit + ENVELOPE_BYTES)) as parts:
        async for _, disposition in parts:
            name, filename = _names(disposition)
            if len(fields) + len(files) == MAX_FIELDS or name in fields or name in files:
                raise _bad_form(f"it has the field '{shorten(name)}' twice, or more than {MAX_FIELDS} fields")
            if filename is None:
                fields[name] = await _field(parts, name)
            elif files:
                raise _bad_form("it has more than one file")
            else:
                blob = await context(request).storage.blobs.put(_data(parts), limit=limit)
                files[name] = ReceivedFile(shown_name(filename), blob)
    if length is None:
        await require_stored_bytes(request, sum(file.blob.num_bytes for file in files.values()))
    said = [sorted(fields.items()), [[name, one.filename, one.blob.digest] for name, one in files.items()]]
    return Form(fields, files, hashlib.blake2b(orjson.dumps(said), digest_size=32).digest())


def _limit(path: str, config: Config) -> int:
    """The bytes that the file of a form may have."""
    if path.startswith("/v1/uploads/"):
        return min(MAX_PART_BYTES, config.max_file_bytes)
    if path.startswith("/v1/containers/"):
        return min(config.max_container_bytes, config.max_file_bytes)
    return config.max_file_bytes


async def _field(parts: AsyncGenerator[Part], name: str) -> str:
    value = bytearray()
    async for data in _data(parts):
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise _bad_form(f"the field '{shorten(name)}' is longer than {MAX_FIELD_BYTES} bytes")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _bad_form(f"the field '{shorten(name)}' is not UTF-8") from None


async def _data(parts: AsyncGenerator[Part]) -> AsyncGenerator[bytes]:
    """The bytes of the part that has begun, to its end."""
    async for step, data in parts:
        if step == "end":
            return
        yield data


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = (
            "The request's body must be a form with a file, 'Content-Type: multipart/form-data' with a "
            "boundary. (curl -F sends one.)"
        )
        raise ApiError(415, message, code="unsupported_media_type", param="Content-Type")
    return options[b"boundary"]


def _names(disposition: bytes) -> tuple[str, str | None]:
    """The name of a part, and its filename where it is a file."""
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or b"name" not in options:
        raise _bad_form("a part has no name in its Content-Disposition")
    filename = options.get(b"filename")
    name = options[b"name"].decode("utf-8", "replace")
    return name, None if filename is None else filename.decode("utf-8", "replace").replace("%22", '"')


async def _parts(request: Request, boundary: bytes, limit: int) -> AsyncGenerator[Part]:
    """The steps of a form, as its bytes come in."""
    reading = _Reading()
    try:
        parser = MultipartParser(boundary, reading.callbacks())  # type: ignore[arg-type]
        async with aclosing(body_chunks(request, limit)) as chunks:
            async for chunk in chunks:
                parser.write(chunk)
                for step in reading.take():
                    yield step
    except MultipartParseError as error:
        raise _bad_form(str(error)) from None
    if not reading.ended:
        raise _bad_form("it ends before its last boundary")


class _Reading:
    """What the parser tells of a form, as steps."""

    def __init__(self) -> None:
        self.ended = False
        self._steps: list[Part] = []
        self._header = self._value = b""
        self._disposition = b""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": lambda: self._steps.append(("begin", self._disposition)),
            "on_part_data": lambda data, start, end: self._steps.append(("data", bytes(data[start:end]))),
            "on_part_end": lambda: self._steps.append(("end", b"")),
            "on_end": self._end,
        }

    def take(self) -> list[Part]:
        """The steps since this was called last."""
        steps, self._steps = self._steps, []
        return steps

    def _begin(self) -> None:
        self._header = self._value = self._disposition = b""

    def _field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end(self) -> None:
        self.ended = True


def shown_name(filename: str) -> str:
    """A filename as it may be shown: its last part, without what controls a terminal or reorders text, and at
    most MAX_FILENAME characters. Nothing is ever stored under it."""
    last = re.split(r"[/\\]", filename)[-1]
    kept = "".join(char for char in last if char.isprintable()).strip(" .")
    if len(kept) > MAX_FILENAME:
        stem, dot, ending = kept.rpartition(".")
        tail = dot + ending if stem and len(ending) <= 16 else ""
        kept = kept[: MAX_FILENAME - len(tail)] + tail
    return kept or "file"


def _bad_form(why: str) -> ApiError:
    return ApiError(400, f"We could not read the form of your request: {why}.", code="invalid_form")
