"""The routes of /v1/vector_stores: stores themselves, and searches."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.http import (
    context,
    owner,
    page_args,
    principal,
    query_text,
    read_body,
    require_stored_bytes,
    while_connected,
)
from server.routes.documented import PAGE, documented
from server.routes.vector_stores.replying import (
    READS,
    WRITES,
    page_reply,
    reply,
    taken_files,
)
from server.schema import check_metadata
from server.vector_stores import Payer
from server.vector_stores.wire import (
    CHANGE_STORE,
    CREATE_STORE,
    SEARCH,
    asked,
    expires_after,
    search_page,
    store_object,
)
from storage import NewVectorStore

router = APIRouter(prefix="/v1/vector_stores", tags=["Vector stores"])


@router.post("", **documented("VectorStore", WRITES, body="CreateVectorStore", body_required=False))
async def create_store(request: Request) -> Response:
    """Create one; the files that are named are read into it."""
    said = CREATE_STORE.read(await read_body(request, allow_empty=True))
    here, now = context(request), now_us()
    metadata = orjson.dumps(check_metadata(said.get("metadata", {})))
    named = [(id, said) for id in dict.fromkeys(said.get("file_ids", ()))]
    files = await taken_files(request, named, "file_ids")
    await require_stored_bytes(request, len(metadata))
    embedder = here.library.embedder
    new = NewVectorStore(
        f"vs_{secrets.token_hex(16)}",
        owner(request),
        now,
        said.get("name", ""),
        said.get("description"),
        metadata,
        expires_after(said.get("expires_after")),
        None if embedder is None else embedder.identity,
        None if embedder is None else embedder.dimensions,
    )
    made = await here.storage.vector_stores.create(new, files)
    here.library.ingester.wake()
    return reply(store_object(made, now))


@router.get("", **documented("VectorStoreList", READS, query=(*PAGE, "before:of_page")))
async def list_stores(request: Request) -> Response:
    """One page of the stores, newest first unless `order=asc`."""
    query = request.query_params
    page = await context(request).storage.vector_stores.list(
        owner(request), **page_args(query), before=query_text(query, "before")
    )
    now = now_us()
    return page_reply(page, [store_object(store, now) for store in page.data])


@router.get("/{vector_store_id}", **documented("VectorStore", READS))
async def get_store(request: Request, vector_store_id: str) -> Response:
    """The store, and how many of its files can be searched."""
    stored = await context(request).storage.vector_stores.get(owner(request), vector_store_id)
    return reply(store_object(stored, now_us()))


@router.post("/{vector_store_id}", **documented("VectorStore", WRITES, body="UpdateVectorStore"))
async def change_store(request: Request, vector_store_id: str) -> Response:
    """Change its name, its expiry and its metadata; null takes the expiry away."""
    body = await read_body(request)
    said = CHANGE_STORE.read(body)
    values: dict[str, Any] = {}
    if "name" in body:
        values["name"] = said.get("name", "")
    if "expires_after" in body:
        values["expires_after"] = expires_after(said.get("expires_after"))
    if "metadata" in body:
        values["metadata"] = orjson.dumps(check_metadata(said.get("metadata", {})))
        await require_stored_bytes(request, len(values["metadata"]))
    now = now_us()
    stored = await context(request).storage.vector_stores.change(owner(request), vector_store_id, now, values)
    return reply(store_object(stored, now))


@router.delete("/{vector_store_id}", **documented("Deleted", WRITES))
async def delete_store(request: Request, vector_store_id: str) -> Response:
    """Make the id unknown; the files themselves stay."""
    here = context(request)
    await here.storage.vector_stores.delete(owner(request), vector_store_id, now_us())
    here.library.ingester.wake()
    return reply({"id": vector_store_id, "object": "vector_store.deleted", "deleted": True})


@router.post(
    "/{vector_store_id}/search", **documented("VectorStoreSearchPage", READS, body="SearchVectorStore")
)
async def search_store(request: Request, vector_store_id: str) -> Response:
    """The chunks that answer a query best."""
    wanted = asked(vector_store_id, SEARCH.read(await read_body(request)))
    who = principal(request)
    payer = Payer(who.owner, who.subjects, who.key_id, who.service.weight)
    hits = await while_connected(request, context(request).library.searcher.search(payer, wanted))
    return reply(search_page(wanted.queries, hits))
