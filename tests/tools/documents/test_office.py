"""What stands beside the text of Office documents: charts, headers, footers, comments."""

from __future__ import annotations

import io

import pytest
from openpyxl import Workbook
from openpyxl.comments import Comment
from pptx import Presentation
from pptx.chart.data import CategoryChartData, XyChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

from tests.support import documents as made
from tools.documents import ReadingLimits, UnreadableDocument, read_document


async def test_charts_are_tables() -> None:
    sales, points = CategoryChartData(), XyChartData()
    sales.categories = ["Q1", "Q2"]
    sales.add_series("North", (1, None))
    sales.add_series("South", (3, 4.5))
    points.add_series("measured").add_data_point(0.5, 2)
    deck, inches = Presentation(), Inches(2)
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    for kind, data in (
        (XL_CHART_TYPE.COLUMN_CLUSTERED, sales),
        (XL_CHART_TYPE.XY_SCATTER, points),
    ):
        chart = slide.shapes.add_chart(kind, inches, inches, inches, inches, data).chart
    chart.has_title = True
    chart.chart_title.text_frame.text = "Lamps"
    file = io.BytesIO()
    deck.save(file)
    document = await read_document(file.getvalue(), "a.pptx")
    assert document.text == (
        "|  | North | South |\n| --- | --- | --- |\n| Q1 | 1 | 3 |\n| Q2 |  | 4.5 |\n\n"
        "Chart: Lamps\n\n|  | measured |\n| --- | --- |\n| 0.5 | 2 |"
    )


async def test_headers_and_footers_stand_once_around_the_text() -> None:
    def part(noun: str, *lines: str) -> str:
        words = "".join(f"<w:p><w:r><w:t>{line}</w:t></w:r></w:p>" for line in lines)
        return f'<w:{noun} xmlns:w="{made.WORDPROCESSING}">{words}</w:{noun}>'

    more = {
        "word/header1.xml": part("hdr", "Contract", "Draft &amp; secret"),
        "word/header2.xml": part("hdr", "Contract"),
        "word/footer1.xml": part("ftr", " "),
        "word/footer2.xml": part("ftr", "Page 1"),
    }
    document = await read_document(made.docx(made.docx_paragraph("Between A and B."), more=more), "a.docx")
    assert document.text == "Header: Contract\nDraft & secret\n\nBetween A and B.\n\nFooter: Page 1"


async def test_comments_of_cells_stand_below_their_sheet() -> None:
    workbook, file = Workbook(), io.BytesIO()
    for number, sheet in enumerate((workbook.active, workbook.create_sheet("Other"))):
        sheet["B2"] = number
        sheet["C9"].comment = Comment(f"note {number}", "me")
    workbook.save(file)
    document = await read_document(file.getvalue(), "a.xlsx")
    assert [page.text for page in document.pages] == [
        f"# {name}\n\n| {number} |\n| --- |\n\nComment on C9: note {number}"
        for number, name in enumerate(("Sheet", "Other"))
    ]


async def test_a_docx_that_is_too_long_is_refused_before_it_is_converted() -> None:
    data = made.docx(made.docx_paragraph("a lamp ") * 300_000)
    with pytest.raises(UnreadableDocument, match="longer than 1000000 characters") as raised:
        await read_document(data, "a.docx", limits=ReadingLimits(max_chars=1_000_000, cpu_s=4))
    assert raised.value.code == "too_large"
