"""Calls of tools behind the Model Context Protocol, their listings and approvals.

One MCP server is in this process: `{"type": "mcp", "server_url": "builtin:"}`. The tools of others are known
once a listing among the items of a conversation says them.

This server's own tools are run as they are, and not through the SDK's client for servers in the same process.
That way was measured: a call takes 0.24 ms in place of 0.03, and the first one waits half a second for the
SDK's import. It would take nothing away, either: the registry has to stay for tools that are no MCP tools,
and for what the protocol has no words for (strict schemas, limits of time, whether a call may run twice). And
no request could be refused for a wrong name in `allowed_tools`, because names would be known only later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.ignored import ignore
from server.items.calls.function_tools import CALLERS
from server.items.item_type import (
    Approval,
    Call,
    Elsewhere,
    Execution,
    Item,
    ItemType,
    Listing,
    Route,
    Scene,
    Stream,
    Tool,
    function_of,
    unspoken,
)
from server.items.parts import PLACE, STATUSES, identifier, item_shape
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript, speakable, text_of
from server.mcp_servers import BUILTIN_URL, Approvals, Reach
from server.shapes import (
    NAME,
    STRING,
    anything,
    array,
    boolean,
    described,
    exactly,
    map_of,
    mapping,
    one_of,
    record,
    refuse,
    schema_of,
    tagged,
    whole,
)
from tools import Listing as ServerListing
from tools import Registry, ToolResult, execute

SECRETS = ("authorization", "headers")
"""Members of the tool that are no part of it once it was read: it is echoed and stored."""

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

_MEMBERS = exactly({}, {"tool_names": array(STRING), "read_only": boolean})


def _filter(value: Any, path: str) -> Any:
    found = _MEMBERS(value, path)
    if not found:  # it would fit every tool, which nobody should come to by leaving something out
        refuse(path, f"Invalid '{path}': an empty filter. Give 'tool_names', 'read_only', or both.")
    return found


described(_filter, lambda: {**schema_of(_MEMBERS), "minProperties": 1})


def _allowed(value: Any, path: str) -> Any:
    return _filter(value, path) if isinstance(value, dict) else array(STRING)(value, path)


described(_allowed, lambda: {"anyOf": [schema_of(array(STRING)), schema_of(_filter)]})

_SETTING = one_of("always", "never")
_FILTERS = exactly({}, {"always": _filter, "never": _filter})


def _approved(value: Any, path: str) -> Any:
    return _FILTERS(value, path) if isinstance(value, dict) else _SETTING(value, path)


described(_approved, lambda: {"anyOf": [schema_of(_SETTING), schema_of(_FILTERS)]})

_TOOL = exactly(
    {"server_label": NAME},
    {
        "server_url": STRING,
        "connector_id": STRING,
        "tunnel_id": STRING,
        "authorization": STRING,
        "server_description": STRING,
        "headers": map_of(STRING),
        "allowed_tools": _allowed,
        "require_approval": _approved,
        "defer_loading": boolean,
        "allowed_callers": CALLERS,
    },
    "type",
)


def mcp_tool(value: Any, path: str) -> Tool:
    """The shape of such a tool, of which its credentials are no part any more. Raises ApiError 400."""
    tool, secrets = _without_secrets(_TOOL(value, path))
    places = [key for key in ("server_url", "connector_id", "tunnel_id") if key in tool]
    if len(places) != 1:
        message = f"Invalid '{path}': exactly one of server_url, connector_id and tunnel_id must be given."
        code = "mutually_exclusive_parameters" if places else "missing_required_parameter"
        refuse(f"{path}.server_url", message, code)
    _require_url(tool.get("server_url", BUILTIN_URL), f"{path}.server_url")
    if not _is_elsewhere(tool):
        for name in secrets:
            ignore(f"{path}.{name}")
    if tool.get("server_description") and not tool.get("defer_loading"):
        ignore(f"{path}.server_description")  # the server's tools are offered by their own words
    return tool


described(mcp_tool, lambda: schema_of(_TOOL))


def _without_secrets(tool: Tool) -> tuple[Tool, Item]:
    """A tool without its credentials, and they. A URL may have some in its query and before its host: the
    tool keeps it without these, and as a whole it is a credential."""
    secrets = {name: tool[name] for name in SECRETS if tool.get(name) is not None}
    kept = {name: member for name, member in tool.items() if name not in SECRETS}
    url = kept.get("server_url")
    if isinstance(url, str) and (parts := _ADDRESS.match(url)) is not None and parts.expand(r"\1\2") != url:
        kept["server_url"], secrets["server_url"] = parts.expand(r"\1\2"), url
    return kept, secrets


_ADDRESS = re.compile(r"(?s)(https?://)(?:[^/?#]*@)?([^?#]*)", re.IGNORECASE)
"""The beginning of a URL, with its scheme, and its host and path."""


def _require_url(url: str, path: str) -> None:
    if not (url.startswith(BUILTIN_URL) or url.lower().startswith(("http://", "https://"))):
        message = f"Invalid '{path}': expected a URL that begins with https:// or http://, or '{BUILTIN_URL}'"
        refuse(path, f"{message} (with its colon) for this server's own tools.")


def _is_elsewhere(tool: Tool) -> bool:
    return tool.get("server_url") != BUILTIN_URL


def _offers(tool: Tool, registry: Registry, path: str) -> Sequence[Tool]:
    if _is_elsewhere(tool):
        return []  # listings offer them
    specs = {spec.name: spec for spec in registry.values() if spec.offered_by == "mcp"}
    for member, wanted in _filters(tool):
        _require_known(wanted, specs, f"{path}.{member}")
    allowed = tool.get("allowed_tools")
    names = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
    return [function_of(spec) for spec in specs.values() if names is None or spec.name in names]


def _filters(tool: Tool) -> Iterator[tuple[str, Any]]:
    """The members of a tool that name some of its server's tools, each with its list or filter."""
    yield "allowed_tools", tool.get("allowed_tools")
    approval = tool.get("require_approval")
    if isinstance(approval, dict):
        yield from ((f"require_approval.{side}", approval.get(side)) for side in ("always", "never"))


