"""Asks a tool of an MCP server for results, and reads what it answers: nobody has agreed on either form.

The tool's own schema says which of its arguments take the text, the number of results and the domains.
Results are read out of JSON, wherever in it objects with URLs stand, and else out of text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.egress import Egress
from tools.mcp import ConnectionPool, Connections, McpServer
from tools.web.providers import Query
from tools.web.search import Hit, SearchFailed, hit_of

PREFIX = "mcp:"
"""What the names of such providers begin with: `mcp:NAME/TOOL`."""

_NAME = re.compile(r"mcp:([A-Za-z0-9][A-Za-z0-9_-]{0,63})/(.{1,128})")

_TEXT = (
    "query",
    "q",
    "search_query",
    "search_term",
    "search",
    "keywords",
    "term",
    "question",
    "text",
    "input",
)
_QUERIES = ("queries", "search_queries")
_COUNT = (
    "count",
    "max_results",
    "num_results",
    "numResults",
    "maxResults",
    "limit",
    "top_k",
    "k",
    "n",
    "size",
)
_DOMAINS = ("include_domains", "includeDomains", "allowed_domains", "domains", "sites")
_COUNTRY = ("country", "country_code")
"""Names of arguments, the likeliest first."""

_LINK = ("url", "link", "href", "uri")
_TITLE = ("title", "name", "headline")
_SNIPPET = ("snippet", "description", "content", "text", "summary", "body", "abstract", "highlights")
"""Names of a result's members, likewise."""

MAX_DEPTH = 6
"""Of JSON in which results are looked for."""

_SPACE = re.compile(r"\s*")
_URL = re.compile(r"https?://[^\s<>\"')\]]+")
_MARKDOWN = re.compile(r"\[([^\[\]\n]{1,300})\]\((https?://[^\s)]{1,2000})\)")
_FIELD = re.compile(
    r"^\W*(title|url|link|source|description|snippet|content|text|summary)\W*:\W*", re.IGNORECASE
)

SEARCHES = "web search"
"""For whom connections are kept: no owner, because a search is nobody's."""


def read_name(provider: str) -> tuple[str, str] | None:
    """Server and tool of a provider that is a tool of an MCP server; None for another name."""
    found = _NAME.fullmatch(provider)
    return None if found is None else (found[1], found[2])


@dataclass(eq=False)
class McpSearch:
    """A tool of an MCP server as search provider. provider: its name, `mcp:NAME/TOOL`. It connects when it is
    first asked, and `close` ends its connections."""

    provider: str
    server: McpServer
    tool: str
    _pool: ConnectionPool = field(init=False, repr=False, default_factory=lambda: ConnectionPool(Egress()))
    _schema: Mapping[str, Any] | None = field(init=False, repr=False, default=None)
    _asking: asyncio.Lock = field(init=False, repr=False, default_factory=asyncio.Lock)

    @property
    def address(self) -> str:
        """Where it is asked: a URL, or a program."""
        return self.server.url or " ".join(self.server.command)

    async def find(self, query: Query) -> Sequence[Hit]:
        """The results of a query, the best first. Raises SearchFailed."""
        connections = Connections(self._pool, SEARCHES)
        try:
            schema = await self._known(connections)
            arguments = json.dumps(asked(schema, query))
            answer = await connections.call("search", self.server, self.tool, schema, arguments, "web_search")
        finally:
            connections.close()
        if answer.output is None:
            self._schema = None  # the tool may have become another one
            raise SearchFailed(f"The search provider failed: {answer.error}")
        return hits_in(answer.output)

    async def close(self) -> None:
        """End the connections that wait for the next search."""
        await self._pool.close()

    async def _known(self, connections: Connections) -> Mapping[str, Any]:
        """The schema of the tool's arguments, which the server is asked for once."""
        async with self._asking:
            if self._schema is None:
                listing = await connections.list_tools("search", self.server)
                if listing.error is not None:
                    raise SearchFailed(listing.error)
                schemas = {tool.name: tool.input_schema for tool in listing.tools}
                if self.tool not in schemas:
                    there = ", ".join(sorted(schemas)) or "none"
                    hint = f"its tools are: {there}"
                    raise SearchFailed(f"The MCP server has no tool {self.tool!r}.", hint)
                self._schema = schemas[self.tool]
            return self._schema


