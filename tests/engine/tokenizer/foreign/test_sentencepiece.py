"""`tokenizer.model`: the ids are those of SentencePiece, which joins the pair that makes the best piece.

The files that Mistral ships (v1 to v7), which are too large to be here, were compared with its own reader.
"""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from engine.tokenizer.foreign.sentencepiece import find_sentencepiece, read_sentencepiece
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import LoadError

SPACE = "▁"
JOINED = [
    "th",
    "the",
    SPACE + "t",
    SPACE + "the",
    "in",
    "ing",
    SPACE + "c",
    SPACE + "cat",
    "at",
    "cat",
    "aa",
    "aaa",
]
LETTERS = [SPACE, *"abcdefghint"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def field(number: int, value: bytes | float | int) -> bytes:
    """A field of a protobuf message."""
    match value:
        case int():
            return varint(number << 3) + varint(value)
        case float():
            return varint(number << 3 | 5) + struct.pack("<f", value)
        case _:
            return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    value %= 1 << 64
    found = b""
    while value >= 128:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def pieces() -> list[tuple[str, float, int]]:
    named = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        ("[TOOL]", 0.0, USER_DEFINED),
    ]
    in_bytes = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    ranked = [(text, -float(rank), NORMAL) for rank, text in enumerate((*JOINED, *LETTERS))]
    return [*named, *in_bytes, *ranked]


def model(folder: Path, name: str = "tokenizer.model", *, kind: int = 2, **normalizer: int) -> Path:
    """A file. kind: 2 for one that joins pairs, 1 for one that does not."""
    said = {"add_dummy_prefix": 1, "remove_extra_whitespaces": 0, **normalizer}
    data = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, type)) for text, score, type in pieces()
    )
    data += field(2, field(3, kind) + field(35, 1) + field(40, 0) + field(41, 1) + field(43, -1))
    data += field(3, field(3, said["add_dummy_prefix"]) + field(4, said["remove_extra_whitespaces"]))
    (folder / name).write_bytes(data)
    return folder / name


def expected(text: str) -> list[int]:
    """As SentencePiece does it."""
    ids = {text: id for id, (text, _, _) in enumerate(pieces())}
    scores = {text: score for text, score, type in pieces() if type == NORMAL}
    parts = list((SPACE + text).replace(" ", SPACE)) if text else []
    while pairs := [
        (-scores[one + two], at) for at, (one, two) in enumerate(pairwise(parts)) if one + two in scores
    ]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        id
        for part in parts
        for id in ([ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


def test_pairs_are_joined_by_their_scores_and_other_letters_are_bytes(tmp_path: Path) -> None:
    model(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    drawn = random.Random(5)
    texts = ["", "the cat", "  in the  thing ", "aaaaaaa", "é日\n"]
    texts += [
        "".join(drawn.choices([*JOINED, *LETTERS, "x", "é"], k=20)).replace(SPACE, " ") for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == expected(text), text
        assert tokenizer.decode(ids) == text


def test_what_stands_for_itself_is_one_token(tmp_path: Path) -> None:
    model(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("cat", add_special_tokens=True)[0] == 1
    assert 3 in tokenizer.encode("cat[TOOL]")
    assert [tokenizer.piece(token, frozenset()) for token in (3, 1)] == ["[TOOL]", ""]


def test_spaces_are_kept_or_not_as_the_file_says(tmp_path: Path) -> None:
    bare = read_sentencepiece(model(tmp_path, add_dummy_prefix=0))
    tidy = read_sentencepiece(model(tmp_path, remove_extra_whitespaces=1))
    assert bare is not None and tidy is not None
    assert bare.encode("cat", add_special_tokens=False).tokens == ["cat"]
    assert tidy.encode("  cat  cat ", add_special_tokens=False).tokens == [SPACE + "cat"] * 2


def test_of_several_versions_the_latest_is_read(tmp_path: Path) -> None:
    assert find_sentencepiece(tmp_path) is None
    for version in ("v2", "v11", "v7m1", "vocab"):
        model(tmp_path, f"tokenizer.model.{version}")
    assert find_sentencepiece(tmp_path) == tmp_path / "tokenizer.model.v11"
    assert find_sentencepiece(model(tmp_path).parent) == tmp_path / "tokenizer.model"


def test_one_of_another_kind_is_left_to_others_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert read_sentencepiece(model(tmp_path, kind=1)) is None
    file = model(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(b"IQ== 0\nIg== 1\n")
    assert read_sentencepiece(file) is None, "it is tiktoken's"
    for data, told in ((whole[:-3], "cut off"), (b"\n\x00", "KeyError"), (whole + b"\x0b", "of the type 3")):
        file.write_bytes(data)
        with pytest.raises(LoadError, match=told) as refused:
            read_sentencepiece(file)
        assert "\n" not in str(refused.value)
