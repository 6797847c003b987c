"""Which words of a query search, and the index of the database that they search in.

The order is that of BM25. A chunk with a single word of the query is a match, so a query with a frequent word
would have to rank most of a store. Ranking is what costs: 1 us a chunk on SQLite, where counting costs 0.04
us. So the words are counted first, and the rarest ones search, as many of them as match no more than `RANKED`
chunks together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from sqlalchemy import Connection

from storage.vector_stores.chunk_ids import by_store
from storage.vector_stores.records import WordHits
from storage.vector_stores.words.interface import Wanted, WordsIndex
from storage.vector_stores.words.postgresql import PostgresqlWords
from storage.vector_stores.words.sqlite import SqliteWords

INDEXES: dict[str, WordsIndex] = {"sqlite": SqliteWords(), "postgresql": PostgresqlWords()}
"""By the dialect of a connection."""

RANKED = 15_000
"""Chunks that one search ranks at most. [measured] 100,000 chunks of 200 words, one busy core: 17 ms."""

RANKED_OF_ONE = 2000
"""Those that it may rank of each store, however many stores share them: at most 64,000 of 32 stores."""

JUDGED = 5
"""Hits of a store of which the one with most of the query tells how well the query fits."""

MAX_WORDS = 32
"""Words of a query that are looked for, and pieces of what is written without spaces."""

WHOLE = 4
"""Characters without spaces between them that are looked for as one phrase. More are a sentence, which hardly
any text repeats: of it each two neighbours are looked for, which bounds what a phrase costs, too."""

# The characters at the end are letters to Python, and separators to FTS5: a word of them would be a phrase.
_WORD = re.compile(r"[^\W_\u19b0-\u19c0\u19c8\u19c9\u1cf2\u1cf3]+")

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
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text)


def words_of(query: str) -> list[str]:
    """The words of a query, each once, as phrases of the index: letters, digits and spaces, nothing else."""
    words = list(dict.fromkeys(piece for word in _WORD.findall(query.casefold()) for piece in _pieces(word)))
    return ([word for word in words if not _FREQUENT.fullmatch(word)] or words)[:MAX_WORDS]


def _pieces(word: str) -> list[str]:
    parts = _WORD.findall(indexed(word))
    return [" ".join(parts)] if len(parts) <= WHOLE else [" ".join(pair) for pair in pairwise(parts)]


def add_words(conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
    """Takes chunks in: ids and texts."""
    if chunks:
        INDEXES[conn.dialect.name].add(conn, [(id, indexed(text)) for id, text in chunks])


def remove_words(conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
    """Takes chunks out; the texts must be those that were taken in."""
    if chunks:
        INDEXES[conn.dialect.name].remove(conn, [(id, indexed(text)) for id, text in chunks])


def merge_words(conn: Connection, *, whole: bool = False) -> bool:
    """Merges some of what transactions have added; False when there is nothing to be merged. whole: see
    `WordsIndex.merge`."""
    return INDEXES[conn.dialect.name].merge(conn, whole=whole)


def search_words(
    conn: Connection, stores: Sequence[int], query: str, files: Collection[int], *, only: bool, most: int
) -> WordHits:
    """The chunks of stores that match a query best, at most `most`.

    files: keys of files: those whose chunks are looked at where `only`, and otherwise those whose are not.
    """
    words = words_of(query)
    if not words:
        return WordHits((), 0.0)
    index = INDEXES[conn.dialect.name]
    share = min(RANKED, max(RANKED // len(stores), RANKED_OF_ONE))
    found: list[tuple[int, float]] = []
    fit = 0.0
    for store, of_store in by_store(stores, files, only=only):
        counted = index.count(conn, store, words, share)
        rarest = _rarest(counted.counts, share)
        if rarest:
            of_them = replace(counted, counts=[counted.counts[n] for n in rarest])
            wanted = Wanted(store, of_store, only, most)
            hits = index.rank(conn, wanted, [words[n] for n in rarest], of_them, share)
            best = index.words_in(conn, [id for id, _ in hits[:JUDGED]], words)
            rarities = counted.rarities()
            fit = max([fit, *(sum(rarities[n] for n in has) / sum(rarities) for has in best.values())])
            found += hits
    return WordHits(sorted(found, key=lambda hit: (-hit[1], hit[0]))[:most], fit)


def _rarest(counts: Sequence[int], share: int) -> list[int]:
    """The places of the words that search, by how many chunks have each: at least one, if any chunk has
    any."""
    chosen: list[int] = []
    total = 0
    for count, place in sorted((count, place) for place, count in enumerate(counts)):
        if count and (not chosen or total + count <= share):
            chosen.append(place)
            total += count
    return chosen
