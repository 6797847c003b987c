"""Texts that must not be said: every token that would complete one is found, and no other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.tokenizer.banned_texts import BannedTexts, Vocabulary

PIECES = [
    *(b"", b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cab", b"bcab", b" a", b"aa", b"aba", b"\xff", b"\xc3"),
    *("\u00fc".encode(), "\u20ac".encode(), b"\xbc", b"\xe2\x82", b"\xac", b"x", b"ax", b"xa", b" ", b"abab"),
]


def reference(texts: list[str], said: list[int]) -> list[bool]:
    """Which tokens leave a text unsaid that was not said before, by looking."""
    before = b"".join(PIECES[token] for token in said)
    wanted = [text.encode() for text in texts]
    return [all((before + piece).count(text) <= before.count(text) for text in wanted) for piece in PIECES]


def found(banned: BannedTexts, said: list[int]) -> list[bool]:
    words = banned.allowed(np.array(said, np.int32))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(PIECES)]
    return [bool(bit) for bit in bits]


@pytest.mark.parametrize(
    "texts",
    [
        ["ab"],
        ["a"],
        ["abc", "cab"],
        ["aab", "ba"],
        ["\u00fc"],
        ["\u20acx", "x\u20ac"],
        [" a", "a "],
        ["abab", "bab"],
    ],
    ids=str,
)
def test_as_by_looking(texts: list[str]) -> None:
    dice = random.Random(str(texts))
    banned = BannedTexts(Vocabulary(PIECES), texts)
    for _ in range(200):
        said: list[int] = []
        for _ in range(12):
            allowed = reference(texts, said)
            assert found(banned, said) == allowed, (texts, [PIECES[token] for token in said])
            said.append(dice.choice([token for token, may in enumerate(allowed) if may]))


def test_ids_beyond_the_vocabulary_show_nothing() -> None:
    banned = BannedTexts(Vocabulary(PIECES), ["ab"])
    assert found(banned, [PIECES.index(b"a"), 10_000]) == found(banned, [PIECES.index(b"a")])


def test_the_end_of_a_turn_is_never_banned() -> None:
    tokenizer = scripted_tokenizer()
    banned = tokenizer.banning((*map(chr, range(32, 127)), "<|im_end|>"))
    words = banned.allowed(np.zeros(0, np.int32))
    for token_id in tokenizer.eos_token_ids:
        assert words[token_id // 32] >> (token_id % 32) & 1
    assert not words[ord("a") // 32] >> (ord("a") % 32) & 1
    assert tokenizer.banning(("a",)) is tokenizer.banning(("a",))
