"""An MCP server in a process of its own, for tests: `python -m tests.support.mcp_program LOG [PORT]`.

It serves its standard streams, or with a port the older HTTP with server-sent events, which has sessions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer


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

    if len(sys.argv) > 2:
        server.run("sse", port=int(sys.argv[2]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
