"""The bodies of requests about vector stores, and what storage and searches make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import invalid_value
from server.shapes import (
    Schema,
    Shape,
    array,
    boolean,
    check_range,
    described,
    either,
    exactly,
    label,
    mapping,
    missing,
    number,
    one_of,
    record,
    refuse,
    schema_of,
    shorten,
    tagged,
    text,
    whole,
)
from server.vector_stores.filters import FILTER, attributes
from server.vector_stores.searching import Asked
from storage import (
    NewStoreFile,
)

Json = dict[str, Any]

CHUNK_TOKENS, CHUNK_OVERLAP = 800, 400
"""How files are cut where a request does not say."""

DAY_US = 86_400_000_000
MAX_QUERIES = 16
FOUND = 10


def _static(value: Any, path: str) -> Any:
    read = _STATIC(value, path)
    if read["chunk_overlap_tokens"] > read["max_chunk_size_tokens"] // 2:
        what = f"{path}.chunk_overlap_tokens"
        refuse(what, f"Invalid '{what}': it must not exceed half of 'max_chunk_size_tokens'.")
    return read


def _threshold(value: Any, path: str) -> Any:
    check_range(path, number(value, path), "decimal", 0, 1)
    return value


_STATIC = exactly({"max_chunk_size_tokens": whole(100, 4096), "chunk_overlap_tokens": whole(0, 2048)})
_SIZES = described(_static, lambda: schema_of(_STATIC))
_CUTTING = tagged(
    {
        "auto": exactly({}, None, "type"),
        "static": exactly({"static": described(_static, lambda: {"type": "object"})}, None, "type"),
    }
)
_EXPIRES = record({"anchor": one_of("last_active_at"), "days": whole(1, 365)})
_ID = label(1, 128)
_STORE = {"name": label(0, 1024), "expires_after": _EXPIRES, "metadata": mapping}


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: its members, and which of them must be there, of these `nullable` also as null.
    Others are refused, as by the official schemas of this family."""

    members: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    nullable: frozenset[str] = frozenset()

    def read(self, body: Mapping[str, Any]) -> Json:
        """The members that are there and not null. Raises ApiError 400."""
        for name in body.keys() - self.members.keys():
            known = ", ".join(f"'{member}'" for member in self.members)
            refuse(
                shorten(name),
                f"Unknown parameter: '{shorten(name)}'. The members are {known}.",
                "unknown_parameter",
            )
        for name in self.required:
            if name not in body or (body[name] is None and name not in self.nullable):
                missing(name)
        return {name: self.members[name](value, name) for name, value in body.items() if value is not None}

    def schema(self) -> Schema:
        """The same as JSON Schema."""
        return {**schema_of(exactly({}, self.members)), "required": [*self.required]}


CREATE_STORE = Body(
    {
        **_STORE,
        "description": label(0, 4096),
        "file_ids": array(_ID, 0, 500),
        "chunking_strategy": _CUTTING,
    }
)
CHANGE_STORE = Body(_STORE)
_CHOICES = {"chunking_strategy": _CUTTING, "attributes": attributes}
ADD_FILE = Body({"file_id": _ID, **_CHOICES}, ("file_id",))
CHANGE_FILE = Body({"attributes": attributes}, ("attributes",), frozenset({"attributes"}))
_BATCHED = exactly({"file_id": _ID}, _CHOICES)
ADD_BATCH = Body({**_CHOICES, "file_ids": array(_ID, 1, 2000), "files": array(_BATCHED, 1, 2000)})
SEARCH = Body(
    {
        "query": either(text(1, 10_000), array(text(1, 10_000), 1, MAX_QUERIES)),
        "rewrite_query": boolean,
        "max_num_results": whole(1, 50),
        "filters": FILTER,
        "ranking_options": exactly(
            {},
            {
                "ranker": one_of("none", "auto", "default-2024-11-15"),
                "score_threshold": described(_threshold, lambda: {"type": "number"}),
            },
        ),
    },
    ("query",),
)


def new_files(named: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[NewStoreFile]:
    """Files as a store takes them, each by its id, its name, and what a body says of cutting and attributes.
    What is said once of many files is one value of all of them."""
    read: dict[int, tuple[int, int, bytes | None]] = {}
    for _, _, said in named:
        if id(said) not in read:
            cut = said.get("chunking_strategy") or {}
            sizes = cut.get("static") or {}
            told = said.get("attributes")
            read[id(said)] = (
                sizes.get("max_chunk_size_tokens", CHUNK_TOKENS),
                sizes.get("chunk_overlap_tokens", CHUNK_OVERLAP),
                None if told is None else orjson.dumps(told),
            )
    return [NewStoreFile(file_id, filename, *read[id(said)]) for file_id, filename, said in named]


def batch_files(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The files of a batch: their ids, and what is said of each. Raises ApiError 400."""
    ids, files = body.get("file_ids"), body.get("files")
    if (ids is None) == (files is None):
        raise invalid_value("file_ids", "Give either 'file_ids' or 'files', and not both.")
    if ids is not None:
        return [(id, body) for id in dict.fromkeys(ids)]
    for name in ("attributes", "chunking_strategy"):
        if name in body:
            raise invalid_value(name, f"'{name}' must stand in each of 'files' where these are given.")
    return list({file["file_id"]: file for file in files or ()}.items())


def asked(store_id: str, body: Mapping[str, Any]) -> Asked:
    """What a search asks for."""
    query, options = body["query"], body.get("ranking_options") or {}
    return Asked(
        [store_id],
        [query] if isinstance(query, str) else query,
        body.get("max_num_results", FOUND),
        body.get("filters"),
        options.get("score_threshold", 0.0),
        rerank=options.get("ranker") != "none",
    )


def expires_after(value: Mapping[str, Any] | None) -> int | None:
    """The lifetime of an unused store in microseconds."""
    return None if value is None else int(value["days"]) * DAY_US
