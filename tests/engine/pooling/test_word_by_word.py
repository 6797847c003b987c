"""A text's tokens word by word are those of the tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.pooling import word_by_word
from engine.pooling.word_by_word import WordByWord
from engine.tiny_embedder import CHECKPOINT

DOCS = Path(__file__).parents[3] / "docs"
ODD = (
    *(chr(code) for code in range(0x21)),
    *"\x7f\x85\xa0\xad\u1680\u2007\u200b\u200d\u2028\u2029\u202f\u205f\u3000\ufeff\ufffd",
    *("café", "CAFE\u0301", "Straße", "ΣΟΦΟΣ", "İstanbul", "ﬁle", "naïve-ish", "don't", "x" * 300),
    *(
        "東京タワー",
        "한국어",
        "عربي",
        "हिन्दी",
        "👩\u200d👩",
        "[UNK]",
        "##ing",
        "a_b",
        "1,000.5",
        "§7",
        "“so”",
    ),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_manuals_have_the_same_tokens(tokenizer: Tokenizer) -> None:
    texts = [file.read_text("utf-8") for file in sorted(DOCS.glob("*.md"))]
    by_word = WordByWord(tokenizer)
    assert len(texts) > 20
    for text in texts:
        assert by_word.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_whatever_stands_between_words_and_in_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_by_word, "MOST_WORDS", 50)
    by_word, chance = WordByWord(tokenizer), random.Random(1)
    for _ in range(3000):
        text = "".join(chance.choice((*ODD, " ", "word", "The")) for _ in range(chance.randint(0, 12)))
        assert by_word.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


def test_other_tokenizers_are_left_alone(tokenizer: Tokenizer) -> None:
    other = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    assert WordByWord.fits(tokenizer) and not WordByWord.fits(other)
