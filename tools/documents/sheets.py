"""Workbooks (xlsx) as text: a page a sheet, as a table."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from openpyxl import load_workbook
from openpyxl.comments.comment_sheet import CommentSheet
from openpyxl.packaging.relationship import get_dependents, get_rels_path
from openpyxl.xml.constants import COMMENTS_NS
from openpyxl.xml.functions import fromstring

from tools.documents.document import Text
from tools.documents.markup import table_of

_FORMULA = re.compile(rb"<(?:\w+:)?f[\s/>]")


def read_sheets(data: bytes, text: Text) -> None:
    """Formulas are shown by the values that were stored with them, and as they are where none was."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    values = _sheets(data, values=True)
    # The library shows values or formulas. Most workbooks have no formulas, and are read once.
    formulas = _sheets(data, values=False) if _has_formulas(archive) else repeat(None)
    for number, (sheet, its_formulas) in enumerate(zip(values, formulas, strict=False), 1):
        rows, chars = [], 0
        for row in _rows(sheet, its_formulas):
            if any(map(str.strip, row)):
                chars += sum(map(len, row))
                text.require(chars)
                rows.append(row)
        parts = [table_of(rows), *_comments(archive, sheet)]
        text.add("\n\n".join([f"# {sheet.title}", *filter(None, parts)]) if any(parts) else "", number)


def _sheets(data: bytes, *, values: bool) -> list[Any]:
    workbook = load_workbook(io.BytesIO(data), read_only=True, data_only=values, keep_links=False)
    for sheet in workbook.worksheets:
        sheet.reset_dimensions()  # what the file says of them need not be so
    return list(workbook.worksheets)


def _has_formulas(archive: zipfile.ZipFile) -> bool:
    for name in archive.namelist():
        if name.startswith("xl/worksheets/") and name.endswith(".xml"):
            with archive.open(name) as content:
                rest = b""
                while piece := content.read(1 << 20):
                    if _FORMULA.search(rest + piece):
                        return True
                    rest = piece[-64:]  # a tag may begin in one piece and end in the next
    return False


def _rows(sheet: Any, formulas: Any | None) -> Iterator[list[str]]:
    """The cells of each row."""
    if formulas is None:
        for row in sheet.iter_rows(values_only=True):
            yield ["" if value is None else str(value) for value in row]
        return
    for row, written in zip(sheet.iter_rows(), formulas.iter_rows(), strict=True):
        yield [_shown(*cells) for cells in zip(row, written, strict=True)]


def _shown(cell: Any, written: Any) -> str:
    """A cell by its value, else by its formula. cell, written: as the workbook's values, its formulas have
    it."""
    # What is a text (`str`) without characters is the value of many a formula.
    if cell.value is None and cell.data_type != "str" and written.data_type == "f":
        formula = getattr(written.value, "text", written.value)
        return formula if isinstance(formula, str) else ""  # of a data table nothing is written
    return "" if cell.value is None else str(cell.value)


def _comments(archive: zipfile.ZipFile, sheet: Any) -> Iterator[str]:
    path = get_rels_path(sheet._worksheet_path)
    for each in get_dependents(archive, path).find(COMMENTS_NS) if path in archive.namelist() else ():
        for cell, comment in CommentSheet.from_tree(fromstring(archive.read(each.target))).comments:
            yield f"Comment on {cell}: {comment.text}"
