"""Tools and tool choices of the Messages API, in the flat form of Responses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from server.ignored import ignore
from server.items import Tool, as_flat, function_name, limit_tools
from server.schema.anthropic.client_tools import CLIENT_TOOLS
from server.schema.formats import name_unheeded
from server.schema.tools import MAX_TOOLS_BYTES, Unsupported, leave_out
from server.shapes import (
    NAME,
    STRING,
    anything,
    array,
    boolean,
    described,
    mapping,
    mistyped,
    one_of,
    record,
    refuse,
    schema_of,
    shorten,
    tagged,
)

Json = dict[str, Any]

_COMMON = {
    "cache_control": anything,
    "allowed_callers": array(STRING, 1),
    "defer_loading": boolean,
    "eager_input_streaming": boolean,  # inputs are streamed as they are written, always
    "input_examples": array(mapping),
    "strict": boolean,
}
_CUSTOM = record({"name": function_name, "input_schema": mapping}, {"description": STRING, **_COMMON})
_CLIENTS_OWN = {"max_characters": anything, "enable_zoom": anything}
"""What clients are to do themselves as they carry a tool out."""
_DISPLAY = ("display_width_px", "display_height_px", "display_number")

_FOUND_AT_ONCE = re.compile(r"tool_search_tool_(bm25|regex)(_\d{8})?\Z")
"""Tools that search for deferred tools. All tools are offered at once here, so there is nothing to find."""
_DATED = re.compile(r"[a-z_]+_\d{8}\Z")
_OTHERS = frozenset({"mcp_toolset"})
"""Official types that have no date."""


def message_tool(value: Any, path: str) -> Tool:
    """A tool that clients carry out, as a function in its flat form. Raises ApiError 400."""
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    kind = value.get("type")
    if kind is not None and not isinstance(kind, str):
        mistyped(f"{path}.type", "a string", kind)
    if kind is not None and kind in CLIENT_TOOLS:
        return _client_tool(value, kind, path)
    if kind not in (None, "custom"):
        wanted = ", ".join(f"'{known}'" for known in ("custom", *CLIENT_TOOLS))
        refuse(f"{path}.type", f"Invalid value: '{shorten(kind)}'. Supported values are: {wanted}.")
    tool = _CUSTOM(value, path)
    _name_hints(tool, path)
    strict = tool.get("strict", False)
    name_unheeded(tool["input_schema"], f"{path}.input_schema", strict=strict)
    return as_flat(
        {
            "name": tool["name"],
            "description": _with_examples(tool),
            "parameters": tool["input_schema"],
            "strict": strict,
        }
    )


def _described() -> Json:
    """What `message_tool` takes, and the types of other tools."""
    custom = schema_of(_CUSTOM)
    custom["properties"]["type"] = {"enum": ["custom", None]}
    return {
        "anyOf": [custom, {"type": "object", "properties": {"type": STRING_SCHEMA}, "required": ["type"]}]
    }


STRING_SCHEMA: Json = {"type": "string"}
described(message_tool, _described)


def _client_tool(value: Mapping[str, Any], kind: str, path: str) -> Tool:
    known = CLIENT_TOOLS[kind]
    shape = record(
        {"name": one_of(known.name)}, {**_COMMON, **_CLIENTS_OWN, **dict.fromkeys(_DISPLAY, anything)}
    )
    tool = shape(value, path)
    _name_hints(tool, path)
    sizes = [f"{name}: {tool[name]}" for name in known.told if isinstance(tool.get(name), int)]
    described = " ".join([known.description, *([f"({', '.join(sizes)})"] if sizes else [])])
    return as_flat(
        {
            "name": known.name,
            "description": _with_examples({**tool, "description": described}),
            "parameters": known.schema,
            "strict": tool.get("strict", False),
        }
    )


def _with_examples(tool: Mapping[str, Any]) -> str | None:
    """The description of a tool, with the examples of its input."""
    told: str | None = tool.get("description")
    if not tool.get("input_examples"):
        return told
    shown = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool["input_examples"])
    return f"{told or ''}\nExamples of the input:\n{shown}".lstrip()


def _name_hints(tool: Mapping[str, Any], path: str) -> None:
    """Name what a tool says that changes nothing here: it is offered at once, and no program calls it."""
    if tool.get("defer_loading"):
        ignore(f"{path}.defer_loading")
    if any(caller != "direct" for caller in tool.get("allowed_callers", ())):
        ignore(f"{path}.allowed_callers")


def read_tools(value: Any, unsupported: Unsupported, param: str = "tools") -> list[Tool]:
    """A request's tools; those that are left out have the type that they came with, and are offered by
    nobody. Raises ApiError 400, `unsupported_tool` for tools that only Anthropic's own servers carry out."""
    if not isinstance(value, list):
        mistyped(param, "an array", value)
    if (size := len(orjson.dumps(value))) > MAX_TOOLS_BYTES:
        refuse(param, f"Invalid '{param}': {size} bytes of tools; at most {MAX_TOOLS_BYTES} are taken.")
    tools = [_read(tool, f"{param}[{index}]", unsupported) for index, tool in enumerate(value)]
    limit_tools(tools, param)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool["type"] == "function" and tool["name"] in names:
            refuse(f"{param}[{index}].name", f"There is more than one tool with the name '{tool['name']}'.")
        names.add(tool.get("name", ""))
    return tools


def _read(value: Any, path: str, unsupported: Unsupported) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in CLIENT_TOOLS:
        if _FOUND_AT_ONCE.match(kind):
            ignore(path)
            return {"type": kind}
        if _DATED.match(kind) or kind in _OTHERS:
            message = (
                f"This server does not run tools of type '{shorten(kind)}'. Functions are offered here that "
                "clients carry out, and the server's tools on /v1/responses and /v1/chat/completions."
            )
            leave_out(path, message, unsupported)
            return {"type": kind}
    tool = message_tool(value, path)
    callers = value.get("allowed_callers")
    if callers and "direct" not in callers:
        message = "This tool is for programs alone, which the model would write; this server runs none."
        leave_out(
            path, f"{message} Add 'direct' to 'allowed_callers' to have the model call it.", unsupported
        )
        return {"type": "left_out"}
    return tool


# ------------------------------------------------------------------------------------------------------------
# Choices

_PARALLEL = {"disable_parallel_tool_use": boolean}
CHOICE = tagged(
    {
        "auto": record({}, _PARALLEL),
        "any": record({}, _PARALLEL),
        "tool": record({"name": NAME}, _PARALLEL),
        "none": record({}),
    }
)


def read_choice(value: Any) -> tuple[str | Json, bool]:
    """A tool choice in the form of Responses, and whether one turn may have several calls."""
    choice = CHOICE(value, "tool_choice")
    parallel = not choice.get("disable_parallel_tool_use", False)
    match choice["type"]:
        case "tool":
            return {"type": "function", "name": choice["name"]}, parallel
        case "any":
            return "required", parallel
        case kind:
            return kind, parallel