def _names(wanted: Any) -> Sequence[str]:
    return (wanted.get("tool_names") if isinstance(wanted, dict) else wanted) or ()


def _unknown(tool: Tool, listing: Item) -> tuple[str, str] | None:
    known = [listed["name"] for listed in listing["tools"]]
    left_out = {each["name"]: each["reason"] for each in listing.get("left_out", ())}
    for member, wanted in _filters(tool):
        for name in _names(wanted):
            if name not in known:
                label = tool["server_label"]
                if name in left_out:
                    return (
                        member,
                        f"The tool {name!r} of the MCP server {label!r} is left out: {left_out[name]}",
                    )
                told = f"Its tools are: {', '.join(known)}." if known else "It has none."
                return member, f"The MCP server {label!r} has no tool {name!r}. {told}"
    return None


def _require_known(wanted: Any, specs: Mapping[str, Any], path: str) -> None:
    """ApiError 400 for a list or filter that asks of this server's own tools what they do not say."""
    if isinstance(wanted, dict) and wanted.get("read_only") is not None:
        message = "This server does not tell tools that only read from others."
        refuse(f"{path}.read_only", message, "unsupported_parameter")
    if unknown := [name for name in _names(wanted) if name not in specs]:
        message = f"There is no tool {unknown[0]!r}. The tools of {BUILTIN_URL!r} are: {', '.join(specs)}."
        refuse(path, message)


def _asks(tool: Tool, name: str, approvals: Approvals) -> bool:
    return approvals.ask(tool, name)


def _offers_listed(tool: Tool, listing: Item, approvals: Approvals) -> Sequence[tuple[Tool, Route]]:
    allowed = tool.get("allowed_tools")
    names = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
    reads = allowed.get("read_only") if isinstance(allowed, dict) else None
    found = []
    for listed in listing["tools"]:
        annotations = listed.get("annotations") or {}
        hint = annotations.get("readOnlyHint") is True
        if (names is not None and listed["name"] not in names) or reads not in (None, hint):
            continue
        function = {
            "type": "function",
            "name": speakable(listed["name"]),
            "description": listed.get("description"),
            "parameters": listed["input_schema"],
            "strict": False,
        }
        asks = approvals.ask(tool, listed["name"], annotations)
        route = Route("mcp_call", {**_fields(tool), "name": listed["name"]}, asks, _server(tool))
        found.append((function, route))
    return found


def _fields(tool: Tool) -> Mapping[str, Any]:
    return {"server_label": tool["server_label"]}


def _server(tool: Tool) -> str | None:
    """What a server is known by: its URL without the query, or the operator's name for it."""
    return tool.get("server_url") or tool.get("connector_id")


# ------------------------------------------------------------------------------------------------------------
# Listings


def _opened_listing(route: Route) -> Item:
    # A label may be given to another server later, which has other tools, and hints of its own about them.
    return {**route.fields, "server": route.server, "tools": []}


def _filled_listing(functions: Sequence[Tool]) -> Item:
    listed = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in functions
    ]
    return {"tools": listed}


