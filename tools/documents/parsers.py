"""Files as text, one function a kind. What is here runs in a confined process (see `child_process`)."""

from __future__ import annotations

import re
from dataclasses import replace

from tools.documents.document import Document, Kind, ReadingLimits, Text, UnreadableDocument, too_many_pages
from tools.documents.kinds import HEAD, family_of, likely_kind
from tools.documents.markup import markdown_of
from tools.documents.office import read_office
from tools.documents.plain import decoded
from tools.documents.splitting import cuts_of

_NO_CHARACTERS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
"""Control characters, tabs and line ends aside; halves of surrogate pairs. No database takes them."""
_BROKEN_WORD = re.compile("[\x02\xad\ufffe]\n?")
"""How PDFium tells the hyphen of a word that is broken over two lines."""
_HEADING = re.compile(r"\s*#{1,6}\s+(.+)")
_STRUCTURE = re.compile(r"^(?:#{1,6} |[-*+] |\d+\. |\|)", re.MULTILINE)
"""A heading, a list or a table of Markdown."""
_MAX_TITLE = 300


def parse(data: bytes, filename: str, url: str | None, limits: ReadingLimits) -> Document:
    """A file as text, with where it is to be cut, if it is. url: where links in HTML lead from; they are left
    out where there is none. Raises UnreadableDocument, and what libraries raise on what is broken."""
    head = data[:HEAD]
    family = family_of(head, filename)
    text = Text(limits)
    if family == "pdf":
        kind, title = _pdf(data, text, limits)
    elif family == "archive":
        kind, title = read_office(data, text, limits)
    elif family == "html":
        kind, title = _html(data, url, text)
    else:
        kind, title = _plain(data, likely_kind(head, filename), text)
    document = _cleaned(kind, title, text)
    return replace(document, cuts=cuts_of(document, limits)) if limits.chunk_tokens else document


def _cleaned(kind: Kind, title: str | None, text: Text) -> Document:
    pages = []
    for page in text.pages:
        lines = page.text.replace("\r\n", "\n").replace("\r", "\n")
        if kind == "pdf":
            lines = _BROKEN_WORD.sub("", lines)
        pages.append(replace(page, text=_NO_CHARACTERS.sub("", lines).strip("\n")))
    if not any(page.text.strip() for page in pages):
        raise UnreadableDocument("unsupported_file", "This file has no text.")
    title = " ".join(_NO_CHARACTERS.sub(" ", title or "").split())[:_MAX_TITLE]
    return Document(kind, tuple(pages), title or None)


def _plain(data: bytes, kind: Kind, text: Text) -> tuple[Kind, str | None]:
    text.add(decoded(data))
    heading = _HEADING.match(text.pages[0].text) if kind == "markdown" else None
    return kind, heading[1] if heading else None


def _html(data: bytes, url: str | None, text: Text) -> tuple[Kind, str | None]:
    """The article of a page, where there is one; else all that it shows."""
    title, found = None, None
    try:
        import trafilatura
    except ModuleNotFoundError:
        if url is not None:
            raise
    else:
        if url is not None:
            found = trafilatura.extract(data, url=url, include_links=True, include_comments=False)
        else:
            found = trafilatura.extract(data, output_format="markdown", favor_recall=True)
        # Its date is not asked for, and a long search for one takes seconds of some pages.
        title = trafilatura.extract_metadata(data, default_url=url, extensive=False).title
    if not (found and found.strip()):
        found, title = markdown_of(decoded(data))
    elif url is None and not _STRUCTURE.search(found):
        # Of a short page trafilatura gives the words alone, and a table without cells says something else.
        whole, _ = markdown_of(decoded(data))
        found = whole if _STRUCTURE.search(whole) else found
    text.add(found)
    return "html", title


def _pdf(data: bytes, text: Text, limits: ReadingLimits) -> tuple[Kind, str | None]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            message = "This PDF is encrypted: it can be read without a password only."
            raise UnreadableDocument("invalid_file", message) from None
        raise
    if len(document) > limits.max_pages:
        raise too_many_pages(limits)
    broken = 0
    for index in range(len(document)):
        try:
            page = document[index]
            text_page = page.get_textpage()
            text.add(text_page.get_text_range(), index + 1)
            text_page.close()
            page.close()
        except pypdfium2.PdfiumError:
            broken += 1
            text.add("", index + 1, damaged=True)
    if broken == len(document):
        raise UnreadableDocument("invalid_file", "This PDF is damaged: none of its pages can be read.")
    if not any(page.text.strip() for page in text.pages):
        message = (
            "This PDF has no text: its pages are pictures, such as scans. Let a program for text recognition"
            " (OCR) add the text first."
        )
        raise UnreadableDocument("unsupported_file", message)
    return "pdf", document.get_metadata_value("Title")
