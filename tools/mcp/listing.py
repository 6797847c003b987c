"""The tools of an MCP server as it lists them, bounded and cleaned: the server may be anybody's.

A tool that cannot be shown is left out, with the reason, and the others are there all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from tools.mcp.messages import first_fault
from tools.spec import ToolError

if TYPE_CHECKING:
    from mcp import Client, types

MAX_TOOLS = 1000
"""Of one server. Each response that lists them carries them, and no model reads so many."""

MAX_BYTES = 1 << 20
"""Of all tools of a server together, as JSON: as much as a request may bring itself."""

MAX_PAGES = 100
"""In which a server lists its tools."""

MAX_LEFT_OUT = 100
"""Tools that are left out and named with the reason; what stands in the item is stored."""

MAX_NAME = 128
"""Characters of a tool's name. The protocol allows letters, digits and `_./-`; others are taken as well."""

_FRAME = ("cacheScope", "resultType", "ttlMs")
"""Members that a page must have beside its tools, in one version of the protocol or another."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool. input_schema: JSON Schema of an object. annotations: what the server says of it, or None."""

    name: str
    description: str | None
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a server answered when its tools were asked for. error: why there are none, for the client.
    left_out: name -> why, of the tools that cannot be shown."""

    tools: tuple[McpTool, ...] = ()
    error: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


async def all_tools(client: Client) -> Listing:
    """Every tool of a server, page by page. Raises ToolError where there are too many, and what the SDK
    raises."""
    found: dict[str, McpTool] = {}
    num_bytes, cursor = 0, None
    with _judging(client) as judge:
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            judge.compare(listed.name for listed in page.tools)
            for listed in page.tools:
                tool = _tool(listed)
                found[tool.name] = tool
                schema = json.dumps([tool.input_schema, tool.annotations])
                num_bytes += len(tool.description or "") + len(schema)
                if num_bytes > MAX_BYTES:
                    raise ToolError(f"its list of tools has more than {MAX_BYTES} bytes")
            cursor = page.next_cursor
            if cursor is None:
                return Listing(tuple(found.values()), left_out=judge.left_out)
    raise ToolError(f"it lists its tools in more than {MAX_PAGES} pages")


class _Judge:
    """Takes the tools that cannot be shown out of the pages of a listing. Without it the SDK refuses a page
    for one tool that is not as the protocol says, or drops a tool and tells nobody."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._kept: list[str] = []  # of the last page
        self._names: set[str] = set()  # that are taken
        self._num_listed = 0
        self.left_out: dict[str, str] = {}

    def page(self, result: dict[str, Any]) -> dict[str, Any]:
        """A page as it came, without these tools. Raises ToolError where there are too many, with those of
        the pages before."""
        listed = result.get("tools")
        if not isinstance(listed, list):
            return result
        self._num_listed += len(listed)
        if self._num_listed > MAX_TOOLS:
            raise ToolError(f"it lists more than {MAX_TOOLS} tools")
        # Each tool is judged in a page of its own, without what else this page holds: that may be long, and
        # would be read anew for each of them.
        frame = {name: result[name] for name in _FRAME if name in result}
        kept = []
        for tool in listed:
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str):
                self._leave_out("?", "it has no name")
                continue
            if name in self._names:
                self._leave_out(name, "another tool has this name; the first of them is taken")
                continue
            mended = {**tool, "inputSchema": _as_object(tool.get("inputSchema"))}
            if (why := self._fault(name, mended, frame)) is not None:
                self._leave_out(name[:MAX_NAME].encode("unicode_escape").decode(), why)
            else:
                kept.append(mended)
                self._names.add(name)
        self._kept = [tool["name"] for tool in kept]
        return {**result, "tools": kept}

    def compare(self, names: Iterator[str]) -> None:
        """Note what the SDK has dropped of the last page."""
        for name in {*self._kept}.difference(names):
            self._leave_out(name, "its x-mcp-header annotations are not as the protocol says")

    def _leave_out(self, name: str, why: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            self.left_out[name] = why
        else:
            self.left_out["..."] = f"only {MAX_LEFT_OUT} of the tools that are left out are named"

    def _fault(self, name: str, tool: Mapping[str, Any], frame: Mapping[str, Any]) -> str | None:
        """Why a tool cannot be shown; None where it can. frame: what a page must have beside its tools."""
        from mcp_types.methods import validate_server_result

        if not name or len(name) > MAX_NAME or not name.isprintable():
            return f"its name is not one of 1 to {MAX_NAME} printable characters"
        try:
            validate_server_result("tools/list", self._version, {**frame, "tools": [tool]})
        except KeyError:  # this version has no rules for it
            pass
        except ValueError as error:  # pydantic's
            return f"it is not as the protocol says: {first_fault(error).removeprefix('tools.0.')}"[:300]
        return None if _is_writable(tool) else "it holds a number or a character that cannot be stored"


def _is_writable(tool: Mapping[str, Any]) -> bool:
    """Whether it can be written as JSON again: integers of any length can be read, and half a character."""
    try:
        orjson.dumps(tool)
    except orjson.JSONEncodeError:
        return False
    return True


def _as_object(schema: Any) -> Any:
    """An input schema that leaves its type out, or all of it, is that of an object: arguments are one."""
    if schema is None:
        return {"type": "object"}
    return {"type": "object", **schema} if isinstance(schema, dict) and "type" not in schema else schema


@contextmanager
def _judging(client: Client) -> Iterator[_Judge]:
    """Have the pages of a listing judged before the SDK reads them, for which it has no place of its own."""
    judge, dispatcher = _Judge(client.protocol_version), client.session._dispatcher
    send = dispatcher.send_raw_request

    async def sent(method: str, *args: Any, **more: Any) -> dict[str, Any]:
        result = await send(method, *args, **more)
        return judge.page(result) if method == "tools/list" else result

    dispatcher.send_raw_request = sent  # type: ignore[method-assign]
    try:
        yield judge
    finally:
        del dispatcher.send_raw_request


def _tool(listed: types.Tool) -> McpTool:
    said = listed.annotations
    annotations = None if said is None else said.model_dump(by_alias=True, exclude_none=True, mode="json")
    description = None if listed.description is None else _UNPRINTABLE.sub(" ", listed.description)
    return McpTool(listed.name, description, listed.input_schema, annotations)
