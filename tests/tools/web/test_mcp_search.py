"""Tools of MCP servers as search providers: what they are asked, and what is read out of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.mcp_servers import serving
from tests.support.wire import Json
from tools import McpSearch, McpServer, SearchFailed
from tools.web.mcp_search import asked, hits_in
from tools.web.providers import Query
from tools.web.search import Hit

QUERY = Query("spring tide", 8, ("bay.example", "sea.example"), "de")
PAGES = [
    {"title": "Tides", "url": "https://bay.example/tides", "snippet": "The <b>spring</b> tide."},
    {"title": "Moon", "url": "https://sea.example/moon", "snippet": "Full."},
]
HITS = [
    Hit("https://bay.example/tides", "Tides", "The spring tide."),
    Hit("https://sea.example/moon", "Moon", "Full."),
]


def schema(*required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*required]}


TEXT, NUMBER, TEXTS = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}
SITES = "spring tide (site:bay.example OR site:sea.example)"


@pytest.mark.parametrize(
    ("known", "sent"),
    [
        (schema("query", query=TEXT), {"query": SITES}),
        (
            schema("q", q=TEXT, max_results={**NUMBER, "maximum": 5}, include_domains=TEXTS, country=TEXT),
            {"q": "spring tide", "max_results": 5, "include_domains": [*QUERY.domains], "country": "DE"},
        ),
        (
            schema("queries", queries=TEXTS, limit={"type": ["integer", "null"]}),
            {"queries": [SITES], "limit": 8},
        ),
        (schema("wanted", wanted={"anyOf": [TEXT, {"type": "null"}]}), {"wanted": SITES}),
        (schema(query={}), {"query": SITES}),
    ],
)
def test_the_schema_says_how_a_tool_is_asked(known: Json, sent: Json) -> None:
    assert asked(known, QUERY) == sent


@pytest.mark.parametrize("known", [{}, schema(), schema("id", id=NUMBER), {"properties": 3}])
def test_a_tool_that_takes_no_text_is_no_search(known: Json) -> None:
    with pytest.raises(SearchFailed, match="no argument for a text"):
        asked(known, QUERY)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param(json.dumps(PAGES), HITS, id="a list"),
        pytest.param(json.dumps({"web": {"results": PAGES}, "query": "x"}), HITS, id="a list within"),
        pytest.param("\n".join(map(json.dumps, PAGES)), HITS, id="one behind the other"),
        pytest.param(
            json.dumps([{"name": "Tides", "link": PAGES[0]["url"], "description": ["The spring", "tide."]}]),
            HITS[:1],
            id="other names",
        ),
        pytest.param(
            "Title: Tides\nURL: https://bay.example/tides\nDescription: The spring tide.\n\n"
            "Title: Moon\nURL: https://sea.example/moon\nDescription: Full.",
            HITS,
            id="paragraphs",
        ),
        pytest.param(
            "1. [Tides](https://bay.example/tides)\nThe spring tide.\n\n2. [Moon](https://sea.example/moon)\nFull.",
            HITS,
            id="links of Markdown",
        ),
        pytest.param(
            "[1] Tides\nhttps://bay.example/tides.\nThe spring tide.",
            [Hit("https://bay.example/tides", "[1] Tides", "The spring tide.")],
            id="a number in front",
        ),
        pytest.param(json.dumps({"results": [], "help": "https://help.example"}), [], id="no result"),
        pytest.param("Nothing was found.", [], id="no result in words"),
        pytest.param(json.dumps([{"url": "file:///etc/passwd"}, {"url": 3}, "x", None]), [], id="no URLs"),
        pytest.param("[" * 100_000, [], id="brackets"),
        pytest.param("", [], id="nothing"),
    ],
)
def test_results_are_read_out_of_what_a_tool_says(answer: str, found: list[Hit]) -> None:
    assert hits_in(answer) == found


async def test_a_search_asks_for_the_schema_once_and_says_what_fails() -> None:
    server, asked_for = MCPServer("finder"), list[Any]()

    @server.tool()
    def search(query: str, count: int = 3) -> list[dict[str, str]]:
        """Search."""
        asked_for.append((query, count))
        if query == "bad":
            raise ValueError("no")
        return PAGES[:count]

    async with serving(server.streamable_http_app()) as url:
        known = McpServer("finder", url=f"{url}/mcp", guarded=False)
        web, other = McpSearch("mcp:finder/search", known, "search"), McpSearch("mcp:finder/x", known, "x")
        try:
            assert await web.find(Query("tide", 1)) == HITS[:1]
            assert await web.find(Query("tide", 8)) == HITS
            with pytest.raises(SearchFailed, match="failed"):
                await web.find(Query("bad", 1))
            assert await web.find(Query("tide", 1)) == HITS[:1], "it goes on"
            with pytest.raises(SearchFailed, match="no tool 'x'") as refused:
                await other.find(Query("tide", 1))
            assert refused.value.hint == "its tools are: search"
        finally:
            await web.close()
            await other.close()
    assert asked_for == [("tide", 1), ("tide", 8), ("bad", 1), ("tide", 1)]
    with pytest.raises(SearchFailed, match="could not be"):
        await McpSearch("mcp:finder/search", known, "search").find(Query("tide", 1))
