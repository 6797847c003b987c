"""The vector stores of one server: what searches them, what reads files into them, and with which model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.vector_stores.documents import Documents
from server.vector_stores.embedding import Embedder, Reranker
from server.vector_stores.ingesting import Ingesting, Room
from server.vector_stores.search_tool import search_tools
from server.vector_stores.searching import Searcher

if TYPE_CHECKING:
    from storage import Storage
    from tools import Registry


class Library:
    """One for each server. embedder, reranker: None where stores are searched by words alone. room: counts
    the bytes that are about to be stored."""

    def __init__(
        self,
        storage: Storage,
        room: Room,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.embedder = embedder
        self.searcher = Searcher(storage, embedder, reranker)
        self.ingesting = Ingesting(storage, Documents(storage).chunks, room, embedder)

    def tools(self) -> Registry:
        """What the server runs for the tool `file_search`."""
        return search_tools(self.searcher)
