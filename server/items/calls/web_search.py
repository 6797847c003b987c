"""Web searches: the model searches, opens pages and looks for words in them, and this server does it.

What the model was shown of a search or a page is the private half of its item: the item itself says only
which queries there were, or which URL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from server.ignored import ignore
from server.items.item_type import Call, Execution, Item, ItemType, Scene, Tool
from server.items.parts import PLACE, SEARCHING, item_shape
from server.items.private_half import Private, private_of
from server.items.sources import Source, Sources
from server.items.transcript import Transcript, text_of
from server.shapes import (
    STRING,
    array,
    boolean,
    described,
    exactly,
    mapping,
    one_of,
    record,
    refuse,
    schema_of,
    shorten,
    tagged,
    whole,
)
from tools import PAGE, SEARCH, Registry, ToolResult, execute, is_within, urls_in

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

_DOMAIN = re.compile(r"\.?[\w-]+(\.[\w-]+)*\.?")


def _domain(value: Any, path: str) -> str:
    """A text that is the name of a host. What stands around it in a URL would be dropped, and a filter that
    means less than it says be wider than its client wants."""
    text: str = STRING(value, path)
    if not _DOMAIN.fullmatch(text):
        refuse(
            path,
            f"Invalid '{path}': {shorten(text)!r} is no domain. A domain is a host's name without scheme, "
            "port and path, such as 'example.org', and stands for those below it too.",
        )
    return text


described(_domain, lambda: schema_of(STRING))

_DOMAINS = array(_domain, max_items=100)  # as the hosted service has it; each is compared with each result

_LOCATION = record(
    {}, {"country": STRING, "region": STRING, "city": STRING, "timezone": STRING}, type="approximate"
)
_CONTEXT_SIZE = one_of("low", "medium", "high")


def _unused(value: Any, path: str) -> Any:
    """What official clients send that changes nothing here: a reply names it."""
    ignore(path)
    return value


described(_unused, dict)

_MEMBERS = {
    "filters": exactly({}, {"allowed_domains": _DOMAINS, "blocked_domains": _DOMAINS}),
    "user_location": _LOCATION,
    "search_context_size": _CONTEXT_SIZE,
    "search_content_types": _unused,
    "image_settings": _unused,
}
_TOOL = exactly({}, {"external_web_access": boolean, **_MEMBERS}, "type")
_PREVIEW = exactly({}, _MEMBERS, "type")
_TOOLS = {
    "web_search": _TOOL,
    "web_search_2025_08_26": _TOOL,
    "web_search_preview": _PREVIEW,
    "web_search_preview_2025_03_11": _PREVIEW,
}

_RESULTS = {"low": 4, "medium": 8, "high": 12}
"""Results of a search, all its queries together, by the size of the context."""
_LINES = {"low": 20, "medium": 40, "high": 80}
"""Lines of a page that are shown at once, by the size of the context."""
MAX_QUERIES, MAX_QUERY, MAX_PATTERN, MAX_URL, MAX_PART = 4, 400, 200, 2000, 100_000
MAX_FOUND = 20
"""Lines with a pattern that are shown."""


def _declines(tool: Tool) -> bool:
    """Whether only what is kept of the web may be searched: Codex says so by default, and does without."""
    return tool.get("external_web_access") is False


def _lacks(tool: Tool, registry: Registry) -> str | None:
    if _declines(tool):
        return "it has external_web_access=false, and this server keeps no copy of the web to search instead"
    if SEARCH not in registry:
        return "no search provider is configured: the operator gives one in the table [web] of antiphon.toml"
    return None


def _offers(tool: Tool, registry: Registry, _path: str) -> Sequence[Tool]:
    functions = [
        _function(
            "web_search",
            f"Search the web. Results are numbered sources.{_whereabouts(tool)} {_CITE}",
            ["queries"],
            queries={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_QUERIES},
        )
    ]
    if PAGE in registry:
        functions += [
            _function(
                "open_page",
                "Read a page of the web: the source with the number ref, or a url. Long pages are shown in"
                f" parts, by the number page. {_CITE}",
                [],
                ref={"type": "integer"},
                url={"type": "string"},
                page={"type": "integer"},
            ),
            _function(
                "find_in_page",
                f"Find the lines of a page, given by ref or url, that have a text. {_CITE}",
                ["pattern"],
                ref={"type": "integer"},
                url={"type": "string"},
                pattern={"type": "string"},
            ),
        ]
    return functions


_CITE = "In the answer, write 【n】 behind what comes from source n."


def _function(name: str, description: str, required: Sequence[str], **properties: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }
    told = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", **told}


def _whereabouts(tool: Tool) -> str:
    place = tool.get("user_location") or {}
    parts = [place[name] for name in ("city", "region", "country") if place.get(name)]
    where = f" The user is in {', '.join(parts)}." if parts else ""
    zone = place.get("timezone")
    return f"{where} The user's time zone is {zone}." if zone else where


# ------------------------------------------------------------------------------------------------------------
# Calls

_NOWHERE = "about:invalid"
"""The URL of a page that is to be searched where the model names none; the official item must have one."""

_NUMBERED = re.compile(r"source:(\d{1,4})")
"""What stands for the URL of a source that only its number is known of."""


def _opened(name: str, _call_id: str, arguments: str) -> Item:
    said = _read(arguments)
    if name == "open_page":
        return {"action": {"type": "open_page", "url": _page_url(said), **_part(said)}}
    if name == "find_in_page":
        pattern = _text(said.get("pattern"), MAX_PATTERN)
        return {"action": {"type": "find_in_page", "url": _page_url(said) or _NOWHERE, "pattern": pattern}}
    asked = said.get("queries")
    texts = asked if isinstance(asked, list) else [asked]
    queries = [query for text in texts if (query := _text(text, MAX_QUERY))]
    action: Item = {"type": "search", "queries": queries[:MAX_QUERIES]}
    return {"action": {**action, "query": queries[0]} if queries else action}


def _part(said: Mapping[str, Any]) -> Item:
    """Which part of a long page is meant, where it is not the first."""
    page = said.get("page")
    return {"page": min(page, MAX_PART)} if _is_number(page) and page > 1 else {}


def _refers(item: Item, arguments: str, sources: Sources) -> None:
    """Put a source's URL in the place of its number."""
    action, number = item["action"], _read(arguments).get("ref")
    source = sources.get(number) if _is_number(number) else None
    if source is not None and action["type"] != "search" and not _is_url(action["url"]):
        item["action"] = {**action, "url": source.url}


