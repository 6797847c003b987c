"""Workbooks (xlsx) as text: a page a sheet, as a table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from openpyxl import load_workbook
from openpyxl.comments.comment_sheet import CommentSheet
from openpyxl.packaging.relationship import get_dependents, get_rels_path
from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser
from openpyxl.xml.constants import COMMENTS_NS
from openpyxl.xml.functions import fromstring

from tools.documents.document import Text
from tools.documents.markup import table_of


def read_sheets(data: bytes, text: Text) -> None:
    """Formulas are shown by the values that were stored with them, and as they are where none was."""
    workbook = load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
    for number, sheet in enumerate(workbook.worksheets, 1):
        rows, chars = [], 0
        for row in _rows(workbook, sheet):
            if any(map(str.strip, row)):
                chars += sum(map(len, row))
                text.require(chars)
                rows.append(row)
        parts = [table_of(rows), *_comments(workbook, sheet)]
        text.add("\n\n".join([f"# {sheet.title}", *filter(None, parts)]) if any(parts) else "", number)


def _rows(workbook: Any, sheet: Any) -> Iterator[list[str]]:
    """The cells of each row that the file has."""
    with sheet._get_source() as source:
        cells = _Cells(
            source,
            sheet._shared_strings,
            data_only=True,
            epoch=workbook.epoch,
            date_formats=workbook._date_formats,
            timedelta_formats=workbook._timedelta_formats,
        )
        for _, row in cells.parse():
            columns = {cell["column"]: str(cell["value"]) for cell in row if cell["value"] is not None}
            yield [columns.get(column, "") for column in range(1, max(columns, default=0) + 1)]


def _comments(workbook: Any, sheet: Any) -> Iterator[str]:
    archive, path = workbook._archive, get_rels_path(sheet._worksheet_path)
    for each in get_dependents(archive, path).find(COMMENTS_NS) if path in archive.namelist() else ():
        for cell, comment in CommentSheet.from_tree(fromstring(archive.read(each.target))).comments:
            yield f"Comment on {cell}: {comment.text}"


class _Cells(WorkSheetParser):  # type: ignore[misc]
    """The library shows either values or formulas, and would have to read a workbook twice for both."""

    def parse_cell(self, element: Any) -> dict[str, Any]:
        cell: dict[str, Any] = super().parse_cell(element)
        # What is a text (`str`) without characters is the value of many a formula.
        if cell["value"] is None and cell["data_type"] != "str" and element.find(FORMULA_TAG) is not None:
            formula = self.parse_formula(element)
            cell["value"] = getattr(formula, "text", formula)
        return cell
