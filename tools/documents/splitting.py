"""Cuts documents into chunks of at most so many tokens, which overlap. The same document gives the same
chunks.

Where to cut is found in the confined process that has read the document (`cuts_of`), because a text of a
stranger can make it long work; what is told of that is made into chunks here (`chunks_of`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from tools.documents.document import BETWEEN_PAGES, Document, ReadingLimits

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

CHARS_PER_TOKEN = 4
"""Where no tokenizer counts."""

WINDOW = 40
"""Characters that are looked at in one go, for each token of a chunk: some ten chunks. The library looks at
all that is left of them for each chunk."""

_GAP = re.compile(r"(?<!\s)\s{1000,}")
"""Blanks that no chunk reaches over: the library's time grows with the square of how many follow each other,
and 10,000 lines without a word took seconds."""

_PLAIN = ("text", "pdf")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document. start, end: of its text in `Document.text`, in characters. page: the number of
    the page, slide or sheet that it begins on; None where there are none. num_tokens: of its text. breaks:
    where in its text other pages begin, in characters, each with its number."""

    text: str
    page: int | None
    start: int
    end: int
    num_tokens: int
    breaks: tuple[tuple[int, int], ...] = ()


def cuts_of(document: Document, limits: ReadingLimits) -> tuple[tuple[int, int], ...]:
    """Where chunks of such sizes begin and end, in characters of `Document.text`, `max_chunks` at most: at
    headings, paragraphs or sentences where that is possible. Raises ValueError for an overlap of more than
    half a chunk."""
    most, overlap = limits.chunk_tokens, limits.chunk_overlap
    if most < 1 or not 0 <= overlap <= most // 2:
        raise ValueError("a chunk has at least one token, and shares at most half of them with the next")
    cuts = _cut(_splitter(document, most, overlap), document.text, most * WINDOW)
    return tuple(islice(cuts, limits.max_chunks))


def chunks_of(document: Document) -> Iterator[Chunk]:
    """The chunks of a document that was cut as it was read, in order; made as they are taken."""
    text = document.text
    starts = [0, *accumulate(len(page.text) + len(BETWEEN_PAGES) for page in document.pages)][:-1]
    for start, end in document.cuts or ():
        part = text[start:end]
        first, behind = bisect_right(starts, start), bisect_left(starts, end)
        page = document.pages[first - 1].number
        later = zip(starts[first:behind], document.pages[first:behind], strict=True)
        breaks = tuple((at - start, each.number) for at, each in later if each.number is not None)
        yield Chunk(part, page, start, end, estimated_tokens(part), breaks)


def _cut(splitter: MarkdownSplitter | TextSplitter, text: str, window: int) -> Iterator[tuple[int, int]]:
    """Where chunks begin and end. Windows overlap by a chunk: the last of one, which may have been cut
    short, is the first of the next."""
    at = 0
    for stop, behind in (*(gap.span() for gap in _GAP.finditer(text)), (len(text), len(text))):
        while at < stop:
            last = at + window >= stop
            found = splitter.chunk_indices(text[at : min(at + window, stop)])
            for offset, part in found if last or len(found) == 1 else found[:-1]:
                yield at + offset, at + offset + len(part)
            if last:
                break
            if not found:
                at += window  # nothing but blanks
                continue
            offset, part = found[-1]
            at += offset + len(part) if len(found) == 1 else offset
        at = behind


def _splitter(document: Document, max_tokens: int, overlap_tokens: int) -> MarkdownSplitter | TextSplitter:
    # here, because a document that is not cut has no use for it
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    splitter = TextSplitter if document.kind in _PLAIN else MarkdownSplitter
    return splitter.from_callback(estimated_tokens, max_tokens, overlap_tokens)


def estimated_tokens(text: str) -> int:
    """About as many tokens as a text has: one for four characters of English, one for each of Chinese."""
    return -(-len(text.encode("utf-8", "replace")) // CHARS_PER_TOKEN)


@cache
def splitter_version() -> str:
    """What chunks depend on besides their document: this code, and the library."""
    return f"2 semantic-text-splitter={version('semantic-text-splitter')}"
