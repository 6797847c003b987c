"""The processes in which documents are read.

A nursery process loads the libraries that documents need, and forks a child for each document: a child reads
one document, confined, and ends. So no document meets another, and none waits for a start. The nursery itself
reads no byte of a document.

What a child is told and what it tells are plain frames: a length, and bytes. Whoever asks believes nothing of
an answer but that it is text.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mimetypes
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.documents.confinement import confine, library_folders, limit
from tools.documents.document import Code, Document, Pixels, ReadingLimits, UnreadableDocument
from tools.documents.kinds import LIBRARIES
from tools.documents.sound import Sound
from tools.priority import NICENESS

FRAME = struct.Struct("<I")
PAGE = struct.Struct("<i?")
"""In front of a page's text: its number, 0 for none; and whether it is damaged."""
CUT = struct.Struct("<II")
"""Where a chunk begins and ends, in characters of the text. All cuts are one frame, behind the pages."""
ORDER = struct.Struct("<cq")
"""To the nursery: fork, with the index of the likely kind in KINDS; or end the child of a process id."""
ANSWER = struct.Struct("<q")
"""The process id; or how the child ended, as `os.waitpid` says it."""
FORK, END = b"f", b"e"

EXTRAS = {"trafilatura": "web", "soundfile": "audio", "av": "audio", "numpy": "audio", "PIL": "images"}
"""The extra that a library comes with, where it is not `files`."""

KINDS = ("text", "markdown", "pdf", "docx", "pptx", "xlsx", "html")

PIECE = 1 << 20
"""Bytes of samples or of pixels in a frame."""

Read = Document | Sound | Pixels

Parse = Callable[[bytes, str, str | None, ReadingLimits], Read]
"""Takes the file's bytes, its name, its URL if it has one, and limits. Raises UnreadableDocument."""


def send(channel: socket.socket, *parts: bytes | memoryview) -> None:
    """One frame."""
    channel.sendall(FRAME.pack(sum(map(len, parts))) + b"".join(parts))


def receive(channel: socket.socket, most: int) -> bytes:
    """One frame; EOFError where the other side is gone, ValueError where it is longer than `most` bytes."""
    length = FRAME.unpack(exactly(channel, FRAME.size))[0]
    if length > most:
        raise ValueError("the frame is too long")
    return exactly(channel, length)


def exactly(channel: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        if not (got := channel.recv_into(view[at:])):
            raise EOFError
        at += got
    return bytes(data)


# -- the nursery ---------------------------------------------------------------------------------------------


def main(descriptor: int, module: str, folders: Sequence[str]) -> None:
    """Fork whoever is asked for, until the server is gone, which ends them all. module: what parses."""
    # openpyxl asks for types of files as it is loaded, which reads tables that a child may not open.
    mimetypes.knownfiles.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=descriptor)
    parser = importlib.import_module(module)
    parse: Parse = parser.parse
    with contextlib.suppress(ImportError):  # the child says what is missing
        getattr(parser, "prepare", lambda: None)()
    control.sendall(ANSWER.pack(0))
    loaded: set[int] = set()
    children: set[int] = set()
    try:
        while True:
            data, handed, _, _ = socket.recv_fds(control, ORDER.size, 1)
            if not data:
                return
            order, number = ORDER.unpack(data)
            if order == FORK:
                if number not in loaded:
                    loaded.add(number)
                    _load(KINDS[number])
                number = os.fork()
                if number == 0:
                    _child(control, handed[0], parse, folders)
                children.add(number)
                for each in handed:
                    os.close(each)
            else:
                children.discard(number)
                os.kill(number, signal.SIGKILL)
                number = os.waitpid(number, 0)[1]
            control.sendall(ANSWER.pack(number))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def _load(kind: str) -> None:
    """Load what a kind of document needs, so that whoever is forked has it."""
    for name, libraries in LIBRARIES.items():
        for library in libraries if name == kind else ():
            with contextlib.suppress(ImportError):  # the child says what is missing
                importlib.import_module(library)
    gc.collect()
    gc.freeze()


