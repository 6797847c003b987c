"""The tool that searches stores, as the registry has it: it takes and returns JSON, and no model is shown it.

The item type `file_search_call` offers the model a function of its own and calls this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from engine import EngineError
from server.errors import ApiError, to_api_error
from server.vector_stores.embedding import Payer
from server.vector_stores.searching import WEIGHTS, Asked, Searcher, merged
from storage import NotFound
from tools import Registry, ToolError, ToolSpec

SEARCH_FILES = "files.search"
"""Its name, which no function can have."""

_TEXT: Mapping[str, Any] = {"type": "string"}
_TEXTS: Mapping[str, Any] = {"type": "array", "items": _TEXT}


def search_tools(searcher: Searcher, payer_of: Callable[[str], Awaitable[Payer]]) -> Registry:
    """The tool, over the stores of one server. payer_of: who pays for the searches of an owner."""

    async def search(
        owner: str,
        vector_store_ids: Sequence[str],
        queries: Sequence[str],
        most: int,
        options: Mapping[str, Any],
        filters: Mapping[str, Any] | None = None,
    ) -> str:
        mix = options.get("hybrid_search")
        asked = Asked(
            vector_store_ids,
            queries,
            most,
            filters,
            options.get("score_threshold", 0.0),
            (mix["embedding_weight"], mix["text_weight"]) if mix else WEIGHTS,
        )
        try:
            hits = await searcher.search(await payer_of(owner), asked)
        except (NotFound, ApiError, EngineError) as error:
            raise ToolError(to_api_error(error).message) from error
        passages = await asyncio.to_thread(merged, hits)
        return orjson.dumps([asdict(hit) for hit in passages]).decode()

    properties = {
        "owner": _TEXT,
        "vector_store_ids": _TEXTS,
        "queries": _TEXTS,
        "most": {"type": "integer"},
        "options": {"type": "object"},
        "filters": {"type": "object"},
    }
    required = ["owner", "vector_store_ids", "queries", "most", "options"]
    spec = ToolSpec(
        SEARCH_FILES,
        "Searches vector stores.",
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
        search,
        offered_by="file_search",
        idempotent=True,
        strict=False,
    )
    return {spec.name: spec}
