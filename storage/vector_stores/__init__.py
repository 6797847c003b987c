"""Vector stores: documents cut into chunks that can be searched, and the work of reading them."""

from __future__ import annotations

from storage.vector_stores.ingestion import erase, let_go
from storage.vector_stores.stores import files_gone
from storage.vector_stores.verbs import VectorStores

__all__ = ["VectorStores", "erase", "files_gone", "let_go"]
