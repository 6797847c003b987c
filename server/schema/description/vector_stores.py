"""Describes vector stores, as JSON Schema for the OpenAPI document; tests check real replies against it."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.description.parts import (
    ATTRIBUTES,
    BOOLEAN,
    INTEGER,
    METADATA,
    NUMBER,
    STRING,
    listed,
    of,
    page_of,
    ref,
)
from server.shapes import Schema, or_null
from server.vector_stores.wire import ADD_BATCH, ADD_FILE, CHANGE_FILE, CHANGE_STORE, CREATE_STORE, SEARCH

_COUNTS = of(dict.fromkeys(("in_progress", "completed", "failed", "cancelled", "total"), INTEGER))
_STATUSES = ("in_progress", "completed", "failed", "cancelled")
_CONTENT = listed(of({"type": {"const": "text"}, "text": STRING}))


def _results(name: str, items: Schema, more: Mapping[str, Schema] | None = None) -> Schema:
    ends = {"has_more": BOOLEAN, "next_page": or_null(STRING)}
    return of({"object": {"const": name}, "data": items, **ends, **(more or {})})


def vector_store_components() -> Mapping[str, Schema]:
    """The schemas of this family, by name."""
    sizes = dict.fromkeys(("max_chunk_size_tokens", "chunk_overlap_tokens"), INTEGER)
    return {
        "CreateVectorStore": CREATE_STORE.schema(),
        "UpdateVectorStore": CHANGE_STORE.schema(),
        "CreateVectorStoreFile": ADD_FILE.schema(),
        "UpdateVectorStoreFile": CHANGE_FILE.schema(),
        "CreateVectorStoreFileBatch": ADD_BATCH.schema(),
        "SearchVectorStore": SEARCH.schema(),
        "VectorStore": of(
            {
                "id": STRING,
                "object": {"const": "vector_store"},
                "created_at": INTEGER,
                "name": STRING,
                "description": or_null(STRING),
                "usage_bytes": INTEGER,
                "file_counts": _COUNTS,
                "status": {"enum": ["expired", "in_progress", "completed"]},
                "expires_at": or_null(INTEGER),
                "last_active_at": or_null(INTEGER),
                "metadata": METADATA,
                "embedding": {
                    **or_null(of({"model": STRING, "completed": INTEGER, "total": INTEGER})),
                    "description": "An extension: the model of its vectors, and how many files have them.",
                },
            },
            {"expires_after": of({"anchor": {"const": "last_active_at"}, "days": INTEGER})},
        ),
        "VectorStoreList": page_of(ref("VectorStore")),
        "VectorStoreFile": of(
            {
                "id": STRING,
                "object": {"const": "vector_store.file"},
                "usage_bytes": INTEGER,
                "created_at": INTEGER,
                "vector_store_id": STRING,
                "status": {"enum": [*_STATUSES]},
                "last_error": or_null(of({"code": STRING, "message": STRING})),
                "chunking_strategy": of({"type": {"const": "static"}, "static": of(sizes)}),
                "attributes": ATTRIBUTES,
            }
        ),
        "VectorStoreFileList": page_of(ref("VectorStoreFile")),
        "VectorStoreFileBatch": of(
            {
                "id": STRING,
                "object": {"const": "vector_store.files_batch"},
                "created_at": INTEGER,
                "vector_store_id": STRING,
                "status": {"enum": [*_STATUSES]},
                "file_counts": _COUNTS,
            }
        ),
        "VectorStoreFileContent": _results("vector_store.file_content.page", _CONTENT),
        "VectorStoreSearchPage": _results(
            "vector_store.search_results.page",
            listed(
                of(
                    {
                        "file_id": STRING,
                        "filename": STRING,
                        "score": {**NUMBER, "minimum": 0, "maximum": 1},
                        "attributes": ATTRIBUTES,
                        "content": _CONTENT,
                    }
                )
            ),
            {"search_query": listed(STRING)},
        ),
    }
