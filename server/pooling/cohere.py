"""Vectors as clients of Cohere ask for them: bodies of /v1/embed and /v2/embed, and their replies."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from server.pooling.requests import MAX_INPUTS, filled_text, read_text, read_whole, text_of_parts
from server.schema import check_length, missing, mistyped, refuse
from server.shapes import name_others

FIELDS = (
    *("model", "texts", "inputs", "images", "input_type", "embedding_types", "truncate"),
    *("max_tokens", "output_dimension"),
)
TYPES = ("float", "base64", "binary", "ubinary")
"""What vectors are written as: numbers, the bytes of float32 numbers, or a bit for the sign of each number,
eight of them in a number from -128 or from 0. int8 and uint8 need ranges that no checkpoint tells."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """field: where the texts stand in the body. types: () where nothing is said. whole: a text that is too
    long is refused; otherwise it is cut at its end, to max_tokens where that is less than the model takes."""

    model: str | None
    texts: tuple[str, ...]
    field: str
    input_type: str | None
    types: tuple[str, ...]
    whole: bool
    max_tokens: int | None
    dimensions: int | None

    def path(self, index: int) -> str:
        """Where a text stands in the body."""
        return f"{self.field}[{index}]"


def parse_embed(body: Mapping[str, Any]) -> EmbedRequest:
    """A body of POST /v1/embed or /v2/embed. Raises ApiError 400."""
    name_others(body, FIELDS)
    if body.get("images"):
        refuse("images", "Invalid 'images': the models of this server take texts.", "unsupported_parameter")
    field = "texts" if body.get("texts") is not None else "inputs"
    if body.get(field) is None:
        missing("texts")
    if not isinstance(body[field], list):
        mistyped(field, "an array", body[field])
    check_length(field, len(body[field]), "array", 1, MAX_INPUTS)
    read = filled_text if field == "texts" else _parts
    texts = tuple(read(each, f"{field}[{index}]") for index, each in enumerate(body[field]))
    truncate = body.get("truncate")
    if truncate not in (None, "NONE", "END"):
        refuse("truncate", "Invalid 'truncate': texts are cut at their 'END', or not at all ('NONE').")
    return EmbedRequest(
        read_text(body, "model"),
        texts,
        field,
        read_text(body, "input_type"),
        _types(body),
        truncate == "NONE",
        read_whole(body, "max_tokens", least=1),
        read_whole(body, "output_dimension", least=1),
    )


def _parts(value: Any, path: str) -> str:
    """The text of an input in parts."""
    parts = value.get("content") if isinstance(value, dict) else value
    return text_of_parts(parts, f"{path}.content")


def _types(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("embedding_types")
    if value is None:
        return ()
    if not isinstance(value, list):
        mistyped("embedding_types", "an array", value)
    for index, each in enumerate(value):
        if each not in TYPES:
            path = f"embedding_types[{index}]"
            refuse(path, f"Invalid '{path}': vectors are written as {', '.join(TYPES)}.")
    return tuple(dict.fromkeys(value))


def embed_json(rows: Sequence[Any], asked: EmbedRequest, num_tokens: int, *, version: Literal[1, 2]) -> bytes:
    """The reply: lists of vectors by type, or, in the first version where no type is named, one list. rows:
    float32 arrays."""
    named = asked.types or ("float",)
    by_type = version == 2 or bool(asked.types)
    vectors: Any = {name: [_written(row, name) for row in rows] for name in named}
    reply = {
        "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
        "id": secrets.token_hex(16),
        "embeddings": vectors if by_type else vectors["float"],
        "texts": asked.texts,
        "meta": {"api_version": {"version": str(version)}, "billed_units": {"input_tokens": num_tokens}},
    }
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)


def _written(row: Any, name: str) -> Any:
    if name == "float":
        return row.astype("f4")
    if name == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    bits = np.packbits(row > 0)
    return bits if name == "ubinary" else (bits.astype("i2") - 128).astype("i1")
