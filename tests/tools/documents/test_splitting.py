"""Chunks cover a document, fit their size, overlap, and say where they are."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tools.documents import (
    Chunk,
    Document,
    DocumentPage,
    ReadingLimits,
    chunks_of,
    estimated_tokens,
    splitting,
)

SENTENCE = "Sentence number {} says something about the tides, the moon and the harbour. "


def words(text: str) -> int:
    return len(re.findall(r"\S+", text))


@pytest.fixture
def by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is a token, so that a test can say where a chunk ends."""
    monkeypatch.setattr(splitting, "estimated_tokens", words)


def split(document: Document, max_tokens: int, overlap_tokens: int = 0) -> list[Chunk]:
    limits = ReadingLimits(chunk_tokens=max_tokens, chunk_overlap=overlap_tokens, max_chunks=100_000)
    return [*chunks_of(replace(document, cuts=splitting.cuts_of(document, limits)))]


def prose(sentences: int, first: int = 0) -> str:
    lines = ("".join(SENTENCE.format(first + at + n) for n in range(5)) for at in range(0, sentences, 5))
    return "\n\n".join(lines)


def check(document: Document, chunks: list[Chunk], most: int) -> None:
    """What every cutting keeps to."""
    text, reached = document.text, 0
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert 0 < chunk.num_tokens <= most
        assert not text[reached : chunk.start].strip(), "nothing is left out"
        reached = chunk.end
    assert not text[reached:].strip()


@pytest.mark.parametrize("kind", ["text", "markdown"])
def test_chunks_of_a_long_text(kind: str) -> None:
    """Of a text that is longer than the window in which it is cut."""
    document = Document(kind, (DocumentPage(None, prose(2000)),))
    chunks = split(document, 300, 120)
    check(document, chunks, 300)
    assert all(chunk.page is None for chunk in chunks)
    assert all(chunk.num_tokens == estimated_tokens(chunk.text) for chunk in chunks)
    assert all(chunk.num_tokens > 150 for chunk in chunks[:-1]), "chunks are filled, at seams as well"
    overlaps = [before.end - after.start for before, after in pairwise(chunks)]
    assert sum(overlap > 0 for overlap in overlaps) > 0.9 * len(overlaps)
    assert chunks == split(document, 300, 120)


def test_a_chunk_names_the_page_that_it_begins_on(by_words: None) -> None:
    pages = tuple(DocumentPage(n, prose(10, 10 * n) if n != 3 else "") for n in range(1, 6))
    document = Document("pdf", pages)
    chunks = split(document, 80)
    check(document, chunks, 80)
    for chunk in chunks:
        first = re.search(r"Sentence number (\d+)", chunk.text)
        assert first is not None
        assert chunk.page == int(first[1]) // 10
    assert [chunk.page for chunk in chunks] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert not any(chunk.breaks for chunk in chunks), "each of them is on one page"


def test_a_chunk_says_where_in_it_other_pages_begin(by_words: None) -> None:
    texts = ("One apple.", "Two pears.", "", "Four plums.")
    document = Document("pdf", tuple(DocumentPage(n, text) for n, text in enumerate(texts, 1)))
    [chunk] = split(document, 80)
    assert chunk.page == 1
    begins = {number: chunk.text[at:].split("\n")[0] for at, number in chunk.breaks}
    assert begins == {2: "Two pears.", 3: "", 4: "Four plums."}
    [whole] = split(Document("text", (DocumentPage(None, "One."), DocumentPage(None, "Two."))), 80)
    assert (whole.page, whole.breaks) == (None, ()), "what has no pages names none"


def test_sections_of_markdown_are_kept_together(by_words: None) -> None:
    sections = [f"# Section {n}\n\n{prose(3, n)}" for n in range(20)]
    document = Document("markdown", (DocumentPage(None, "\n\n".join(sections)),))
    chunks = split(document, 80)
    assert [chunk.text for chunk in chunks] == [section.strip() for section in sections]


@pytest.mark.parametrize(
    "text", ["x" * 50_000, " " * 100_000 + "end", "* " * 20_000, "字" * 9_000, "> " * 5_000]
)
def test_texts_without_anything_to_cut_at(text: str) -> None:
    document = Document("markdown", (DocumentPage(None, text),))
    chunks = split(document, 100, 50)
    check(document, chunks, 100)
    assert chunks


@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("blanks", ["\n", " \n", "\u2028", "\x85", "\t \u3000"])
def test_many_blanks_are_little_work(kind: str, blanks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks for the size of a chunk for each of them, and looks at all others then."""
    asked = 0

    def count(text: str) -> int:
        nonlocal asked
        asked += 1
        return estimated_tokens(text)

    monkeypatch.setattr(splitting, "estimated_tokens", count)
    gap = blanks * 10_000
    document = Document(kind, (DocumentPage(None, f"{gap}one{gap}two\n\nthree{gap}"),))
    chunks = split(document, 800, 400)
    check(document, chunks, 800)
    assert [chunk.text for chunk in chunks] == ["one", "two\n\nthree"]
    assert asked < 1000


def test_sizes_that_make_no_sense() -> None:
    document = Document("text", (DocumentPage(None, "text"),))
    for most, overlap in ((0, 0), (100, 51), (100, -1)):
        with pytest.raises(ValueError, match="at least one token"):
            split(document, most, overlap)
