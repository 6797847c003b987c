"""What is remembered of words gives the tokens that the tokenizer gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer, Lowercase, Sequence

from engine.pooling import word_memo
from engine.pooling.word_memo import LONGEST, WordMemo, treats_words_apart
from engine.tiny_embedder import CHECKPOINT

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
MEMO = WordMemo(TOKENIZER)


def ids(text: str) -> Any:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_has_the_tokens_that_it_had(text: str) -> None:
    assert MEMO.encode(text).tolist() == ids(text)
    assert MEMO.encode(f"{text} again\n{text}").tolist() == ids(f"{text} again\n{text}")


@pytest.mark.parametrize(
    "text",
    [
        "The quick (brown) fox, again: the quick fox.",
        "Ärger e\u0301 \u0301a İ ß ﬁ ab\u200bc",
        "漢字かな and 漢字",
        "a\x0bb c\x1cd e\x85f",
        "",
        "  \n\t ",
    ],
)
def test_odd_texts_have_them_too(text: str) -> None:
    assert MEMO.encode(text).tolist() == ids(text)


def test_words_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_memo, "MOST_WORDS", 4)
    memo = WordMemo(TOKENIZER)
    for text in ("one two three", "three four five", "one six seven eight nine ten"):
        assert memo.encode(text).tolist() == ids(text)
    assert set(memo._ids) == {"one", "six", "seven", "eight", "nine", "ten"}


def test_long_words_are_not_remembered() -> None:
    memo, long = WordMemo(TOKENIZER), "x" * (LONGEST + 1)
    assert memo.encode(f"a {long} b").tolist() == ids(f"a {long} b")
    assert set(memo._ids) == {"a", "b"}


def test_only_tokenizers_that_treat_words_apart_are_asked_for_words() -> None:
    def changed(change: Any) -> bool:
        tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
        change(tokenizer)
        return treats_words_apart(tokenizer)

    assert changed(lambda tokenizer: None)
    assert not changed(lambda tokenizer: tokenizer.add_special_tokens(["[NEW]"]))
    assert not changed(lambda tokenizer: tokenizer.enable_truncation(5))
    assert not changed(lambda tokenizer: setattr(tokenizer, "normalizer", Lowercase()))
    assert not changed(lambda tokenizer: setattr(tokenizer, "normalizer", BertNormalizer(clean_text=False)))
    assert not changed(lambda tokenizer: setattr(tokenizer, "normalizer", Sequence([BertNormalizer()])))
