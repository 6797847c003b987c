"""Vector stores on the wire: the bodies of requests, and the official objects of replies."""

from __future__ import annotations

from server.vector_stores.wire.replies import (
    batch_object,
    content_page,
    file_object,
    search_page,
    store_object,
)
from server.vector_stores.wire.requests import (
    ADD_BATCH,
    ADD_FILE,
    CHANGE_FILE,
    CHANGE_STORE,
    CREATE_STORE,
    SEARCH,
    asked,
    batch_files,
    expires_after,
    new_files,
)

__all__ = [
    "ADD_BATCH",
    "ADD_FILE",
    "CHANGE_FILE",
    "CHANGE_STORE",
    "CREATE_STORE",
    "SEARCH",
    "asked",
    "batch_files",
    "batch_object",
    "content_page",
    "expires_after",
    "file_object",
    "new_files",
    "search_page",
    "store_object",
]
