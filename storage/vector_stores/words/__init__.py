"""The index of the words of chunks: which chunks of a store share most words with a query."""

from __future__ import annotations

from storage.vector_stores.words.searching import INDEXES, add_words, merge_words, remove_words, search_words

__all__ = ["INDEXES", "add_words", "merge_words", "remove_words", "search_words"]
