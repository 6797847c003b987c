"""File searches: the model asks, and this server looks in the vector stores of the request.

What the model was shown is the private half of the item: the item itself says only which queries there were.
A search that another server made is told as far as its item says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from server.items.item_type import Call, Execution, Item, ItemType, Scene, Tool
from server.items.parts import PLACE, SEARCHING, identifier, item_shape, read_arguments
from server.items.private_half import Private, private_of
from server.items.sources import Source, Sources
from server.items.transcript import Transcript
from server.shapes import (
    STRING,
    Shape,
    array,
    check_range,
    described,
    exactly,
    mapping,
    number,
    one_of,
    record,
    refuse,
    schema_of,
    whole,
)
from server.vector_stores import FILTER, SEARCH_FILES
from tools import Registry, ToolResult, execute

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

MAX_STORES = 32
MAX_QUERIES, MAX_QUERY = 4, 400
FOUND = 8
"""Results of a search where the request does not say how many: some 6000 tokens."""


def _share(value: Any, path: str) -> Any:
    check_range(path, number(value, path), "decimal", 0, 1)
    return value


def _weight(value: Any, path: str) -> Any:
    check_range(path, number(value, path), "decimal", 0, None)
    return value


_SHARE: Shape = described(_share, lambda: {"type": "number", "minimum": 0, "maximum": 1})
_WEIGHT: Shape = described(_weight, lambda: {"type": "number", "minimum": 0})
_WEIGHTS = record({"embedding_weight": _WEIGHT, "text_weight": _WEIGHT})


def _mix(value: Any, path: str) -> Any:
    weights = _WEIGHTS(value, path)
    if not (weights["embedding_weight"] or weights["text_weight"]):
        refuse(path, f"Invalid '{path}': one of the two weights must be greater than 0.")
    return weights


_TOOL = exactly(
    {"vector_store_ids": array(identifier, 1, MAX_STORES)},
    {
        "max_num_results": whole(1, 50),
        "ranking_options": record(
            {},
            {
                "ranker": one_of("auto", "default-2024-11-15"),
                "score_threshold": _SHARE,
                "hybrid_search": described(_mix, lambda: schema_of(_WEIGHTS)),
            },
        ),
        "filters": FILTER,
    },
    "type",
)


def _lacks(_tool: Tool, registry: Registry) -> str | None:
    return None if SEARCH_FILES in registry else "this server has no vector stores"


def _offers(_tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    text = {"type": "string", "minLength": 1}
    others = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_QUERIES - 1}
    return [
        {
            "type": "function",
            "name": "file_search",
            "description": (
                "Search the user's files. Results are numbered sources: passages of the files, quoted. In "
                "the answer, write 【n】 behind what comes from source n."
            ),
            "parameters": {
                "type": "object",
                # A small model writes one text with ease, and loses itself in lists.
                "properties": {"query": text, "other_queries": others},
                "required": ["query"],
                "additionalProperties": False,
            },
            "strict": True,
        }
    ]


# ------------------------------------------------------------------------------------------------------------
# Calls


def _opened(_name: str, _call_id: str, arguments: str) -> Item:
    # `queries` is what the hosted tool calls them, and what models may write that were trained on it.
    read = read_arguments(arguments, mapping, ("query", "other_queries", "queries")) or {}
    texts = [text for asked in read.values() for text in (asked if isinstance(asked, list) else [asked])]
    # JSON can write halves of surrogate pairs, which are no characters.
    said = [text.encode("utf-8", "replace").decode().strip() for text in texts if isinstance(text, str)]
    return {"queries": [text[:MAX_QUERY] for text in said if text][:MAX_QUERIES], "results": None}


async def _run(item: Item, registry: Registry, scene: Scene) -> ToolResult:
    tool = next((tool for tool in scene.tools if tool["type"] == "file_search"), None)
    if tool is None or SEARCH_FILES not in registry:
        return ToolResult(error="Files cannot be searched here any more.")
    if not item["queries"]:
        return ToolResult(error=f"Give one to {MAX_QUERIES} queries.")
    asked = {
        "owner": scene.owner,
        "vector_store_ids": tool["vector_store_ids"],
        "queries": item["queries"],
        "most": tool.get("max_num_results", FOUND),
        "options": tool.get("ranking_options", {}),
        **({"filters": tool["filters"]} if "filters" in tool else {}),
    }
    answer = await execute(registry[SEARCH_FILES], json.dumps(asked))
    if answer.output is None:
        return answer
    hits = json.loads(answer.output)
    sources = Sources(scene.items)
    numbered = [(_source(hit, sources), hit) for hit in hits]
    shown = "\n\n".join(_quoted(source, hit) for source, hit in numbered)
    kept = {
        "sources": [_told(source) for source, _ in numbered],
        "results": [_result(hit) for hit in hits],
        "vector_store_ids": tool["vector_store_ids"],
    }
    return ToolResult(output=shown or "Nothing was found.", kept=kept)


def _source(hit: Mapping[str, Any], sources: Sources) -> Source:
    """The source that a passage is: the same one whenever the same chunks of the same store are found."""
    place = f"{hit['file_id']}@{hit['key']}#{hit['first']}-{hit['last']}"
    return sources.of(place, hit["filename"], hit["file_id"])


def _quoted(source: Source, hit: Mapping[str, Any]) -> str:
    """A passage as the model is shown it: quoted, so that what it says is no instruction. Where it is on
    several pages, each page's part stands behind a line that names the page, as in a file of a message; no
    document can write such a line, because it is outside of the quotes."""
    text, page, breaks = hit["text"], hit["page"], hit["breaks"]
    head = f"【{source.number}】 {source.title}"
    if not breaks:
        return "\n".join([head if page is None else f"{head}, page {page}", *_quotes(text)])
    pages = [page, *(other for _, other in breaks)]
    starts = [0, *(at for at, _ in breaks)]
    lines = [f"{head}, pages {min(pages)}-{max(pages)}"]
    for page, (start, end) in zip(pages, pairwise([*starts, len(text)]), strict=True):
        if part := text[start:end].strip():
            lines += [f"[page {page}]", *_quotes(part)]
    return "\n".join(lines)


def _quotes(text: str) -> Iterator[str]:
    return (f"> {line}".rstrip() for line in text.strip().split("\n"))


def _told(source: Source) -> Item:
    return {"number": source.number, "url": source.url, "title": source.title, "file_id": source.file_id}


def _result(hit: Mapping[str, Any]) -> Item:
    return {name: hit[name] for name in ("file_id", "filename", "text", "score", "attributes")}


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "failed"
    return "response.file_search_call.completed" if result.error is None else None


def _keeps(_item: Item, result: ToolResult) -> Private:
    shown = result.output if result.error is None else f"error: {result.error}"
    return {"output": shown, **(result.kept or {})}


def _repeatable(_item: Item, _registry: Registry) -> bool:
    return True  # it only reads


def _counts(result: ToolResult) -> tuple[str, str]:
    """Searches are counted under the first of their stores."""
    return "file_search_calls", (result.kept or {}).get("vector_store_ids", [""])[0]


# ------------------------------------------------------------------------------------------------------------
# Prompts, and what `include` adds

_HIT = {"file_id": STRING, "text": STRING, "filename": STRING, "attributes": mapping, "score": number}


def _say(item: Item, transcript: Transcript) -> None:
    first, *others = item["queries"] or [""]
    said = {"query": first, **({"other_queries": others} if others else {})}
    transcript.call(item["id"], "file_search", json.dumps(said, ensure_ascii=False))
    private = private_of(item)
    transcript.answer(item["id"], _found(item) if private is None else private["output"])


def _found(item: Item) -> str:
    """What is known of a search that another server made."""
    if item.get("status") == "failed":
        return "The search failed."
    results = item.get("results")
    if results is None:
        return "The search was made; its results were not kept."
    hits = (
        f"{hit.get('filename') or hit.get('file_id') or 'file'}:\n{hit.get('text', '')}" for hit in results
    )
    return "\n\n".join(hits) or "Nothing was found."


def _with_results(item: Item, private: Private) -> None:
    item["results"] = [dict(result) for result in private.get("results", ())]


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
        # There is no event for a search that failed: the item's own end says it.
        order="file_search_call.in_progress (file_search_call.searching file_search_call.completed?)?",
        tools={"file_search": _TOOL},
        call=Call(
            _opened,
            opens=("response.file_search_call.in_progress",),
            offers=_offers,
            lacks=_lacks,
            stores=lambda tool: tool["vector_store_ids"],
            execution=Execution(
                "searching",
                _run,
                _finish,
                _repeatable,
                starts=("response.file_search_call.searching",),
                keeps=_keeps,
                broken="failed",
                counts=_counts,
            ),
        ),
        includes={"file_search_call.results": _with_results},
        instead="Offer a function that searches your files, or an MCP server that does.",
    ),
)
