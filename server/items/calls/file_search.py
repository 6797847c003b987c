"""File searches that other servers made."""

from __future__ import annotations

import json

from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, SEARCHING, item_shape
from server.items.transcript import Transcript
from server.shapes import STRING, array, mapping, number, record, whole

_HIT = {"file_id": STRING, "text": STRING, "filename": STRING, "attributes": mapping, "score": number}


def _say(item: Item, transcript: Transcript) -> None:
    transcript.call(item["id"], "file_search", json.dumps({"queries": item["queries"]}, ensure_ascii=False))
    transcript.answer(item["id"], _found(item))


def _found(item: Item) -> str:
    if item.get("status") == "failed":
        return "The search failed."
    results = item.get("results")
    if results is None:
        return "The search was made; its results were not kept."
    hits = (
        f"{hit.get('filename') or hit.get('file_id') or 'file'}:\n{hit.get('text', '')}" for hit in results
    )
    return "\n\n".join(hits) or "Nothing was found."


ROWS = (
    ItemType(
        "file_search_call",
        "fs_",
        item_shape(
            {"queries": array(STRING)},
            {"results": array(record({}, _HIT))},
            statuses=(*SEARCHING, "incomplete"),
        ),
        _say,
        events={
            "response.file_search_call.in_progress": PLACE,
            "response.file_search_call.searching": PLACE,
            "response.file_search_call.completed": PLACE,
        },
        order="file_search_call.in_progress file_search_call.searching file_search_call.completed",
        tools={
            "file_search": record(
                {"vector_store_ids": array(STRING)},
                {"max_num_results": whole(1, 50), "ranking_options": mapping, "filters": mapping},
            )
        },
        instead="Offer a function that searches your files, or an MCP server that does.",
    ),
)
