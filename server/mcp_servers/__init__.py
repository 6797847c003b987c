"""Which MCP servers a request may reach, with whose credentials, and how a run reaches them.

The operator's servers are configured under `[mcp.servers.NAME]`; other addresses are for the way out to
allow.
"""

from __future__ import annotations

from server.mcp_servers.directory import BUILTIN_URL, Directory
from server.mcp_servers.reach import Reach
from server.mcp_servers.settings import McpSettings, ServerSettings, read_mcp_settings, resolved

__all__ = [
    "BUILTIN_URL",
    "Directory",
    "McpSettings",
    "Reach",
    "ServerSettings",
    "read_mcp_settings",
    "resolved",
]