def _listed(listing: ServerListing) -> Item:
    # What a server has not said is left out and never null, which clients refuse here: Vercel's AI SDK does.
    tools = []
    for tool in listing.tools:
        said: Item = {"name": tool.name}
        if tool.description is not None:
            said["description"] = tool.description
        said["input_schema"] = dict(tool.input_schema)
        if tool.annotations is not None:
            said["annotations"] = dict(tool.annotations)
        tools.append(said)
    listed: Item = {"tools": tools}
    if listing.error is not None:
        listed["error"] = listing.error
    elif listing.left_out or not tools:  # without tools it tells a listing that is done from one under way
        listed["left_out"] = [{"name": name, "reason": why} for name, why in listing.left_out.items()]
    return listed


def _shows(item: Item, route: Route) -> bool:
    if item["type"] != "mcp_list_tools" or item["server_label"] != route.fields["server_label"]:
        return False
    done = bool(item["tools"]) or "left_out" in item or "error" in item
    return done and item.get("error") is None and item.get("server", route.server) == route.server


_LISTING = Listing(
    "mcp_list_tools",
    _opened_listing,
    _filled_listing,
    ("response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed"),
    _shows,
)

# ------------------------------------------------------------------------------------------------------------
# Calls


def _opened(name: str, _call_id: str, arguments: str) -> Item:
    return {
        "name": name,
        "arguments": arguments,
        "output": None,
        "error": None,
        "approval_request_id": None,
    }


async def _run(item: Item, registry: Registry, _scene: Scene) -> ToolResult:
    spec = registry.get(item["name"])
    if spec is None:
        return ToolResult(error=f"There is no tool {item['name']!r} any more.")
    return await execute(spec, item["arguments"])


def _finish(item: Item, result: ToolResult) -> str:
    item["output"], item["error"] = result.output, None
    if result.error is None:
        item["status"] = "completed"
        return "response.mcp_call.completed"
    item["status"] = "failed"
    content = [{"type": "text", "text": result.error}]
    if result.source == "tool":
        item["error"] = {"type": "mcp_tool_execution_error", "content": content}
    else:
        kind = "http_error" if result.source == "http" else "mcp_protocol_error"
        item["error"] = {"type": kind, "code": result.code or 0, "message": result.error}
    return "response.mcp_call.failed"


def _repeatable(item: Item, registry: Registry) -> bool:
    spec = registry.get(item["name"])
    return spec is not None and spec.idempotent


def _is_held(item: Item, reach: Reach) -> bool:
    return reach.has(item["server_label"])


async def _run_elsewhere(item: Item, reach: Reach) -> ToolResult:
    return await reach.call(item["server_label"], item["name"], item["arguments"], item["id"])


def _repeatable_elsewhere(item: Item, reach: Reach) -> bool:
    return reach.may_repeat(item["server_label"], item["name"])


_ELSEWHERE = Elsewhere(
    _is_elsewhere,
    _offers_listed,
    _listed,
    failed="response.mcp_list_tools.failed",
    unknown=_unknown,
    holds=_is_held,
    run=_run_elsewhere,
    repeatable=_repeatable_elsewhere,
)


def _say(item: Item, transcript: Transcript) -> None:
    told = item.get("approval_request_id") is not None and transcript.has(item["id"])
    if not told:  # by the request for its approval, where the model has written the call
        _tell(item["id"], item, _outcome(item), transcript)


def _tell(call_id: str, item: Item, outcome: str, transcript: Transcript) -> None:
    transcript.call(call_id, transcript.name(item["server_label"], item["name"]), item["arguments"])
    transcript.answer(call_id, outcome)


def _outcome(item: Item) -> str:
    """What the model is told of a call: its output, or its error in words."""
    if item.get("error"):
        error = item["error"]
        return f"error: {error.get('message') or text_of(error.get('content'))}"
    return item.get("output") or ""


# ------------------------------------------------------------------------------------------------------------
# Approvals


def _asked(name: str, arguments: str) -> Item:
    return {"name": name, "arguments": arguments}


def _made(request: Item) -> Item:
    opened = _opened(request["name"], "", request["arguments"])
    return {"server_label": request["server_label"], **opened, "approval_request_id": request["id"]}


def _kept(route: Route) -> Private:
    # A label may be given to another server later, which nobody has approved a call at.
    return {"server": route.server}


def _asked_at(request: Item) -> str | None:
    return (private_of(request) or {}).get("server")


