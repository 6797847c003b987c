"""Connections with MCP servers, and their ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.mcp_servers import stdio_command
from tools.egress import Egress
from tools.mcp import Connections, McpServer


async def test_an_end_that_is_cancelled_leaves_no_program_behind(tmp_path: Path) -> None:
    connections = Connections(Egress())
    server = McpServer("desk", command=stdio_command(tmp_path / "log"))
    assert (await connections.list_tools("desk", server)).error is None
    held = [task for task in asyncio.all_tasks() if task.get_name() == "mcp desk"]
    assert len(held) == 1
    closing = asyncio.create_task(connections.close())
    await asyncio.sleep(0)  # it has begun
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert held[0].done()
