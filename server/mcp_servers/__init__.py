"""Which MCP servers a request may reach, with whose credentials, how a run reaches them, and which
of their calls a client has to approve.

The operator's servers are configured under `[mcp.servers.NAME]`; other addresses are for the way out to
allow.
"""

from __future__ import annotations

from server.mcp_servers.approvals import BUILTIN_URL, Approvals
from server.mcp_servers.directory import Directory, server_of
from server.mcp_servers.reach import Reach
from server.mcp_servers.settings import McpSettings, ServerSettings, read_mcp_settings

__all__ = [
    "BUILTIN_URL",
    "Approvals",
    "Directory",
    "McpSettings",
    "Reach",
    "ServerSettings",
    "read_mcp_settings",
    "server_of",
]
