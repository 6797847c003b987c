"""The two tools of the web, as the registry has them. They take and return JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from tools.egress import Egress
from tools.spec import ToolSpec
from tools.web.folder import Folder
from tools.web.mcp_search import McpSearch
from tools.web.pages import Reading, WebPages, require_seen
from tools.web.providers import Query
from tools.web.search import Searching, search_all
from tools.web.urls import domain_of

SEARCH, PAGE = "web.search", "web.page"
"""Their names. No function can have these, and no model is shown them."""

OFFERED_BY = "web_search"

_TEXT: Mapping[str, Any] = {"type": "string"}
_TEXTS: Mapping[str, Any] = {"type": "array", "items": _TEXT}


def web_tools(web: Searching, egress: Egress, open: Literal["seen", "any"] = "seen") -> dict[str, ToolSpec]:
    """The tools of the web. egress: which pages may be reached; where none may, none is opened. open: whether
    only URLs are opened that were seen before."""
    reading = WebPages(egress) if egress.mode != "off" or egress.allow else None
    tools = _tools(web, reading, open)
    if isinstance(web, McpSearch):
        tools[SEARCH] = replace(tools[SEARCH], close=web.close)
    return tools


def folder_tools(folder: Folder) -> dict[str, ToolSpec]:
    """The same tools over a folder of documents."""
    return _tools(folder, folder, "seen")


def _tools(web: Searching, reading: Reading | None, open: Literal["seen", "any"]) -> dict[str, ToolSpec]:
    async def search(
        queries: list[str], count: int, domains: list[str], blocked: list[str], country: str | None = None
    ) -> str:
        asked = [Query(text, count, _bare(domains), country, _bare(blocked)) for text in queries]
        found, failed = await search_all(web, asked, count)
        return _json({"results": [asdict(hit) for hit in found], "failed": failed})

    async def page(url: str, domains: list[str], blocked: list[str], seen: list[str], owner: str = "") -> str:
        assert reading is not None
        if open == "seen":
            require_seen(url, frozenset(seen))
        return _json(asdict(await reading.page(url, _bare(domains), _bare(blocked), owner)))

    specs = [
        ToolSpec(
            SEARCH,
            "Searches the web.",
            _object(queries=_TEXTS, count={"type": "integer"}, domains=_TEXTS, blocked=_TEXTS, country=_TEXT),
            search,
        )
    ]
    if reading is not None:
        specs.append(
            ToolSpec(
                PAGE,
                "Reads a page of the web.",
                _object(url=_TEXT, domains=_TEXTS, blocked=_TEXTS, seen=_TEXTS, owner=_TEXT),
                page,
            )
        )
    return {spec.name: _hosted(spec) for spec in specs}


def _bare(domains: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(domain_of, domains))


def _hosted(spec: ToolSpec) -> ToolSpec:
    return ToolSpec(
        spec.name,
        spec.description,
        spec.parameters,
        spec.run,
        offered_by=OFFERED_BY,
        idempotent=True,
        strict=False,
    )


def _object(**properties: Any) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
