"""An MCP server over standard streams, for tests: `python -m tests.support.mcp_program LOG`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer


def main() -> None:
    """Serve until the streams are closed."""
    log = Path(sys.argv[1])
    server = MCPServer("program")

    @server.tool()
    def append(line: str) -> str:
        """Append a line to the log."""
        with log.open("a") as file:
            file.write(f"{line}\n")
        return f"{line} {os.environ.get('DESK', '')}".strip()

    server.run("stdio")


if __name__ == "__main__":
    main()
