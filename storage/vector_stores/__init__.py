"""Vector stores: documents cut into chunks that can be searched, and the work of reading them.

The values are here at once; what needs SQLAlchemy is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from storage.vector_stores.records import (
    MAX_CHUNKS,
    POSITION_BITS,
    Due,
    FileClaim,
    FileClaimLost,
    FileCounts,
    NewChunk,
    NewStoreFile,
    NewVectorStore,
    SearchedStore,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
    VectorStoreFull,
    WordHits,
)

if TYPE_CHECKING:
    from storage.vector_stores.ingestion import erase, let_go
    from storage.vector_stores.stores import remove_from_stores
    from storage.vector_stores.verbs import VectorStores

__all__ = [
    "MAX_CHUNKS",
    "POSITION_BITS",
    "Due",
    "FileClaim",
    "FileClaimLost",
    "FileCounts",
    "NewChunk",
    "NewStoreFile",
    "NewVectorStore",
    "SearchedStore",
    "StoredChunk",
    "StoredFileBatch",
    "StoredStoreFile",
    "StoredVectorStore",
    "VectorStoreFull",
    "VectorStores",
    "WordHits",
    "erase",
    "let_go",
    "remove_from_stores",
]

_WITH_SQL = {
    "VectorStores": "verbs",
    "erase": "ingestion",
    "let_go": "ingestion",
    "remove_from_stores": "stores",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_SQL:
        return getattr(import_module(f"storage.vector_stores.{_WITH_SQL[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
