"""Finds the texts that share most words with a query, by BM25. Nothing is kept from search to search."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing

MAX_QUERY = 1000
"""Characters of a query that are looked at."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def best_matches(query: str, texts: Sequence[tuple[str, str]], most: int) -> list[int]:
    """The indices of those texts, each a name and a description, that have words of the query, the best
    first, at most `most` of them; of equals the first comes first.

    A word in a name counts four times as much as one in a description. Words are compared by their stems,
    without case and accents; names are also cut at underscores, points and changes of case.
    """
    asked = " OR ".join(f'"{word}"' for word in re.findall(r"[^\W_]+", _words(query[:MAX_QUERY])))
    if not asked:
        return []
    with closing(sqlite3.connect(":memory:")) as index:
        index.execute(
            "CREATE VIRTUAL TABLE texts USING fts5(name, description, tokenize = 'porter unicode61')"
        )
        rows = [(number, _words(name), about) for number, (name, about) in enumerate(texts)]
        index.executemany("INSERT INTO texts (rowid, name, description) VALUES (?, ?, ?)", rows)
        found = index.execute(
            "SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY bm25(texts, 4, 1), rowid LIMIT ?",
            (asked, most),
        )
        return [number for (number,) in found]


def _words(text: str) -> str:
    """A text with names such as listOrders cut into their words."""
    return _HUMP.sub(" ", text)
