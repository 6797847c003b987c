"""The fields of a form that brings sound: their shapes, and how the strings of a form are read as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from server.shapes import (
    Shape,
    array,
    boolean,
    check_range,
    described,
    missing,
    number,
    one_of,
    record,
    refuse,
    schema_of,
    text,
)

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")
MAX_PROMPT = 16_000
MAX_KEYWORDS = 1_000


def _share(value: Any, path: str) -> Any:
    """A number from 0 to 1."""
    number(value, path)
    check_range(path, value, "decimal", 0, 1)
    return value


described(_share, lambda: {"type": "number", "minimum": 0, "maximum": 1})

_OF_VOICES = record(
    {"type": one_of("server_vad")},
    {"prefix_padding_ms": number, "silence_duration_ms": number, "threshold": _share},
)


def _strategy(value: Any, path: str) -> Any:
    """How sound is cut: `auto`, or by voices."""
    if isinstance(value, str):
        return one_of("auto")(value, path)
    return _OF_VOICES(value, path)


described(_strategy, lambda: {"anyOf": [{"const": "auto"}, schema_of(_OF_VOICES)]})

_BOTH: Mapping[str, Shape] = {
    "model": text(1, 256),
    "prompt": text(0, MAX_PROMPT),
    "response_format": one_of(*FORMATS),
    "temperature": _share,
}
TRANSCRIPTION: Mapping[str, Shape] = {
    **_BOTH,
    "language": text(1, 64),
    "languages": array(text(1, 64), 1, 128),
    "keywords": array(text(1, 1_000), 0, MAX_KEYWORDS),
    "include": array(one_of("logprobs")),
    "timestamp_granularities": array(one_of(*GRANULARITIES), 1),
    "stream": boolean,
    "chunking_strategy": _strategy,
}
"""The fields of a transcription, besides its file."""

TRANSLATION = _BOTH
"""The fields of a translation into English, besides its file."""

LISTS = ("languages", "keywords", "include", "timestamp_granularities")
"""Fields with several values, each of which is a field of the form by this name, mostly with `[]` behind
it."""

SPEAKERS = ("known_speaker_names", "known_speaker_references")


def form_schema(fields: Mapping[str, Shape]) -> dict[str, Any]:
    """A form of these fields as JSON Schema."""
    described_as = {
        (f"{name}[]" if name in LISTS else name): schema_of(shape) for name, shape in fields.items()
    }
    file = {"type": "string", "format": "binary"}
    return {"type": "object", "properties": {"file": file, **described_as}, "required": ["file"]}


def read_fields(
    given: Mapping[str, tuple[str, ...]], fields: Mapping[str, Shape]
) -> tuple[dict[str, Any], list[str]]:
    """The values of a form's fields by their names, as the shapes have them, and the names of those that
    nothing here knows. given: every field's strings. Raises ApiError 400."""
    found: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    unknown = []
    for written, strings in given.items():
        name = written.removesuffix("[]")
        outer, bracket, inner = written.partition("[")
        if bracket and outer == "chunking_strategy" and outer in fields and inner.endswith("]"):
            nested[inner[:-1]] = _plain(strings[-1])
        elif name not in fields:
            unknown.append(written)
        elif name in LISTS:
            found[name] = fields[name]([*strings], name)
        elif len(strings) > 1 or written != name:
            refuse(name, f"Invalid '{name}': expected one value.")
        elif strings[0] or name == "prompt":  # what is empty is left out, as in forms of browsers
            found[name] = fields[name](_READ.get(name, _itself)(strings[0], name), name)
    if nested:
        found["chunking_strategy"] = _strategy(nested, "chunking_strategy")
    return found, unknown


def require_file(has_file: bool) -> None:
    """Raise the 400 of a form without a file."""
    if not has_file:
        missing("file")


def _itself(value: str, name: str) -> Any:
    return value


def _boolean(value: str, name: str) -> Any:
    known = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in known:
        refuse(name, f"Invalid '{name}': expected 'true' or 'false'.", "invalid_type")
    return known[value.lower()]


def _number(value: str, name: str) -> Any:
    try:
        return float(value)
    except ValueError:
        refuse(name, f"Invalid '{name}': expected a number.", "invalid_type")


def _maybe_json(value: str, name: str) -> Any:
    if not value.lstrip().startswith("{"):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        refuse(name, f"Invalid '{name}': it is no JSON.")


_READ: Mapping[str, Callable[[str, str], Any]] = {
    "stream": _boolean,
    "temperature": _number,
    "chunking_strategy": _maybe_json,
}


def _plain(value: str) -> Any:
    """A member of an object that a form has in parts: a number where it is one."""
    try:
        return float(value)
    except ValueError:
        return value
