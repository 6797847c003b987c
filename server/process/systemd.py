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

ROOM_S = 1.0
"""How long a change of state waits for room in the manager's queue, which holds about ten datagrams and is
full while the manager is busy. The process does nothing else meanwhile."""


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
        self._tell("READY=1", f"STATUS={status}", wait_s=ROOM_S)

    def stopping(self, status: str) -> None:
        """The process takes no new work, and is about to end."""
        self._tell("STOPPING=1", f"STATUS={status}", wait_s=ROOM_S)

    def reloading(self) -> None:
        """The settings are read again; `ready` says that this is over."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell("RELOADING=1", f"MONOTONIC_USEC={now}", wait_s=ROOM_S)

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

    def _tell(self, *lines: str, wait_s: float = 0.0) -> None:
        """Send one datagram. What finds no room within `wait_s` is lost: the next sign of life comes in time,
        since the manager waits for three. Only where there is no manager is nothing sent any more."""
        if not self.address:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(wait_s)
                sock.connect(address)  # only a socket that is connected can wait for room at the other end
                sock.send("\n".join(lines).encode())
        except OSError as error:
            log.warning("the service manager at %s was not told %s: %s", self.address, lines[0], error)
            if isinstance(error, FileNotFoundError | PermissionError):
                self.address = ""
