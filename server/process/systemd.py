"""Tells the service manager that started this process how the process is: systemd's `sd_notify`.

The manager names a socket in the variable NOTIFY_SOCKET, and takes datagrams of lines `NAME=VALUE` there. A
process that no manager started has no such variable, and tells nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger("antiphon")

STARTING_S = 5.0
"""Seconds between two notices while the process starts."""

MORE_S = 60.0
"""How much longer each of these notices asks the manager to wait."""


class ServiceManager:
    """The manager of this process, if it has one."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        """address: the path of a Unix socket, or `@name` of an abstract one; empty for no manager.
        watchdog_s: how long the manager waits for a sign of life before it ends the process."""
        self.address = address
        self.watchdog_s = watchdog_s

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The one that the environment names. Its variables are taken out: no process that this one starts,
        such as a tool, is to speak for the service."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        whose = environment.pop("WATCHDOG_PID", "")
        meant = microseconds.isdecimal() and whose in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if meant else None)

    def ready(self, status: str) -> None:
        """Requests are taken; what waits for this service may start."""
        self._tell("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """The process takes no new work, and is about to end."""
        self._tell("STOPPING=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The settings are read again; `ready` says that this is over."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def still_starting(self, status: str) -> None:
        """The start goes on, however long the manager waits for one by default."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(MORE_S * 1e6)}", f"STATUS={status}")

    async def while_starting(self, status: str) -> None:
        """Say so until this task is cancelled."""
        while self.address:
            self.still_starting(status)
            await asyncio.sleep(STARTING_S)

    async def alive(self) -> None:
        """Give signs of life until this task is cancelled: a hung event loop gives none."""
        while self.address and self.watchdog_s:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)

    def _tell(self, *lines: str) -> None:
        if not self.address:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            log.warning("the service manager at %s cannot be told: %s", self.address, error)
            self.address = ""
