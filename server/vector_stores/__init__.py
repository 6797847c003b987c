"""Vector stores: files are read into them, and their chunks are searched by words and by vectors."""

from __future__ import annotations

from server.vector_stores.embedding import Embedder, Kind, Payer, Reranker
from server.vector_stores.filters import FILTER, attributes, compiled
from server.vector_stores.ingester import Ingester, digest_of
from server.vector_stores.library import Library
from server.vector_stores.search_tool import SEARCH_FILES
from server.vector_stores.searching import Asked, Hit, Searcher, merged, usable_stores

__all__ = [
    "FILTER",
    "SEARCH_FILES",
    "Asked",
    "Embedder",
    "Hit",
    "Ingester",
    "Kind",
    "Library",
    "Payer",
    "Reranker",
    "Searcher",
    "attributes",
    "compiled",
    "digest_of",
    "merged",
    "usable_stores",
]
