"""Tools and tool choices as clients send them, normalised to the official flat form.

Owns the limits on tools, and the forms in which clients send them; the item types say what a tool of each
kind looks like. A kind that no model can call here is refused, unless the operator has such tools left out,
because some clients always send one. A kind that is not official is a misspelt one as often as one that a
client knows and this server does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import orjson

from server.ignored import ignore, unread
from server.items import (
    ITEM_TYPES,
    Item,
    Tool,
    as_flat,
    declines,
    each_tool,
    instead_of,
    is_direct,
    is_offered,
    is_server_run,
    limit_tools,
    tool_shapes,
    tools_added,
    type_of_calls,
)
from server.schema.formats import name_unheeded
from server.shapes import (
    NAME,
    STRING,
    Schema,
    array,
    check_length,
    described,
    mapping,
    member,
    missing,
    mistyped,
    one_of,
    record,
    refuse,
    schema_of,
    shorten,
    with_type,
)

Unsupported = Literal["refuse", "ignore"]
"""What becomes of tools that no model can call here: a 400, or they are left out and named in the header."""

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
_DATE = re.compile(r"_\d{4}_\d{2}_\d{2}\Z")
"""What the official API ends the kinds of a new version of a tool with."""


Messages = Literal["chat", "tokens"]
ON_CHAT: Mapping[Messages, str] = {
    "chat": "Chat completions have functions, custom tools, and tools that the server runs; others are "
    "offered on /v1/responses.",
    "tokens": "Only functions and custom tools are counted here; POST /v1/responses/input_tokens counts "
    "with all.",
}
"""Where a request has messages in the place of items -> which tools a model can be offered there."""


def normalize_tool(value: Any, path: str, *, strict: bool = True, on: Messages | None = None) -> Tool:
    """One tool in the official flat form. `strict` is the default for functions: true on Responses, false on
    chat. on: see `require_offered`.

    A function or custom tool nested in chat's way is unwrapped; a known kind with the date of another version
    passes without its credentials, and one that is not official alone: see `require_offered`. Raises ApiError
    400.
    """
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    kind = value.get("type")
    if kind is None and isinstance(value.get("function"), dict):
        kind = "function"
    if kind is None:
        missing(f"{path}.type")
    if not isinstance(kind, str):
        mistyped(f"{path}.type", "a string", kind)
    if kind in ("function", "custom"):
        _require_nested(value, kind, path, on)
    if kind == "function":
        return _function(value, path, strict)
    if kind == "custom":
        value, path = _flat_custom(value, path)
    shape = tool_shapes().get(kind)
    if shape is None:
        # Nothing is known of its members, but what is a credential in the version that is known is not kept;
        # of a kind that is not official, anything could be one.
        known = _DATE.sub("", kind)
        row = type_of_calls(known)
        if known not in tool_shapes():
            return {"type": kind}
        return value if row is None or row.without_secrets is None else row.without_secrets(value)[0]
    tool: Tool = shape(value, path)
    if kind == "namespace":
        inside = enumerate(tool["tools"])
        return {**tool, "tools": [normalize_tool(inner, f"{path}.tools[{place}]") for place, inner in inside]}
    _name_hints(tool, path, on_chat=not strict)
    return tool


def _refuse_kind(kind: str, path: str, on: Messages | None, *others: str) -> NoReturn:
    """Raise the 400 that names the kinds which are offered there, after `others` that can be said."""
    wanted = ", ".join(
        f"'{known}'" for known in (*others, *tool_shapes()) if known in others or _has(known, on)
    )
    refuse(path, f"Invalid value: '{shorten(kind)}'. Supported values are: {wanted}.")


def _has(kind: str, on: Messages | None) -> bool:
    return kind in ("function", "custom") or _is_offered({"type": kind}, on)


def _is_offered(tool: Tool, on: Messages | None) -> bool:
    """Whether a tool that is no function or custom tool can be offered to the model there."""
    return is_offered(tool) if on is None else on == "chat" and is_server_run(tool)


def _described() -> Schema:
    """Every kind in its flat form, functions in chat's too; kinds with the date of another version pass."""
    kinds = tool_shapes()
    nested: Schema = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": schema_of(kinds["function"])},
        "required": ["function"],
    }
    custom: Schema = {
        "type": "object",
        "properties": {"type": {"const": "custom"}, "custom": {"type": "object"}},
        "required": ["type", "custom"],
    }
    dated: Schema = {
        "type": "object",
        "properties": {
            "type": {
                "type": "string",
                "pattern": rf"^({'|'.join(sorted(kinds))})_\d{{4}}_\d{{2}}_\d{{2}}$",
                "not": {"enum": [*kinds]},
            }
        },
        "required": ["type"],
    }
    flat = [with_type(schema_of(shape), kind) for kind, shape in kinds.items()]
    return {"anyOf": [nested, *flat, custom, dated]}


