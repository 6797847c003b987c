"""Vector stores on the wire: the bodies of requests, and the official objects of replies, in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import invalid_value
from server.shapes import (
    Schema,
    Shape,
    array,
    boolean,
    check_range,
    closed,
    described,
    either,
    label,
    mapping,
    missing,
    number,
    one_of,
    record,
    refuse,
    schema_of,
    shorten,
    tagged,
    text,
    whole,
)
from server.vector_stores.filters import FILTER, attributes
from server.vector_stores.searching import Asked, Hit
from storage import (
    FileCounts,
    NewStoreFile,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
)

Json = dict[str, Any]

CHUNK_TOKENS, CHUNK_OVERLAP = 800, 400
"""How files are cut where a request does not say."""

DAY_US = 86_400_000_000
MAX_QUERIES = 16
FOUND = 10


# ------------------------------------------------------------------------------------------------------------
# Requests


def _exactly(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object with these members and no others, as the official schemas of this family have them."""
    return closed(record(required, optional), *required, *(optional or {}))


def _static(value: Any, path: str) -> Any:
    read = _STATIC(value, path)
    if read["chunk_overlap_tokens"] > read["max_chunk_size_tokens"] // 2:
        what = f"{path}.chunk_overlap_tokens"
        refuse(what, f"Invalid '{what}': it must not exceed half of 'max_chunk_size_tokens'.")
    return read


def _threshold(value: Any, path: str) -> Any:
    check_range(path, number(value, path), "decimal", 0, 1)
    return value


_STATIC = _exactly({"max_chunk_size_tokens": whole(100, 4096), "chunk_overlap_tokens": whole(0, 2048)})
_SIZES = described(_static, lambda: schema_of(_STATIC))
_CUTTING = tagged(
    {
        "auto": closed(record({}), "type"),
        "static": closed(
            record({"static": described(_static, lambda: {"type": "object"})}), "type", "static"
        ),
    }
)
_EXPIRES = record({"anchor": one_of("last_active_at"), "days": whole(1, 365)})
_ID = label(1, 128)
_STORE = {"name": label(0, 1024), "expires_after": _EXPIRES, "metadata": mapping}


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: its members, and which of them must be there. Others are refused, as by the
    official schemas of this family."""

    members: Mapping[str, Shape]
    required: tuple[str, ...] = ()

    def read(self, body: Mapping[str, Any]) -> Json:
        """The members that are there and not null. Raises ApiError 400."""
        for name in body.keys() - self.members.keys():
            known = ", ".join(f"'{member}'" for member in self.members)
            refuse(shorten(name), f"Unknown parameter: '{shorten(name)}'. The members are {known}.")
        for name in self.required:
            if body.get(name) is None:
                missing(name)
        return {name: self.members[name](value, name) for name, value in body.items() if value is not None}

    def schema(self) -> Schema:
        """The same as JSON Schema."""
        return {**schema_of(_exactly({}, self.members)), "required": [*self.required]}


CREATE_STORE = Body(
    {
        **_STORE,
        "description": label(0, 4096),
        "file_ids": array(_ID, 0, 500),
        "chunking_strategy": _CUTTING,
    }
)
CHANGE_STORE = Body(_STORE)
_CHOICES = {"chunking_strategy": _CUTTING, "attributes": attributes}
ADD_FILE = Body({"file_id": _ID, **_CHOICES}, ("file_id",))
CHANGE_FILE = Body({"attributes": attributes})
_BATCHED = _exactly({"file_id": _ID}, _CHOICES)
ADD_BATCH = Body({**_CHOICES, "file_ids": array(_ID, 1, 2000), "files": array(_BATCHED, 1, 2000)})
SEARCH = Body(
    {
        "query": either(text(1, 10_000), array(text(1, 10_000), 1, MAX_QUERIES)),
        "rewrite_query": boolean,
        "max_num_results": whole(1, 50),
        "filters": FILTER,
        "ranking_options": _exactly(
            {},
            {
                "ranker": one_of("none", "auto", "default-2024-11-15"),
                "score_threshold": described(_threshold, lambda: {"type": "number"}),
            },
        ),
    },
    ("query",),
)


def new_file(file_id: str, filename: str, said: Mapping[str, Any]) -> NewStoreFile:
    """A file as a store takes it; said: what a body says of cutting, and of attributes."""
    cut = said.get("chunking_strategy") or {}
    sizes = cut.get("static") or {}
    told = said.get("attributes")
    return NewStoreFile(
        file_id,
        filename,
        sizes.get("max_chunk_size_tokens", CHUNK_TOKENS),
        sizes.get("chunk_overlap_tokens", CHUNK_OVERLAP),
        None if told is None else orjson.dumps(told),
    )


def batch_files(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The files of a batch: their ids, and what is said of each. Raises ApiError 400."""
    ids, files = body.get("file_ids"), body.get("files")
    if (ids is None) == (files is None):
        raise invalid_value("file_ids", "Give either 'file_ids' or 'files', and not both.")
    if ids is not None:
        return [(id, body) for id in dict.fromkeys(ids)]
    for name in ("attributes", "chunking_strategy"):
        if name in body:
            raise invalid_value(name, f"'{name}' must stand in each of 'files' where these are given.")
    return list({file["file_id"]: file for file in files or ()}.items())


