"""Tools that a model may call: what a tool is, those that come with the server, and how a call is run."""

from __future__ import annotations

from tools.builtin import BUILTIN
from tools.mcp import Connections, HttpTransport, Listing, McpServer, McpTool
from tools.runtime import ToolResult, execute
from tools.spec import Registry, ToolError, ToolSpec

__all__ = [
    "BUILTIN",
    "Connections",
    "HttpTransport",
    "Listing",
    "McpServer",
    "McpTool",
    "Registry",
    "ToolError",
    "ToolResult",
    "ToolSpec",
    "execute",
]