described(normalize_tool, _described)


def _function(value: dict[str, Any], path: str, strict: bool) -> Tool:
    nested = value.get("function")
    if "name" not in value and isinstance(nested, dict):
        unread(value, ("type", "function"), path)
        value, path = nested, f"{path}.function"
    parts = tool_shapes()["function"](value, path)
    _name_hints(parts, path, on_chat=not strict)
    name_unheeded(parts.get("parameters"), f"{path}.parameters", strict=parts.get("strict") is True)
    return as_flat(parts, strict=strict)


def _require_nested(value: dict[str, Any], kind: str, path: str, on: Messages | None) -> None:
    """Raise ApiError 400 for a tool of chat, or what refers to one, that neither has a name nor is nested
    under its kind, as chat has it: the error names what a client of chat would look for."""
    if on is not None and "name" not in value:
        member(value, kind, mapping, path)


def _flat_custom(value: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Chat nests a custom tool under its kind, and its grammar once more."""
    if "name" not in value and isinstance(value.get("custom"), dict):
        unread(value, ("type", "custom"), path)
        value, path = {"type": "custom", **value["custom"]}, f"{path}.custom"
    form = value.get("format")
    if isinstance(form, dict) and isinstance(nested := form.get("grammar"), dict):
        unread(form, ("type", "grammar"), f"{path}.format")
        unread(nested, ("syntax", "definition"), f"{path}.format.grammar")
        syntax = {"syntax": nested.get("syntax"), "definition": nested.get("definition")}
        value = {**value, "format": {"type": form.get("type"), **syntax}}
    return value, path


def _name_hints(tool: Mapping[str, Any], path: str, *, on_chat: bool) -> None:
    """Name what a tool says that changes nothing here: the model itself calls it, and no program, it is
    offered on chat at once, and nothing reads its output."""
    if on_chat and tool.get("defer_loading"):
        ignore(f"{path}.defer_loading")
    if "programmatic" in tool.get("allowed_callers", ()) and is_direct(tool):
        ignore(f"{path}.allowed_callers")
    if tool.get("output_schema") is not None:
        ignore(f"{path}.output_schema")


def parse_tools(
    value: Any, param: str = "tools", *, strict: bool = True, on: Messages | None = None
) -> list[Tool]:
    """A request's tools, normalised. strict, on: see `normalize_tool`.

    Raises ApiError 400 for a wrong shape, above 128 tools or 1 MiB, or for schemas of strict tools that are
    together larger than one may be.
    """
    if not isinstance(value, list):
        mistyped(param, "an array", value)
    check_length(param, len(value), "array", most=MAX_TOOLS)
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        refuse(param, f"Invalid '{param}': {error}.")
    if size > MAX_TOOLS_BYTES:
        refuse(param, f"Invalid '{param}': {size} bytes of tools; at most {MAX_TOOLS_BYTES} are taken.")
    tools = [
        normalize_tool(tool, f"{param}[{index}]", strict=strict, on=on) for index, tool in enumerate(value)
    ]
    limit_tools(tools, param)
    return tools


def require_search(tools: Sequence[Tool], param: str = "tools") -> None:
    """Raise ApiError 400 for deferred tools that no search could load, for a search of this server's that
    could load none, and for a second search. tools: normalised."""
    searches = [index for index, tool in enumerate(tools) if tool["type"] == "tool_search"]
    deferred = [path for path, tool, _ in each_tool(tools, param) if tool.get("defer_loading")]
    if len(searches) > 1:
        refuse(f"{param}[{searches[1]}]", "A request has one tool of type 'tool_search'.")
    if deferred and not searches:
        message = "Deferred tools require a tool of type 'tool_search' among the tools, which loads them."
        refuse(f"{deferred[0]}.defer_loading", message)
    if searches and not deferred and tools[searches[0]].get("execution") != "client":
        message = (
            "A 'tool_search' of the server requires at least one deferred tool: give a function, one in a "
            "namespace, or an MCP server with 'defer_loading'."
        )
        refuse(f"{param}[{searches[0]}]", message)


def secrets_of(value: list[dict[str, Any]], param: str = "tools") -> dict[str, dict[str, Any]]:
    """The credentials that tools came with, which `parse_tools` has checked and taken out: by the tool's
    path."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(value):
        row = type_of_calls(tool.get("type", "function"))
        if row is not None and row.without_secrets is not None and (given := row.without_secrets(tool)[1]):
            found[f"{param}[{index}]"] = given
    return found


def secrets_of_items(value: Any, param: str = "input") -> dict[str, dict[str, Any]]:
    """The credentials of the tools that items add, which `normalize_input` has checked: by the tool's path.
    value: the items as they came."""
    found: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(value if isinstance(value, list) else ()):
        row = ITEM_TYPES.get(item.get("type"))
        if row is not None and row.adds:
            found |= secrets_of(item["tools"], f"{param}[{index}].tools")
    return found


_SEARCH_OPTIONS = record(
    {},
    {
        "search_context_size": one_of("low", "medium", "high"),
        "user_location": record(
            {
                "approximate": record(
                    {}, {"country": STRING, "region": STRING, "city": STRING, "timezone": STRING}
                )
            },
            type="approximate",
        ),
    },
)


def search_tool(value: Any, param: str = "web_search_options") -> Tool:
    """The tool of type `web_search` that chat's field of its own stands for. Raises ApiError 400."""
    options = _SEARCH_OPTIONS(value, param)
    tool: Tool = {"type": "web_search"}
    if "search_context_size" in options:
        tool["search_context_size"] = options["search_context_size"]
    if "user_location" in options:  # which chat nests once more
        tool["user_location"] = {"type": "approximate", **options["user_location"]["approximate"]}
    return tool


described(search_tool, lambda: schema_of(_SEARCH_OPTIONS))


def require_offered(
    tools: Sequence[Tool], tool_choice: Any, unsupported: Unsupported, *, on: Messages | None = None
) -> None:
    """Raise ApiError 400 `unsupported_tool` for a tool that the model cannot be offered, or for one that a
    list of allowed tools names, and for one whose kind is not official; or only name their places,
    `tools[1]`, if `unsupported` is `ignore`.

    tools, tool_choice: normalised. on: where, of `ON_CHAT`, fewer tools can be offered; None on Responses.
    """
    lists = isinstance(tool_choice, dict) and tool_choice["type"] == "allowed_tools"
    _require_kinds(tools, "tools", unsupported, on)
    _require_direct(tools, "tools", unsupported)
    _require_kinds(tool_choice["tools"] if lists else (), "tool_choice.tools", unsupported, on)


def require_added_offered(items: Sequence[Item], unsupported: Unsupported, param: str = "input") -> None:
    """The same for the tools that normalised items add. param: the field that has the items."""
    for index, item in enumerate(items):
        added, path = tools_added(item), f"{param}[{index}].tools"
        _require_kinds(added, path, unsupported, None)
        _require_direct(added, path, unsupported)


def _require_kinds(tools: Sequence[Tool], param: str, unsupported: Unsupported, on: Messages | None) -> None:
    for index, tool in enumerate(tools):
        kind = tool["type"]
        if kind not in ("function", "custom") and not _is_offered(tool, on):
            if unsupported == "refuse" and _DATE.sub("", kind) not in tool_shapes():
                _refuse_kind(kind, f"{param}[{index}].type", on)
            leave_out(f"{param}[{index}]", _unsupported(kind, on), unsupported)


def _require_direct(tools: Sequence[Tool], param: str, unsupported: Unsupported) -> None:
    for path, tool, _ in each_tool(tools, param):
        if not is_direct(tool):
            leave_out(f"{path}.allowed_callers", _PROGRAMS_ALONE, unsupported)


_PROGRAMS_ALONE = (
    "This tool is for programs alone, which the model would write to call tools; this server runs no such "
    "programs. Add 'direct' to 'allowed_callers' to have the model call it."
)


def leave_out(path: str, why: str, unsupported: Unsupported) -> None:
    """Raise ApiError 400 `unsupported_tool` for the tool at a path of the request, or only name its place, if
    `unsupported` is `ignore`. why: a sentence or more."""
    if unsupported == "ignore":
        ignore(path)
        return
    setting = (
        "If your client always sends such tools, the operator can have the server leave them out: "
        "--unsupported-tools ignore."
    )
    param = f"{path}.type" if path.endswith("]") else path  # or a field that stands for one tool
    refuse(param, f"{why} {setting}", "unsupported_tool")


def leave_out_lacking(tool: Tool, path: str, why: str, unsupported: Unsupported) -> None:
    """The same for a tool that this server would run, and cannot, which is left out in any case where its
    client agrees to that. why: a clause."""
    kind = tool["type"]
    told = f"This server cannot run tools of type '{kind}': {why}. {instead_of(kind)}".rstrip()
    leave_out(path, told, "ignore" if declines(tool) else unsupported)


def _unsupported(kind: str, on: Messages | None) -> str:
    known = _DATE.sub("", kind)
    if type_of_calls(known) is None:
        advice = instead_of(known)
    elif known != kind:
        advice = f"It has one of type '{known}'."
    else:
        advice = "" if on is None else ON_CHAT[on]
    told = f"This server has no tool of type '{shorten(kind)}'{' here' if on else ''}."
    return " ".join(filter(None, (told, advice)))


# ------------------------------------------------------------------------------------------------------------
# Choices

_NAMED = record({"type": STRING, "name": NAME}, {"namespace": STRING})


def parse_tool_choice(value: Any, *, on: Messages | None = None) -> str | dict[str, Any]:
    """A tool choice in its official flat form; chat's nested forms are unwrapped. on: see `require_offered`.

    Whether the tools that it names exist and can be forced is not decided here. Raises ApiError 400.
    """
    if isinstance(value, str):
        choice: str = one_of("none", "auto", "required")(value, "tool_choice")
        return choice
    if not isinstance(value, dict):
        mistyped("tool_choice", "a string or an object", value)
    kind: str = member(value, "type", STRING, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(value, "tool_choice", on)
    if kind == "computer_use":  # an older name of it, of choices alone
        kind, value = "computer", {**value, "type": "computer"}
    if kind not in tool_shapes():
        _refuse_kind(kind, "tool_choice.type", on, "allowed_tools")
    if kind in ("function", "custom"):
        _require_nested(value, kind, "tool_choice", on)
    value, path = _unwrapped(value, kind, "tool_choice")
    if kind in ("function", "custom"):
        named = _NAMED(value, path)
        return {"type": kind, **{key: named[key] for key in ("name", "namespace") if key in named}}
    parts: dict[str, Any] = record({}, {"server_label": STRING, "name": STRING})(value, path)
    return parts


def _unwrapped(value: dict[str, Any], kind: str, path: str) -> tuple[dict[str, Any], str]:
    """Chat nests a named choice under its kind."""
    nested = value.get(kind)
    if "name" not in value and isinstance(nested, dict):
        unread(value, ("type", kind), path)
        return {"type": kind, **nested}, f"{path}.{kind}"
    return value, path


def _allowed(value: dict[str, Any], path: str, on: Messages | None) -> dict[str, Any]:
    nested = value.get("allowed_tools")
    if "tools" not in value and isinstance(nested, dict):
        unread(value, ("type", "allowed_tools"), path)
        value, path = nested, f"{path}.allowed_tools"
    elif on is not None and not value.keys() & {"mode", "tools"}:
        missing(f"{path}.allowed_tools")
    shape = record({"mode": one_of("auto", "required"), "tools": array(mapping, max_items=MAX_TOOLS)})
    parts = shape(value, path)
    tools = [_reference(ref, f"{path}.tools[{index}]", on) for index, ref in enumerate(parts["tools"])]
    return {"type": "allowed_tools", "mode": parts["mode"], "tools": tools}


def _reference(ref: dict[str, Any], path: str, on: Messages | None) -> dict[str, Any]:
    """One of the tools that a choice allows, in its flat form."""
    kind = ref.get("type", "function")
    if kind in ("function", "custom"):
        _require_nested(ref, kind, path, on)
        ref, path = _unwrapped(ref, kind, path)
    elif not isinstance(kind, str):
        mistyped(f"{path}.type", "a string", kind)
    unread(ref, ("type", "name", "namespace", "server_label"), path)
    return {"type": kind, **ref}
