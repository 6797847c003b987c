"""The routes of `/file_batches` under a vector store: files that are put into it together."""

from __future__ import annotations

import secrets

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.http import (
    context,
    owner,
    read_body,
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
from server.vector_stores.wire import ADD_BATCH, batch_files, batch_object

router = APIRouter(prefix="/v1/vector_stores", tags=["Vector stores"])


@router.post(
    "/{vector_store_id}/file_batches",
    **documented("VectorStoreFileBatch", WRITES, body="CreateVectorStoreFileBatch"),
)
async def create_batch(request: Request, vector_store_id: str) -> Response:
    """Put several files into the store, to be read."""
    named = batch_files(said := ADD_BATCH.read(await read_body(request)))
    here = context(request)
    files = await taken_files(request, named, "files" if "files" in said else "file_ids")
    made = await here.storage.vector_stores.create_batch(
        owner(request), vector_store_id, f"vsfb_{secrets.token_hex(16)}", files, now_us()
    )
    here.library.ingester.wake()
    return reply(batch_object(made))


@router.get("/{vector_store_id}/file_batches/{batch_id}", **documented("VectorStoreFileBatch", READS))
async def get_batch(request: Request, vector_store_id: str, batch_id: str) -> Response:
    """The batch, and how many of its files can be searched."""
    stored = await context(request).storage.vector_stores.get_batch(owner(request), vector_store_id, batch_id)
    return reply(batch_object(stored))


@router.post(
    "/{vector_store_id}/file_batches/{batch_id}/cancel", **documented("VectorStoreFileBatch", WRITES)
)
async def cancel_batch(request: Request, vector_store_id: str, batch_id: str) -> Response:
    """Cancel those of its files that are not read yet."""
    await read_body(request, allow_empty=True)
    here = context(request)
    made = await here.storage.vector_stores.cancel_batch(owner(request), vector_store_id, batch_id, now_us())
    here.library.ingester.wake()
    return reply(batch_object(made))


@router.get(
    "/{vector_store_id}/file_batches/{batch_id}/files",
    **documented("VectorStoreFileList", READS, query=(*PAGE, "before:of_page", "filter")),
)
async def list_batch_files(request: Request, vector_store_id: str, batch_id: str) -> Response:
    """One page of the files of a batch, newest first unless `order=asc`."""
    return file_page(await files_of(request, vector_store_id, batch_id))
