"""The words of chunks on PostgreSQL: a `tsvector` for each, with a GIN index, which BM25 is made of.

To look at a `tsvector` is what costs, 8 us each: where a frequent word is asked for, those of all chunks that
have it take longer than anybody would wait. The index tells which chunks have a word without a look at any.
So a search has three steps. A sample of the chunks tells how long chunks are, and which words are frequent;
the others are counted. Then the index tells which chunks have the words, and those with most rarity among
them are looked at and ranked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

from sqlalchemy import Connection, text

from storage.vector_stores.chunk_ids import FILE_BITS, of_store
from storage.vector_stores.records import POSITION_BITS
from storage.vector_stores.words.interface import Counted, Wanted

SAMPLE = 128
"""Chunks of a store that are looked at to know how long its chunks are, and which words are frequent."""

FREQUENT = 8
"""Chunks of a sample that have a word of which the sample tells well enough how frequent it is."""

SAMPLE_S = 60.0
"""A connection looks at the same chunks for so long. [measured] 10,000 files: to choose them takes 10 ms."""

MAX_SAMPLES = 256
"""Stores of which a connection knows the chunks of a sample."""

RANKED = 1000
"""Chunks that one search looks at and ranks."""

K1, B = 1.2, 0.75
"""Of BM25, as FTS5 has them: how soon more of a word adds nothing, and how much less long chunks count."""

_FULL = pi**2 / 6

_ADD = text("INSERT INTO vector_words (id, words) VALUES (:id, to_tsvector('english', CAST(:words AS text)))")
_REMOVE = text("DELETE FROM vector_words WHERE id = :id")


# To the planner a look at a `tsvector` costs nothing, so where the index has much that is not sorted in yet,
# as after many chunks have come, it would rather look at all of them. It holds for the transaction.
_BY_INDEX = text("SET LOCAL enable_seqscan = off")


def _query(n: int) -> str:
    """The nth word of a statement, as PostgreSQL asks for it."""
    return f"to_tsquery('english', CAST(:word{n} AS text))"


def _once(n: int) -> str:
    """The same, made once and not for each chunk; the planner then cannot know how frequent the word is."""
    return f"(SELECT {_query(n)})"


def _within(store: int) -> str:
    """Ids of a store's chunks. They are no parameters: a plan that PostgreSQL keeps takes any range for a
    small one, and looks at the words of all chunks in it instead of asking the index."""
    first, last = of_store(store)
    return f"id BETWEEN {first} AND {last}"


# Chunks at equal distances, by how many chunks the files before theirs have.
_CHOOSE_SAMPLE = text(
    f"""
    WITH files AS MATERIALIZED (
        SELECT number, next_position AS many, sum(next_position) OVER (ORDER BY number) AS through
        FROM vector_store_files WHERE store_number = :store AND deleted_at IS NULL AND next_position > 0
    ), whole AS (
        SELECT max(through) AS total, least(max(through), :most) AS taken FROM files
    ), places AS (
        SELECT number, through - many AS before, ((through - many) * taken + total - 1) / total AS first,
            (through * taken + total - 1) / total AS behind, total, taken
        FROM files CROSS JOIN whole
    )
    SELECT total, (CAST(:store AS bigint) << {FILE_BITS} | number) << {POSITION_BITS}
        | (place * total / taken - before) AS id
    FROM places CROSS JOIN LATERAL generate_series(first, behind - 1) AS place
    WHERE first < behind
    """
)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some chunks of a store that has so many. at: when they were chosen, of a monotonic clock."""

    at: float
    num_chunks: int
    ids: list[int]


def _sample_of(conn: Connection, store: int) -> _Sample:
    known: dict[int, _Sample] = conn.info.setdefault("vector_words", {})
    now = time.monotonic()
    if store not in known or now - known[store].at > SAMPLE_S:
        rows = conn.execute(_CHOOSE_SAMPLE, {"store": store, "most": SAMPLE}).all()
        if len(known) >= MAX_SAMPLES:
            known.clear()
        known[store] = _Sample(now, rows[0].total if rows else 0, [row.id for row in rows])
    return known[store]


