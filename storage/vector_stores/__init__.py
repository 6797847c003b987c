"""Vector stores: documents cut into chunks that can be searched, and the work of reading them."""

from __future__ import annotations

from storage.vector_stores.ingestion import erase, let_go
from storage.vector_stores.verbs import VectorStores

__all__ = ["VectorStores", "erase", "let_go"]
