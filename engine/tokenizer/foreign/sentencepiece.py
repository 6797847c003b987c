"""Reads a model of SentencePiece (`tokenizer.model`) for the `tokenizers` library, without SentencePiece.

Older checkpoints of Llama and Mistral have no other tokenizer, and Mistral's own tools put a version behind
the name (`tokenizer.model.v3`). The file is a protobuf message with the pieces in the order of their ids. A
pair of pieces is joined where both together are a piece, the one with the highest score first, so the scores
say all that a list of merges would.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.types import LoadError

NAME = "tokenizer.model"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands in pieces for a space."""

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


@dataclass(slots=True)
class _Model:
    """What a file says. pieces: text, score and type of each, by its id. bos: an id."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = 1
    unknown: int = 0
    bos: int = 1
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def find_sentencepiece(folder: Path) -> Path | None:
    """The file of a folder; of several versions, the latest."""
    if (file := folder / NAME).is_file():
        return file
    versions = [file for file in folder.glob(f"{NAME}.v*") if re.fullmatch(r"\.v\d+\w*", file.suffix)]
    return max(versions, key=lambda file: (int(re.findall(r"\d+", file.suffix)[0]), file.name), default=None)


def read_sentencepiece(path: Path) -> Backend | None:
    """The tokenizer of a file; None for one of another kind, or by another program. Raises LoadError for one
    that is damaged."""
    data = path.read_bytes()
    if not data.startswith(b"\n"):  # the first field: tiktoken's files have the same name
        return None
    try:
        model = _read(data)
        return _backend(model) if model.kind == _BPE else None
    except Exception as error:  # the library raises bare Exceptions
        raise LoadError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _backend(model: _Model) -> Backend:
    vocab = {text: id for id, (text, _, _) in enumerate(model.pieces)}
    joined = sorted(
        (-score, id, vocab[text[:at]], vocab[text[at:]])
        for id, (text, score, kind) in enumerate(model.pieces)
        if kind == _NORMAL
        for at in range(1, len(text))
        if text[:at] in vocab and text[at:] in vocab
    )
    texts = [text for text, _, _ in model.pieces]
    merges = [(texts[left], texts[right]) for _, _, left, right in joined]
    unknown = texts[model.unknown]
    backend = Backend(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback))
    backend.normalizer = normalizers.Sequence(list(_normalizers(model)))
    stripped = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    special = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(text, special=special[kind], normalized=False)
            for text, _, kind in model.pieces
            if kind in special
        ]
    )
    if model.bos >= 0:
        bos = texts[model.bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.bos)]
        )
    return backend


def _normalizers(model: _Model) -> Iterator[normalizers.Normalizer]:
    if model.charsmap:
        yield normalizers.Precompiled(model.charsmap)
    if model.remove_extra_whitespaces:
        yield normalizers.Strip()
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if model.add_dummy_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


# ------------------------------------------------------------------------------------------------------------
# Protobuf


def _read(data: bytes) -> _Model:
    model = _Model()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            text, score = piece[1], piece.get(2, 0.0)
            assert isinstance(text, bytes) and isinstance(score, float)
            model.pieces.append((text.decode(), score, _int(piece.get(3, _NORMAL))))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
            model.kind = _int(trainer.get(3, 1))
            model.byte_fallback = bool(trainer.get(35, 0))
            model.unknown, model.bos = _int(trainer.get(40, 0)), _int(trainer.get(41, 1))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
            charsmap = normalizer.get(2, b"")
            assert isinstance(charsmap, bytes)
            model.charsmap = charsmap
            model.add_dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    return model


def _int(value: bytes | float | int) -> int:
    """A number, of which protobuf writes negative ones as their complement to 2 ** 64."""
    assert isinstance(value, int)
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | float | int]]:
    """The fields of a message, by their numbers."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                number, at = _varint(data, at)
                yield tag >> 3, number
            case 1:
                yield tag >> 3, data[at : at + 8]
                at += 8
            case 2:
                length, at = _varint(data, at)
                if at + length > len(data):
                    raise ValueError("it is cut off")
                yield tag >> 3, data[at : at + length]
                at += length
            case 5:
                yield tag >> 3, struct.unpack_from("<f", data, at)[0]
                at += 4
            case wire:
                raise ValueError(f"a field of the type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
