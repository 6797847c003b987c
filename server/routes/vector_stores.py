"""The routes under /v1/vector_stores: stores, the files in them, batches of files, and searches."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.errors import to_api_error
from server.http import (
    choice,
    context,
    integer,
    json_reply,
    owner,
    page_args,
    page_json,
    query_text,
    read_body,
    require_stored_bytes,
)
from server.routes.documented import PAGE, documented
from server.schema import check_metadata
from server.vector_stores import wire
from storage import NewStoreFile, NewVectorStore, NotFound, Page, StoredStoreFile

router = APIRouter(prefix="/v1/vector_stores")

READS, WRITES = "vector_stores.read", "vector_stores.write"

POLL_MS = 250
"""After which a client may ask again for what is in progress: SDKs wait as long as they are told."""

CONTENT = 100
"""Chunks of one page of a file's content."""


def _reply(made: Mapping[str, Any]) -> Response:
    headers = {"openai-poll-after-ms": str(POLL_MS)} if made.get("status") == "in_progress" else None
    return json_reply(orjson.dumps(made), headers)


def _page(page: Page[Any], made: Sequence[Mapping[str, Any]]) -> Response:
    bodies = [orjson.dumps(each) for each in made]
    return json_reply(page_json(bodies, [each["id"] for each in made], has_more=page.has_more))


# ------------------------------------------------------------------------------------------------------------
# Stores


@router.post("", **documented("VectorStore", WRITES, body="CreateVectorStore", body_required=False))
async def create_store(request: Request) -> Response:
    """Create one; the files that are named are read into it."""
    said = wire.CREATE_STORE.read(await read_body(request, allow_empty=True))
    here, now = context(request), now_us()
    metadata = orjson.dumps(check_metadata(said.get("metadata", {})))
    named = [(id, said) for id in dict.fromkeys(said.get("file_ids", ()))]
    files = await _new_files(request, named, "file_ids")
    await require_stored_bytes(request, len(metadata))
    embedder = here.library.embedder
    new = NewVectorStore(
        f"vs_{secrets.token_hex(16)}",
        owner(request),
        now,
        said.get("name", ""),
        said.get("description"),
        metadata,
        wire.expires_after(said.get("expires_after")),
        None if embedder is None else embedder.model,
        None if embedder is None else embedder.dimensions,
    )
    made = await here.storage.vector_stores.create(new, files)
    here.library.ingesting.wake()
    return _reply(wire.store_object(made, now))


@router.get("", **documented("VectorStoreList", READS, query=(*PAGE, "before:of_page")))
async def list_stores(request: Request) -> Response:
    """One page of the stores, newest first unless `order=asc`."""
    query = request.query_params
    page = await context(request).storage.vector_stores.list(
        owner(request), **page_args(query), before=query_text(query, "before")
    )
    now = now_us()
    return _page(page, [wire.store_object(store, now) for store in page.data])


@router.get("/{store_id}", **documented("VectorStore", READS))
async def get_store(request: Request, store_id: str) -> Response:
    """The store, and how many of its files can be searched."""
    stored = await context(request).storage.vector_stores.get(owner(request), store_id)
    return _reply(wire.store_object(stored, now_us()))


@router.post("/{store_id}", **documented("VectorStore", WRITES, body="UpdateVectorStore"))
async def change_store(request: Request, store_id: str) -> Response:
    """Change its name, its expiry and its metadata; null takes the expiry away."""
    body = await read_body(request)
    said = wire.CHANGE_STORE.read(body)
    values: dict[str, Any] = {}
    if "name" in body:
        values["name"] = said.get("name", "")
    if "expires_after" in body:
        values["expires_after"] = wire.expires_after(said.get("expires_after"))
    if "metadata" in body:
        values["metadata"] = orjson.dumps(check_metadata(said.get("metadata", {})))
        await require_stored_bytes(request, len(values["metadata"]))
    now = now_us()
    stored = await context(request).storage.vector_stores.change(owner(request), store_id, now, values)
    return _reply(wire.store_object(stored, now))


@router.delete("/{store_id}", **documented("Deleted", WRITES))
async def delete_store(request: Request, store_id: str) -> Response:
    """Make the id unknown; the files themselves stay."""
    here = context(request)
    await here.storage.vector_stores.delete(owner(request), store_id, now_us())
    here.library.ingesting.wake()
    return _reply({"id": store_id, "object": "vector_store.deleted", "deleted": True})


@router.post("/{store_id}/search", **documented("VectorStoreSearchPage", READS, body="SearchVectorStore"))
async def search_store(request: Request, store_id: str) -> Response:
    """The chunks that answer a query best."""
    asked = wire.asked(store_id, wire.SEARCH.read(await read_body(request)))
    hits = await context(request).library.searcher.search(owner(request), asked)
    return _reply(wire.search_page(asked.queries, hits))


# ------------------------------------------------------------------------------------------------------------
# Files


async def _new_files(
    request: Request, named: Sequence[tuple[str, Mapping[str, Any]]], param: str
) -> list[NewStoreFile]:
    """Files as stores take them. Raises ApiError 404 for one that the owner does not have, 429 where there
    would be no room for their texts."""
    here, who = context(request), owner(request)
    if not named:
        return []
    known = await here.storage.files.get_many(who, [id for id, _ in named], now_us())
    for place, (id, _) in enumerate(named):
        if id not in known:
            where = param if param == "file_id" else f"{param}[{place}]"
            raise to_api_error(NotFound("file", id), param=where)
    await require_stored_bytes(request, 0)
    return [wire.new_file(id, known[id].filename, said) for id, said in named]