class PostgresqlWords:
    """See `WordsIndex`."""

    def add(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        conn.execute(_ADD, [{"id": id, "words": words} for id, words in chunks])

    def remove(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        conn.execute(_REMOVE, [{"id": id} for id, _ in chunks])

    def merge(self, conn: Connection, *, whole: bool = False) -> bool:
        return False

    def count(self, conn: Connection, store: int, words: Sequence[str], most: int) -> Counted:
        conn.execute(_BY_INDEX)
        sample = _sample_of(conn, store)
        seen_in = "".join(f", count(*) FILTER (WHERE words @@ {_once(n)})" for n in range(len(words)))
        # What `ts_delete` leaves, here all, is a copy that every word is looked for in; each would fetch the
        # kept one anew.
        chosen = "id = ANY(CAST(:ids AS bigint[]))"
        copies = f"SELECT ts_delete(words, '') AS words FROM vector_words WHERE {chosen}"
        query = f"SELECT count(*), avg(length(words)){seen_in} FROM ({copies} OFFSET 0) AS copied"
        values: dict[str, Any] = {f"word{n}": f"'{word}'" for n, word in enumerate(words)}
        looked_at, length, *seen = conn.execute(text(query), values | {"ids": sample.ids}).one()
        told = {
            n: times * sample.num_chunks // looked_at for n, times in enumerate(seen) if times >= FREQUENT
        }
        others = [n for n in range(len(words)) if n not in told]
        if others:
            within = f"{_within(store)} LIMIT {most + 1}"
            having = (f"SELECT 1 FROM vector_words WHERE words @@ {_query(n)} AND {within}" for n in others)
            counted = ", ".join(f"(SELECT count(*) FROM ({each}) AS matching)" for each in having)
            told |= zip(others, conn.execute(text(f"SELECT {counted}"), values).one(), strict=True)
        return Counted(sample.num_chunks, [told[n] for n in range(len(words))], float(length or 1))

    def rank(
        self, conn: Connection, wanted: Wanted, words: Sequence[str], counted: Counted, share: int
    ) -> list[tuple[int, float]]:
        values: dict[str, Any] = {"most": wanted.most, "length": K1 * B / counted.length}
        within = _within(wanted.store)
        if wanted.files:
            values["files"] = sorted(wanted.files)
            chosen = "= ANY" if wanted.only else "<> ALL"
            within += f" AND (id >> {POSITION_BITS}) {chosen} (CAST(:files AS bigint[]))"
        having, terms = [], []
        for n, (word, rarity) in enumerate(zip(words, counted.rarities(), strict=True)):
            values |= {f"word{n}": f"'{word}'", f"rare{n}": rarity}
            rare = f"CAST(:rare{n} AS float8)"
            having.append(
                f"(SELECT id, {rare} AS rare FROM vector_words"
                f" WHERE words @@ {_query(n)} AND {within} LIMIT {share})"
            )
            terms.append(f"{rare} * {K1 + 1} * (1 - long / (long + {_times(n, word)}))")
        statement = f"""
        WITH chosen AS MATERIALIZED (
            SELECT id FROM ({" UNION ALL ".join(having)}) AS matching
            GROUP BY id ORDER BY sum(rare) DESC, id LIMIT {RANKED}
        )
        SELECT id, {" + ".join(terms)} AS score FROM (
            SELECT chosen.id, words, {K1 * (1 - B)} + CAST(:length AS float8) * length(words) AS long
            FROM chosen CROSS JOIN LATERAL (
                SELECT ts_delete(kept.words, '') AS words FROM vector_words kept
                WHERE kept.id = chosen.id OFFSET 0
            ) AS copied OFFSET 0
        ) AS looked_at ORDER BY score DESC, id LIMIT :most
        """
        return [(id, float(score)) for id, score in conn.execute(text(statement), values).all()]

    def words_in(self, conn: Connection, chunks: Sequence[int], words: Sequence[str]) -> dict[int, list[int]]:
        has = ", ".join(f"words @@ {_once(n)}" for n in range(len(words)))
        values: dict[str, Any] = {f"word{n}": f"'{word}'" for n, word in enumerate(words)}
        query = text(f"SELECT id, {has} FROM vector_words WHERE id = ANY(CAST(:chunks AS bigint[]))")
        rows = conn.execute(query, values | {"chunks": list(chunks)}).all()
        return {id: [n for n, there in enumerate(having) if there] for id, *having in rows}


def _times(n: int, word: str) -> str:
    """How often a chunk has a word, which hides in `ts_rank`: for a word that occurs n times that is a tenth
    of 1 + 1/4 + ... + 1/n^2, divided by what this comes to without an end, `_FULL`. What is missing of the
    sum is nearly 1 / (n + 1/2). A phrase is ranked otherwise: it is there, or it is not."""
    if " " in word:
        return f"CAST(words @@ {_once(n)} AS integer)"
    return f"(1 / ({_FULL} - {10 * _FULL} * ts_rank(words, {_once(n)})) - {1 / _FULL})"
