"""Remembers what a tokenizer makes of a word, where it looks at each word apart.

A tokenizer takes a millisecond for a page of text, and nearly all of its words were there before.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_WORDS = 1 << 16
"""Words that are remembered, some ten megabytes; with more, all are forgotten."""

LONGEST = 40
"""Characters of such a word: longer ones hardly come again, like the sentences of scripts without spaces."""

# Python takes these for spaces, and BERT's normalizer takes them out.
_ODD = re.compile("[\x0b\x0c\x1c-\x1f\x85]")


class WordMemo:
    """Token ids of texts, and of the words that were in them."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: one of the package `tokenizers`, of which `treats_words_apart` is true."""
        self._tokenizer = tokenizer
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> NDArray[np.int32]:
        """What the tokenizer makes of a text, without special tokens."""
        if _ODD.search(text):
            return encode_alone(self._tokenizer, text)
        words, known = text.split(), self._ids
        new = [word for word in dict.fromkeys(words) if word not in known]
        if new:
            if len(known) + len(new) > MOST_WORDS:
                known.clear()
                new = list(dict.fromkeys(words))
            known.update(self._read(new))
        ids = np.frombuffer(b"".join([known[word] for word in words]), np.int32)
        for word in new:
            if len(word) > LONGEST:
                del known[word]
        return ids

    def _read(self, words: list[str]) -> dict[str, bytes]:
        # A batch of one: unlike other ways in, it lets go of the interpreter's lock, and begins no threads.
        [found] = self._tokenizer.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        ids, of = np.array(found.ids, np.int32), np.array(found.word_ids, np.int64)
        ends = np.searchsorted(of, np.arange(len(words)), side="right").tolist()
        return {
            word: ids[start:end].tobytes() for word, start, end in zip(words, [0, *ends], ends, strict=False)
        }


def encode_alone(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Token ids of a text, without special tokens. It is a batch of one: unlike other ways in, that lets go
    of the interpreter's lock, for which whatever generates would wait many times in each of its steps."""
    [found] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(found.ids, np.int32)


def treats_words_apart(tokenizer: Any) -> bool:
    """Whether a text's tokens are those of its words, one after the other, whatever is beside them."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    return (
        isinstance(tokenizer.normalizer, BertNormalizer)
        and tokenizer.normalizer.clean_text
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and not tokenizer.get_added_tokens_decoder()
        and tokenizer.truncation is None
    )
