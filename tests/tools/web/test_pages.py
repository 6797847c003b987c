"""Pages that are no plain text are read by the parsers of documents."""

from __future__ import annotations

import pytest

from tests.support.documents import docx, docx_paragraph, pdf
from tools.spec import ToolError
from tools.web.pages import as_page

URL = "https://a.test/b/c"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


async def test_a_pdf_is_a_page() -> None:
    page = await as_page(URL, "application/pdf", pdf(["High water", "Low water"], title="Tides"), "utf-8")
    assert (page.url, page.title, page.text) == (URL, "Tides", "High water\n\nLow water")


async def test_an_office_document_is_a_page() -> None:
    page = await as_page(URL, DOCX, docx(docx_paragraph("High water")), "utf-8")
    assert (page.title, page.text) == (URL, "High water")


async def test_links_of_html_lead_from_its_url() -> None:
    words = "The tides of the bay follow the moon, and are told of in many old books and songs."
    link = f"<p>{words} <a href='../d'>More</a> of it.</p>"
    html = f"<html><head><title>Bay</title></head><body><article>{link * 5}</article></body></html>"
    page = await as_page(URL, "text/html", html.encode(), "utf-8")
    assert page.title == "Bay"
    assert "[More](https://a.test/d)" in page.text
    page = await as_page(URL, "text/html", b"<title>Menu</title><nav>No article</nav>", "utf-8")
    assert (page.title, page.text) == ("Menu", "No article")


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("application/pdf", pdf([""]), "no text"),
        ("application/pdf", b"<html>not found</html>", "no pdf file"),
        ("text/html", b"<html></html>", "no text"),
        ("image/png", b"\x89PNG", "type image/png"),
    ],
    ids=["scan", "no PDF", "empty", "picture"],
)
async def test_a_page_that_cannot_be_read_says_why(kind: str, data: bytes, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        await as_page(URL, kind, data, "utf-8")
