"""A folder of documents as a small web of its own: searched in memory, without a network.

Its pages have URLs under `https://demo.test/`, a name that leads nowhere.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import quote

from tools.operator import ToolsError
from tools.spec import ToolError
from tools.web.pages import Page, as_page, require_within
from tools.web.providers import Query
from tools.web.search import Hit
from tools.web.urls import key

HOST = "https://demo.test"
KINDS = {".md": "text/markdown", ".txt": "text/plain", ".html": "text/html", ".htm": "text/html"}
MAX_FILES, MAX_BYTES = 1000, 1 << 20
"""How many files are read, and how long one may be."""


class Folder:
    """Documents that can be searched and opened."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = {key(page.url): page for page in pages}
        # It is filled on the thread that reads the files, and searched on the event loop's alone.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE pages USING fts5(url UNINDEXED, title, text)")
        rows = [(page.url, page.title, page.text) for page in pages]
        self._index.executemany("INSERT INTO pages VALUES (?, ?, ?)", rows)

    def __len__(self) -> int:
        return len(self._pages)

    async def find(self, query: Query) -> Sequence[Hit]:
        """The documents with most of a query's words."""
        words = re.findall(r"\w+", query.text)
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        sql = (
            "SELECT url, title, snippet(pages, 2, '', '', '...', 40) FROM pages WHERE pages MATCH ?"
            " ORDER BY bm25(pages, 0, 4, 1) LIMIT ?"
        )
        found = self._index.execute(sql, (asked, query.count)).fetchall()
        return [Hit(url, title, " ".join(snippet.split())) for url, title, snippet in found]

    async def page(
        self, url: str, domains: Collection[str], blocked: Collection[str] = (), owner: str = ""
    ) -> Page:
        """One document. Raises ToolError."""
        require_within(url, domains, blocked)
        if (page := self._pages.get(key(url))) is None:
            raise ToolError("There is no such page.")
        return page


async def read_folder(folder: Path) -> Folder:
    """The documents of a folder and of those in it: `.md`, `.txt` and `.html`. Raises ToolsError."""
    if not os.path.isdir(folder):  # which raises nothing where it may not be looked up
        why = f"{folder} is not a folder" if os.path.exists(folder) else f"there is no folder {folder}"
        raise ToolsError(why)
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in KINDS and file.is_file())
    if not files:
        raise ToolsError(f"{folder}: there is no .md, .txt or .html file in it")
    pages = []
    for file in files[:MAX_FILES]:
        url = f"{HOST}/{quote(file.relative_to(folder).as_posix())}"
        try:
            pages.append(await as_page(url, KINDS[file.suffix.lower()], _read(file), "utf-8"))
        except ToolError as error:
            raise ToolsError(f"{file}: {error}") from None
    return Folder(pages)


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES)
    except OSError as error:
        raise ToolsError(f"{file}: {error.strerror or error}") from None
