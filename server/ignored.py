"""Collects what a request contains but the server ignores, for the reply header `x-antiphon-ignored`.

Everything that a client sends is either honoured, refused with a 4xx, or named in this header. The header
names, by path:

* a member, at any depth of the body, that the server's schemas do not know, whether it is dropped or (in
  items and tools, where clients keep data of their own) kept and returned; refused are misspelt fields
  (`shapes.name_others`), and any unknown member of a fork, or of a tool that has filters
  (`shapes.require_members`);
* a known field that makes no difference to what this request does, though it may be echoed;
* a keyword of a JSON Schema that no grammar knows, such as a misspelt one, or a `format` that is not enforced
  (annotations, `title` and `x-...` among them, are not meant to be);
* a query parameter that the route did not read, as `?name`.

The header does not name nulls, which mean absent; members of objects whose keys the client chooses
(`metadata`, a schema's properties, function arguments); or official parts of items that only record a turn
(`status`, `annotations`), since those exist to be kept and returned. Code that reads a part of a request
calls `ignore` or `unread`; outside a request both do nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

HEADER = "x-antiphon-ignored"
# A client of another server may send dozens of fields that make no difference here, some deep in its tools,
# and should hear of all of them at once. This holds about a hundred names, and is half of the 4 KiB that
# nginx, say, takes for the headers of a reply by default.
MAX_HEADER_BYTES = 2048
MAX_PATH = 200
"""Characters of one path; a longer one is cut."""
MORE = "..."
"""The last of the names where there is no room for all."""


class Ignored:
    """What is ignored of one request: paths in the order in which they were met, each once.

    No more are kept than there is room for in the header: a body can have hundreds of thousands of them.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        self._num_bytes = 0
        self._more = False
        self._read: set[str] = set()

    def add(self, path: str) -> None:
        """Name a path."""
        if self._more:
            return
        cut = path if len(path) <= MAX_PATH else path[:MAX_PATH] + MORE
        name = quote(cut, safe="[]?.")
        if name in self._paths:
            return
        if self._num_bytes + len(name) + 1 > MAX_HEADER_BYTES - len(MORE):
            self._more = True
            return
        self._paths[name] = None
        self._num_bytes += len(name) + 1

    def take(self, other: Ignored, path: str) -> None:
        """Name what is ignored of the object at a path, which was read by itself."""
        for name in other._paths:
            self.add(member(path, unquote(name)))
        self._more = self._more or other._more

    def read(self, name: str) -> None:
        """Say of a query parameter that it was read."""
        self._read.add(name)

    def headers(self, query: str) -> dict[str, str]:
        """The header of the reply to a request with this query, whose parameters are named that were not
        read; empty where nothing was ignored."""
        for name, _ in parse_qsl(query, keep_blank_values=True):
            if name not in self._read:
                self.add(f"?{name}")
        value = self.header()
        return {HEADER: value} if value else {}

    def header(self) -> str:
        """The header's value: percent-encoded paths between commas, `...` last where some are left out; at
        most MAX_HEADER_BYTES, empty where nothing was ignored."""
        return ",".join([*self._paths, *([MORE] if self._more else [])])


_current: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextmanager
def collecting() -> Iterator[Ignored]:
    """Collect what is ignored while this is held, also by threads and tasks that are begun meanwhile."""
    found = Ignored()
    token = _current.set(found)
    try:
        yield found
    finally:
        _current.reset(token)


@contextmanager
def within(path: str) -> Iterator[None]:
    """Have what is named while this is held stand in the object at a path."""
    outer = collected()
    with collecting() as found:
        yield
    if outer is not None:
        outer.take(found, path)


def collected() -> Ignored | None:
    """What is collected here; None outside a request."""
    return _current.get()


def ignore(path: str) -> None:
    """Name what stands at a path, dotted and bracketed."""
    current = _current.get()
    if current is not None:
        current.add(path)


def unread(value: Mapping[str, Any], known: Container[str], path: str = "") -> None:
    """Name the members of the object at `path` (the body where empty) that are not among those `known`."""
    for key, element in value.items():
        if key not in known and element is not None:
            ignore(member(path, key))


def member(path: str, key: str) -> str:
    """The path of an object's member."""
    return f"{path}.{key}" if path else key


def queried(name: str) -> None:
    """Say that the route has read a query parameter."""
    current = _current.get()
    if current is not None:
        current.read(name)
