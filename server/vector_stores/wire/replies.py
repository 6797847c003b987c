"""The official objects of vector stores, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from server.vector_stores.searching import Hit
from storage import (
    FileCounts,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
)

Json = dict[str, Any]

DAY_US = 86_400_000_000


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
        "embedding": _embedding(store),
    }


def _embedding(store: StoredVectorStore) -> Json | None:
    """An extension: the model of the store, and how many of its files can be searched by vectors of it."""
    if store.embedding is None:
        return None
    return {"model": store.embedding, "completed": store.num_embedded, "total": store.counts.completed}


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
