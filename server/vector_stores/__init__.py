"""Vector stores: files are read into them, and their chunks are searched by words and by vectors."""

from __future__ import annotations

from server.vector_stores.embedding import Embedder, Kind, Reranker
from server.vector_stores.filters import FILTER, attributes, compiled
from server.vector_stores.ingesting import Ingesting, digest_of
from server.vector_stores.library import Library
from server.vector_stores.search_tool import SEARCH_FILES
from server.vector_stores.searching import Asked, Hit, Searcher, merged, usable_stores

__all__ = [
    "FILTER",
    "SEARCH_FILES",
    "Asked",
    "Embedder",
    "Hit",
    "Ingesting",
    "Kind",
    "Library",
    "Reranker",
    "Searcher",
    "attributes",
    "compiled",
    "digest_of",
    "merged",
    "usable_stores",
]
