"""Workbooks as text: which cells are shown, and how."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

from openpyxl.worksheet.formula import ArrayFormula

from tests.support import documents as made
from tools.documents import read_document


def changed(workbook: bytes, change: Callable[[str], str]) -> bytes:
    """The workbook with another XML of its first sheet."""
    name = "xl/worksheets/sheet1.xml"
    with zipfile.ZipFile(io.BytesIO(workbook)) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    return made.archive({**members, name: change(members[name].decode())})


async def test_a_formula_is_shown_where_no_value_is_stored_with_it() -> None:
    rows: list[list[object]] = [["pieces", "price", "sum"], [2, 5, "=A2*B2"], [3, 4, "=A3*B3"]]
    rows += [["in all", None, ArrayFormula("C4", "=SUM(A2:A3*B2:B3)")]]
    workbook = made.xlsx({"Sales": rows})
    table = (
        "| pieces | price | sum |\n| --- | --- | --- |\n| 2 | 5 | {} |\n| 3 | 4 | {} |\n| in all |  | {} |"
    )
    document = await read_document(workbook, "a.xlsx")
    assert document.text == "# Sales\n\n" + table.format("=A2*B2", "=A3*B3", "=SUM(A2:A3*B2:B3)")
    # What other programs write: a value, a value that is an empty text, and a formula that another shares.
    shared = '<f t="shared" ref="C2:C3" si="0">A2*B2</f><v></v>'

    def stored(xml: str) -> str:
        xml = xml.replace("<f>A2*B2</f><v></v>", shared)
        xml = xml.replace("<f>A3*B3</f><v></v>", '<f t="shared" si="0"/>')
        return xml.replace('<c r="C4"><f', '<c r="C4" t="str"><f')

    document = await read_document(changed(workbook, stored), "a.xlsx")
    assert document.text == "# Sales\n\n" + table.format("=A2*B2", "=A3*B3", "").replace(" |  |  |", " |")
    with_value = changed(workbook, lambda xml: xml.replace("<f>A2*B2</f><v></v>", "<f>A2*B2</f><v>10</v>"))
    document = await read_document(with_value, "a.xlsx")
    assert document.text == "# Sales\n\n" + table.format("10", "=A3*B3", "=SUM(A2:A3*B2:B3)")


async def test_a_cell_far_to_the_right_costs_the_other_rows_nothing() -> None:
    rows: list[list[object]] = [[f"row {number}", number] for number in range(200)]
    alone = await read_document(made.xlsx({"Sales": rows}), "a.xlsx")
    rows[0] += [None] * 16_381 + ["far"]  # in column XFD, which is the last
    document = await read_document(made.xlsx({"Sales": rows}), "a.xlsx")
    assert document.text == alone.text.replace("| 0 |\n", "| 0 | far |\n").replace(
        " --- |\n", " --- | --- |\n"
    )
