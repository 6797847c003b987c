"""Tools that a model may call: what a tool is, those that come with the server, how a call is run, and what
tools may reach."""

from __future__ import annotations

from tools.arguments import prepare_arguments
from tools.builtin import BUILTIN
from tools.egress import Caps, Egress, EgressError, guarded_client, prepare_egress, read_rule
from tools.mcp import ConnectionPool, Connections, Listing, McpServer, McpTool
from tools.operator import ToolsError, operator_tools, tool
from tools.runtime import ToolResult, execute
from tools.spec import Registry, ToolError, ToolSpec

__all__ = [
    "BUILTIN",
    "Caps",
    "ConnectionPool",
    "Connections",
    "Egress",
    "EgressError",
    "Listing",
    "McpServer",
    "McpTool",
    "Registry",
    "ToolError",
    "ToolResult",
    "ToolSpec",
    "ToolsError",
    "execute",
    "guarded_client",
    "operator_tools",
    "prepare_arguments",
    "prepare_egress",
    "read_rule",
    "tool",
]