@router.post("/{store_id}/files", **documented("VectorStoreFile", WRITES, body="CreateVectorStoreFile"))
async def add_file(request: Request, store_id: str) -> Response:
    """Put a file into the store, to be read."""
    said = wire.ADD_FILE.read(await read_body(request))
    here = context(request)
    files = await _new_files(request, [(said["file_id"], said)], "file_id")
    [made] = await here.storage.vector_stores.add_files(owner(request), store_id, files, now_us())
    here.library.ingesting.wake()
    return _reply(wire.file_object(made))


@router.get(
    "/{store_id}/files",
    **documented("VectorStoreFileList", READS, query=(*PAGE, "before:of_page", "filter")),
)
async def list_files(request: Request, store_id: str) -> Response:
    """One page of the files of a store, newest first unless `order=asc`."""
    return _file_page(await _files(request, store_id))


async def _files(request: Request, store_id: str, batch_id: str | None = None) -> Page[StoredStoreFile]:
    query = request.query_params
    status = choice(query, "filter", ("in_progress", "completed", "failed", "cancelled"))
    return await context(request).storage.vector_stores.list_files(
        owner(request),
        store_id,
        **page_args(query),
        before=query_text(query, "before"),
        status=status,
        batch_id=batch_id,
    )


def _file_page(page: Page[StoredStoreFile]) -> Response:
    return _page(page, [wire.file_object(file) for file in page.data])


@router.get("/{store_id}/files/{file_id}", **documented("VectorStoreFile", READS))
async def get_file(request: Request, store_id: str, file_id: str) -> Response:
    """The file, and how far its reading has come."""
    stored = await context(request).storage.vector_stores.get_file(owner(request), store_id, file_id)
    return _reply(wire.file_object(stored))


@router.post(
    "/{store_id}/files/{file_id}", **documented("VectorStoreFile", WRITES, body="UpdateVectorStoreFile")
)
async def change_file(request: Request, store_id: str, file_id: str) -> Response:
    """Replace its attributes; null takes them away."""
    said = wire.CHANGE_FILE.read(await read_body(request))
    told = orjson.dumps(said["attributes"]) if "attributes" in said else None
    stored = await context(request).storage.vector_stores.set_attributes(
        owner(request), store_id, file_id, told
    )
    return _reply(wire.file_object(stored))


@router.delete("/{store_id}/files/{file_id}", **documented("Deleted", WRITES))
async def remove_file(request: Request, store_id: str, file_id: str) -> Response:
    """Take a file out of the store; the file itself stays."""
    here = context(request)
    await here.storage.vector_stores.remove_file(owner(request), store_id, file_id, now_us())
    here.library.ingesting.wake()
    return _reply({"id": file_id, "object": "vector_store.file.deleted", "deleted": True})


@router.get(
    "/{store_id}/files/{file_id}/content",
    **documented("VectorStoreFileContent", READS, query=("page:chunks",)),
)
async def get_content(request: Request, store_id: str, file_id: str) -> Response:
    """The chunks of the file, in their order."""
    after = integer(request.query_params, "page", minimum=0)
    stores = context(request).storage.vector_stores
    chunks = await stores.file_chunks(
        owner(request), store_id, file_id, after=-1 if after is None else after, limit=CONTENT + 1
    )
    page = chunks[:CONTENT]
    more = str(page[-1].position) if len(chunks) > CONTENT else None
    return _reply(wire.content_page(page, more))


# ------------------------------------------------------------------------------------------------------------
# Batches


@router.post(
    "/{store_id}/file_batches",
    **documented("VectorStoreFileBatch", WRITES, body="CreateVectorStoreFileBatch"),
)
async def create_batch(request: Request, store_id: str) -> Response:
    """Put several files into the store, to be read."""
    named = wire.batch_files(said := wire.ADD_BATCH.read(await read_body(request)))
    here = context(request)
    files = await _new_files(request, named, "files" if "files" in said else "file_ids")
    made = await here.storage.vector_stores.create_batch(
        owner(request), store_id, f"vsfb_{secrets.token_hex(16)}", files, now_us()
    )
    here.library.ingesting.wake()
    return _reply(wire.batch_object(made))


@router.get("/{store_id}/file_batches/{batch_id}", **documented("VectorStoreFileBatch", READS))
async def get_batch(request: Request, store_id: str, batch_id: str) -> Response:
    """The batch, and how many of its files can be searched."""
    stored = await context(request).storage.vector_stores.get_batch(owner(request), store_id, batch_id)
    return _reply(wire.batch_object(stored))


@router.post("/{store_id}/file_batches/{batch_id}/cancel", **documented("VectorStoreFileBatch", WRITES))
async def cancel_batch(request: Request, store_id: str, batch_id: str) -> Response:
    """Cancel those of its files that are not read yet."""
    await read_body(request, allow_empty=True)
    here = context(request)
    made = await here.storage.vector_stores.cancel_batch(owner(request), store_id, batch_id, now_us())
    here.library.ingesting.wake()
    return _reply(wire.batch_object(made))


@router.get(
    "/{store_id}/file_batches/{batch_id}/files",
    **documented("VectorStoreFileList", READS, query=(*PAGE, "before:of_page", "filter")),
)
async def list_batch_files(request: Request, store_id: str, batch_id: str) -> Response:
    """One page of the files of a batch, newest first unless `order=asc`."""
    return _file_page(await _files(request, store_id, batch_id))
