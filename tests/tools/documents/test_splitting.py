"""Chunks cover a document, fit their size, overlap, and say where they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from tools.documents import Chunk, Document, DocumentPage, estimated_tokens, split_document

SENTENCE = "Sentence number {} says something about the tides, the moon and the harbour. "


def words(text: str) -> int:
    return len(re.findall(r"\S+", text))


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
@pytest.mark.parametrize("count", [words, None], ids=["counted", "estimated"])
def test_chunks_of_a_long_text(kind: str, count: Callable[[str], int] | None) -> None:
    """Of a text that is longer than the window in which it is cut."""
    document = Document(kind, (DocumentPage(None, prose(2000)),))
    chunks = list(split_document(document, max_tokens=300, overlap_tokens=120, count=count))
    check(document, chunks, 300)
    assert all(chunk.page is None for chunk in chunks)
    assert all(chunk.num_tokens == (count or estimated_tokens)(chunk.text) for chunk in chunks)
    assert all(chunk.num_tokens > 150 for chunk in chunks[:-1]), "chunks are filled, at seams as well"
    overlaps = [before.end - after.start for before, after in pairwise(chunks)]
    assert sum(overlap > 0 for overlap in overlaps) > 0.9 * len(overlaps)
    assert chunks == list(split_document(document, max_tokens=300, overlap_tokens=120, count=count))


def test_a_chunk_names_the_page_that_it_begins_on() -> None:
    pages = tuple(DocumentPage(n, prose(10, 10 * n) if n != 3 else "") for n in range(1, 6))
    document = Document("pdf", pages)
    chunks = list(split_document(document, max_tokens=80, overlap_tokens=0, count=words))
    check(document, chunks, 80)
    for chunk in chunks:
        first = re.search(r"Sentence number (\d+)", chunk.text)
        assert first is not None
        assert chunk.page == int(first[1]) // 10
    assert [chunk.page for chunk in chunks] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert not any(chunk.breaks for chunk in chunks), "each of them is on one page"


def test_a_chunk_says_where_in_it_other_pages_begin() -> None:
    texts = ("One apple.", "Two pears.", "", "Four plums.")
    document = Document("pdf", tuple(DocumentPage(n, text) for n, text in enumerate(texts, 1)))
    [chunk] = split_document(document, max_tokens=80, overlap_tokens=0, count=words)
    assert chunk.page == 1
    begins = {number: chunk.text[at:].split("\n")[0] for at, number in chunk.breaks}
    assert begins == {2: "Two pears.", 3: "", 4: "Four plums."}
    [whole] = split_document(Document("text", (DocumentPage(None, "One."), DocumentPage(None, "Two."))))
    assert (whole.page, whole.breaks) == (None, ()), "what has no pages names none"


def test_sections_of_markdown_are_kept_together() -> None:
    sections = [f"# Section {n}\n\n{prose(3, n)}" for n in range(20)]
    document = Document("markdown", (DocumentPage(None, "\n\n".join(sections)),))
    chunks = list(split_document(document, max_tokens=80, overlap_tokens=0, count=words))
    assert [chunk.text for chunk in chunks] == [section.strip() for section in sections]


@pytest.mark.parametrize(
    "text", ["x" * 50_000, " " * 100_000 + "end", "* " * 20_000, "字" * 9_000, "> " * 5_000]
)
def test_texts_without_anything_to_cut_at(text: str) -> None:
    document = Document("markdown", (DocumentPage(None, text),))
    chunks = list(split_document(document, max_tokens=100, overlap_tokens=50))
    check(document, chunks, 100)
    assert chunks


@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("blanks", ["\n", " \n", "\u2028", "\x85", "\t \u3000"])
def test_many_blanks_are_little_work(kind: str, blanks: str) -> None:
    """The library asks for the size of a chunk for each of them, and looks at all others then."""
    asked = 0

    def count(text: str) -> int:
        nonlocal asked
        asked += 1
        return estimated_tokens(text)

    gap = blanks * 10_000
    document = Document(kind, (DocumentPage(None, f"{gap}one{gap}two\n\nthree{gap}"),))
    chunks = list(split_document(document, count=count))
    check(document, chunks, 800)
    assert [chunk.text for chunk in chunks] == ["one", "two\n\nthree"]
    assert asked < 1000


def test_sizes_that_make_no_sense() -> None:
    document = Document("text", (DocumentPage(None, "text"),))
    for most, overlap in ((0, 0), (100, 51), (100, -1)):
        with pytest.raises(ValueError, match="at least one token"):
            list(split_document(document, max_tokens=most, overlap_tokens=overlap))
