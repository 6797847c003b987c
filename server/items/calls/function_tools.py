"""Functions and custom tools as requests offer them: alone, or in a namespace.

A tool in a namespace is known to clients by both names, `crm` and `list_orders`. The model is shown one name,
`crm__list_orders`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from server.items.item_type import Tool
from server.shapes import (
    NAME,
    STRING,
    Shape,
    array,
    boolean,
    check_length,
    described,
    limit_parts,
    mapping,
    mistyped,
    one_of,
    record,
    refuse,
    shorten,
    tagged,
)

_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
MAX_NAMESPACE = 64
"""Characters; an output that names a namespace may have no more, either."""

MAX_EACH = 1000
"""Tools of one request, those in namespaces counted one by one; as many as an MCP server may have."""

CALLERS = array(one_of("direct", "programmatic"), 1)
"""Who may call a tool: the model itself, or a program that it writes."""


def function_name(value: Any, path: str) -> Any:
    """A function's name: 1 to 128 letters, digits, underscores and hyphens."""
    if not isinstance(value, str):
        mistyped(path, "a string", value)
    if not _PATTERN.match(value):
        message = (
            f"Invalid '{path}': '{shorten(value)}' does not match the pattern '^[a-zA-Z0-9_-]{{1,128}}$'."
        )
        refuse(path, message)
    return value


described(function_name, lambda: {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"})


def _namespace_name(value: Any, path: str) -> Any:
    function_name(value, path)
    check_length(path, len(value), "string", 1, MAX_NAMESPACE)
    return value


described(_namespace_name, lambda: {"type": "string", "pattern": f"^[a-zA-Z0-9_-]{{1,{MAX_NAMESPACE}}}$"})

_PARTS: Mapping[str, Shape] = {
    "description": STRING,
    "parameters": mapping,
    "output_schema": mapping,
    "strict": boolean,
    "defer_loading": boolean,
    "allowed_callers": CALLERS,
}
_SYNTAX = record({"syntax": one_of("lark", "regex"), "definition": NAME})
_FORMAT = tagged({"text": record({}), "grammar": _SYNTAX})

FUNCTION = record({"name": function_name}, _PARTS)
CUSTOM = record(
    {"name": function_name},
    {"description": STRING, "format": _FORMAT, "defer_loading": boolean, "allowed_callers": CALLERS},
)
NAMESPACE = record(
    {"name": _namespace_name, "tools": array(tagged({"function": FUNCTION, "custom": CUSTOM}), 1)},
    {"description": STRING},
    description="",
)


def as_flat(parts: Mapping[str, Any], *, strict: bool = True) -> Tool:
    """A function that was read, in the official flat form. strict: where it does not say it itself."""
    given = {"description": None, "parameters": None, "strict": strict, **parts}
    first = ("name", "description", "parameters", "strict")
    rest = {key: value for key, value in given.items() if key not in (*first, "type")}
    return {"type": "function", **{key: given[key] for key in first}, **rest}


def flat_namespace(parts: Mapping[str, Any]) -> Tool:
    """A namespace that was read, its functions in their flat form. Raises ApiError 400 for two of a name."""
    tools = [as_flat(tool) if tool["type"] == "function" else dict(tool) for tool in parts["tools"]]
    return {**parts, "tools": tools}


def limit_tools(tools: Iterable[Tool], param: str = "tools") -> None:
    """Raise ApiError 400 for too many tools, those in namespaces counted, and for schemas of strict functions
    that are together larger than one may be."""
    parts = 0
    for number, (path, tool, _) in enumerate(each_tool(tools, param), 1):
        if number > MAX_EACH:
            refuse(path, f"Invalid '{param}': at most {MAX_EACH} are taken, those in namespaces counted.")
        if tool["type"] == "function" and tool["strict"]:
            parts = limit_parts(orjson.dumps(tool["parameters"]), f"{path}.parameters", parts)


def each_tool(
    tools: Iterable[Tool], param: str = "tools", start: int = 0
) -> Iterator[tuple[str, Tool, Tool | None]]:
    """The tools of a request one by one, those in namespaces too: their paths, the tools, and the namespace
    of each, None where it is in none. A tool in a namespace says its name as `namespace`. start: the index of
    the first."""
    for index, tool in enumerate(tools, start):
        path = f"{param}[{index}]"
        if tool["type"] != "namespace":
            yield path, tool, None
            continue
        for place, inner in enumerate(tool["tools"]):
            yield f"{path}.tools[{place}]", {**inner, "namespace": tool["name"]}, tool


def shown_name(said: Mapping[str, Any]) -> str:
    """The name under which the model is shown a tool; said: the tool, or a call of it."""
    name, namespace = said["name"], said.get("namespace")
    # The official API gives a tool that was loaded by a search its own name as its namespace.
    return str(name) if namespace in (None, name) else f"{namespace}__{name}"


def shown(tool: Tool) -> Tool:
    """A tool as the model is shown it."""
    offered = {key: value for key, value in tool.items() if key != "namespace"}
    return {**offered, "name": shown_name(tool)}


def names_of(tool: Tool) -> Mapping[str, Any]:
    """What every call of a tool says of its names, where the model is shown another one, or a search has
    loaded it."""
    namespace = tool.get("namespace") or (tool["name"] if tool.get("defer_loading") else None)
    return {} if namespace is None else {"namespace": namespace, "name": tool["name"]}
