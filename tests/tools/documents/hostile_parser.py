"""A parser that does what the bytes tell it to: what a parser might be made to do by those of a stranger."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from functools import partial
from pathlib import Path

from tools.documents.document import Document, DocumentPage, ReadingLimits


def attempts() -> dict[str, object]:
    """What must not succeed, by its name."""

    def connect() -> None:
        socket.create_connection(("127.0.0.1", 9), 1)

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def use_a_right_of_root() -> None:
        sets = (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capget(struct.pack("Ii", 0x20080522, 0), sets)
        if not (sets[0] | sets[1] | sets[3] | sets[4]) & ~(1 << 2):  # to read every file
            raise OSError

    return {
        "fork": fork,
        "a right of root": use_a_right_of_root,
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "socket": connect,
        "pair": socket.socketpair,
        "kill": lambda: os.kill(1, signal.SIGKILL),
        "kill parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
        "read": lambda: Path("/etc/passwd").read_bytes(),
        "list": lambda: os.listdir("/root"),
        "write": lambda: Path("/tmp/written-by-a-parser").write_bytes(b"x"),
        "write beside": lambda: Path(__file__).with_suffix(".new").touch(),
        "a signal by way of a descriptor": lambda: fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid()),
        "a file without a name": lambda: os.memfd_create("x"),
        "raise limits": lambda: __import__("resource").setrlimit(7, (4096, 4096)),
    }


def parse(data: bytes, filename: str, url: str | None, limits: ReadingLimits) -> Document:
    told = data.decode()
    if told == "compute":
        while True:
            pass
    elif told == "wait":
        time.sleep(600)
    elif told == "memory":
        bytearray(2 << 30)
    elif told == "crash":
        ctypes.string_at(0)
    elif told == "abort":
        os.abort()
    elif told == "garbage":
        os.write(3, b"\xff" * 4096)  # the lowest of its descriptors is its channel
        os._exit(0)
    elif told.startswith("say "):
        os.write(3, bytes.fromhex(told[4:]))
        os._exit(0)
    elif told == "attempt":
        return _text(" ".join(name for name, attempt in attempts().items() if _succeeds(attempt)))
    elif told == "descriptors":
        return _text(" ".join(str(each) for each in range(64) if _succeeds(partial(os.fstat, each))))
    elif told.startswith("read "):
        return _text("read" if _succeeds(partial(os.open, told[5:], os.O_RDONLY)) else "refused")
    elif told == "environment":
        return _text(" ".join(sorted(os.environ)))
    return _text(told)


def _succeeds(attempt: object) -> bool:
    try:
        attempt()  # type: ignore[operator]
    except (OSError, ValueError):
        return False
    return True


def _text(text: str) -> Document:
    return Document("text", (DocumentPage(None, text),))
