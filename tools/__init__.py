"""Tools that a model may call: what a tool is, those that come with the server, how a call is run, and what
tools may reach."""

from __future__ import annotations

from tools.arguments import prepare_arguments
from tools.builtin import BUILTIN
from tools.documents import (
    Chunk,
    Document,
    DocumentPage,
    ReadingLimits,
    UnreadableDocument,
    estimated_tokens,
    parser_version,
    prepare_documents,
    read_document,
    reading_confinement,
    split_document,
    splitter_version,
    unreadable_kinds,
)
from tools.egress import Caps, Egress, EgressError, guarded_client, prepare_egress, read_rule
from tools.images import GENERATE, Image, ImageGenerator, image_tools
from tools.mcp import ConnectionPool, Connections, Listing, McpServer, McpTool
from tools.operator import ToolsError, operator_tools, tool
from tools.ranking import best_matches
from tools.runtime import UNKNOWN_EFFECT, execute, with_doubt
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
    "GENERATE",
    "PAGE",
    "PROVIDERS",
    "SEARCH",
    "UNKNOWN_EFFECT",
    "Caps",
    "Chunk",
    "ConnectionPool",
    "Connections",
    "Document",
    "DocumentPage",
    "Egress",
    "EgressError",
    "Image",
    "ImageGenerator",
    "Listing",
    "McpSearch",
    "McpServer",
    "McpTool",
    "ReadingLimits",
    "Registry",
    "SearchFailed",
    "ToolError",
    "ToolResult",
    "ToolSpec",
    "ToolsError",
    "UnreadableDocument",
    "WebSearch",
    "best_matches",
    "estimated_tokens",
    "execute",
    "folder_tools",
    "guarded_client",
    "host_of",
    "image_tools",
    "is_within",
    "operator_tools",
    "parser_version",
    "prepare_arguments",
    "prepare_documents",
    "prepare_egress",
    "prepare_pages",
    "read_document",
    "read_folder",
    "read_name",
    "read_rule",
    "reading_confinement",
    "reads_html",
    "search_once",
    "split_document",
    "splitter_version",
    "tool",
    "unreadable_kinds",
    "urls_in",
    "web_tools",
    "with_doubt",
]