def _child(control: socket.socket, channel_fd: int, parse: Parse, folders: Sequence[str]) -> None:
    """A forked process, for one document; never returns."""
    status = 1
    try:
        control.close()
        with contextlib.suppress(OSError):  # Linux: should memory run out, this one goes, not the server
            Path("/proc/self/oom_score_adj").write_text("900")
        channel = socket.socket(fileno=channel_fd)
        order = json.loads(receive(channel, 1 << 20))
        limits = ReadingLimits(**order["limits"])
        os.nice(NICENESS)
        limit(limits.memory, limits.cpu_s)
        confined = confine(folders)
        _answer(channel, order, limits, confined, parse)
        status = 0
    except (EOFError, OSError):
        status = 0  # whoever asked is gone
    finally:
        os._exit(status)


def _answer(
    channel: socket.socket, order: dict[str, Any], limits: ReadingLimits, confined: list[str], parse: Parse
) -> None:
    """Read one document, and tell what it is, or why it cannot be read."""
    try:
        data = exactly(channel, order["size"])
        read = parse(data, order["filename"], order["url"], limits)
    except UnreadableDocument as error:
        _refuse(channel, error.code, error.message)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "", "files")
        message = f"This server cannot read such files: its operator has to install the extra '{extra}'."
        _refuse(channel, "unsupported_file", message)
    except MemoryError:
        message = f"Reading this file takes more than {limits.memory >> 20} MiB of memory."
        _refuse(channel, "too_large", message)
    except RecursionError:
        _refuse(channel, "invalid_file", "This file is nested too deeply.")
    except (EOFError, OSError):
        raise
    except Exception:  # whatever a parser raises on broken bytes
        _refuse(channel, "invalid_file", "This file is damaged: it cannot be read.")
    else:
        _tell(channel, read, confined)


def _tell(channel: socket.socket, read: Read, confined: list[str]) -> None:
    """Tell what was read: what it is, then its pages, its samples or its pixels."""
    if isinstance(read, Document):
        told: dict[str, Any] = {"kind": read.kind, "title": read.title, "pages": len(read.pages)}
        send(channel, json.dumps(told | {"confined": confined}).encode())
        for page in read.pages:
            send(channel, PAGE.pack(page.number or 0, page.damaged), page.text.encode("utf-8", "replace"))
        if read.cuts is not None:
            send(channel, *(CUT.pack(*cut) for cut in read.cuts))
        return
    if isinstance(read, Sound):
        told, whole = {"bytes": len(read.samples)}, memoryview(read.samples)
    else:
        told, whole = {"width": read.width, "height": read.height}, memoryview(read.rgb)
    send(channel, json.dumps(told | {"confined": confined}).encode())
    for at in range(0, len(whole), PIECE):
        send(channel, whole[at : at + PIECE])


def _refuse(channel: socket.socket, code: Code, message: str) -> None:
    send(channel, json.dumps({"code": code, "message": message}).encode())


_START = """
import sys, types
sys.path[:] = {path!r}
for name in {packages!r}:
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{root!r} + "/" + name.replace(".", "/")]
from tools.documents.child_process import main
main({descriptor}, {module!r}, {folders!r})
"""


def command(descriptor: int, module: str, folders: Sequence[str], root: str) -> list[str]:
    """The command line of a nursery that is handed this descriptor. It finds the modules that we found, but
    goes past the doors of our packages, which would load all that the server has tools for."""
    standard = [each for each in sys.path if each.startswith((sys.base_prefix, sys.prefix))]
    path = [root, *dict.fromkeys([*standard, *library_folders()])]
    code = _START.format(
        path=path,
        packages=("tools", "tools.documents"),
        root=root,
        descriptor=descriptor,
        module=module,
        folders=list(folders),
    )
    return [sys.executable, "-I", "-S", "-c", code]
