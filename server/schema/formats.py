"""Parses the output formats that clients ask for: the official ones and those of other open servers.

A format is kept in the flat form of the Responses API: `{"type", "name", "schema", "strict", "description"}`.
A format other than `text`, or an extension such as `guided_json`, becomes a `Shape`, which the engine
enforces. A request may ask for one shape only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from engine import Shape, closed_schema, unheeded
from server.ignored import ignore, unread
from server.shapes import (
    STRING,
    array,
    boolean,
    limit_parts,
    mapping,
    member,
    missing,
    mistyped,
    one_of,
    refuse,
    shorten,
    text,
)

Format = dict[str, Any]

MAX_SCHEMA_BYTES = 1 << 20
MAX_CHOICES = 1000
TEXT: Mapping[str, Any] = {"type": "text"}
MAX_NAME_CHARS = 64

EXTENSIONS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Request fields of other open servers, and what they are called among `structured_outputs`."""

_KIND = one_of("text", "json_object", "json_schema", "structural_tag")
_OUTPUTS = frozenset({"json", "regex", "choice", "grammar", "structural_tag", "json_object"})


def parse_format(value: Any, param: str, *, nested: bool = False) -> Format:
    """`text.format`, or chat's `response_format` (`nested`: the parts of a JSON Schema stand under
    `json_schema`), in the flat form. Raises ApiError 400."""
    mapping(value, param)
    if isinstance(value.get("type"), str) and value["type"] in _BARE_TAGS:
        return {"type": "structural_tag", "format": dict(_tags(value, param))}
    kind = member(value, "type", _KIND, param)
    if kind == "structural_tag":
        return dict(_tags(value, param))
    if kind != "json_schema":
        unread(value, ("type",), param)
        return {"type": kind}
    parts, path = value, param
    more: tuple[str, ...] = ("type",)
    if nested or ("schema" not in value and isinstance(value.get("json_schema"), dict)):
        unread(value, ("type", "json_schema"), param)
        path, more = f"{param}.json_schema", ()
        if nested and value.get("json_schema") is None:
            message = (
                f"Missing required parameter: '{path}'. The parts of a format stand one level deeper here "
                'than on Responses: {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}.'
            )
            refuse(path, message, "missing_required_parameter")
        parts = mapping(value.get("json_schema"), path)
    unread(parts, ("name", "schema", "strict", "description", *more), path)
    return _json_schema(parts, path, needs_schema=not nested)


def _json_schema(parts: Mapping[str, Any], path: str, *, needs_schema: bool) -> Format:
    name, schema, strict = parts.get("name"), parts.get("schema"), parts.get("strict")
    if name is None:
        missing(f"{path}.name")
    if not isinstance(name, str):
        mistyped(f"{path}.name", "a string", name)
    if not (name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARS):
        message = f"Invalid '{path}.name': expected 1 to {MAX_NAME_CHARS} characters that can be printed."
        refuse(f"{path}.name", message)
    if schema is None:
        if needs_schema:
            missing(f"{path}.schema")
        schema = {"type": "object"}
    form: Format = {"type": "json_schema", "name": name, "schema": _bounded(schema, f"{path}.schema")}
    form["strict"] = bool(boolean(strict, f"{path}.strict")) if strict is not None else False
    name_unheeded(form["schema"], f"{path}.schema", strict=form["strict"])
    if parts.get("description") is not None:
        form["description"] = STRING(parts["description"], f"{path}.description")
    return form


def name_unheeded(schema: Any, path: str, *, strict: bool) -> None:
    """Name the keywords of a JSON Schema at `path` that make no difference, such as misspelt ones.

    A `strict` one promises that the answer fits the whole of it: a keyword that is none is refused there,
    with ApiError 400 `invalid_schema`.
    """
    for each in unheeded(schema):
        where = path
        for step in each.path:
            where += f"[{step}]" if isinstance(step, int) else f".{shorten(step)}"
        if strict and not each.known:
            keyword = shorten(str(each.path[-1]))
            hint = f" Did you mean '{meant}'?" if (meant := each.meant()) is not None else ""
            message = f"Invalid schema: '{keyword}' at '{where}' is not a keyword of JSON Schema."
            refuse(where, f"{message}{hint} Without 'strict' it would be ignored.", "invalid_schema")
        ignore(where)