def _read(arguments: str) -> Mapping[str, Any]:
    try:
        said = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _page_url(said: Mapping[str, Any]) -> str | None:
    """The URL of a page that is meant; one that says a source's number, where only that is given."""
    number = said.get("ref")
    numbered = f"source:{number}" if _is_number(number) else ""
    return _url(said) or (numbered if _NUMBERED.fullmatch(numbered) else None)


def _is_url(url: str | None) -> bool:
    return url not in (None, _NOWHERE) and not _NUMBERED.fullmatch(url or "")


def _url(said: Mapping[str, Any]) -> str | None:
    url = _text(said.get("url"), MAX_URL)
    return None if not url else url if "://" in url else f"https://{url}"


def _text(value: Any, most: int) -> str:
    """A text among the arguments; empty where there is none. JSON can write halves of surrogate pairs, which
    are no characters."""
    text = value.encode("utf-8", "replace").decode().strip() if isinstance(value, str) else ""
    return text[:most]


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


async def _run(item: Item, registry: Registry, scene: Scene) -> ToolResult:
    tool = next((tool for tool in scene.tools if tool["type"] in _TOOLS), {})
    sources, action = Sources(scene.items), item["action"]
    needed = SEARCH if action["type"] == "search" else PAGE
    if needed not in registry:
        return ToolResult(error="The web cannot be searched here any more.")
    if action["type"] == "search":
        return await _search(action, tool, registry, sources)
    if not _is_url(action["url"]):
        return ToolResult(error="There is no such source: give the number of one, or a url.")
    page, fault = await _page(action["url"], tool, registry, scene, sources)
    if page is None:
        return ToolResult(error=fault)
    source = sources.of(page["url"], page["title"])
    lines = _LINES[tool.get("search_context_size") or "medium"]
    shown = (
        _part_of(page, source, action.get("page", 1), lines)
        if action["type"] == "open_page"
        else _found_in(page, source, action["pattern"])
    )
    kept: Item = {"sources": [_told(source)]}
    if page not in _pages(scene):
        kept["page"] = page
    return shown if shown.output is None else ToolResult(output=shown.output, kept=kept)


