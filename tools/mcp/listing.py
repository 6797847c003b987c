"""The tools of an MCP server as it lists them, bounded and cleaned: the server may be anybody's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.spec import ToolError

if TYPE_CHECKING:
    from mcp import Client, types

MAX_TOOLS = 1000
"""Of one server. Each response that lists them carries them, and no model reads so many."""

MAX_BYTES = 1 << 20
"""Of all tools of a server together, as JSON: as much as a request may bring itself."""

MAX_PAGES = 100
"""In which a server lists its tools."""

NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""The names that the protocol allows; tools of other names are left out."""

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
    """What a server answered when its tools were asked for. error: why there are none, for the client."""

    tools: tuple[McpTool, ...] = ()
    error: str | None = None


async def all_tools(client: Client) -> tuple[McpTool, ...]:
    """Every tool of a server, page by page. Raises ToolError where there are too many, and what the SDK
    raises."""
    found: dict[str, McpTool] = {}
    num_bytes, cursor = 0, None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for listed in page.tools:
            if not NAME.fullmatch(listed.name):
                continue
            tool = _tool(listed)
            found[tool.name] = tool
            num_bytes += len(tool.description or "") + len(json.dumps([tool.input_schema, tool.annotations]))
            if len(found) > MAX_TOOLS:
                raise ToolError(f"it lists more than {MAX_TOOLS} tools")
            if num_bytes > MAX_BYTES:
                raise ToolError(f"its list of tools has more than {MAX_BYTES} bytes")
        cursor = page.next_cursor
        if cursor is None:
            return tuple(found.values())
    raise ToolError(f"it lists its tools in more than {MAX_PAGES} pages")


def _tool(listed: types.Tool) -> McpTool:
    said = listed.annotations
    annotations = None if said is None else said.model_dump(by_alias=True, exclude_none=True, mode="json")
    description = None if listed.description is None else _UNPRINTABLE.sub(" ", listed.description)
    return McpTool(listed.name, description, listed.input_schema, annotations)
