"""An MCP server in a process of its own, for tests.

`python -m tests.support.mcp_program LOG [TRANSPORT PORT]` serves its standard streams, or a port of loopback
over `sse` or `streamable-http`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer


def main() -> None:
    """Serve until the streams are closed, or for ever."""
    log = Path(sys.argv[1])
    server = MCPServer("program")

    @server.tool()
    def append(line: str) -> str:
        """Append a line to the log."""
        with log.open("a") as file:
            file.write(f"{line}\n")
        return f"{line} {os.environ.get('DESK', '')}".strip()

    @server.tool()
    async def wait(ctx: Context[Any, Any]) -> str:
        """Take ten minutes, with notices of progress."""
        for minute in range(10):
            for second in range(0, 60, 20):
                await ctx.report_progress(minute * 60 + second, 600)
                await asyncio.sleep(20)
        return "done"

    @server.tool()
    def crash() -> str:
        """Write to the log, and end the program before it answers."""
        with log.open("a") as file:
            file.write("crashed\n")
        print("first words\nthe desk is gone", file=sys.stderr, flush=True)
        os._exit(7)

    match sys.argv[2:]:
        case ["sse", port]:
            server.run("sse", port=int(port))
        case ["streamable-http", port]:
            server.run("streamable-http", port=int(port))
        case _:
            server.run("stdio")


if __name__ == "__main__":
    main()
