"""The index of the words of chunks: which chunks of a store share most words with a query.

The order is that of BM25. On SQLite the index is an FTS5 table without the texts, and how rare a word is,
FTS5 counts over the chunks of all stores. On PostgreSQL it is a `tsvector` with a GIN index, which has no
BM25, so a query works it out (`_rank_postgresql`), by how rare a word is among the chunks of its store.

A chunk with a single word of the query is a match, so a query with a frequent word would have to rank most
of a store. Ranking is what costs: 1 us a chunk, where counting costs 0.04 us. So the words are counted first,
and the rarest ones search, as many of them as match no more than `RANKED` chunks together.

Each transaction leaves SQLite's index a segment, and a search looks into all segments. To merge them is half
of the work of indexing, so FTS5 does not do it while it commits: `merge` does, when there is time for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, text

from storage.vector_stores.chunk_ids import of_store
from storage.vector_stores.records import POSITION_BITS

RANKED = 15_000
"""Chunks that one search ranks at most. [measured] 100,000 chunks of 200 words, one busy core: 17 ms."""

RANKED_OF_ONE = 2000
"""Those that it may rank of each store, however many stores share them: at most 64,000 of 32 stores."""

COUNTED = 4 * RANKED
"""Chunks of a store that are counted at most, to know how rare a word is among them."""

MEASURED = 256
"""Chunks of a store whose words are counted, to know how long its chunks are."""

K1, B = 1.2, 0.75
"""Of BM25, as FTS5 has them: how soon more of a word adds nothing, and how much less long chunks count."""

MAX_WORDS = 32
"""Words of a query that are looked for."""

MERGED = 16
"""Pages that one merge writes. [measured] 256 segments of 64 chunks: 16 ms, 37 ms at most."""

_WORD = re.compile(r"[^\W_]+")

# Scripts that are written without spaces: each character is a word, and neighbours are looked for together.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f]")

_FREQUENT = re.compile(
    "a|about|after|all|also|an|and|any|are|as|at|be|been|but|by|can|could|did|do|does|for|from|had|has|"
    "have|he|her|his|how|i|if|in|into|is|it|its|just|may|me|more|most|my|no|not|of|on|one|only|or|other|"
    "our|out|over|she|should|so|some|such|than|that|the|their|them|then|there|these|they|this|to|up|us|"
    "use|used|was|we|were|what|when|where|which|while|who|why|will|with|would|you|your"
)
"""English words that say nothing of what a text is about; they are looked for where a query has no others."""


def indexed(text: str) -> str:
    """A text as the index takes it."""
    return _UNSPACED.sub(r" \g<0> ", text)


def words_of(query: str) -> list[str]:
    """The words of a query, each once, as phrases of the index: letters, digits and spaces, nothing else."""
    spaced = (" ".join(_WORD.findall(indexed(word))) for word in _WORD.findall(query.casefold()))
    words = list(dict.fromkeys(spaced))
    return ([word for word in words if not _FREQUENT.fullmatch(word)] or words)[:MAX_WORDS]


def add(conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
    """Takes chunks in: ids and texts."""
    rows = [{"id": id, "words": indexed(words)} for id, words in chunks]
    if rows:
        conn.execute(_ADD[conn.dialect.name], rows)


def remove(conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
    """Takes chunks out; the texts must be those that were taken in."""
    rows = [{"id": id, "words": indexed(words)} for id, words in chunks]
    if rows:
        conn.execute(_REMOVE[conn.dialect.name], rows)


def merge(conn: Connection) -> bool:
    """Merges some of what transactions have added; False when there is nothing to be merged."""
    if conn.dialect.name != "sqlite":
        return False
    changes = text("SELECT total_changes()")
    before = conn.execute(changes).scalar_one()
    conn.execute(text(f"INSERT INTO vector_words (vector_words, rank) VALUES ('merge', {MERGED})"))
    # Fewer than two changes are FTS5's word for it (https://sqlite.org/fts5.html#the_merge_command).
    return bool(conn.execute(changes).scalar_one() - before >= 2)


def search(
    conn: Connection, stores: Sequence[int], query: str, files: Collection[int], *, only: bool, most: int
) -> list[tuple[int, float]]:
    """The chunks of stores that match a query best: ids and scores, the highest first, at most `most`.

    files: keys of files: those whose chunks are looked at where `only`, and otherwise those whose are not.
    """
    words = words_of(query)
    if not words or (only and not files):
        return []
    dialect = conn.dialect.name
    share = min(RANKED, max(RANKED // len(stores), RANKED_OF_ONE))
    found: list[tuple[int, float]] = []
    for store in stores:
        first, last = of_store(store)
        place = {"first": first, "last": last, "most": share + 1}
        counted = [
            (conn.execute(_COUNT[dialect], {**place, "words": _phrase(word, dialect)}).scalar_one(), word)
            for word in words
        ]
        chosen = _rarest(counted, share)
        if chosen:
            found += _RANK[dialect](conn, chosen, first, last, files, only, share, most)
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:most]


def _rarest(counted: Sequence[tuple[int, str]], share: int) -> list[tuple[int, str]]:
    """The words that search, each with how many chunks have it: at least one, if any chunk has any."""
    chosen: list[tuple[int, str]] = []
    total = 0
    for count, word in sorted(counted):
        if count and (not chosen or total + count <= share):
            chosen.append((count, word))
            total += count
    return chosen


def _phrase(word: str, dialect: str) -> str:
    """A word in the query language of a database. It is of letters, digits and spaces, so nothing needs an
    escape."""
    return f'"{word}"' if dialect == "sqlite" else f"'{word}'"


# ------------------------------------------------------------------------------------------------------------
# What each database does

_ADD = {
    "sqlite": text("INSERT INTO vector_words (rowid, words) VALUES (:id, :words)"),
    "postgresql": text(
        "INSERT INTO vector_words (id, words) VALUES (:id, to_tsvector('english', CAST(:words AS text)))"
    ),
}
_REMOVE = {
    "sqlite": text("INSERT INTO vector_words (vector_words, rowid, words) VALUES ('delete', :id, :words)"),
    "postgresql": text("DELETE FROM vector_words WHERE id = :id AND CAST(:words AS text) IS NOT NULL"),
}
_COUNT = {
    "sqlite": text(
        "SELECT count(*) FROM (SELECT 1 FROM vector_words WHERE vector_words MATCH :words"
        " AND rowid BETWEEN :first AND :last LIMIT :most)"
    ),
    "postgresql": text(
        "SELECT count(*) FROM (SELECT 1 FROM vector_words"
        " WHERE words @@ to_tsquery('english', CAST(:words AS text))"
        " AND id BETWEEN :first AND :last LIMIT :most) AS matching"
    ),
}


def _rank_sqlite(
    conn: Connection,
    words: Sequence[tuple[int, str]],
    first: int,
    last: int,
    files: Collection[int],
    only: bool,
    share: int,
    most: int,
) -> list[tuple[int, float]]:
    within = f"(rowid >> {POSITION_BITS}) {'IN' if only else 'NOT IN'} (SELECT value FROM json_each(:files))"
    where = f"vector_words MATCH :words AND rowid BETWEEN :first AND :last{f' AND {within}' if files else ''}"
    ranked = f"SELECT rowid AS id, bm25(vector_words) AS cost FROM vector_words WHERE {where} LIMIT {share}"
    rows = conn.execute(
        text(f"SELECT id, cost FROM ({ranked}) ORDER BY cost, id LIMIT :most"),
        {
            "words": " OR ".join(_phrase(word, "sqlite") for _, word in words),
            "first": first,
            "last": last,
            "most": most,
            **({"files": json.dumps(sorted(files))} if files else {}),
        },
    ).all()
    return [(id, -cost) for id, cost in rows]


_MEASURE = text(
    "WITH own AS (SELECT words FROM vector_words WHERE id BETWEEN :first AND :last LIMIT :most)"
    " SELECT (SELECT count(*) FROM own),"
    " (SELECT avg(length(words)) FROM (SELECT words FROM own LIMIT :some) AS few)"
)

_FULL = math.pi**2 / 6


def _rank_postgresql(
    conn: Connection,
    words: Sequence[tuple[int, str]],
    first: int,
    last: int,
    files: Collection[int],
    only: bool,
    share: int,
    most: int,
) -> list[tuple[int, float]]:
    """BM25 out of what PostgreSQL tells of a `tsvector`: how many different words it has, and how often each.

    The latter hides in `ts_rank`: for a word that occurs n times it is a tenth of 1 + 1/4 + ... + 1/n^2,
    divided by what that comes to without an end, `_FULL`. What is missing of the sum is nearly 1 / (n + 1/2).
    """
    place: dict[str, Any] = {"first": first, "last": last}
    num_chunks, usual = conn.execute(_MEASURE, place | {"most": COUNTED, "some": MEASURED}).one()
    values = place | {"most": most, "words": " | ".join(_phrase(word, "postgresql") for _, word in words)}
    values["length"] = K1 * B / float(usual or 1)
    terms = []
    for index, (count, word) in enumerate(words):
        rare = math.log1p((max(num_chunks, count) - count + 0.5) / (count + 0.5))
        values |= {f"word{index}": _phrase(word, "postgresql"), f"rare{index}": rare * (K1 + 1)}
        query = f"(SELECT to_tsquery('english', CAST(:word{index} AS text)))"  # once, not for each chunk
        times = f"1 / ({_FULL} - {10 * _FULL} * ts_rank(words, {query})) - {1 / _FULL}"
        if " " in word:  # a phrase is ranked otherwise: it is there, or it is not
            times = f"CAST(words @@ {query} AS integer)"
        terms.append(f"CAST(:rare{index} AS float8) * (1 - long / (long + {times}))")
    within = ""
    if files:
        values["files"] = sorted(files)
        word = "= ANY" if only else "<> ALL"
        within = f" AND (id >> {POSITION_BITS}) {word} (CAST(:files AS bigint[]))"
    # What `ts_delete` leaves, here all, is a copy that all terms read; each would fetch the kept one anew.
    matching = (
        "SELECT id, ts_delete(words, '') AS words FROM vector_words"
        " WHERE words @@ to_tsquery('english', CAST(:words AS text))"
        f" AND id BETWEEN :first AND :last{within} LIMIT {share}"
    )
    long = f"{K1 * (1 - B)} + CAST(:length AS float8) * length(words)"
    measured = f"SELECT id, words, {long} AS long FROM ({matching}) AS matching"
    ranked = f"SELECT id, {' + '.join(terms)} AS score FROM ({measured}) AS measured"
    rows = conn.execute(text(f"{ranked} ORDER BY score DESC, id LIMIT :most"), values).all()
    return [(id, float(score)) for id, score in rows]


_RANK = {"sqlite": _rank_sqlite, "postgresql": _rank_postgresql}