def asked(store_id: str, body: Mapping[str, Any]) -> Asked:
    """What a search asks for."""
    query, options = body["query"], body.get("ranking_options") or {}
    return Asked(
        [store_id],
        [query] if isinstance(query, str) else query,
        body.get("max_num_results", FOUND),
        body.get("filters"),
        options.get("score_threshold", 0.0),
        rerank=options.get("ranker") != "none",
    )


def expires_after(value: Mapping[str, Any] | None) -> int | None:
    """The lifetime of an unused store in microseconds."""
    return None if value is None else int(value["days"]) * DAY_US


# ------------------------------------------------------------------------------------------------------------
# Replies


def store_object(store: StoredVectorStore, now: int) -> Json:
    """The official VectorStoreObject."""
    expired = store.expires_at is not None and store.expires_at <= now
    days = None if store.expires_after is None else store.expires_after // DAY_US
    expiry = None if days is None else {"anchor": "last_active_at", "days": days}
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": store.created_at // 1_000_000,
        "name": store.name,
        "description": store.description,
        "usage_bytes": store.num_bytes,
        "file_counts": _counts(store.counts),
        "status": "expired" if expired else "in_progress" if store.counts.in_progress else "completed",
        **({} if expiry is None else {"expires_after": expiry}),
        "expires_at": None if store.expires_at is None else store.expires_at // 1_000_000,
        "last_active_at": store.last_active_at // 1_000_000,
        "metadata": orjson.Fragment(store.metadata),
    }


def file_object(file: StoredStoreFile) -> Json:
    """The official VectorStoreFileObject."""
    sizes = {"max_chunk_size_tokens": file.chunk_tokens, "chunk_overlap_tokens": file.chunk_overlap}
    error = None if file.error is None else {"code": file.error[0], "message": file.error[1]}
    return {
        "id": file.file_id,
        "object": "vector_store.file",
        "usage_bytes": file.num_bytes,
        "created_at": file.created_at // 1_000_000,
        "vector_store_id": file.store_id,
        "status": file.status,
        "last_error": error,
        "chunking_strategy": {"type": "static", "static": sizes},
        "attributes": orjson.Fragment(file.attributes or b"{}"),
    }


def batch_object(batch: StoredFileBatch) -> Json:
    """The official VectorStoreFileBatchObject."""
    counts, status = batch.counts, "completed"
    if counts.in_progress:
        status = "in_progress"
    elif batch.cancelled_at is not None:
        status = "cancelled"
    elif counts.failed and counts.failed == counts.total:
        status = "failed"
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_at // 1_000_000,
        "vector_store_id": batch.store_id,
        "status": status,
        "file_counts": _counts(counts),
    }


def _counts(counts: FileCounts) -> Json:
    names = ("in_progress", "completed", "failed", "cancelled", "total")
    return {name: getattr(counts, name) for name in names}


def search_page(queries: Sequence[str], hits: Sequence[Hit]) -> Json:
    """The official VectorStoreSearchResultsPage."""
    data = [
        {
            "file_id": hit.file_id,
            "filename": hit.filename,
            "score": hit.score,
            "attributes": hit.attributes,
            "content": [{"type": "text", "text": hit.text}],
        }
        for hit in hits
    ]
    return {
        "object": "vector_store.search_results.page",
        "search_query": list(queries),
        "data": data,
        "has_more": False,
        "next_page": None,
    }


def content_page(chunks: Sequence[StoredChunk], next_page: str | None) -> Json:
    """The official VectorStoreFileContentResponse: one part for each chunk."""
    return {
        "object": "vector_store.file_content.page",
        "data": [{"type": "text", "text": chunk.text} for chunk in chunks],
        "has_more": next_page is not None,
        "next_page": next_page,
    }