def asked(schema: Mapping[str, Any], query: Query) -> dict[str, Any]:
    """The arguments that a tool with this schema takes for a query. Domains that it has no argument for are
    put into the words of the query. Raises SearchFailed where it has none for these."""
    properties = schema.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, dict) else {}

    def named(*names: str, kind: str) -> str | None:
        return next((name for name in names if name in known and _takes(known[name], kind)), None)

    domains = named(*_DOMAINS, kind="array")
    words = query.text if domains else query.with_sites()
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    found: dict[str, Any] = {}
    if (text := named(*_TEXT, *required, kind="string")) is not None:
        found[text] = words
    elif (texts := named(*_QUERIES, *required, kind="array")) is not None:
        found[texts] = [words]
    else:
        raise SearchFailed("The search provider's tool has no argument for a text to search for.")
    if (count := named(*_COUNT, kind="integer")) is not None:
        most = known[count].get("maximum")
        found[count] = query.count if not isinstance(most, int) else min(query.count, most)
    if domains is not None and query.domains:
        found[domains] = [*query.domains]
    if (country := named(*_COUNTRY, kind="string")) is not None and query.country is not None:
        found[country] = query.country.upper()
    return found


def _takes(schema: Any, kind: str) -> bool:
    """Whether a schema lets values of a type in, as far as its first words say."""
    if not isinstance(schema, dict):
        return False
    kinds = {"integer", "number"} if kind == "integer" else {kind}
    choices = [schema, *(each for each in schema.get("anyOf") or () if isinstance(each, dict))]
    said = [each.get("type") for each in choices if "type" in each]
    types = {name for each in said for name in (each if isinstance(each, list) else [each])}
    return not said or bool(kinds & types)


# ------------------------------------------------------------------------------------------------------------
# Answers


def hits_in(answer: str) -> list[Hit]:
    """The results in what a tool said, as JSON or as text."""
    values, whole = _values(answer)
    found = [hit for value in values for hit in _hits(value, 0)]
    return found if found or whole else _hits_in_text(answer)


def _values(answer: str) -> tuple[list[Any], bool]:
    """The JSON values at the beginning of an answer, one behind the other, and whether that is all of it."""
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while (at := _SPACE.match(answer, at).end()) < len(answer):  # type: ignore[union-attr]
        try:
            value, at = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            return values, False
        values.append(value)
    return values, True


def _hits(value: Any, depth: int) -> Iterator[Hit]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, list):
        for each in value:
            yield from _hits(each, depth + 1)
    elif isinstance(value, dict):
        link = _member(value, _LINK)
        hit = None if link is None else hit_of(link, _member(value, _TITLE), _member(value, _SNIPPET))
        if hit is not None:
            yield hit
            return
        for each in value.values():
            yield from _hits(each, depth + 1)


def _member(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    for name in names:
        said = value.get(name)
        if isinstance(said, list) and said and all(isinstance(each, str) for each in said):
            said = " ".join(said)
        if isinstance(said, str) and said.strip():
            return said
    return None


def _hits_in_text(answer: str) -> list[Hit]:
    """Results in text: links of Markdown, or paragraphs with a URL each."""
    found: list[Hit] = []
    for block in re.split(r"\n\s*\n", answer):
        linked = _MARKDOWN.search(block)
        url = linked[2] if linked is not None else next(iter(_URL.findall(block)), None)
        if url is None:
            continue
        lines = [line for line in block.splitlines() if line.strip()]
        title = linked[1] if linked is not None else ""
        rest = []
        for line in lines:
            named = _FIELD.match(line)
            said = line[named.end() :] if named is not None else line
            if url in line:
                continue
            if not title:
                title = said
            else:
                rest.append(said)
        hit = hit_of(url.rstrip(".,;"), title, " ".join(rest))
        found += [] if hit is None else [hit]
    return found
