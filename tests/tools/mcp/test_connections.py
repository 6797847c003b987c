"""Connections with MCP servers: whom they pass to, and their ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.mcp_servers import stdio_command
from tests.support.processes import ROOT, free_port, listens
from tools.egress import Egress
from tools.mcp import ConnectionPool, Connections, McpServer


def held() -> list[asyncio.Task[object]]:
    """The tasks of connections that have not ended."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "mcp desk"]


async def listed(pool: ConnectionPool, owner: str, server: McpServer) -> None:
    connections = Connections(pool, owner)
    listing = await connections.list_tools("desk", server)
    assert listing.error is None and listing.tools
    connections.close()


async def test_a_program_serves_one_run_of_its_owner_after_the_other(tmp_path: Path) -> None:
    pool = ConnectionPool(Egress())
    server = McpServer("desk", command=stdio_command(tmp_path / "log"))
    await listed(pool, "ann", server)
    first = held()
    await listed(pool, "ann", server)
    assert held() == first and len(first) == 1
    await listed(pool, "bob", server)
    await listed(pool, "ann", McpServer("desk", command=server.command, env={"DESK": "other"}))
    assert len(held()) == 3
    both = [Connections(pool, "ann"), Connections(pool, "ann")]
    await asyncio.gather(*(each.list_tools("desk", server) for each in both))
    assert len(held()) == 4, "two runs at once have a connection each"
    for each in both:
        each.close()
    await pool.close()
    assert not held()


async def test_what_waits_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.mcp import connections

    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    pool = ConnectionPool(Egress())
    await listed(pool, "ann", McpServer("desk", command=stdio_command(tmp_path / "log")))
    await asyncio.wait_for(asyncio.gather(*held()), 20)
    await pool.close()


async def test_only_so_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.mcp import connections

    monkeypatch.setattr(connections, "MOST_IDLE", 1)
    pool = ConnectionPool(Egress())
    server = McpServer("desk", command=stdio_command(tmp_path / "log"))
    await listed(pool, "ann", server)
    (first,) = held()
    await listed(pool, "bob", server)
    await asyncio.wait_for(first, 20)
    assert len(held()) == 1
    await pool.close()


@asynccontextmanager
async def sse_program(log: Path, port: int) -> AsyncIterator[str]:
    """A server in a process that is killed at the end; yields its URL."""
    child = await asyncio.create_subprocess_exec(*stdio_command(log), "sse", str(port), cwd=ROOT)
    try:
        await listens(port)
        yield f"http://127.0.0.1:{port}/sse"
    finally:
        child.kill()
        await child.wait()


async def test_a_server_that_began_anew_is_connected_with_anew(tmp_path: Path) -> None:
    port = free_port()
    pool = ConnectionPool(Egress(mode="any"))
    async with sse_program(tmp_path / "log", port) as url:
        server = McpServer("desk", url=url)
        await listed(pool, "ann", server)
        first = held()
        await listed(pool, "ann", server)
        assert held() == first, "its session goes on"
    async with sse_program(tmp_path / "log", port):
        await listed(pool, "ann", server)
        await pool.close()
    assert not held()
