"""The routes under /v1/uploads: a large file in parts, which may come in any order and at once.

The parts are put together when the upload is completed, in the order that the client gives then. They count
among what their owner stores, each is used once, and one upload is put together once at a time: so the disk
never has more of an upload than twice what is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from weakref import WeakValueDictionary

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.http import context, file_json, json_reply, owner, read_body
from server.http.contents import load_form, shown_name
from server.ignored import unread
from server.routes.documented import documented
from server.routes.files.files import SECONDS, lifetime, new_file_id, purpose_shape
from server.schema import missing, refuse, shorten
from server.shapes import STRING, array, label, name_others, whole
from storage import NotFound, Storage, StoredFile, StoredPart, StoredUpload, UploadEnded

router = APIRouter(prefix="/v1/uploads", tags=["Files"])

LIFETIME = 3600 * SECONDS
"""How long an upload may take, from its creation to its completion."""

MAX_PARTS = 10_000

_completing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""By the ids of uploads that are being put together."""


@router.post("", **documented("Upload", "files.write", body="CreateUpload"))
async def create_upload(request: Request) -> Response:
    """Begin an upload; it expires after an hour."""
    body = await read_body(request)
    name_others(body, ("filename", "purpose", "bytes", "mime_type", "expires_after"))
    given = {name: body.get(name) for name in ("filename", "purpose", "bytes", "mime_type")}
    for name, value in given.items():
        if value is None:
            missing(name)
    purpose: str = purpose_shape(given["purpose"], "purpose")
    num_bytes: int = whole(0)(given["bytes"], "bytes")
    limit = context(request).config.max_file_bytes
    if num_bytes > limit:
        refuse("bytes", f"Invalid 'bytes': a file may have at most {limit} bytes.")
    now = now_us()
    upload = StoredUpload(
        f"upload_{secrets.token_hex(16)}",
        owner(request),
        shown_name(label(1)(given["filename"], "filename"), "filename"),
        purpose,
        label(0, 255)(given["mime_type"], "mime_type"),
        num_bytes,
        now,
        now + LIFETIME,
        lifetime(body.get("expires_after"), purpose),
    )
    await context(request).storage.files.create_upload(upload)
    return json_reply(_upload_json(upload))


@router.post(
    "/{upload_id}/parts",
    **documented("UploadPart", "files.write", body="AddUploadPart", body_type="multipart/form-data"),
)
async def add_part(request: Request, upload_id: str) -> Response:
    """Add a part, of at most 64 MiB."""
    storage = context(request).storage
    await _pending(request, upload_id)  # before its bytes are taken in
    form = await load_form(request)
    name_others({**form.fields, **form.files}, ("data",))
    blob = form.file("data").blob
    id = f"part_{secrets.token_hex(16)}"
    part = StoredPart(id, upload_id, owner(request), blob.num_bytes, blob.digest, now_us())
    await storage.files.add_part(part)
    shown = {
        "id": part.id,
        "object": "upload.part",
        "created_at": part.created_at // SECONDS,
        "upload_id": upload_id,
    }
    return json_reply(orjson.dumps(shown))


@router.post("/{upload_id}/complete", **documented("Upload", "files.write", body="CompleteUpload"))
async def complete_upload(request: Request, upload_id: str) -> Response:
    """Put the parts together to a file, in the order of `part_ids`."""
    body = await read_body(request)
    name_others(body, ("part_ids", "md5"))
    if body.get("part_ids") is None:
        missing("part_ids")
    part_ids: list[str] = array(STRING, max_items=MAX_PARTS)(body["part_ids"], "part_ids")
    md5 = None if body.get("md5") is None else label(32, 32)(body["md5"], "md5").lower()
    storage, who = context(request).storage, owner(request)
    async with _completing.setdefault(upload_id, asyncio.Lock()):
        # What its parts have is counted already, and is all that the file has.
        upload = await _pending(request, upload_id)
        parts = _chosen(await storage.files.parts(who, upload_id), part_ids, upload.num_bytes)
        async with storage.blobs.incoming(_joined(storage, parts, md5)) as blob:
            now = now_us()
            expires_at = None if upload.file_lifetime is None else now + upload.file_lifetime
            file = StoredFile(
                new_file_id(),
                who,
                upload.filename,
                upload.purpose,
                upload.num_bytes,
                blob.digest,
                now,
                expires_at,
            )
            completed = await storage.files.complete_upload(upload_id, file)
    return json_reply(_upload_json(completed, file))


@router.post(
    "/{upload_id}/cancel", **documented("Upload", "files.write", body="Nothing", body_required=False)
)
async def cancel_upload(request: Request, upload_id: str) -> Response:
    """End an upload without a file; its parts go."""
    unread(await read_body(request, allow_empty=True), ())
    cancelled = await context(request).storage.files.cancel_upload(owner(request), upload_id, now_us())
    return json_reply(_upload_json(cancelled))


# ------------------------------------------------------------------------------------------------------------


async def _pending(request: Request, upload_id: str) -> StoredUpload:
    """An upload that still takes parts. ApiError 404, 400."""
    storage = context(request).storage
    upload = await storage.files.get_upload(owner(request), upload_id)
    if upload.status != "pending" or await storage.is_over(upload.expires_at, now_us()):
        raise UploadEnded(upload_id, upload.status if upload.status != "pending" else "expired")
    return upload


def _chosen(known: Mapping[str, StoredPart], part_ids: Sequence[str], num_bytes: int) -> list[StoredPart]:
    """The parts of a file in their order, which have so many bytes together. ApiError 400."""
    seen: set[str] = set()
    for index, id in enumerate(part_ids):
        path = f"part_ids[{index}]"
        if id not in known:
            refuse(path, f"Invalid '{path}': the upload has no part with id '{shorten(id)}'.")
        if id in seen:
            refuse(path, f"Invalid '{path}': the part with id '{id}' is named twice.")
        seen.add(id)
    parts = [known[id] for id in part_ids]
    found = sum(part.num_bytes for part in parts)
    if found != num_bytes:
        message = f"The parts have {found} bytes together; the upload was to have {num_bytes}."
        refuse("part_ids", message)
    return parts


async def _joined(storage: Storage, parts: Sequence[StoredPart], md5: str | None) -> AsyncGenerator[bytes]:
    """The contents of parts, one after the other. ApiError 400 at their end where they do not have this MD5,
    in hexadecimal, by which a client says that all is to come as it was meant."""
    found = hashlib.md5(usedforsecurity=False)
    for part in parts:
        try:
            async with aclosing(storage.blobs.open(part.digest)) as content:
                async for data in content:
                    await asyncio.to_thread(found.update, data)
                    yield data
        except NotFound:  # it was cancelled meanwhile
            raise UploadEnded(part.upload_id, "cancelled") from None
    if md5 is not None and md5 != found.hexdigest():
        refuse("md5", f"Invalid 'md5': the file's MD5 is {found.hexdigest()}.")


def _upload_json(upload: StoredUpload, file: StoredFile | None = None) -> bytes:
    """The official Upload object."""
    return orjson.dumps(
        {
            "id": upload.id,
            "object": "upload",
            "bytes": upload.num_bytes,
            "created_at": upload.created_at // SECONDS,
            "filename": upload.filename,
            "purpose": upload.purpose,
            "status": upload.status,
            "expires_at": upload.expires_at // SECONDS,
            "file": None if file is None else orjson.Fragment(file_json(file)),
        }
    )
