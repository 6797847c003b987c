"""Every kind of document as text, and a sentence for each that cannot be read."""

from __future__ import annotations

import asyncio
import io
import struct
import tempfile
import time
import zipfile
from dataclasses import replace
from datetime import date

import pytest

from tests.support import documents as made
from tests.support.blocking import until
from tools.documents import (
    Document,
    DocumentPage,
    ReadingLimits,
    UnreadableDocument,
    chunks_of,
    read_document,
)
from tools.documents.kinds import family_of
from tools.documents.markup import markdown_of
from tools.documents.reader import PLACES, Load
from tools.documents.splitting import cuts_of

OF_OWNER = 1 + PLACES // 2
"""Documents of one owner that are read at a time."""


async def test_pdf_by_its_pages() -> None:
    document = await read_document(
        made.pdf(["First page\nof two", "", "Third (page)"], title="Tides"), "a.pdf"
    )
    pages = (DocumentPage(1, "First page\nof two"), DocumentPage(2, ""), DocumentPage(3, "Third (page)"))
    assert document == Document("pdf", pages, "Tides")


async def test_a_pdf_with_a_damaged_page_and_a_picture() -> None:
    whole = made.pdf(["First", "Second", "", "Fourth"])
    document = await read_document(
        whole.replace(b"6 0 obj\n<< /Type /Page", b"6 0 obj\n<< /Type /Pag"), "a.pdf"
    )
    assert [page.shown() for page in document.pages] == [
        "First",
        "(this page is damaged)",
        "(this page has no text; it may be a picture)",
        "Fourth",
    ]
    assert document.text.split() == ["First", "Fourth"], "chunks are made of what the document says alone"


async def test_docx_with_headings_and_tables() -> None:
    body = (
        made.docx_paragraph("Rules", heading=True)
        + made.docx_paragraph("All of them.")
        + made.docx_table([["name", "a|b"], ["x", "1"]])
        + made.docx_paragraph("The end.")
    )
    core = '<c xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The rules</dc:title></c>'
    document = await read_document(made.docx(body, more={"docProps/core.xml": core}), "a.docx")
    table = "| name | a\\|b |\n| --- | --- |\n| x | 1 |"
    assert document.text == f"# Rules\n\nAll of them.\n\n{table}\n\nThe end."
    assert (document.kind, document.title) == ("docx", "The rules")


async def test_pptx_by_its_slides_with_notes() -> None:
    data = made.pptx([("Plan", "Do it", "Say it slowly"), ("End", "Thanks", "")])
    document = await read_document(data, "a.pptx")
    table = "| one | two |\n| --- | --- |\n| three | four |"
    first = f"# Plan\n\nDo it\n\n{table}\n\nNotes: Say it slowly"
    assert document.pages == (DocumentPage(1, first), DocumentPage(2, "# End\n\nThanks"))


async def test_xlsx_by_its_sheets() -> None:
    sheets = {"Sales": [["day", "sum"], [date(2026, 3, 1), 2.5], [None, None], ["total"]], "Empty": []}
    document = await read_document(made.xlsx(sheets), "no name that tells")
    table = "| day | sum |\n| --- | --- |\n| 2026-03-01 00:00:00 | 2.5 |\n| total |"
    assert document.pages == (DocumentPage(1, f"# Sales\n\n{table}"), DocumentPage(2, ""))
    assert document.kind == "xlsx"


async def test_html_with_and_without_an_article() -> None:
    words = "A long paragraph of an article, which is what a reader of the page has come for. " * 5
    page = f"<!doctype html><title>Moon</title><nav>menu</nav><article><h1>Moon</h1><p>{words}</p></article>"
    document = await read_document(page.encode(), "page.txt")  # the bytes tell more than the name
    assert (document.kind, document.title) == ("html", "Moon")
    assert document.text.startswith("# Moon\n\nA long paragraph") and "menu" not in document.text
    bare = await read_document(b"<html><title>Bare</title><nav>One<br>two</nav>", "bare.html")
    assert (bare.title, bare.text) == ("Bare", "One\ntwo")


