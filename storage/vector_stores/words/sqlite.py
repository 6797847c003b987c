"""The words of chunks on SQLite: an FTS5 table without the texts.

FTS5 counts how rare a word is over the chunks of all stores, of whatever owner. So each word is looked for by
itself, and what FTS5 makes of it is divided by FTS5's rarity and multiplied by that within the store: what
others store is not to be told by scores. The mean length of a chunk alone is of all stores.

Each transaction leaves the index a segment, and a search looks into all segments. To merge them is half of
the work of indexing, so FTS5 does not do it while it commits: `merge` does, when there is time for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from storage.vector_stores.chunk_ids import of_store
from storage.vector_stores.records import POSITION_BITS
from storage.vector_stores.words.interface import Counted, Wanted

MERGED = 16
"""Pages that one merge writes. [measured] 256 segments of 64 chunks: 16 ms, 37 ms at most."""

_ADD = text("INSERT INTO vector_words (rowid, words) VALUES (:id, :words)")
_REMOVE = text("INSERT INTO vector_words (vector_words, rowid, words) VALUES ('delete', :id, :words)")
_MERGE = text("INSERT INTO vector_words (vector_words, rank) VALUES ('merge', :pages)")
_COUNT = text(
    "SELECT count(*) FROM (SELECT 1 FROM vector_words WHERE vector_words MATCH :words"
    " AND rowid BETWEEN :first AND :last LIMIT :most)"
)
_NUM_CHUNKS = text(
    "SELECT coalesce(sum(next_position), 0) FROM vector_store_files"
    " WHERE store_number = :store AND deleted_at IS NULL"
)
_HAVING = text(
    "SELECT rowid FROM vector_words WHERE vector_words MATCH :words"
    " AND rowid IN (SELECT value FROM json_each(:chunks))"
)


class SqliteWords:
    """See `WordsIndex`."""

    def add(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        conn.execute(_ADD, _rows(chunks))

    def remove(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        conn.execute(_REMOVE, _rows(chunks))

    def merge(self, conn: Connection, *, whole: bool = False) -> bool:
        changes = text("SELECT total_changes()")
        before = conn.execute(changes).scalar_one()
        conn.execute(_MERGE, {"pages": -MERGED if whole else MERGED})
        # Fewer than two changes are FTS5's word for it (https://sqlite.org/fts5.html#the_merge_command).
        return bool(conn.execute(changes).scalar_one() - before >= 2)

    def count(self, conn: Connection, store: int, words: Sequence[str], most: int) -> Counted:
        first, last = of_store(store)
        place = {"first": first, "last": last, "most": most + 1}
        counts = [conn.execute(_COUNT, {**place, "words": _phrase(word)}).scalar_one() for word in words]
        return Counted(conn.execute(_NUM_CHUNKS, {"store": store}).scalar_one(), counts)

    def rank(
        self, conn: Connection, wanted: Wanted, words: Sequence[str], counted: Counted, share: int
    ) -> list[tuple[int, float]]:
        first, last = of_store(wanted.store)
        values: dict[str, Any] = {"first": first, "last": last, "most": wanted.most}
        once = within = ""
        if wanted.files:
            values["files"] = json.dumps(sorted(wanted.files))
            once = "WITH keys AS MATERIALIZED (SELECT value FROM json_each(:files)) "  # not for each word
            chosen = "IN" if wanted.only else "NOT IN"
            within = f" AND (rowid >> {POSITION_BITS}) {chosen} (SELECT value FROM keys)"
        where = f"rowid BETWEEN :first AND :last{within} LIMIT {share}"
        ranked = []
        for n, (word, rarity) in enumerate(zip(words, counted.rarities(), strict=True)):
            values[f"word{n}"], values[f"rarity{n}"] = _phrase(word), rarity
            matches = f"FROM vector_words WHERE vector_words MATCH :word{n}"
            # As if the word was all of a chunk: what is left of its score is its rarity as FTS5 has it.
            of_all = f"(SELECT bm25(vector_words, 1e12) {matches} LIMIT 1)"
            score = f"bm25(vector_words) * :rarity{n} / {of_all}"
            ranked.append(f"SELECT * FROM (SELECT rowid AS id, {score} AS score {matches} AND {where})")
        best = "GROUP BY id ORDER BY total DESC, id LIMIT :most"
        query = f"{once}SELECT id, sum(score) AS total FROM ({' UNION ALL '.join(ranked)}) {best}"
        return [(id, score) for id, score in conn.execute(text(query), values)]

    def words_in(self, conn: Connection, chunks: Sequence[int], words: Sequence[str]) -> dict[int, list[int]]:
        has: dict[int, list[int]] = {id: [] for id in chunks}
        for n, word in enumerate(words):
            values = {"words": _phrase(word), "chunks": json.dumps(chunks)}
            for id in conn.execute(_HAVING, values).scalars():
                has[id].append(n)
        return has


def _rows(chunks: Sequence[tuple[int, str]]) -> list[dict[str, object]]:
    return [{"id": id, "words": words} for id, words in chunks]


def _phrase(word: str) -> str:
    """A word as FTS5 asks for it; it has nothing that needs an escape."""
    return f'"{word}"'