async def _search(action: Item, tool: Tool, registry: Registry, sources: Sources) -> ToolResult:
    if not action["queries"]:
        return ToolResult(error=f"Give one to {MAX_QUERIES} queries.")
    asked = {
        "queries": action["queries"],
        "count": _RESULTS[tool.get("search_context_size") or "medium"],
        "domains": _domains(tool),
        "blocked": _blocked(tool),
    }
    country = (tool.get("user_location") or {}).get("country") or ""
    if re.fullmatch("[A-Za-z]{2}", country):
        asked["country"] = country
    answer = await execute(registry[SEARCH], json.dumps(asked))
    if answer.output is None:
        return answer
    answered = json.loads(answer.output)
    results = answered["results"]
    numbered = [(sources.of(found["url"], found["title"]), found) for found in results]
    shown = [f"【{s.number}】 {s.title}\n{s.url}\n{found['snippet']}".strip() for s, found in numbered]
    kept = {"sources": [_told(source) for source, _ in numbered], "results": results}
    failed = [f"[not searched: {query!r}, because {why}]" for query, why in answered["failed"].items()]
    return ToolResult(output="\n\n".join([*(shown or ["Nothing was found."]), *failed]), kept=kept)


async def _page(
    url: str, tool: Tool, registry: Registry, scene: Scene, sources: Sources
) -> tuple[Private | None, str | None]:
    """A page as it was read before in this conversation, or else as it is now; or why it cannot be read."""
    pages = _pages(scene)
    known = next((page for page in pages if url in (page["url"], page["asked"])), None)
    # The filters are this request's; the page may have been read without them.
    if known is not None and is_within(known["url"], _domains(tool), _blocked(tool)):
        return known, None
    asked = {
        "url": url,
        "domains": _domains(tool),
        "blocked": _blocked(tool),
        "seen": sorted(_seen(scene, sources, pages)),
        "owner": scene.owner,
    }
    answer = await execute(registry[PAGE], json.dumps(asked))
    if answer.output is None:
        return None, answer.error
    return {**json.loads(answer.output), "asked": url}, None


def _pages(scene: Scene) -> list[Private]:
    """The pages that were read in this conversation."""
    return [page for item in scene.items if (page := (private_of(item) or {}).get("page"))]


def _seen(scene: Scene, sources: Sources, pages: Sequence[Private]) -> set[str]:
    """The URLs that may be opened: of sources, in what the user and the instructions say, on opened pages."""
    told = [scene.instructions or "", *sources.urls(), *(page["text"] for page in pages)]
    for item in scene.items:
        if item["type"] == "message" and item["role"] != "assistant":
            told.append(text_of(item["content"]))
    return {url for text in told for url in urls_in(text)}


def _domains(tool: Tool) -> list[str]:
    return [*((tool.get("filters") or {}).get("allowed_domains") or ())]


def _blocked(tool: Tool) -> list[str]:
    return [*((tool.get("filters") or {}).get("blocked_domains") or ())]


