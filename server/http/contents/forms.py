"""A form with a file (`multipart/form-data`): its file goes from the wire into storage as it comes in.

Nothing of the file is kept in memory, and `max_body_bytes` does not bound it: `max_file_bytes` does. Its
bytes are a blob before the request is judged; see `intake` for what becomes of it where it is refused.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson
from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from server.config import Config
from server.errors import ApiError, to_api_error
from server.http.body import body_chunks
from server.http.contents.intake import Intake, intake
from server.http.request import context
from server.items import MAX_FILENAME
from server.schema import missing, refuse, shorten
from server.shapes import check_length
from storage import Blob, BlobTooLarge

MAX_PART_BYTES = 64 << 20
"""Of one part of an upload: the official limit."""

MAX_FIELD_BYTES = 16 << 10
MAX_FIELDS = 32
ENVELOPE_BYTES = 1 << 20
"""What a form may have besides its file: fields, headers, boundaries."""

MAX_BOUNDARY = 70
"""By RFC 2046."""

# What is wrong with a form is for its client to know, not for the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_FORMS = re.compile(r"/v1/(files|uploads/[^/]+/parts|audio/(transcriptions|translations))")
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
    """A form: its fields and its files, by their names. digest: equal for forms that say the same. lists: of
    the fields whose names end in `[]`, all their values, in their order."""

    fields: Mapping[str, str]
    files: Mapping[str, ReceivedFile]
    digest: bytes
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def all_fields(self) -> dict[str, tuple[str, ...]]:
        """Every field with its values; most have one."""
        return {**{name: (value,) for name, value in self.fields.items()}, **self.lists}

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
    that is too large, 408 for one that comes too slowly, 429 where the owner may not store so much. What is
    wrong with the form as a whole is said of the field that the file was to come in.
    """
    known: Form | None = getattr(request.state, "form", None)
    if known is None:
        known = request.state.form = await _receive(request)
    return known


async def _receive(request: Request) -> Form:
    limit = _limit(request.scope["path"], context(request).config)
    length, expected = request.headers.get("content-length"), _file_field(request.scope["path"])
    taken_in = intake(request)
    fields: dict[str, str] = {}
    files: dict[str, ReceivedFile] = {}
    lists: dict[str, list[str]] = {}
    reading = _Reading(_boundary(request), expected)
    refusal = to_api_error(BlobTooLarge(limit), param=expected)
    if length is not None:
        if int(length) > limit + ENVELOPE_BYTES:
            raise refusal
        await taken_in.reserve(int(length))
    async with aclosing(_parts(request, reading, limit + ENVELOPE_BYTES, refusal)) as parts:
        async for _, disposition in parts:
            name, filename = _names(disposition)
            num_fields = len(fields) + len(files) + sum(map(len, lists.values()))
            if num_fields == MAX_FIELDS or name in fields or name in files:
                why = f"it has the field '{shorten(name)}' twice, or more than {MAX_FIELDS} fields"
                raise _bad_form(why, name)
            if filename is None and name.endswith("[]"):
                lists.setdefault(name, []).append(await _field(parts, name))
            elif filename is None:
                fields[name] = await _field(parts, name)
            elif files:
                raise _bad_form("it has more than one file", name)
            else:
                content = _data(parts) if length is not None else _reserving(taken_in, _data(parts))
                try:
                    blob = await taken_in.put(content, limit=limit)
                except BlobTooLarge as error:
                    raise to_api_error(error, param=shorten(name)) from None
                files[name] = ReceivedFile(shown_name(filename, shorten(name)), blob)
    said: list[object] = [
        sorted(fields.items()),
        [[name, one.filename, one.blob.digest] for name, one in files.items()],
    ]
    said.append(sorted(lists.items()))
    several = {name: tuple(values) for name, values in lists.items()}
    return Form(fields, files, hashlib.blake2b(orjson.dumps(said), digest_size=32).digest(), several)


def _limit(path: str, config: Config) -> int:
    """The bytes that the file of a form may have."""
    if path.startswith("/v1/uploads/"):
        return min(MAX_PART_BYTES, config.max_file_bytes)
    if path.startswith("/v1/audio/"):
        return config.max_audio_bytes
    if path.startswith("/v1/containers/"):
        return min(config.max_container_bytes, config.max_file_bytes)
    return config.max_file_bytes


def _file_field(path: str) -> str:
    """The field of a form that its file is to come in."""
    return "data" if path.startswith("/v1/uploads/") else "file"


async def _reserving(taken_in: Intake, content: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """A content whose length nobody has announced: room for each piece before it is written."""
    async for data in content:
        await taken_in.reserve(len(data))
        yield data


async def _field(parts: AsyncGenerator[Part], name: str) -> str:
    value = bytearray()
    async for data in _data(parts):
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise _bad_form(f"the field '{shorten(name)}' is longer than {MAX_FIELD_BYTES} bytes", name)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _bad_form(f"the field '{shorten(name)}' is not UTF-8", name) from None


async def _data(parts: AsyncGenerator[Part]) -> AsyncGenerator[bytes]:
    """The bytes of the part that has begun, to its end."""
    async for step, data in parts:
        if step == "end":
            return
        yield data


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not 1 <= len(options.get(b"boundary", b"")) <= MAX_BOUNDARY:
        message = (
            "The request's body must be a form with a file, 'Content-Type: multipart/form-data' with a "
            f"boundary of 1 to {MAX_BOUNDARY} bytes. (curl -F sends one.)"
        )
        raise ApiError(415, message, code="unsupported_media_type", param="Content-Type")
    return options[b"boundary"]


def _names(disposition: bytes) -> tuple[str, str | None]:
    """The name of a part, and its filename where it is a file."""
    kind, options = parse_options_header(disposition)
    if kind != b"form-data" or not options.get(b"name"):
        raise _bad_form("a part has no name in its Content-Disposition", "Content-Disposition")
    filename = options.get(b"filename")
    name = options[b"name"].decode("utf-8", "replace")
    return name, None if filename is None else filename.decode("utf-8", "replace").replace("%22", '"')


async def _parts(request: Request, reading: _Reading, limit: int, refusal: ApiError) -> AsyncGenerator[Part]:
    """The steps of a form, as its bytes come in. refusal: of one with more than `limit` bytes."""
    parser = MultipartParser(reading.boundary, reading.callbacks())  # type: ignore[arg-type]
    async with aclosing(body_chunks(request, limit, refusal)) as chunks:
        async for chunk in chunks:
            try:
                parser.write(chunk)
            except MultipartParseError as error:
                raise _bad_form(str(error), reading.expected) from None
            for step in reading.take():
                yield step
    if not reading.ended:
        raise _bad_form("it ends before its last boundary", reading.expected)


class _Reading:
    """What the parser tells of a form, as steps. expected: the field that its file is to come in."""

    def __init__(self, boundary: bytes, expected: str) -> None:
        self.boundary, self.expected = boundary, expected
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


def shown_name(filename: str, param: str) -> str:
    """A filename as it may be shown: its last part, without what controls a terminal or reorders text.
    ApiError 400 for one of more than MAX_FILENAME characters. Nothing is ever stored under it."""
    last = re.split(r"[/\\]", filename)[-1]
    kept = "".join(char for char in last if char.isprintable()).strip(" .")
    check_length(param, len(kept), "string", most=MAX_FILENAME)
    return kept or "file"


def _bad_form(why: str, param: str) -> ApiError:
    message = f"We could not read the form of your request: {why}."
    return ApiError(400, message, code="invalid_form", param=shorten(param))