def _bounded(schema: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = mapping(schema, path)
    try:
        written = orjson.dumps(found)
    except orjson.JSONEncodeError as error:
        refuse(path, f"Invalid '{path}': {error}.")
    _limit(written, path)
    return found


def _limit(written: bytes, path: str) -> None:
    if (size := len(written)) > MAX_SCHEMA_BYTES:
        refuse(path, f"Invalid '{path}': {size} bytes of schema; at most {MAX_SCHEMA_BYTES} are taken.")
    limit_parts(written, path)


def asked_shape(body: Mapping[str, Any], form: Format | None, param: str) -> tuple[Shape | None, str]:
    """The shape that a request asks of its answer, in a format (at `param`) or an extension, and the field
    that does. Raises ApiError 400, `mutually_exclusive_parameters` for two shapes."""
    found = [(shape, param)] if form is not None and (shape := _shape_of(form)) is not None else []
    for field, kind in EXTENSIONS.items():
        if field in body:
            found.append((_output(kind, body[field], field), field))
    if (outputs := body.get("structured_outputs")) is not None:
        for name in mapping(outputs, "structured_outputs"):
            if name not in _OUTPUTS and outputs[name] not in (None, False):
                message = f"Unsupported parameter: 'structured_outputs.{shorten(name)}' cannot be honoured."
                refuse(f"structured_outputs.{shorten(name)}", message, "unsupported_parameter")
        for name in sorted(_OUTPUTS & outputs.keys()):
            if outputs[name] not in (None, False):
                path = f"structured_outputs.{name}"
                found.append((_output(name, outputs[name], path), path))
    if len(found) > 1:
        named = ", ".join(f"'{path}'" for _, path in found[:-1])
        last = found[-1][1]
        message = f"An answer has one shape: {named} and '{last}' cannot be used together."
        refuse(last, message, "mutually_exclusive_parameters")
    return found[0] if found else (None, param)


def _shape_of(form: Format) -> Shape | None:
    """The shape of a format; None where any text will do."""
    kind = form["type"]
    if kind == "json_schema":
        return Shape("json", closed_schema(form["schema"]))
    if kind == "structural_tag":
        return Shape("tags", json.dumps(form))
    return Shape("json", '{"type": "object"}') if kind == "json_object" else None


def _output(kind: str, value: Any, path: str) -> Shape:
    """One of `structured_outputs`."""
    if kind == "json_object":
        boolean(value, path)
        return Shape("json", '{"type": "object"}')
    if kind == "choice":
        choices = array(text(1), 1, MAX_CHOICES)(value, path)
        return Shape("choice", json.dumps(choices))
    if kind == "structural_tag":
        return Shape("tags", json.dumps(_tags(_object(value, path), path)))
    if kind == "json":
        schema = _bounded(_object(value, path), path)
        name_unheeded(schema, path, strict=False)
        return Shape("json", closed_schema(schema))
    return Shape("regex" if kind == "regex" else "lark", text(1)(value, path))


_TAG_MEMBERS: Mapping[str | None, tuple[str, ...]] = {
    None: ("begin", "end", "content", "schema"),  # a tag of a list, which has no type
    "structural_tag": ("format", "structures", "triggers"),
    "const_string": ("value",),
    "json_schema": ("json_schema", "schema", "style"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "any_text": ("excludes", "excluded_str"),
    "tag": ("begin", "end", "content"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""What is read of the objects of a structural tag (`engine.structured.structural_tags`), `type` apart."""

_BARE_TAGS = frozenset(_TAG_MEMBERS) - {None, "structural_tag", "json_schema"}
"""Formats of structural tags that a request may give as its own; a `json_schema` is the official one then."""


def _tags(value: Any, param: str) -> dict[str, Any]:
    """A structural tag within the bounds of a schema. Its members, and those of all formats in it, that
    nothing reads are named."""
    tags = _bounded(value, param)
    todo: list[tuple[Any, str]] = [(tags, param)]
    for form, path in todo:  # no recursion: a client says how deep it goes
        if isinstance(form, list):
            todo += [(each, f"{path}[{at}]") for at, each in enumerate(form) if isinstance(each, dict | list)]
            continue
        kind = form.get("type")
        if kind is None and ("format" in form or "structures" in form):
            kind = "structural_tag"
        if kind is None or isinstance(kind, str):
            # The engine refuses a kind that is not among these.
            unread(form, ("type", *_TAG_MEMBERS.get(kind, form)), path)
        nested = ((name, form.get(name)) for name in _NESTED)
        todo += [(each, f"{path}.{name}") for name, each in nested if isinstance(each, dict | list)]
        for name in _TAG_SCHEMAS & form.keys() if kind in (None, "json_schema") else ():
            name_unheeded(form[name], f"{path}.{name}", strict=False)
    return tags


_TAG_SCHEMAS = frozenset({"schema", "json_schema"})
_NESTED = ("format", "content", "elements", "tags", "structures")


def as_output(kind: str, source: str) -> dict[str, Any]:
    """A shape in the form of `structured_outputs`."""
    name = {"lark": "grammar", "tags": "structural_tag"}.get(kind, kind)
    return {name: json.loads(source) if kind in ("json", "tags", "choice") else source}


def _object(value: Any, path: str) -> dict[str, Any]:
    """An object, or its JSON text, which is read as the same object in the body would be."""
    if isinstance(value, str):
        written = value.encode(errors="surrogatepass")
        _limit(written, path)  # the whole of it is parsed at once
        try:
            value = orjson.loads(written)
        except orjson.JSONDecodeError:
            refuse(path, f"Invalid '{path}': the text is not JSON.")
    found: dict[str, Any] = mapping(value, path)
    return found
