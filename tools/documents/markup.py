"""HTML as Markdown: headings, lists and tables stay, everything else becomes plain text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = frozenset({"script", "style", "template", "noscript", "svg"})
_BLOCKS = frozenset(
    {
        *("p", "div", "section", "article", "header", "footer", "main", "aside", "nav", "ul", "ol", "dl"),
        *("dd", "dt", "table", "blockquote", "pre", "figure", "form"),
    }
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_BLANK_LINES = re.compile(r"[ \t]*\n(?:[ \t]*\n)+")


def markdown_of(html: str) -> tuple[str, str | None]:
    """What a page of HTML shows, and its title."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    text = _BLANK_LINES.sub("\n\n", "".join(reader.parts)).strip()
    return text, "".join(reader.title).strip() or None


def table_of(rows: list[list[str]]) -> str:
    """Rows as a table in Markdown; the first has the names of the columns. Columns without any text are left
    out: one cell far to the right would make each row as long as the way to it. So are empty cells at the
    end of a row but the first, which Markdown adds by itself."""
    used = sorted({column for row in rows for column, cell in enumerate(row) if cell.strip()})
    if not used:
        return ""
    first, *others = ([row[column] for column in used if column < len(row)] for row in rows)
    first += [""] * (len(used) - len(first))
    return "\n".join([_row(first), "|" + " --- |" * len(used), *(_row(_trimmed(row)) for row in others)])


def _trimmed(cells: list[str]) -> list[str]:
    while cells and not cells[-1].strip():
        cells.pop()
    return cells


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


class _Reader(HTMLParser):
    """Writes parts of Markdown as it meets elements. Tables within a cell are the cell's text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self._hidden: list[str] = []
        self._in_title = False
        self._tables = 0
        self._rows: list[list[str]] = []
        self._cell: list[str] | None = None
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = not self.title
        elif tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag == "table":
            self._tables += 1
            if self._tables == 1:
                self._rows = []
        elif self._tables:
            self._in_table(tag)
        elif tag in _HEADINGS:
            self._write("\n\n" + _HEADINGS[tag])
        elif tag == "li":
            self._write("\n- ")
        elif tag == "br":
            self._write("\n")
        elif tag in _BLOCKS:
            self._verbatim += tag == "pre"
            self._write("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag in _HIDDEN:
            if tag in self._hidden:
                while self._hidden.pop() != tag:
                    pass
        elif tag == "table" and self._tables:
            self._tables -= 1
            if not self._tables:
                self._end_cell()
                self._write("\n\n" + table_of(self._rows) + "\n\n")
        elif self._tables:
            if tag in ("td", "th", "tr"):
                self._end_cell()
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._verbatim -= tag == "pre" and self._verbatim > 0
            self._write("\n\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._hidden:
            self._write(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _in_table(self, tag: str) -> None:
        if self._tables > 1:
            self._write(" ")
        elif tag == "tr":
            self._end_cell()
            self._rows.append([])
        elif tag in ("td", "th"):
            self._end_cell()
            self._cell = []
            if not self._rows:
                self._rows.append([])
        elif tag in _BLOCKS or tag in ("br", "li"):
            self._write(" ")

    def _end_cell(self) -> None:
        if self._cell is not None:
            self._rows[-1].append("".join(self._cell))
            self._cell = None

    def _write(self, text: str) -> None:
        if not self._tables:
            self.parts.append(text)
        elif self._cell is not None:
            self._cell.append(text)
