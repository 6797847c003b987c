"""Vector stores: files are read into them, and their chunks are searched by words and by vectors."""

from __future__ import annotations

from server.vector_stores.documents import Documents
from server.vector_stores.embedding import Embedder, Reranker
from server.vector_stores.filters import FILTER, attributes, compiled
from server.vector_stores.ingesting import Ingesting
from server.vector_stores.search_tool import SEARCH_FILES, search_tools
from server.vector_stores.searching import Asked, Hit, Searcher, merged, usable_stores

__all__ = [
    "FILTER",
    "SEARCH_FILES",
    "Asked",
    "Documents",
    "Embedder",
    "Hit",
    "Ingesting",
    "Reranker",
    "Searcher",
    "attributes",
    "compiled",
    "merged",
    "search_tools",
    "usable_stores",
]
