"""What the routes of vector stores share: scopes, replies, pages, and the files that a body names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.errors import to_api_error
from server.http import (
    choice,
    context,
    json_reply,
    owner,
    page_args,
    page_json,
    query_text,
    require_stored_bytes,
)
from server.vector_stores.wire import file_object, new_files
from storage import NewStoreFile, NotFound, Page, StoredStoreFile

READS, WRITES = "vector_stores.read", "vector_stores.write"

POLL_MS = 250
"""After which a client may ask again for what is in progress: SDKs wait as long as they are told."""


def reply(made: Mapping[str, Any]) -> Response:
    """A reply; one about what is in progress says when to ask again."""
    headers = {"openai-poll-after-ms": str(POLL_MS)} if made.get("status") == "in_progress" else None
    return json_reply(orjson.dumps(made), headers)


def page_reply(page: Page[Any], made: Sequence[Mapping[str, Any]]) -> Response:
    """A reply with the objects of a page."""
    bodies = [orjson.dumps(each) for each in made]
    return json_reply(page_json(bodies, [each["id"] for each in made], has_more=page.has_more))


async def taken_files(
    request: Request, named: Sequence[tuple[str, Mapping[str, Any]]], param: str
) -> list[NewStoreFile]:
    """Files as stores take them. Raises ApiError 404 for one that the owner does not have, 429 where there
    is no room for their attributes, or for anything."""
    here, who = context(request), owner(request)
    if not named:
        return []
    known = await here.storage.files.get_many(who, [id for id, _ in named], now_us())
    for place, (id, _) in enumerate(named):
        if id not in known:
            where = param if param == "file_id" else f"{param}[{place}]"
            raise to_api_error(NotFound("file", id), param=where)
    files = new_files([(id, known[id].filename, said) for id, said in named])
    await require_stored_bytes(request, sum(len(file.attributes or b"") for file in files))
    return files


async def files_of(
    request: Request, vector_store_id: str, batch_id: str | None = None
) -> Page[StoredStoreFile]:
    """The page of files of a store, or of a batch, that a query asks for."""
    query = request.query_params
    status = choice(query, "filter", ("in_progress", "completed", "failed", "cancelled"))
    return await context(request).storage.vector_stores.list_files(
        owner(request),
        vector_store_id,
        **page_args(query),
        before=query_text(query, "before"),
        status=status,
        batch_id=batch_id,
    )


def file_page(page: Page[StoredStoreFile]) -> Response:
    """A reply with a page of files."""
    return page_reply(page, [file_object(file) for file in page.data])
