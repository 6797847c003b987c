"""The routes under /v1/files: upload, list, retrieve, download and delete."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.http import choice, context, file_json, integer, json_reply, owner, page_json, query_text
from server.http.contents import content_reply, load_form
from server.routes.documented import documented
from server.schema import FILE_PURPOSES, missing, refuse
from server.shapes import name_others, one_of, record, whole
from storage import NotFound, StoredFile

router = APIRouter(prefix="/v1/files", tags=["Files"])

MAX_PAGE = 10_000

SECONDS = 1_000_000  # microseconds
BATCH_LIFETIME = 30 * 86400 * SECONDS
"""Of a file of the purpose `batch`, unless its client says otherwise; others stay."""

purpose_shape = one_of(*FILE_PURPOSES)
expiry_shape = record({"anchor": one_of("created_at"), "seconds": whole(3600, 30 * 86400)})

_ASKED_BY_BOTH: Any = {"error": "EitherError", "headers": ("anthropic-version",)}
"""Clients of two APIs ask for files, and are told errors in the shape of theirs."""

_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")


@router.post(
    "",
    **documented("File", "files.write", body="CreateFile", body_type="multipart/form-data", **_ASKED_BY_BOTH),
)
async def create_file(request: Request) -> Response:
    """Upload a file."""
    form = await load_form(request)
    name_others({**form.fields, **form.files}, ("file", "purpose", *_EXPIRY_FIELDS))
    purpose = purpose_shape(form.fields.get("purpose") or missing("purpose"), "purpose")
    anchor, seconds = (form.fields.get(name) for name in _EXPIRY_FIELDS)
    expires_after = None
    if anchor is not None or seconds is not None:
        if seconds is not None and not (seconds.isascii() and seconds.isdigit() and len(seconds) < 19):
            refuse(_EXPIRY_FIELDS[1], f"Invalid '{_EXPIRY_FIELDS[1]}': expected an integer.")
        expires_after = {"anchor": anchor, "seconds": None if seconds is None else int(seconds)}
    received, now = form.file("file"), now_us()
    after = lifetime(expires_after, purpose)
    file = StoredFile(
        new_file_id(),
        owner(request),
        received.filename,
        purpose,
        received.blob.num_bytes,
        received.blob.digest,
        now,
        None if after is None else now + after,
    )
    await context(request).storage.files.create(file)
    return json_reply(file_json(file))


@router.get(
    "",
    **documented("Files", "files.read", query=("limit:files", "order", "after", "purpose"), **_ASKED_BY_BOTH),
)
async def list_files(request: Request) -> Response:
    """One page of the files, newest first unless `order=asc`."""
    query = request.query_params
    limit: int = integer(query, "limit", minimum=1, maximum=MAX_PAGE) or MAX_PAGE
    order: Any = choice(query, "order", ("asc", "desc")) or "desc"
    page = await context(request).storage.files.list(
        owner(request),
        now=now_us(),
        limit=limit,
        order=order,
        after=query_text(query, "after"),
        purpose=query_text(query, "purpose"),
    )
    bodies, ids = [file_json(file) for file in page.data], [file.id for file in page.data]
    return json_reply(page_json(bodies, ids, has_more=page.has_more))


@router.get("/{file_id}", **documented("File", "files.read", **_ASKED_BY_BOTH))
async def get_file(request: Request, file_id: str) -> Response:
    """What is known of a file, without its content."""
    return json_reply(file_json(await _file(request, file_id)))


@router.delete("/{file_id}", **documented("Deleted", "files.write", **_ASKED_BY_BOTH))
async def delete_file(request: Request, file_id: str) -> Response:
    """Make the id unknown. What conversations were told of the file they keep."""
    await context(request).storage.files.delete(owner(request), file_id, now_us())
    return json_reply(orjson.dumps({"id": file_id, "object": "file", "deleted": True}))


@router.get(
    "/{file_id}/content",
    **documented("", "files.read", texts=("application/octet-stream",), **_ASKED_BY_BOTH),
)
async def get_content(request: Request, file_id: str) -> Response:
    """The bytes of a file, or the range of them that the header `Range` asks for."""
    file = await _file(request, file_id)
    try:
        return await content_reply(request, file.digest, file.num_bytes, file.filename)
    except NotFound:  # it was deleted this very moment
        raise NotFound("file", file_id) from None


# ------------------------------------------------------------------------------------------------------------


async def _file(request: Request, file_id: str) -> StoredFile:
    return await context(request).storage.files.get(owner(request), file_id, now_us())


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def lifetime(expires_after: Any, purpose: str) -> int | None:
    """Microseconds from a file's creation to its expiry, by the field `expires_after`; None: it stays.
    ApiError 400."""
    if expires_after is not None:
        asked: Mapping[str, Any] = expiry_shape(expires_after, "expires_after")
        seconds: int = asked["seconds"]
        return seconds * SECONDS
    return BATCH_LIFETIME if purpose == "batch" else None
