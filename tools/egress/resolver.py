"""From names to addresses.

The system's resolver keeps a thread for as long as the servers of a name are silent, and nobody can end that.
So lookups have threads of their own, of which one domain has a few.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tools.egress.policy import EgressError

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and a port to the host's addresses, the best first. Raises OSError and EgressError."""

MOST, MOST_OF_DOMAIN = 64, 8
"""Names that are looked up at a time: all, and those with the same last two labels."""


class Lookups:
    """Lookups in progress: one for each name, however many wait for it, until its thread has returned, even
    where nobody waits any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST, thread_name_prefix="lookups")
        self._lock = threading.Lock()
        self._running: dict[str, Future[list[str]]] = {}

    async def resolve(self, host: str, _port: int) -> Sequence[str]:
        """The addresses that the system's resolver knows, perhaps none. Raises EgressError where too many
        names are looked up."""
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            return await asyncio.shield(asyncio.wrap_future(self._lookup(host)))

    def _lookup(self, host: str) -> Future[list[str]]:
        with self._lock:
            if (running := self._running.get(host)) is not None:
                return running
            same = [name for name in self._running if _domain(name) == _domain(host)]
            if len(same) >= MOST_OF_DOMAIN or len(self._running) >= MOST:
                names = f"names of {_domain(host)}" if len(same) >= MOST_OF_DOMAIN else "names"
                message = f"{host} is not reached: too many {names} are being looked up already."
                raise EgressError(message, "unreachable")
            lookup = self._running[host] = self._threads.submit(_addresses, host)
        lookup.add_done_callback(lambda _: self._end(host))
        return lookup

    def _end(self, host: str) -> None:
        with self._lock:
            del self._running[host]


def _addresses(host: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # perhaps nobody waits any more, to whom it could be told
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _domain(host: str) -> str:
    return ".".join(host.split(".")[-2:])


resolve: Resolver = Lookups().resolve
