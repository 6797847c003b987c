"""The parts that items share: ids, statuses, content parts, outputs of tools.

Source: the OpenAPI document's InputItem and ItemResource unions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from server.errors import ApiError
from server.ignored import collecting, ignore
from server.shapes import (
    STRING,
    Shape,
    anything,
    array,
    described,
    either,
    number,
    one_of,
    record,
    refuse,
    schema_of,
    tagged,
    text,
    whole,
)
from tools import NO_CODE, Registry

MAX_ID = 512

MAX_FILENAME = 255

PLACE = "item_id output_index"
"""The fields of every event that belongs to an item."""


def identifier(value: Any, path: str) -> Any:
    """An id: printable, and short enough to be a key in any database."""
    text(1, MAX_ID)(value, path)
    if not value.isprintable():
        refuse(path, f"Invalid '{path}': ids must be printable.")
    return value


described(identifier, lambda: {"type": "string", "minLength": 1, "maxLength": MAX_ID})

MEMORY_LIMIT = one_of("1g", "4g", "16g", "64g")
"""What a container's memory may be."""


def why_not_run(what: str, registry: Registry) -> str:
    """Why a server without a sandbox runs no code, or no commands, as part of a sentence."""
    if NO_CODE in registry:
        return (
            f"this server runs no {what}, because it has found no sandbox ({registry[NO_CODE].description})"
        )
    return f"this server runs no {what}: --sandbox turns that on"


_POLICY = tagged({"disabled": record({}), "allowlist": record({"allowed_domains": anything})})


def network_policy(value: Any, path: str) -> Any:
    """Which network a container has: none."""
    policy = _POLICY(value, path)
    if policy["type"] == "allowlist":
        message = f'Invalid \'{path}\': code has no network here; only {{"type": "disabled"}} is taken.'
        refuse(path, message, "unsupported_parameter")
    return policy


described(network_policy, lambda: schema_of(_POLICY))

NEW_CONTAINER: Mapping[str, Shape] = {
    "file_ids": array(STRING, 0, 50),
    "memory_limit": MEMORY_LIMIT,
    "network_policy": network_policy,
}
"""What a tool may say of a container that is made for it."""

STATUSES = ("completed", "in_progress", "incomplete")
SEARCHING = ("completed", "in_progress", "searching", "failed")


def item_shape(
    required: Mapping[str, Shape],
    optional: Mapping[str, Shape] | None = None,
    *,
    statuses: Sequence[str] = STATUSES,
    **defaults: Any,
) -> Shape:
    """The shape of an item. The first of `statuses` is the default; without any the item has no status.

    It says what a stored item must have to be valid in the official form; fields that it does not name are
    kept.
    """
    more = {"created_by": STRING, **(optional or {})}
    if statuses:
        more["status"] = one_of(*statuses)
        defaults["status"] = statuses[0]
    return record(required, more, **defaults)


def call_shape(**fields: Shape) -> dict[str, Shape]:
    """The required fields of a call or of an output: its `call_id`, and these."""
    return {"call_id": identifier, **fields}


def read_arguments(arguments: str, shape: Shape, names: Sequence[str]) -> dict[str, Any] | None:
    """Those of a call's arguments, JSON as a model wrote it, that have these names, in their order; None
    where they do not have this shape."""
    try:
        written = orjson.loads(arguments)
        found = {name: written[name] for name in names if written.get(name) is not None}
        with collecting():  # what the model says too much is no matter of the request
            read: dict[str, Any] = shape(found, "arguments")
    except (ValueError, AttributeError, ApiError):  # no JSON, no object, another shape
        return None
    return read


CALLER: Mapping[str, Shape] = {
    "caller": tagged({"direct": record({}), "program": record({"caller_id": STRING})}),
}

# ------------------------------------------------------------------------------------------------------------
# Content parts

_FILE_CITATION = {"file_id": STRING, "filename": STRING}
ANNOTATION = tagged(
    {
        "file_citation": record({"index": whole(), **_FILE_CITATION}),
        "url_citation": record(
            {"url": STRING, "start_index": whole(), "end_index": whole(), "title": STRING}
        ),
        "container_file_citation": record(
            {"container_id": STRING, "start_index": whole(), "end_index": whole(), **_FILE_CITATION}
        ),
        "file_path": record({"file_id": STRING, "index": whole()}),
    }
)
_LOGPROB_FIELDS: Mapping[str, Shape] = {"token": STRING, "logprob": number}
_BYTES = array(whole(0, 255))
_LOGPROB = record(
    _LOGPROB_FIELDS,
    {"bytes": _BYTES, "top_logprobs": array(record(_LOGPROB_FIELDS, {"bytes": _BYTES}, bytes=[]))},
    bytes=[],
    top_logprobs=[],
)

_INPUT_IMAGE = record(
    {},
    {"image_url": STRING, "file_id": STRING, "detail": one_of("auto", "low", "high", "original")},
    detail="auto",
)
_FILE_DETAIL = one_of("auto", "low", "high")


def _file_detail(value: Any, path: str) -> Any:
    """How closely the pages of a file are looked at: here they are read as text, always alike."""
    if _FILE_DETAIL(value, path) != "auto":
        ignore(path)
    return value


described(_file_detail, lambda: schema_of(_FILE_DETAIL))
_INPUT_FILE = record(
    {},
    {
        "file_id": STRING,
        "filename": text(0, MAX_FILENAME),
        "file_data": STRING,
        "file_url": STRING,
        "detail": _file_detail,
    },
)
TEXT = record({"text": STRING})
_INPUT_PARTS: Mapping[str, Shape] = {
    "input_text": TEXT,
    "input_image": _INPUT_IMAGE,
    "input_file": _INPUT_FILE,
}
_AUDIO = record({"input_audio": record({"data": STRING, "format": STRING})})

USER_PART = tagged(
    {**_INPUT_PARTS, "input_audio": _AUDIO, "computer_screenshot": _INPUT_IMAGE},
    aliases={"text": "input_text", "output_text": "input_text"},
)
ASSISTANT_PART = tagged(
    {
        "output_text": record(
            {"text": STRING},
            {"annotations": array(ANNOTATION), "logprobs": array(_LOGPROB)},
            annotations=[],
            logprobs=[],
        ),
        "refusal": record({"refusal": STRING}),
    },
    aliases={"text": "output_text", "input_text": "output_text"},
)
OUTPUT_PART = tagged(_INPUT_PARTS, aliases={"text": "input_text", "output_text": "input_text"})
TOOL_OUTPUT = either(STRING, array(OUTPUT_PART))
