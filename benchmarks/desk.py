"""The desk of a bath house as an MCP server over standard streams, for `benchmarks.loops`."""

from __future__ import annotations

import asyncio
from typing import Literal

from mcp.server.mcpserver import MCPServer

COURTS = 6
PRICES = {20: 30, 40: 52, 60: 74}
"""What a massage costs, by its minutes."""


def main() -> None:
    """Serve until the streams are closed."""
    server = MCPServer("desk")

    @server.tool()
    def free_sauna() -> str:
        """Which sauna is free now."""
        return "the birch sauna"

    @server.tool()
    def reserve_court(court: int, guest: str) -> str:
        """Reserve a tennis court for a guest.

        Args:
            court: The number of the court.
            guest: Whom it is for.
        """
        if court > COURTS:
            raise ValueError(f"there is no court {court}")
        return f"Court {court} is reserved for {guest}."

    @server.tool()
    def pool_temperature() -> int:
        """The temperature of the pool in degrees."""
        return 26

    @server.tool()
    def massage_price(minutes: Literal[20, 40, 60]) -> str:
        """The price of a massage by its length in minutes."""
        return f"{PRICES[minutes]} crowns for {minutes} minutes"

    asyncio.run(server.run_stdio_async())


if __name__ == "__main__":
    main()