async def test_a_short_page_keeps_its_table_and_its_empty_cells() -> None:
    page = "<h1>Bonuses</h1><p>Who gets what.<table><tr><th>Grade<th>Bonus<th>Days<tr><td>B<td><td>4</table>"
    document = await read_document(f"<!doctype html><html><body>{page}".encode(), "page.html")
    table = "| Grade | Bonus | Days |\n| --- | --- | --- |\n| B |  | 4 |"
    assert document.text == f"# Bonuses\n\nWho gets what.\n\n{table}"


def test_html_as_markdown() -> None:
    html = (
        "<head><title>A &amp; B</title><style>p {}</style></head><h2>Head</h2><p>One\n two<br>three"
        "<ul><li>x<li>y</ul><table><tr><th>a|b<td>c<tr><td><p>1</p><p>2</p></table>"
        "<pre>  kept\n  so</pre><script>no()</script>end"
    )
    table = "| a\\|b | c |\n| --- | --- |\n| 1 2 |"
    shown = f"## Head\n\nOne two\nthree\n\n- x\n- y\n\n{table}\n\n  kept\n  so\n\nend"
    assert markdown_of(html) == (shown, "A & B")


PROGRAM = 'print("Grüße")\n'
SUFFIXES = (
    *("c", "cpp", "cs", "css", "csv", "go", "java", "js", "json", "md", "php", "py", "rb", "sh", "tex"),
    *("ts", "txt", "xml", "yaml", "log", "toml", "ipynb", "tsv", "rs", "kt", "swift", "sql"),
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
async def test_text_in_any_encoding(encoding: str) -> None:
    document = await read_document(PROGRAM.encode(encoding), "a.py")
    assert document == Document("text", (DocumentPage(None, PROGRAM.strip()),), None)


async def test_every_kind_of_source_code_as_it_is() -> None:
    for suffix in SUFFIXES:
        document = await read_document(b"<?php x(1);\tif (a < b) {}\r\n# y", f"A.{suffix.upper()}")
        assert document.text == "<?php x(1);\tif (a < b) {}\n# y"
        assert document.kind == ("markdown" if suffix == "md" else "text")


async def test_an_open_file_without_what_no_database_takes() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"# Head\x1bing\n\n" + b"word " * 1_000_000)
        document = await read_document(file, "a.md")
    assert document.title == "Head ing"
    assert len(document.text) == len("# Heading\n\n") + 5_000_000


async def test_a_document_is_loaded_at_its_turn_and_no_more_when_nobody_waits_for_it() -> None:
    loading, gone, go_on = list[str](), list[str](), asyncio.Event()

    def loads(name: str) -> Load:
        async def load() -> bytes:
            loading.append(name)
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                gone.append(name)
                raise
            if name == "lost":
                raise LookupError(name)
            return name.encode()

        return load

    names = [*(f"document {number}" for number in range(OF_OWNER + 1)), "lost"]
    reads = [asyncio.create_task(read_document(loads(name), "a.txt")) for name in names]
    await until(lambda: len(loading) == OF_OWNER)
    reads[0].cancel()
    await until(lambda: len(loading) == OF_OWNER + 1)
    assert {*loading} == {*names[:-1]} and gone == names[:1], "the next has the place of what was given up"
    go_on.set()
    told = await asyncio.gather(*reads, return_exceptions=True)
    assert [each.text for each in told if isinstance(each, Document)] == names[1:-1]
    assert isinstance(told[0], asyncio.CancelledError) and isinstance(told[-1], LookupError)


PASSWORD = (
    f" /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'41' * 32}> /U <{'42' * 32}> >> /ID [<00> <00>]"
)
ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
LAUGHS = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "ha">{ENTITIES}]>'
WORKBOOK = made.docx("", more={"word/media/zeros": bytes(80 << 20)})