def _part_of(page: Private, source: Source, part: int, size: int) -> ToolResult:
    lines = page["text"].split("\n")
    parts = -(-len(lines) // size)
    if part > parts:
        return ToolResult(error=f"The page has {parts} parts.")
    first = (part - 1) * size
    shown = [f"{number}: {line}" for number, line in enumerate(lines[first : first + size], first + 1)]
    place = f"Part {part} of {parts}" if parts > 1 else "The whole page"
    return ToolResult(
        output="\n".join([f"【{source.number}】 {source.title}", source.url, f"{place}:", *shown])
    )


def _found_in(page: Private, source: Source, pattern: str) -> ToolResult:
    if not pattern:
        return ToolResult(error="Give a pattern: the text that is to be found.")
    wanted = pattern.casefold()
    lines = enumerate(page["text"].split("\n"), 1)
    found = [f"{number}: {line}" for number, line in lines if wanted in line.casefold()]
    more = [f"and {len(found) - MAX_FOUND} lines more"] if len(found) > MAX_FOUND else []
    counted = "1 line has" if len(found) == 1 else f"{len(found)} lines have"
    head = f"【{source.number}】 {source.title}\n{source.url}\n{counted} {pattern!r}"
    return ToolResult(output="\n".join([f"{head}{':' if found else '.'}", *found[:MAX_FOUND], *more]))


def _told(source: Source) -> Item:
    return {"number": source.number, "url": source.url, "title": source.title}


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "failed"
    return "response.web_search_call.completed" if result.error is None else None


def _keeps(_item: Item, result: ToolResult) -> Private:
    shown = result.output if result.error is None else f"error: {result.error}"
    return {"output": shown, **(result.kept or {})}


def _repeatable(_item: Item, _registry: Registry) -> bool:
    return True  # it only reads


# ------------------------------------------------------------------------------------------------------------
# Prompts, and what `include` adds

_NAMES = {"search": "web_search", "open_page": "open_page", "find_in_page": "find_in_page"}


def _say(item: Item, transcript: Transcript) -> None:
    private, action = private_of(item), item["action"]
    assert private is not None, "one without a private half is left out"
    said = {name: action[name] for name in ("queries", "url", "pattern", "page") if action.get(name)}
    if "url" in said and not _is_url(said["url"]):  # it is told as the model wrote it
        numbered = _NUMBERED.fullmatch(said.pop("url"))
        said = {"ref": int(numbered[1]), **said} if numbered else said
    transcript.call(item["id"], _NAMES[action["type"]], json.dumps(said, ensure_ascii=False))
    transcript.answer(item["id"], private["output"])


def _with_sources(item: Item, private: Private) -> None:
    if item["action"]["type"] == "search":
        sources = [{"type": "url", "url": source["url"]} for source in private.get("sources", ())]
        item["action"] = {**item["action"], "sources": sources}


def _with_results(item: Item, private: Private) -> None:
    if item["action"]["type"] == "search":
        item["results"] = [dict(result) for result in private.get("results", ())]


_SEARCHED = record(
    {},
    {"query": STRING, "queries": array(STRING), "sources": array(tagged({"url": record({"url": STRING})}))},
)
_ACTION = tagged(
    {
        "search": _SEARCHED,
        "open_page": record({}, {"url": STRING, "page": whole(1)}),
        "find_in_page": record({"url": STRING, "pattern": STRING}),
    }
)

ROWS = (
    ItemType(
        "web_search_call",
        "ws_",
        item_shape(
            {"action": _ACTION}, {"results": array(mapping)}, statuses=SEARCHING, action={"type": "search"}
        ),
        _say,
        events={
            "response.web_search_call.in_progress": PLACE,
            "response.web_search_call.searching": PLACE,
            "response.web_search_call.completed": PLACE,
        },
        # There is no event for a search that failed: the item's own end says it.
        order=("web_search_call.in_progress (web_search_call.searching web_search_call.completed?)?"),
        tools=_TOOLS,
        call=Call(
            _opened,
            opens=("response.web_search_call.in_progress",),
            offers=_offers,
            lacks=_lacks,
            declines=_declines,
            refers=_refers,
            execution=Execution(
                "searching",
                _run,
                _finish,
                _repeatable,
                starts=("response.web_search_call.searching",),
                keeps=_keeps,
                broken="failed",
            ),
        ),
        told_privately=True,
        includes={
            "web_search_call.action.sources": _with_sources,
            "web_search_call.results": _with_results,
        },
        instead="Offer a function that searches, or an MCP server that does.",
    ),
)
