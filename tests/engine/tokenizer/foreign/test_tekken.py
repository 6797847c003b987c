"""`tekken.json`: the ids are those that tiktoken, on which Mistral's own reader stands, gives for the same
ranks."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from engine.tokenizer.foreign.tekken import read_tekken
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import LoadError

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
NUM_CONTROL = 8
WORDS = [
    "th",
    "the",
    " the",
    "in",
    "ing",
    " c",
    " ca",
    " cat",
    "at",
    " s",
    " sat",
    "é",
    "ä",
    "日",
    "日本",
    "\n\n",
    "  ",
]


def ranks() -> list[bytes]:
    """All bytes, and behind them tokens that are each two others in one."""
    found = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        token = word.encode()
        for end in range(2, len(token) + 1):
            if token[:end] not in found:
                found.append(token[:end])
    return found


def tekken(**changes: Any) -> dict[str, Any]:
    tokens = ranks()
    vocab = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(tokens) + 50,
        "default_vocab_size": NUM_CONTROL + len(tokens),
        "default_num_special_tokens": NUM_CONTROL,
        "version": "v7",
    }
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(CONTROL)]
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


def folder(tmp_path: Path, file: dict[str, Any]) -> Path:
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    return tmp_path


def test_its_ids_are_those_of_tiktoken_behind_the_control_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, tekken()))
    oracle = tiktoken.Encoding(
        "made", pat_str=PATTERN, mergeable_ranks={t: r for r, t in enumerate(ranks())}, special_tokens={}
    )
    drawn = random.Random(7)
    texts = ["", "the cat sat", "naïve café\n\n\n12 345", "日本語", "a  b   c\t\n", "\x00\x7f"]
    texts += ["".join(drawn.choices([*WORDS, "x", " ", "1", "!"], k=20)) for _ in range(50)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [NUM_CONTROL + token for token in oracle.encode_ordinary(text)], text
        assert tokenizer.decode(ids) == text


def test_control_tokens_have_their_ids_and_text_does_not_become_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        folder(tmp_path, tekken()), "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    )
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == NUM_CONTROL + len(ranks())
    assert tokenizer.encode("[INST]")[0] == 3 and tokenizer.encode("a", add_special_tokens=True)[0] == 1
    assert "<SPECIAL_7>" in {token.content for token in tokenizer.added_tokens}
    assert "[INST]" in tokenizer.control


def test_an_older_file_without_control_tokens_has_the_usual_ones(tmp_path: Path) -> None:
    file = tekken()
    del file["special_tokens"]
    assert Tokenizer.load(folder(tmp_path, file)).encode("</s>[INST]") == [2, 3]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({}, "KeyError"),
        (tekken(vocab=tekken()["vocab"][1:]), "order of their ranks"),
        ({**tekken(), "config": {**tekken()["config"], "pattern": "("}}, "cannot be read"),
        (
            {**tekken(), "vocab": [{**tekken()["vocab"][0], "token_bytes": "AQ=="}, *tekken()["vocab"][1:]]},
            "no token for the byte 0",
        ),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, file: dict[str, Any], told: str) -> None:
    folder(tmp_path, file)
    with pytest.raises(LoadError, match=told) as refused:
        read_tekken(tmp_path / "tekken.json")
    assert "\n" not in str(refused.value)