REFUSED = [
    ("picture", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "a.png", "unsupported_file", "neither text nor"),
    ("noise", bytes(range(1, 256)) * 9, "a.txt", "unsupported_file", "neither text nor"),
    (
        "old Word",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99),
        "a.docx",
        "unsupported_file",
        "old binary kind",
    ),
    ("doc", b"text", "a.doc", "unsupported_file", "old binary kind"),
    ("rtf", b"{\\rtf1 text}", "a.rtf", "unsupported_file", "RTF"),
    ("archive", made.archive({"a.txt": "text"}), "a.zip", "unsupported_file", "no docx, pptx or xlsx"),
    ("empty", b"", "a.txt", "invalid_file", "empty"),
    ("blank", b" \n\t\n", "a.txt", "unsupported_file", "no text"),
    ("no pdf", b"text", "a.pdf", "invalid_file", "no pdf file"),
    ("no docx", b"text", "a.docx", "invalid_file", "no docx file"),
    ("scan", made.pdf(["", ""]), "a.pdf", "unsupported_file", "OCR"),
    ("password", made.pdf(["secret"], trailer=PASSWORD), "a.pdf", "invalid_file", "encrypted"),
    ("cut pdf", made.pdf(["text"])[:200], "a.pdf", "invalid_file", "damaged"),
    ("cut docx", made.docx(made.docx_paragraph("text"))[:-40], "a.docx", "invalid_file", "damaged"),
    ("a million pages", made.pdf(["text"], claimed=1_000_000), "a.pdf", "too_large", "pages"),
    ("zip bomb", WORKBOOK, "a.docx", "too_large", "unpacks"),
    ("many members", made.archive({f"{n}": "" for n in range(10_001)}), "a.docx", "too_large", "members"),
    ("laughs", made.docx(made.docx_paragraph("&e9;"), before=LAUGHS), "a.docx", "invalid_file", "entities"),
    ("nested", b"<html>" + b"<div>" * 200_000, "a.html", "", ""),
]


@pytest.mark.parametrize(
    ("data", "name", "code", "words"), [each[1:] for each in REFUSED], ids=[e[0] for e in REFUSED]
)
async def test_what_cannot_be_read_is_refused_by_a_sentence(
    data: bytes, name: str, code: str, words: str
) -> None:
    with pytest.raises(UnreadableDocument) as raised:
        await read_document(data, name)
    assert raised.value.code == code or not code
    assert words in raised.value.message and raised.value.message.endswith(".")


async def test_a_member_that_lies_about_its_size_is_not_unpacked_further() -> None:
    data = bytearray(made.archive({"word/document.xml": b"x" * (64 << 20)}))
    place = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, place + 24, 100)  # the size that the directory tells
    assert zipfile.ZipFile(io.BytesIO(bytes(data))).infolist()[0].file_size == 100
    with pytest.raises(UnreadableDocument) as raised:
        await read_document(bytes(data), "a.docx")
    assert raised.value.code == "invalid_file"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ReadingLimits(max_bytes=100), "larger than"),
        (ReadingLimits(max_pages=2), "more than 2 pages"),
        (ReadingLimits(max_chars=10), "longer than 10 characters"),
    ],
    ids=["bytes", "pages", "characters"],
)
async def test_limits(limits: ReadingLimits, words: str) -> None:
    with pytest.raises(UnreadableDocument, match=words) as raised:
        await read_document(made.pdf(["page"] * 3), "a.pdf", limits=limits)
    assert raised.value.code == "too_large"


async def test_a_document_is_cut_where_it_is_read() -> None:
    paragraph = "The harbour is deep, and the moon is full. " * 8
    data = made.pdf([f"{paragraph}{number}" for number in range(5)])
    limits = ReadingLimits(chunk_tokens=100, chunk_overlap=40, max_chunks=100)
    document = await read_document(data, "a.pdf", limits=limits)
    chunks = [*chunks_of(document)]
    assert document.cuts == cuts_of(document, limits)
    assert {chunk.page for chunk in chunks} == {1, 2, 3, 4, 5}
    first = await read_document(data, "a.pdf", limits=replace(limits, max_chunks=3))
    assert [*chunks_of(first)] == chunks[:3]
    whole = await read_document(data, "a.pdf")
    assert whole.cuts is None and whole.text == document.text


@pytest.mark.parametrize("end", [b"x", b"<html>"])
def test_a_beginning_of_many_comments_is_judged_at_once(end: bytes) -> None:
    began = time.monotonic()
    found = family_of(b"<!---->" * 500 + end, "a.txt")
    assert time.monotonic() - began < 1
    assert (found == "html") is (end == b"<html>")
