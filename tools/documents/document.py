"""What a document is once it is read: pages of text; and why one cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["pdf", "docx", "pptx", "xlsx", "html", "markdown", "text"]
Code = Literal["unsupported_file", "invalid_file", "too_large", "server_error"]

BETWEEN_PAGES = "\n\n"
"""What stands between two pages in `Document.text`."""


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """A part of a document. number: of a page, slide or sheet, from 1; None where a document has none. text:
    plain, or Markdown where the document has headings and tables. damaged: it could not be read, while others
    of its document could."""

    number: int | None
    text: str
    damaged: bool = False

    def shown(self, noun: str = "page") -> str:
        """Its text; of a page without one, which no chunk is made of, a note that says so. noun: for it."""
        if self.number is None or self.text.strip():
            return self.text
        if self.damaged:
            return f"(this {noun} is damaged)"
        return f"(this {noun} has no text; it may be a picture)"


@dataclass(frozen=True, slots=True)
class Document:
    """A document as text. title: as the document itself says it. cuts: where chunks of its text begin and
    end, in characters; None where it was not cut."""

    kind: Kind
    pages: tuple[DocumentPage, ...]
    title: str | None = None
    cuts: tuple[tuple[int, int], ...] | None = None

    @property
    def text(self) -> str:
        """The whole text; positions of chunks are characters of this one."""
        return BETWEEN_PAGES.join(page.text for page in self.pages)


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as it is seen: upright, without transparency, and no larger than was asked for.

    rgb: three bytes a pixel, row by row from the top left.
    """

    width: int
    height: int
    rgb: bytes


class UnreadableDocument(Exception):
    """A document cannot be read.

    code: `unsupported_file`, a kind without a parser, or without text; `invalid_file`, damaged or encrypted;
    `too_large`, more bytes, pages, characters, memory or time than may be taken; `server_error`, no fault of
    the document, so another attempt may succeed. message: a sentence for the client.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message


class ReadersBusy(UnreadableDocument):
    """A document has no place among those that are read, nor among those that wait for one, or has waited too
    long. own: so many of its owner wait already."""

    def __init__(self, *, own: bool) -> None:
        whose = "Too many of your files" if own else "Too many files"
        super().__init__("server_error", f"{whose} wait to be read at this moment. Try again.")
        self.own = own


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """What the reading of one document may take.

    max_bytes: of the file. max_unpacked: bytes of all members of an archive, such as docx. max_pages: pages,
    slides or sheets. max_chars: of the text. chunk_tokens: of a chunk; 0: the text is not cut. chunk_overlap:
    tokens that a chunk shares with the next one. max_chunks: what is behind them is not cut. max_seconds: of
    sound. max_pixels: of an image as it is in its file. max_side: of the pixels that it is given along a
    side. memory: bytes of address space. cpu_s: seconds of a processor. wall_s: seconds by the clock, once it
    is a document's turn.
    """

    max_bytes: int = 128 << 20
    max_unpacked: int = 256 << 20
    max_pages: int = 10_000
    max_chars: int = 16_000_000
    chunk_tokens: int = 0
    chunk_overlap: int = 0
    max_chunks: int = 0
    max_seconds: float = 3600.0
    max_pixels: int = 40_000_000
    max_side: int = 4096
    memory: int = 1 << 30
    cpu_s: int = 30
    wall_s: float = 120.0

    def require_size(self, num_bytes: int) -> None:
        """Raise UnreadableDocument where a file of so many bytes is not read."""
        if num_bytes > self.max_bytes:
            raise UnreadableDocument("too_large", f"This file is larger than {self.max_bytes >> 20} MiB.")


class Text:
    """Pages as they are read, refused as soon as they are more than may be kept."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits = limits
        self._chars = 0
        self.pages: list[DocumentPage] = []

    def add(self, text: str, number: int | None = None, *, damaged: bool = False) -> None:
        """One page more. Raises UnreadableDocument."""
        if len(self.pages) >= self._limits.max_pages:
            raise too_many_pages(self._limits)
        self.require(len(text))
        self._chars += len(text)
        self.pages.append(DocumentPage(number, text, damaged))

    def require(self, chars: int) -> None:
        """Raise UnreadableDocument where so many characters more are too many."""
        if self._chars + chars > self._limits.max_chars:
            message = f"The text of this file is longer than {self._limits.max_chars} characters."
            raise UnreadableDocument("too_large", message)


def too_many_pages(limits: ReadingLimits) -> UnreadableDocument:
    """The error for a document with more pages, slides or sheets than may be read."""
    return UnreadableDocument("too_large", f"This file has more than {limits.max_pages} pages.")
