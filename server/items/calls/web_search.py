"""Web searches that other servers made."""

from __future__ import annotations

import json

from server.items.item_type import Item, ItemType
from server.items.parts import PLACE, SEARCHING, item_shape
from server.items.transcript import Transcript
from server.shapes import STRING, array, boolean, one_of, record, tagged

_LOCATION = record(
    {}, {"country": STRING, "region": STRING, "city": STRING, "timezone": STRING}, type="approximate"
)
_CONTEXT_SIZE = one_of("low", "medium", "high")
_TOOL = record(
    {},
    {
        "external_web_access": boolean,
        "filters": record({}, {"allowed_domains": array(STRING)}),
        "user_location": _LOCATION,
        "search_context_size": _CONTEXT_SIZE,
    },
)
_PREVIEW = record({}, {"user_location": _LOCATION, "search_context_size": _CONTEXT_SIZE})
_SEARCH = record(
    {},
    {"query": STRING, "queries": array(STRING), "sources": array(tagged({"url": record({"url": STRING})}))},
)
_ACTION = tagged(
    {
        "search": _SEARCH,
        "open_page": record({}, {"url": STRING}),
        "find_in_page": record({"url": STRING, "pattern": STRING}),
    }
)


def _say(item: Item, transcript: Transcript) -> None:
    action = {key: value for key, value in item["action"].items() if key != "sources"}
    transcript.call(item["id"], "web_search", json.dumps(action, ensure_ascii=False))
    sources = [source["url"] for source in item["action"].get("sources") or ()]
    outcome = "failed" if item.get("status") == "failed" else "was made"
    told = f"The search {outcome}; its results were not kept."
    transcript.answer(item["id"], "\n".join([told, *(["Its sources:", *sources] if sources else [])]))


ROWS = (
    ItemType(
        "web_search_call",
        "ws_",
        item_shape({"action": _ACTION}, statuses=SEARCHING, action={"type": "search"}),
        _say,
        events={
            "response.web_search_call.in_progress": PLACE,
            "response.web_search_call.searching": PLACE,
            "response.web_search_call.completed": PLACE,
        },
        order="web_search_call.in_progress web_search_call.searching web_search_call.completed",
        tools={
            "web_search": _TOOL,
            "web_search_2025_08_26": _TOOL,
            "web_search_preview": _PREVIEW,
            "web_search_preview_2025_03_11": _PREVIEW,
        },
        instead="Offer a function that searches, or an MCP server that does.",
    ),
)
