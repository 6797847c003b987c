"""Documents as programs write them, made in memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

WORDPROCESSING = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_W = f'xmlns:w="{WORDPROCESSING}"'


def pdf(
    pages: Sequence[str], *, title: str | None = None, claimed: int | None = None, trailer: str = ""
) -> bytes:
    """A PDF with a page for each text, a line of a text each. claimed: how many pages it says it has.
    trailer: more entries of the trailer."""
    kids = " ".join(f"{number} 0 R" for number in range(4, 4 + 2 * len(pages), 2))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages) if claimed is None else claimed} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        shown = "".join(f"({_escaped(line)}) Tj T* " for line in text.split("\n")) if text else ""
        content = f"BT /F1 11 Tf 14 TL 50 780 Td {shown}ET"
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            f" /Contents {5 + 2 * number} 0 R >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    if title is not None:
        objects.append(f"<< /Title ({_escaped(title)}) >>")
        trailer += f" /Info {len(objects)} 0 R"
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R{trailer} >>\n"
    return data + f"{end}startxref\n{len(data)}\n%%EOF\n".encode("latin-1")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def archive(members: Mapping[str, str | bytes]) -> bytes:
    """A zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return file.getvalue()


def docx(body: str, *, before: str = "", more: Mapping[str, str | bytes] | None = None) -> bytes:
    """A docx file. body: its WordprocessingML. before: what stands in front of the root. more: members."""
    style = '<w:style w:type="paragraph" w:styleId="H1"><w:name w:val="heading 1"/></w:style>'
    return archive(
        {
            "[Content_Types].xml": "<Types/>",
            "_rels/.rels": _relation("officeDocument", "word/document.xml"),
            "word/_rels/document.xml.rels": _relation("styles", "styles.xml"),
            "word/styles.xml": f"<w:styles {_W}>{style}</w:styles>",
            "word/document.xml": f"{before}<w:document {_W}><w:body>{body}</w:body></w:document>",
            **(more or {}),
        }
    )


def _relation(kind: str, target: str) -> str:
    of_office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    of_packages = "http://schemas.openxmlformats.org/package/2006/relationships"
    one = f'<Relationship Id="r1" Type="{of_office}/{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{of_packages}">{one}</Relationships>'


def docx_paragraph(text: str, *, heading: bool = False) -> str:
    """A paragraph of WordprocessingML."""
    style = '<w:pPr><w:pStyle w:val="H1"/></w:pPr>' if heading else ""
    return f"<w:p>{style}<w:r><w:t>{text}</w:t></w:r></w:p>"


def docx_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of WordprocessingML."""
    cells = ("".join(f"<w:tc>{docx_paragraph(cell)}</w:tc>" for cell in row) for row in rows)
    return "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in cells) + "</w:tbl>"


def pptx(slides: Sequence[tuple[str, str, str]]) -> bytes:
    """A pptx file with a title, a text and notes for each slide, and a table on the first."""
    from pptx import Presentation
    from pptx.util import Inches

    made = Presentation()
    for number, (title, text, notes) in enumerate(slides):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
        slide.notes_slide.notes_text_frame.text = notes
        if number == 0:
            inches = Inches(1)
            table = slide.shapes.add_table(2, 2, inches, inches, inches, inches).table
            for at, word in enumerate(("one", "two", "three", "four")):
                table.cell(at // 2, at % 2).text = word
    return _saved(made)


def xlsx(sheets: Mapping[str, Sequence[Sequence[Any]]]) -> bytes:
    """An xlsx file with these rows."""
    from openpyxl import Workbook

    made = Workbook()
    made.remove(made.active)
    for name, rows in sheets.items():
        sheet = made.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
    return _saved(made)


def _saved(made: Any) -> bytes:
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()
