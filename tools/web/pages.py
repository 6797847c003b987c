"""Fetches pages and reads them as text.

A page is fetched only where its URL was seen before, unless the operator allows any: a page or a result that
tells the model to open a URL made up of what it knows would carry that away.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urljoin

from tools.documents import BETWEEN_PAGES, ReadingLimits, UnreadableDocument, prepare_documents, read_document
from tools.egress import Caps, Egress, guarded_client
from tools.encodings import read_text
from tools.spec import ToolError
from tools.web.plain_text import one_line, printable
from tools.web.urls import host_of, is_within, key

CAPS = Caps(max_bytes=5 << 20, total_s=15.0)
"""Of one page."""

MAX_URL = 8_000

MAX_PAGE = 100_000
"""Characters of a page's text; the rest is left out."""

MAX_REDIRECTS = 5
WIDTH = 160
"""Characters of a line at most; longer ones are wrapped, so that numbers of lines say where something is."""

_ACCEPT = {
    "accept": "text/html, text/plain, application/json;q=0.9, application/pdf;q=0.9, */*;q=0.1",
    "user-agent": "antiphon",
}
_OFFICE = "application/vnd.openxmlformats-officedocument."
_DOCUMENTS = {
    "text/html": "page.html",
    "application/xhtml+xml": "page.html",
    "application/pdf": "page.pdf",
    f"{_OFFICE}wordprocessingml.document": "page.docx",
    f"{_OFFICE}presentationml.presentation": "page.pptx",
    f"{_OFFICE}spreadsheetml.sheet": "page.xlsx",
}
"""Content types that a parser reads, and the names of files of these kinds."""
_LIMITS = ReadingLimits(cpu_s=10, wall_s=15.0)
_PLAIN = ("application/json", "application/xml", "application/javascript", "application/yaml")


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text. url: where it was at last."""

    url: str
    title: str
    text: str


class Reading(Protocol):
    """Where pages come from."""

    async def page(
        self, url: str, domains: Collection[str], blocked: Collection[str] = (), owner: str = ""
    ) -> Page:
        """One page. domains: those that it may lie in; any where empty. blocked: those that it may not lie
        in. owner: who opens it; owners take turns where pages are read. Raises ToolError."""


@dataclass(frozen=True, slots=True)
class WebPages:
    """Pages of the web, as far as they may be reached."""

    egress: Egress

    async def page(
        self, url: str, domains: Collection[str], blocked: Collection[str] = (), owner: str = ""
    ) -> Page:
        """One page. Raises EgressError and ToolError."""
        try:
            async with asyncio.timeout(CAPS.total_s):
                return await self._page(url, domains, blocked, owner)
        except TimeoutError:
            raise ToolError(f"{host_of(url)} took longer than {CAPS.total_s:g} s.") from None

    async def _page(self, url: str, domains: Collection[str], blocked: Collection[str], owner: str) -> Page:
        async with guarded_client(self.egress, CAPS, headers=_ACCEPT) as client:
            for _ in range(MAX_REDIRECTS + 1):
                require_within(url, domains, blocked)
                answer = await client.get(url)
                if not answer.is_redirect:
                    break
                url = _joined(url, answer.headers.get("location", ""))
            else:
                raise ToolError(f"{host_of(url)} redirects more than {MAX_REDIRECTS} times.")
        if answer.status_code != 200:
            raise ToolError(f"{host_of(url)} answered with status {answer.status_code}.")
        kind = answer.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        return await as_page(url, kind, answer.content, answer.encoding or "utf-8", owner)


def require_within(url: str, domains: Collection[str], blocked: Collection[str]) -> None:
    """ToolError unless a URL is of the web, lies in one of some domains, where there are any, and in none
    that is blocked."""
    if len(url) > MAX_URL:
        raise ToolError(f"The URL is longer than {MAX_URL} characters.")
    if not url.lower().startswith(("http://", "https://")) or not host_of(url):
        raise ToolError("Only a page with an http or https URL can be opened.")
    if not is_within(url, domains):
        raise ToolError(f"{host_of(url)} is not among the allowed domains: {', '.join(domains)}.")
    if not is_within(url, (), blocked):
        raise ToolError(f"{host_of(url)} is among the blocked domains: {', '.join(blocked)}.")


def _joined(url: str, location: str) -> str:
    """Where a redirect leads. Raises ToolError."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise ToolError(f"{host_of(url)} redirects to what is no URL.") from None


def require_seen(url: str, seen: Collection[str]) -> None:
    """ToolError unless a URL is among those that were seen. seen: their keys."""
    if key(url) not in seen:
        message = (
            "This URL was not seen before. Only pages can be opened that a search has found, that the user"
            " has named, or that an opened page shows; search for it."
        )
        raise ToolError(message)


async def as_page(url: str, kind: str, data: bytes, encoding: str, owner: str = "") -> Page:
    """A page of what was fetched. kind: its content type. owner: who opens it. Raises ToolError for one that
    has no text."""
    if kind in _DOCUMENTS:
        return await _from_document(url, _DOCUMENTS[kind], data, owner)
    if not (kind.startswith("text/") or kind in _PLAIN or kind.endswith(("+json", "+xml"))):
        raise ToolError(f"The page is of the type {kind}, which cannot be read.")
    text = read_text(data, encoding)
    return Page(url, _heading(text) or url, wrapped(text))


def reads_html() -> bool:
    """Whether what reads HTML is installed."""
    return find_spec("trafilatura") is not None


def prepare_pages() -> None:
    """Start what the first page would otherwise wait for."""
    prepare_documents()


async def _from_document(url: str, name: str, data: bytes, owner: str) -> Page:
    """What a parser makes of it, in a process of its own: these are the bytes of a stranger."""
    if name == "page.html" and not reads_html():
        message = "This server cannot read HTML: its operator has to install the extra 'web'."
        raise ToolError(message)
    try:
        document = await read_document(data, name, url=url, owner=owner, limits=_LIMITS)
    except UnreadableDocument as error:
        raise ToolError(f"The page cannot be read. {error.message}") from None
    text = BETWEEN_PAGES.join(page.shown() for page in document.pages)
    return Page(url, one_line(document.title or "", 300) or url, wrapped(text))


def _heading(text: str) -> str:
    """The first line of a text, where it is a heading in Markdown."""
    first = text.lstrip().partition("\n")[0]
    return one_line(first.lstrip("#"), 300) if first.startswith("#") else ""


def wrapped(text: str) -> str:
    """A text in lines of at most WIDTH characters, cut at MAX_PAGE, without control characters."""
    lines: list[str] = []
    for line in printable(text[:MAX_PAGE]).split("\n"):
        lines += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines).strip("\n")
