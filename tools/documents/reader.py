"""Reads documents in the processes of `child_process`: starts, asks and ends them, and says what one died of.

Everything that waits does so on threads of the reader's own, so an event loop only waits for these.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import IO, Any, Generic, TypeVar, get_args

from tools.documents.child_process import (
    ANSWER,
    CUT,
    END,
    FORK,
    KINDS,
    ORDER,
    PAGE,
    PIECE,
    command,
    exactly,
    receive,
    send,
)
from tools.documents.confinement import OWN, namespaced, readable_folders
from tools.documents.document import (
    BETWEEN_PAGES,
    Code,
    Document,
    DocumentPage,
    Kind,
    Pixels,
    ReadersBusy,
    ReadingLimits,
    UnreadableDocument,
)
from tools.documents.image import image_limits
from tools.documents.kinds import HEAD, LIBRARIES, likely_kind
from tools.documents.sound import RATE, Sound
from tools.documents.splitting import CHARS_PER_TOKEN
from tools.documents.turns import Turns
from tools.priority import let_session_stand_back

T = TypeVar("T")

Load = Callable[[], Coroutine[Any, Any, bytes]]
"""Loads the bytes of a document, on the event loop of whoever has it read. It is called when it is the
document's turn, so that the bytes of those that wait are not in memory."""

DEFAULT_LIMITS = ReadingLimits()

SOUND_LIMITS = ReadingLimits(cpu_s=180, wall_s=300.0)
"""An hour of sound takes some ten seconds of a processor to decode, in ten formats; of a slow one it takes
more."""

