"""Tools behind the Model Context Protocol, by the official SDK; connections pass from run to run.

Speaks streamable HTTP, the older HTTP with server-sent events, and the standard streams of a program; bounds
time, bytes and numbers of tools, and turns every failure into a value.
"""

from __future__ import annotations

from tools.mcp.arguments import read_arguments
from tools.mcp.connection import prepare_mcp
from tools.mcp.connections import ConnectionPool, Connections
from tools.mcp.listing import Listing, McpTool
from tools.mcp.server import McpServer

__all__ = [
    "ConnectionPool",
    "Connections",
    "Listing",
    "McpServer",
    "McpTool",
    "prepare_mcp",
    "read_arguments",
]
