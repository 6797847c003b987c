"""From names to addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and a port to the host's addresses, the best first. Raises OSError."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses that the system's resolver knows; raises OSError."""
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