PLACES = max(2, min(4, (os.cpu_count() or 1) // 2))
"""How many documents are read at a time. One more may be, of an owner of whom none is being read: so nobody's
first document waits for the many of another. `Turns` says how many one owner has."""

WAIT_S = 60.0
"""How long a document waits for its turn at most."""

START_S = 60.0
"""Of a nursery, and of its answers: the first of a kind of document waits for a library to load."""

PART = 1 << 20
"""Bytes of a document that are sent at a time."""

_ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All that a nursery knows of the server's. One thread each: a process that forks must have no other."""
_MAX_TOLD = 1 << 16
_MAX_MESSAGE = 500


class Nursery:
    """The process that forks children for documents, started by the first and anew should it be lost.
    Thread-safe. module: what parses. folders: what children can read besides Python and its libraries."""

    def __init__(self, module: str = "tools.documents.parsers", folders: tuple[str, ...] = ()) -> None:
        self._module = module
        self._folders = folders
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._number = 0
        self._closed = False
        self.namespaces: bool | None = None
        """Whether it runs under bubblewrap; None before it was started."""

    def fork(self, kind: Kind) -> Child:
        """A child for one document of a likely kind. Raises UnreadableDocument where there is none."""
        channel, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    try:
                        return Child(self, *self._ask(FORK, KINDS.index(kind), theirs.fileno()), channel)
                    except (EOFError, OSError):
                        self._end()  # it was lost, with its children: once more
                        return Child(self, *self._ask(FORK, KINDS.index(kind), theirs.fileno()), channel)
            except (EOFError, OSError) as error:
                channel.close()
                message = "The process that reads documents cannot be started."
                raise UnreadableDocument("server_error", message) from error

    def end(self, number: int, pid: int) -> int | None:
        """End a child, and say how it ended, as `os.waitpid` does; None where nobody knows."""
        with self._lock, suppress(EOFError, OSError):
            if number == self._number and self._control is not None:
                return self._ask(END, pid, None)[1]
        return None

    def start(self) -> None:
        """Start it, so that no document waits for that."""
        with self._lock, suppress(EOFError, OSError):
            if self._control is None:
                self._start()

    def close(self) -> None:
        """End it, and every child."""
        with self._lock:
            self._closed = True
            self._end()

    @property
    def pid(self) -> int | None:
        """The process id of what was started: bubblewrap, or the nursery itself."""
        return None if self._process is None else self._process.pid

    def _ask(self, order: bytes, number: int, descriptor: int | None) -> tuple[int, int]:
        """Which nursery answered, and what."""
        control = self._control or self._start()
        data = ORDER.pack(order, number)
        if descriptor is not None:
            socket.send_fds(control, [data], [descriptor])
        else:
            control.sendall(data)
        return self._number, ANSWER.unpack(exactly(control, ANSWER.size))[0]

    def _start(self) -> socket.socket:
        if self._closed:
            raise EOFError("the reader was closed")
        for namespaces in (True, False) if self.namespaces is None else (self.namespaces,):
            control, theirs = socket.socketpair()
            with theirs:
                if (started := self._command(theirs.fileno(), namespaces)) is None:
                    control.close()
                    continue
                # A session of its own: what a terminal sends to the server ends the server first.
                self._process = subprocess.Popen(
                    started,
                    env=_ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            control.settimeout(START_S)
            try:
                exactly(control, ANSWER.size)
            except (EOFError, OSError):
                control.close()
                self._wait()
                continue  # bubblewrap is installed, and may not do what it does, as in some containers
            let_session_stand_back(self._process.pid)
            self._control, self.namespaces = control, namespaces
            self._number += 1
            return control
        raise EOFError("the nursery does not start")

    def _command(self, descriptor: int, namespaces: bool) -> list[str] | None:
        folders = [*readable_folders(), *self._folders]
        plain = command(descriptor, self._module, folders, str(OWN.parent))
        return namespaced(plain, folders) if namespaces else plain

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None
        self._wait()

    def _wait(self) -> None:
        """It ends as soon as its channel is closed, since it reads no document itself."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


Hear = Callable[[Mapping[str, Any], Callable[[int], bytes], ReadingLimits], T]
"""Makes the result of what a child has told first, and of the frames behind that, of which it says how long
they may be. Raises ValueError, KeyError and TypeError for what no child of ours tells."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """How files of a sort are read. module: what parses them. kind: of which kind a file seems to be, by its
    first bytes and its name; may raise UnreadableDocument. hear: takes what is told."""

    module: str
    kind: Callable[[bytes, str], Kind]
    hear: Hear[T]


def _hear_document(told: Mapping[str, Any], frame: Callable[[int], bytes], limits: ReadingLimits) -> Document:
    kind, title, count = told["kind"], told["title"], told["pages"]
    if kind not in KINDS or not isinstance(title, str | None) or not isinstance(count, int):
        raise ValueError("no such document")
    if not 0 <= count <= limits.max_pages:
        raise ValueError("no such number of pages")
    pages, chars = [], 0
    for _ in range(count):
        page = frame(PAGE.size + 4 * (limits.max_chars - chars))
        text = _plain(page[PAGE.size :].decode())
        chars += len(text)
        number, damaged = PAGE.unpack_from(page)
        if number < 0 or chars > limits.max_chars:
            raise ValueError("no such page")
        pages.append(DocumentPage(number or None, text, damaged))
    cuts = None
    if limits.chunk_tokens:
        cuts = tuple(CUT.iter_unpack(frame(CUT.size * limits.max_chunks)))
        chars += len(BETWEEN_PAGES) * max(count - 1, 0)
        longest = CHARS_PER_TOKEN * limits.chunk_tokens
        if not all(start < end <= min(chars, start + longest) for start, end in cuts):
            raise ValueError("no such chunk")
    return Document(kind, tuple(pages), title if title is None else _plain(title), cuts)


def _hear_sound(told: Mapping[str, Any], frame: Callable[[int], bytes], limits: ReadingLimits) -> Sound:
    size = told["bytes"]
    if not isinstance(size, int) or size % 2 or not 0 <= size <= 2 * RATE * limits.max_seconds:
        raise ValueError("no such sound")
    return Sound(_bytes(frame, size))


def _hear_image(told: Mapping[str, Any], frame: Callable[[int], bytes], limits: ReadingLimits) -> Pixels:
    width, height = told["width"], told["height"]
    for side in (width, height):
        if not isinstance(side, int) or not 0 < side <= limits.max_side:
            raise ValueError("no such image")
    return Pixels(width, height, _bytes(frame, 3 * width * height))


def _bytes(frame: Callable[[int], bytes], size: int) -> bytes:
    """So many bytes, which come in frames."""
    data = bytearray()
    while len(data) < size:
        if not (piece := frame(min(PIECE, size - len(data)))):
            raise ValueError("an empty frame")
        data += piece
    return bytes(data)


DOCUMENTS = Reading("tools.documents.parsers", likely_kind, _hear_document)
SOUNDS: Reading[Sound] = Reading("tools.documents.sound", lambda head, filename: "text", _hear_sound)
IMAGES: Reading[Pixels] = Reading("tools.documents.image", lambda head, filename: "text", _hear_image)


class Child:
    """A process that reads one document. One thread asks; any may cancel."""

    def __init__(self, nursery: Nursery, number: int, pid: int, channel: socket.socket) -> None:
        self._nursery = nursery
        self._number = number
        self._pid = pid
        self._channel = channel
        self._ends = time.monotonic()
        self.confined: tuple[str, ...] = ()

    def read(
        self, data: Iterator[bytes], order: Mapping[str, Any], limits: ReadingLimits, hear: Hear[T]
    ) -> T:
        """What the child makes of a document. order: its size, name and URL. hear: takes what the child
        tells. Raises UnreadableDocument, whatever becomes of the child."""
        self._ends = time.monotonic() + limits.wall_s
        order = {**order, "limits": asdict(limits)}
        try:
            self._channel.settimeout(limits.wall_s)
            with suppress(BrokenPipeError):  # it has died, or refuses what it has seen
                send(self._channel, json.dumps(order).encode())
                for part in data:
                    self._in_time()
                    self._channel.sendall(part)
            return self._heard(limits, hear)
        except TimeoutError:
            message = f"Reading this file takes longer than {limits.wall_s:g} seconds."
            raise UnreadableDocument("too_large", message) from None
        except (EOFError, OSError):
            raise self._death(limits) from None
        except (ValueError, KeyError, TypeError, RecursionError, struct.error):  # no child of ours says so
            raise UnreadableDocument("invalid_file", "This file cannot be read.") from None
        finally:
            self._channel.close()
            if self._pid:
                self._nursery.end(self._number, self._pid)

    def cancel(self) -> None:
        """End it; whoever waits for it gets UnreadableDocument."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _heard(self, limits: ReadingLimits, hear: Hear[T]) -> T:
        told = json.loads(self._frame(_MAX_TOLD))
        if "code" in told:
            code, message = told["code"], told["message"]
            if code not in get_args(Code) or not isinstance(message, str):
                raise ValueError("no such error")
            raise UnreadableDocument(code, _plain(message[:_MAX_MESSAGE]))
        self.confined = tuple(map(str, told["confined"]))
        return hear(told, self._frame, limits)

    def _frame(self, most: int) -> bytes:
        """The next frame, of at most so many bytes."""
        self._in_time()
        return receive(self._channel, most)

    def _in_time(self) -> None:
        """The next operation may take what is left of the time. Raises TimeoutError."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)

    def _death(self, limits: ReadingLimits) -> UnreadableDocument:
        """The error for a document whose child has gone without an answer."""
        status = self._nursery.end(self._number, self._pid)
        self._pid = 0
        if status is None:
            message = "The process that reads documents was lost. Try again."
            return UnreadableDocument("server_error", message)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            message = f"Reading this file takes more than {limits.cpu_s} seconds of a processor."
            return UnreadableDocument("too_large", message)
        message = "This file cannot be read: it is damaged, or needs too much memory."
        return UnreadableDocument("invalid_file", message)


def _plain(text: str) -> str:
    """The same text. Raises ValueError where no database takes it: it has a NUL, or half of a character."""
    if "\0" in text:
        raise ValueError("a NUL in a text")
    text.encode()
    return text


class Reader(Generic[T]):
    """Reads documents, PLACES at a time, the owners in turn. Of any event loop. reading: how."""

    def __init__(self, nursery: Nursery, reading: Reading[T]) -> None:
        self._nursery = nursery
        self._reading = reading
        self._turns = Turns(PLACES)
        self._confined: tuple[str, ...] = ()

    async def read(
        self,
        source: bytes | IO[bytes] | Load,
        filename: str,
        *,
        url: str | None = None,
        owner: str = "",
        limits: ReadingLimits = DEFAULT_LIMITS,
    ) -> T:
        """What a file says. Raises UnreadableDocument; of these ReadersBusy where it is not even tried."""
        order = {"filename": filename, "url": url}
        work = _Work(self._nursery, self._reading, source, order, limits, asyncio.get_running_loop())
        turn = self._turns.submit(owner, work.run)
        reading = asyncio.wrap_future(turn)
        try:
            done, _ = await asyncio.wait({reading}, timeout=WAIT_S)
            if not done and turn.cancel():  # which what has begun cannot be
                raise ReadersBusy(own=False)
            document, self._confined = await reading
        except asyncio.CancelledError:
            reading.cancel()
            turn.cancel()
            work.cancel()
            raise
        return document

    def confinement(self) -> tuple[str, ...]:
        """By what means children are confined, as far as one was seen."""
        return (*(["bubblewrap"] if self._nursery.namespaces else []), *self._confined, "limits")

    def start(self) -> None:
        """Start what the first document would wait for."""
        self._nursery.start()

    def close(self) -> None:
        """End every child."""
        self._nursery.close()
        self._turns.close()


class _Work(Generic[T]):
    """The reading of one document, on a thread. order: its name and its URL. loop: where it is loaded."""

    def __init__(
        self,
        nursery: Nursery,
        reading: Reading[T],
        source: bytes | IO[bytes] | Load,
        order: Mapping[str, str | None],
        limits: ReadingLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._nursery = nursery
        self._reading = reading
        self._source = source
        self._order = order
        self._limits = limits
        self._loop = loop
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None  # ends what is under way
        self._cancelled = False

    def run(self) -> tuple[T, tuple[str, ...]]:
        source = self._loaded(self._source) if callable(self._source) else self._source
        size = len(source) if isinstance(source, bytes) else source.seek(0, os.SEEK_END)
        self._limits.require_size(size)
        if not size:
            raise UnreadableDocument("invalid_file", "This file is empty.")
        head = next(_parts(source, HEAD))
        child = self._nursery.fork(self._reading.kind(head, self._order["filename"] or ""))
        self._begun(child.cancel)
        order = {**self._order, "size": size}
        read = child.read(_parts(source, PART), order, self._limits, self._reading.hear)
        return read, child.confined

    def _loaded(self, load: Load) -> bytes:
        loading = asyncio.run_coroutine_threadsafe(load(), self._loop)
        self._begun(loading.cancel)
        return loading.result()

    def _begun(self, stop: Callable[[], object]) -> None:
        with self._lock:
            self._stop = stop
            if self._cancelled:
                stop()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._stop is not None:
                self._stop()


def _parts(source: bytes | IO[bytes], size: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from (source[at : at + size] for at in range(0, len(source), size))
        return
    source.seek(0)
    while part := source.read(size):
        yield part


@cache
def shared_reader() -> Reader[Document]:
    """The reader of documents of this process."""
    reader = Reader(Nursery(), DOCUMENTS)
    atexit.register(reader.close)
    return reader


@cache
def image_reader() -> Reader[Pixels]:
    """The reader of images of this process."""
    reader = Reader(Nursery(IMAGES.module), IMAGES)
    atexit.register(reader.close)
    return reader


@cache
def sound_reader() -> Reader[Sound]:
    """The reader of sounds of this process."""
    reader = Reader(Nursery(SOUNDS.module), SOUNDS)
    atexit.register(reader.close)
    return reader


async def read_sound(
    source: bytes | IO[bytes], filename: str, *, owner: str = "", limits: ReadingLimits = SOUND_LIMITS
) -> Sound:
    """A file of sound as samples, decoded in a confined process of its own; see `read_document`."""
    return await sound_reader().read(source, filename, owner=owner, limits=limits)


def prepare_sounds() -> None:
    """Start what the first sound would otherwise wait for."""
    sound_reader().start()


async def read_document(
    source: bytes | IO[bytes] | Load,
    filename: str,
    *,
    url: str | None = None,
    owner: str = "",
    limits: ReadingLimits = DEFAULT_LIMITS,
) -> Document:
    """A document as text, read in a confined process of its own.

    source: its bytes, an open file that nobody else moves in until it is read, or what loads the bytes at
    the document's turn. filename: what its sender calls it; its ending tells the kind where the bytes do not.
    url: for a page of the web, from where its relative links lead; links are left out otherwise. owner: whose
    it is; owners take turns. Raises UnreadableDocument, of these ReadersBusy where too much waits or has
    waited too long, OSError for a file that cannot be read, and what `source` raises.
    """
    return await shared_reader().read(source, filename, url=url, owner=owner, limits=limits)


async def read_image(
    source: bytes | Load, *, side: int, max_pixels: int, max_bytes: int, owner: str = ""
) -> Pixels:
    """An image file as pixels, decoded in a confined process of its own: upright, and with `side` pixels at
    most along a side. max_pixels: of the image as it is. source, owner: as in `read_document`, whose errors
    it raises."""
    limits = image_limits(side, max_pixels, max_bytes)
    return await image_reader().read(source, "image", owner=owner, limits=limits)


def prepare_documents() -> None:
    """Start what the first document would otherwise wait for."""
    shared_reader().start()


def reading_confinement() -> tuple[str, ...]:
    """By what means documents are read apart: of bubblewrap, Landlock, seccomp and limits of resources."""
    return shared_reader().confinement()


def unreadable_kinds() -> tuple[Kind, ...]:
    """The kinds of documents that are not read (HTML: not well) because an extra is not installed."""
    missing = (kind for kind, libraries in LIBRARIES.items() if not all(map(find_spec, libraries)))
    return tuple(missing)


@cache
def parser_version() -> str:
    """What the text of a document depends on besides its bytes: this code, and the libraries."""
    names = ("pypdfium2", "mammoth", "python-pptx", "openpyxl", "trafilatura", "charset-normalizer")
    return " ".join(["2", *filter(None, map(_library, names))])


def _library(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return f"{name}={version(name)}"
    return None
