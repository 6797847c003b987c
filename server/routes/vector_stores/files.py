"""The routes of /v1/vector_stores/{vector_store_id}/files: the files in a store."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.http import (
    context,
    integer,
    owner,
    read_body,
    require_stored_bytes,
)
from server.routes.documented import PAGE, documented
from server.routes.vector_stores.replying import (
    READS,
    WRITES,
    file_page,
    files_of,
    reply,
    taken_files,
)
from server.vector_stores.wire import ADD_FILE, CHANGE_FILE, content_page, file_object

router = APIRouter(prefix="/v1/vector_stores", tags=["Vector stores"])

CONTENT = 100
"""Chunks of one page of a file's content."""


@router.post(
    "/{vector_store_id}/files", **documented("VectorStoreFile", WRITES, body="CreateVectorStoreFile")
)
async def add_file(request: Request, vector_store_id: str) -> Response:
    """Put a file into the store, to be read."""
    said = ADD_FILE.read(await read_body(request))
    here = context(request)
    files = await taken_files(request, [(said["file_id"], said)], "file_id")
    [made] = await here.storage.vector_stores.add_files(owner(request), vector_store_id, files, now_us())
    here.library.ingester.wake()
    return reply(file_object(made))


@router.get(
    "/{vector_store_id}/files",
    **documented("VectorStoreFileList", READS, query=(*PAGE, "before:of_page", "filter")),
)
async def list_files(request: Request, vector_store_id: str) -> Response:
    """One page of the files of a store, newest first unless `order=asc`."""
    return file_page(await files_of(request, vector_store_id))


@router.get("/{vector_store_id}/files/{file_id}", **documented("VectorStoreFile", READS))
async def get_file(request: Request, vector_store_id: str, file_id: str) -> Response:
    """The file, and how far its reading has come."""
    stored = await context(request).storage.vector_stores.get_file(owner(request), vector_store_id, file_id)
    return reply(file_object(stored))


@router.post(
    "/{vector_store_id}/files/{file_id}",
    **documented("VectorStoreFile", WRITES, body="UpdateVectorStoreFile"),
)
async def change_file(request: Request, vector_store_id: str, file_id: str) -> Response:
    """Replace its attributes; null takes them away."""
    said = CHANGE_FILE.read(await read_body(request))
    told = orjson.dumps(said["attributes"]) if "attributes" in said else None
    await require_stored_bytes(request, len(told or b""))
    stored = await context(request).storage.vector_stores.set_attributes(
        owner(request), vector_store_id, file_id, told
    )
    return reply(file_object(stored))


@router.delete("/{vector_store_id}/files/{file_id}", **documented("Deleted", WRITES))
async def remove_file(request: Request, vector_store_id: str, file_id: str) -> Response:
    """Take a file out of the store; the file itself stays."""
    here = context(request)
    await here.storage.vector_stores.remove_file(owner(request), vector_store_id, file_id, now_us())
    here.library.ingester.wake()
    return reply({"id": file_id, "object": "vector_store.file.deleted", "deleted": True})


@router.get(
    "/{vector_store_id}/files/{file_id}/content",
    **documented("VectorStoreFileContent", READS, query=("page:chunks",)),
)
async def get_content(request: Request, vector_store_id: str, file_id: str) -> Response:
    """The chunks of the file, in their order."""
    after = integer(request.query_params, "page", minimum=0)
    storage = context(request).storage
    chunks = await storage.vector_stores.file_chunks(
        owner(request), vector_store_id, file_id, after=-1 if after is None else after, limit=CONTENT + 1
    )
    # A file that has expired stays in its stores until the next sweep, and is read no more.
    await storage.files.get(owner(request), file_id, now_us())
    page = chunks[:CONTENT]
    more = str(page[-1].position) if len(chunks) > CONTENT else None
    return reply(content_page(page, more))
