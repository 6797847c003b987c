"""Searches for tools: the model looks for functions that it has not been told of yet, and is offered them.

This server makes the search among the deferred functions of the request, or the client makes it wherever it
likes (`execution`). The outcome is an item of its own, `tool_search_output`: its tools can be called from
there on, in every response that has it in its past. Loaded tools are shown to the model as if the request had
just added them; what it read of the search names them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from server.ignored import ignore
from server.items.calls.function_tools import (
    CUSTOM,
    FUNCTION,
    NAMESPACE,
    as_flat,
    each_tool,
    flat_namespace,
    limit_tools,
    shown_name,
)
from server.items.calls.mcp import mcp_tool
from server.items.item_type import (
    Call,
    Deferred,
    Execution,
    Item,
    ItemType,
    Scene,
    Tool,
    flat_function,
)
from server.items.parts import identifier, item_shape
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import (
    STRING,
    array,
    described,
    mapping,
    missing,
    one_of,
    record,
    refuse,
    schema_of,
    tagged,
)
from tools import Registry, ToolResult, best_matches

NAME = "tool_search"
"""Of the function that the model calls."""

MOST_FOUND = 5
"""Functions that one search loads; the model may search again."""

MAX_ABOUT = 200
"""Characters of what the model is told of a deferred function, a namespace or a server before it searches."""

MAX_LOADED = 128
"""Tools in one output of a search: as many as a request may have."""

_EXECUTION = one_of("server", "client")
_QUERY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "Words for what the tool does, or its name."}},
    "required": ["query"],
    "additionalProperties": False,
}

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

_TOOL = record({}, {"execution": _EXECUTION, "description": STRING, "parameters": mapping})


def _tool(value: Any, path: str) -> Tool:
    tool: Tool = _TOOL(value, path)
    if not _is_clients(tool):
        for name in ("description", "parameters"):  # the search is this server's own
            if tool.get(name) is not None:
                ignore(f"{path}.{name}")
    return tool


described(_tool, lambda: schema_of(_TOOL))


def _is_clients(tool: Tool) -> bool:
    return tool.get("execution") == "client"


def _offers(tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    if not _is_clients(tool):
        return [flat_function(NAME, _ABOUT, _QUERY)]
    function = flat_function(NAME, tool.get("description") or _ABOUT, tool.get("parameters") or _QUERY)
    return [{**function, "strict": None}]  # where a grammar can say the client's schema


_ABOUT = "Find tools that cannot be called yet, and load them, so that they can."


def _searches(function: Tool, deferred: Sequence[Deferred]) -> Tool:
    """The function of a search, with the names of what can be found by it."""
    groups: dict[str, list[Deferred]] = {}
    for known in deferred:
        groups.setdefault(known.group, []).append(known)
    if not groups:
        return function
    lines = [function["description"], "There are:"]
    for name, members in groups.items():
        count = f" ({len(members)} tool{'s' * (len(members) > 1)})"
        number = "" if members[0].function["name"] == name else count
        about = " ".join((members[0].about or "").split())[:MAX_ABOUT]
        lines.append(f"- {name}{number}{f': {about}' if about else ''}")
    return {**function, "description": "\n".join(lines)}


def _fields(tool: Tool) -> Mapping[str, Any]:
    if _is_clients(tool):
        return {"execution": "client"}
    return {"execution": "server", "call_id": None}  # as in the official API


# ------------------------------------------------------------------------------------------------------------
# Calls


def _opened(_name: str, call_id: str, arguments: str) -> Item:
    return {"call_id": call_id, "arguments": _read(arguments)}


def _read(arguments: str) -> Mapping[str, Any]:
    """Arguments as an item can hold them. JSON can write what no item can: halves of surrogate pairs, which
    are no characters, and integers of any length."""
    try:
        written = json.dumps(json.loads(arguments), ensure_ascii=False).encode("utf-8", "replace")
        said = orjson.loads(written)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _is_ours(item: Item) -> bool:
    return item.get("execution") == "server"


async def _run(item: Item, _registry: Registry, scene: Scene) -> ToolResult:
    query = item["arguments"].get("query")
    texts = [(_named(known), _told(known)) for known in scene.deferred]
    asked = query if isinstance(query, str) else json.dumps(item["arguments"], ensure_ascii=False)
    found = await asyncio.to_thread(best_matches, asked, texts, MOST_FOUND)
    return ToolResult(output="", kept={"tools": _together(scene.deferred[index].tool for index in found)})


def _named(deferred: Deferred) -> str:
    """The names by which a function is found."""
    names = (deferred.group, deferred.function["name"])
    return " ".join(dict.fromkeys(names))


def _told(deferred: Deferred) -> str:
    """The words by which a function is found besides."""
    parameters = (deferred.function.get("parameters") or {}).get("properties")
    names = parameters.keys() if isinstance(parameters, dict) else ()
    about = (deferred.about, deferred.function.get("description"))
    return " ".join([*filter(None, dict.fromkeys(about)), *names])


def _together(tools: Iterable[Tool]) -> list[Tool]:
    """Tools with those of one namespace, and those of one server, in one."""
    found: dict[tuple[str, str], Tool] = {}
    for tool in tools:
        key = (tool["type"], tool["server_label"] if tool["type"] == "mcp" else tool["name"])
        known = found.get(key)
        if known is None:
            found[key] = dict(tool)
        else:
            member = "allowed_tools" if tool["type"] == "mcp" else "tools"
            known[member] = [*known[member], *tool[member]]
    return [*found.values()]


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "incomplete"
    return None


def _keeps(_item: Item, result: ToolResult) -> Private:
    if result.error is None:
        return {}
    return {"error": result.error, **(result.kept or {})}


def _follows(_item: Item, result: ToolResult) -> Item | None:
    if result.error is not None or result.kept is None:
        return None
    said = {"execution": "server", "call_id": None, "status": "completed"}
    return {"type": "tool_search_output", **said, "tools": result.kept["tools"]}


def _repeatable(_item: Item, _registry: Registry) -> bool:
    return True  # it only reads what the request has


def _say(item: Item, transcript: Transcript) -> None:
    arguments = json.dumps(item["arguments"], ensure_ascii=False)
    if not _is_ours(item):
        if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
            transcript.call(item["call_id"], NAME, arguments)
        return
    transcript.call(item["id"], NAME, arguments)
    if item["status"] == "completed":
        transcript.expect(item["id"])
    else:
        why = (private_of(item) or {}).get("error", "The search was not made.")
        transcript.answer(item["id"], f"error: {why}")


def _say_output(item: Item, transcript: Transcript) -> None:
    call_id = transcript.expected() if _is_ours(item) else item["call_id"]
    if call_id is not None:
        names = [name for tool in item["tools"] for name in _names_in(tool, transcript)]
        told = f"These tools can be called now: {', '.join(names)}." if names else "Nothing was found."
        transcript.answer(call_id, told)


def _names_in(tool: Tool, transcript: Transcript) -> list[str]:
    """The names by which the model is shown the tools that an entry of an output loads."""
    if tool["type"] != "mcp":
        return [shown_name(inner) for _, inner, _ in each_tool([tool])]
    allowed = tool.get("allowed_tools")
    names = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
    label = tool["server_label"]
    return [f"all of {label}"] if names is None else [transcript.name(label, name) for name in names]


# ------------------------------------------------------------------------------------------------------------
# Items that clients send

_LOADED = tagged({"function": FUNCTION, "custom": CUSTOM, "namespace": NAMESPACE, "mcp": mcp_tool})


def loaded_tool(value: Any, path: str) -> Tool:
    """A tool of an output, in its flat form. Raises ApiError 400 for one that cannot be loaded."""
    tool: Tool = _LOADED(value, path)
    if tool["type"] == "function":
        return as_flat(tool)
    return flat_namespace(tool) if tool["type"] == "namespace" else tool


described(loaded_tool, lambda: schema_of(_LOADED))

_FIELDS = {"call_id": identifier, "execution": _EXECUTION}
_CALL = item_shape({"arguments": mapping}, _FIELDS, call_id=None)
_OUTPUT = item_shape({"tools": array(loaded_tool, max_items=MAX_LOADED)}, _FIELDS, call_id=None)


def _call(value: Any, path: str) -> Item:
    return _of_a_side(_CALL(value, path), path)


def _output(value: Any, path: str) -> Item:
    item = _OUTPUT(value, path)
    limit_tools(item["tools"], f"{path}.tools")
    return _of_a_side(item, path)


def _of_a_side(item: Item, path: str) -> Item:
    """An item that says who made the search: by the official API, only a client's has the id of a call."""
    item.setdefault("execution", "server" if item["call_id"] is None else "client")
    if item["execution"] == "client" and item["call_id"] is None:
        missing(f"{path}.call_id")
    return item


described(_call, lambda: schema_of(_CALL))
described(_output, lambda: schema_of(_OUTPUT))


def _of_text(_text: str) -> Item:
    message = "A tool search is answered with tools: give an item of type 'tool_search_output'."
    refuse("tool_outputs", message)


ROWS = (
    ItemType(
        "tool_search_call",
        "tsc_",
        _call,
        _say,
        tools={"tool_search": _tool},
        call=Call(
            _opened,
            offers=_offers,
            fields=_fields,
            searches=_searches,
            execution=Execution("in_progress", _run, _finish, _repeatable, keeps=_keeps, follows=_follows),
        ),
        answered_by="tool_search_output",
        ours=_is_ours,
    ),
    ItemType(
        "tool_search_output",
        "tso_",
        _output,
        _say_output,
        answers="tool_search_call",
        of_text=_of_text,
        ours=_is_ours,
        loads=True,
    ),
)