def _say_request(item: Item, transcript: Transcript) -> None:
    """A call that was asked for is told with what came of it, and where the model has written it: so the
    prompt is the same as if nobody had to be asked."""
    if (call := transcript.made.get(item["id"])) is not None:
        _tell(call["id"], item, _outcome(call), transcript)
        return
    answer = transcript.answers.get(("approval_request_id", item["id"]))
    if answer is None or answer["approve"]:  # the call may come yet
        transcript.settled = False
    transcript.asked[item["id"]] = item
    _tell(item["id"], item, _refusal(answer), transcript)


def _say_answer(item: Item, transcript: Transcript) -> None:
    """An answer is told where the call was asked for, unless a compaction has come in between: that says for
    good that nobody has answered. What a call has done that was made since, that call tells."""
    request = transcript.asked.get(item["approval_request_id"])
    if request is not None and not transcript.has(request["id"]) and request["id"] not in transcript.made:
        transcript.settled = transcript.settled and not item["approve"]
        _tell(request["id"], request, _refusal(item), transcript)


def _refusal(answer: Item | None) -> str:
    """What the model is told of a call that was not made."""
    if answer is None:
        return "error: The call was not made: it needs the user's approval, which the user has not given."
    if answer["approve"]:
        return "error: The user approved the call, but it was not made."
    reason = f" The reason: {answer['reason']}" if answer.get("reason") else ""
    return f"error: The call was not made: the user declined it.{reason}"


def _approves(answer: Item) -> bool:
    return bool(answer["approve"])


_APPROVAL = Approval(
    "mcp_approval_request", _asked, _made, source="approval_request_id", keeps=_kept, server=_asked_at
)
_ERROR = {"code": whole(), "message": STRING}
_SHAPE = item_shape(
    {"server_label": STRING, "name": STRING, "arguments": STRING},
    {
        "output": STRING,
        "error": tagged(
            {
                "mcp_protocol_error": record(_ERROR),
                "mcp_tool_execution_error": record({"content": anything}),
                "http_error": record(_ERROR),
            }
        ),
        "approval_request_id": STRING,
    },
    statuses=(*STATUSES, "calling", "failed"),
)
_LISTED = record({"name": STRING, "input_schema": mapping}, {"description": STRING, "annotations": mapping})
_LEFT_OUT = record({"name": STRING, "reason": STRING})

ROWS = (
    ItemType(
        "mcp_list_tools",
        "mcpl_",
        item_shape(
            {"server_label": STRING, "tools": array(_LISTED)},
            {"error": STRING, "server": STRING, "left_out": array(_LEFT_OUT)},
            statuses=(),
        ),
        unspoken,  # the model is offered the tools themselves
        events={
            "response.mcp_list_tools.in_progress": PLACE,
            "response.mcp_list_tools.completed": PLACE,
            "response.mcp_list_tools.failed": PLACE,
        },
        order="mcp_list_tools.in_progress (mcp_list_tools.completed | mcp_list_tools.failed)",
    ),
    ItemType(
        "mcp_call",
        "mcp_",
        _SHAPE,
        _say,
        events={
            "response.mcp_call.in_progress": PLACE,
            "response.mcp_call_arguments.delta": f"{PLACE} delta",
            "response.mcp_call_arguments.done": f"{PLACE} arguments",
            "response.mcp_call.completed": PLACE,
            "response.mcp_call.failed": PLACE,
        },
        order=(
            "mcp_call.in_progress mcp_call_arguments.delta* mcp_call_arguments.done"
            " (mcp_call.completed | mcp_call.failed)"
        ),
        tools={"mcp": mcp_tool},
        call=Call(
            _opened,
            Stream("arguments", "response.mcp_call_arguments"),
            opens=("response.mcp_call.in_progress",),
            offers=_offers,
            fields=_fields,
            server=_server,
            asks=_asks,
            execution=Execution(
                "calling",
                _run,
                _finish,
                _repeatable,
                listing=_LISTING,
                elsewhere=_ELSEWHERE,
                approval=_APPROVAL,
                side_by_side=True,
            ),
        ),
        without_secrets=_without_secrets,
    ),
    ItemType(
        "mcp_approval_request",
        "mcpr_",
        item_shape({"server_label": STRING, "name": STRING, "arguments": STRING}, statuses=()),
        _say_request,
        answered_by="mcp_approval_response",
        key="id",
        keeps=True,
    ),
    ItemType(
        "mcp_approval_response",
        "mcpa_",
        item_shape(
            {"approval_request_id": identifier, "approve": boolean},
            {"reason": STRING, "request_id": STRING},
            statuses=(),
        ),
        _say_answer,
        doubled=("request_id", "approval_request_id"),
        answers="mcp_approval_request",
        key="approval_request_id",
        approves=_approves,
    ),
)
