"""Office documents (docx, pptx, xlsx) as text. Each is an archive, which is judged before it is unpacked."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from tools.documents.document import Kind, ReadingLimits, Text, UnreadableDocument
from tools.documents.markup import markdown_of, table_of

MAX_MEMBERS = 10_000
MAX_RATIO = 200
"""How many bytes one byte may unpack to, in an archive that unpacks to more than SMALL bytes."""
SMALL = 16 << 20

_MAIN: dict[str, Kind] = {
    "word/document.xml": "docx",
    "ppt/presentation.xml": "pptx",
    "xl/workbook.xml": "xlsx",
}
_DECLARATIONS = tuple(
    mark.encode(encoding)
    for mark in ("<!DOCTYPE", "<!ENTITY")
    for encoding in ("ascii", "utf-16-le", "utf-16-be")
)
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
_AROUND = re.compile(r"word/(header|footer)\d*\.xml")
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"


def read_office(data: bytes, text: Text, limits: ReadingLimits) -> tuple[Kind, str | None]:
    """The kind and title of a document; its text goes to `text`. Raises UnreadableDocument, and what
    libraries raise on what is broken."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        _judge(members, limits)
        names = {member.filename for member in members}
        kind = next((kind for name, kind in _MAIN.items() if name in names), None)
        if kind is None:
            message = "This archive is no docx, pptx or xlsx file. Unpack it, and upload the files in it."
            raise UnreadableDocument("unsupported_file", message)
        _refuse_declarations(archive, members)
        title = _title(archive) if "docProps/core.xml" in names else None
    if kind == "docx":
        _docx(data, text)
    elif kind == "pptx":
        _pptx(data, text)
    else:
        from tools.documents.sheets import read_sheets  # here, because it needs openpyxl

        read_sheets(data, text)
    return kind, title


def _judge(members: list[zipfile.ZipInfo], limits: ReadingLimits) -> None:
    """Raise UnreadableDocument for an archive that unpacks to far more than it is. Python never unpacks more
    of a member than the archive says that it has."""
    packed = sum(member.compress_size for member in members)
    unpacked = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS:
        raise UnreadableDocument("too_large", f"This file is an archive of more than {MAX_MEMBERS} members.")
    if unpacked > limits.max_unpacked or unpacked > max(SMALL, MAX_RATIO * packed):
        raise UnreadableDocument("too_large", "This file unpacks to far more than it should.")
    if any(member.flag_bits & 1 for member in members):
        raise UnreadableDocument("invalid_file", "This file is encrypted: save it without a password.")


def _refuse_declarations(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> None:
    """ECMA-376 (part 2) forbids Office documents to declare entities, and what these expand to has no end."""
    for member in members:
        if member.filename.endswith((".xml", ".rels", ".vml")):
            content = archive.read(member)
            if any(mark in content for mark in _DECLARATIONS):
                message = "This file declares entities of XML, which no Office document may do."
                raise UnreadableDocument("invalid_file", message)


def _title(archive: zipfile.ZipFile) -> str | None:
    return ElementTree.fromstring(archive.read("docProps/core.xml")).findtext(_TITLE)


def _docx(data: bytes, text: Text) -> None:
    import mammoth

    _require_length(data, text)
    without_images = mammoth.images.img_element(lambda image: {})
    html = mammoth.convert_to_html(io.BytesIO(data), convert_image=without_images).value
    header, footer = _around_pages(data)
    text.add("\n\n".join(part for part in (header, markdown_of(html)[0], footer) if part))


def _require_length(data: bytes, text: Text) -> None:
    """Raise UnreadableDocument for a text that is too long, before minutes are spent on it: mammoth converts
    all of a document in one go."""
    chars = 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open("word/document.xml") as content:
        for _, element in ElementTree.iterparse(content):
            if element.tag == f"{_W}t":
                chars += len(element.text or "")
                text.require(chars)
            element.clear()


def _around_pages(data: bytes) -> tuple[str, str]:
    """The headers and the footers of all pages, each line once, which mammoth leaves out."""
    lines: dict[str, list[str]] = {"header": [], "footer": []}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if (found := _AROUND.fullmatch(name)) is not None:
                words = ""
                for element in ElementTree.fromstring(archive.read(name)).iter():
                    if element.tag == f"{_W}t":
                        words += element.text or ""
                    elif element.tag in (f"{_W}p", f"{_W}br"):
                        words += "\n"
                    elif element.tag == f"{_W}tab":
                        words += " "
                lines[found[1]] += [line.strip() for line in words.split("\n") if line.strip()]
    header, footer = ("\n".join(dict.fromkeys(each)) for each in lines.values())
    return header and f"Header: {header}", footer and f"Footer: {footer}"


# -- slides --------------------------------------------------------------------------------------------------


def _pptx(data: bytes, text: Text) -> None:
    """A page a slide: its title as a heading, its texts and tables, and the notes of who speaks."""
    from pptx import Presentation

    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        title = slide.shapes.title
        parts = [f"# {' '.join(title.text_frame.text.split())}"] if title is not None else []
        heading = None if title is None else title.shape_id
        parts += [part for shape in slide.shapes if shape.shape_id != heading for part in _shape(shape)]
        if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
            parts += [f"Notes: {notes.text}"] if notes.text.strip() else []
        text.add("\n\n".join(part for part in parts if part.strip()), number)


def _shape(shape: Any) -> Iterator[str]:
    """The texts of a shape, and of those in it where it is a group."""
    if shape.has_text_frame:
        yield shape.text_frame.text
    elif getattr(shape, "has_table", False):
        yield table_of([[cell.text for cell in row.cells] for row in shape.table.rows])
    elif getattr(shape, "has_chart", False):
        yield from _chart(shape.chart)
    elif hasattr(shape, "shapes"):
        for each in shape.shapes:
            yield from _shape(each)


def _chart(chart: Any) -> Iterator[str]:
    """The title of a chart, and its series as columns, behind those of what they are drawn over. The XML is
    read here because the library knows some kinds of charts alone."""
    if chart.has_title and chart.chart_title.has_text_frame:
        yield f"Chart: {' '.join(chart.chart_title.text_frame.text.split())}"
    columns: list[dict[int, str]] = []
    for series in chart.element.iter(f"{_C}ser"):
        name = series.findtext(f"{_C}tx//{_C}v") or ""
        for place in ("cat", "xVal", "val", "yVal", "bubbleSize"):
            found = series.findall(f"{_C}{place}")
            for points in [level for each in found for level in each.iter(f"{_C}lvl")] or found:
                column = {int(each.get("idx")): each.findtext(f"{_C}v") for each in points.iter(f"{_C}pt")}
                column[-1] = name if place in ("val", "yVal") else ""
                if column not in columns:  # most series share their categories
                    columns.append(column)
    rows = sorted({row for column in columns for row in column})
    yield table_of([[column.get(row) or "" for column in columns] for row in rows])
