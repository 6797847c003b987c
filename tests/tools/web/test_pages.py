"""Pages that are no plain text are read by the parsers of documents."""

from __future__ import annotations

import time

import pytest

from tests.support.documents import docx, docx_paragraph, pdf
from tests.support.loopback_web import loopback_web
from tools.egress import Egress
from tools.spec import ToolError
from tools.web.pages import WebPages, as_page
from tools.web.search import hit_of

URL = "https://a.test/b/c"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


async def test_a_pdf_says_which_part_of_it_has_no_text() -> None:
    page = await as_page(URL, "application/pdf", pdf(["High water", ""]), "utf-8")
    assert page.text == "High water\n\n(this page has no text; it may be a picture)"


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


@pytest.mark.parametrize(
    ("path", "words"), [("", "Only a page with an http"), ("/p/nowhere", "redirects to what is no URL")]
)
async def test_what_is_no_url_is_told(path: str, words: str) -> None:
    async with loopback_web() as web:
        pages = WebPages(Egress("any"))
        with pytest.raises(ToolError, match=words):
            await pages.page(web.url(path) if path else "http://[", ())


async def test_of_a_long_heading_only_the_beginning_is_read() -> None:
    began = time.process_time()
    page = await as_page(URL, "text/plain", b"# High  water" + b"\x00 x" * (5 << 20), "utf-8")
    hit = hit_of(URL, "&amp" * (1 << 20), "\x00 x" * (1 << 20))
    assert time.process_time() - began < 0.4
    assert page.title.startswith("High water x x") and len(page.title) == 300
    assert hit is not None and (hit.title, len(hit.snippet)) == ("&" * 300, 1000)
