"""The vector stores of one server: what searches them, what reads files into them, and with which models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.limits import owner_subject
from server.vector_stores.documents import Documents
from server.vector_stores.embedding import Embedder, Payer, Reranker
from server.vector_stores.ingester import Ingester
from server.vector_stores.search_tool import search_tools
from server.vector_stores.searching import Searcher

if TYPE_CHECKING:
    from server.limits import Limiter
    from server.quota import Quota
    from storage import Storage
    from tools import Registry


class Library:
    """One for each server. generates: whether a model generates at the moment, to which the reading of files
    gives way. embedder, reranker: None where stores are searched by words alone."""

    def __init__(
        self,
        storage: Storage,
        quota: Quota,
        limiter: Limiter,
        generates: Callable[[], bool],
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._storage = storage
        self._quota = quota
        self._limiter = limiter
        self.embedder = embedder
        self.searcher = Searcher(storage, embedder, reranker)
        self.ingester = Ingester(
            storage, Documents(storage).chunks, self._require_room, embedder, self.payer_of, generates
        )

    def tools(self) -> Registry:
        """What the server runs for the tool `file_search`."""
        return search_tools(self.searcher, self.payer_of)

    async def _require_room(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are about to be stored, long after the request that asked for them. ApiError 429
        where they are too many for the owner."""
        await self._quota.require_later(owner, num_bytes, self._limiter)

    async def payer_of(self, owner: str) -> Payer:
        """Who pays for what is done for an owner when no request is there to tell."""
        return Payer(owner, (await owner_subject(self._storage, owner),))
