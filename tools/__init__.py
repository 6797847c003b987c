"""Tools that a model may call: what a tool is, those that come with the server, how a call is run, and what
tools may reach."""

from __future__ import annotations

from tools.arguments import prepare_arguments
from tools.builtin import BUILTIN
from tools.egress import Caps, Egress, EgressError, guarded_client, prepare_egress, read_rule
from tools.images import GENERATE, Image, ImageGenerator, image_tools
from tools.mcp import ConnectionPool, Connections, Listing, McpServer, McpTool
from tools.operator import ToolsError, operator_tools, tool
from tools.ranking import best_matches
from tools.runtime import UNKNOWN_EFFECT, execute, with_doubt
from tools.sandbox import (
    DATA,
    MIB,
    CellLimits,
    CellResult,
    Moment,
    Outcome,
    Sandbox,
    SandboxError,
    Workspace,
    Write,
    find_sandbox,
    is_path,
)
from tools.spec import Registry, ToolError, ToolResult, ToolSpec
from tools.web import (
    PAGE,
    PROVIDERS,
    SEARCH,
    McpSearch,
    SearchFailed,
    WebSearch,
    folder_tools,
    host_of,
    is_within,
    prepare_pages,
    read_folder,
    read_name,
    reads_html,
    search_once,
    urls_in,
    web_tools,
)

__all__ = [
    "BUILTIN",
    "DATA",
    "GENERATE",
    "MIB",
    "PAGE",
    "PROVIDERS",
    "SEARCH",
    "UNKNOWN_EFFECT",
    "Caps",
    "CellLimits",
    "CellResult",
    "ConnectionPool",
    "Connections",
    "Egress",
    "EgressError",
    "Image",
    "ImageGenerator",
    "Listing",
    "McpSearch",
    "McpServer",
    "McpTool",
    "Moment",
    "Outcome",
    "Registry",
    "Sandbox",
    "SandboxError",
    "SearchFailed",
    "ToolError",
    "ToolResult",
    "ToolSpec",
    "ToolsError",
    "WebSearch",
    "Workspace",
    "Write",
    "best_matches",
    "execute",
    "find_sandbox",
    "folder_tools",
    "guarded_client",
    "host_of",
    "image_tools",
    "is_path",
    "is_within",
    "operator_tools",
    "prepare_arguments",
    "prepare_egress",
    "prepare_pages",
    "read_folder",
    "read_name",
    "read_rule",
    "reads_html",
    "search_once",
    "tool",
    "urls_in",
    "web_tools",
    "with_doubt",
]
