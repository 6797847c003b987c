"""Describes shapes of JSON values as data, and reports values that do not fit with the official error.

A shape is a function that takes a value and its path, and returns the normalised value or raises ApiError 400
naming the path. The tables of items and tools are built from these functions. In every shape null means
absent, unknown keys are kept, and no JSON value raises anything but ApiError.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, TypeGuard

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from server.errors import ApiError
from server.ignored import member as path_of
from server.ignored import unread

Shape = Callable[[Any, str], Any]
Schema = dict[str, Any]

MAX_INT32 = (1 << 31) - 1
ALIKE = 0.9  # names that are as like as this, by `difflib`'s measure, mean the same
MOST_SPELT, LONGEST_SPELT = 16, 40  # unknown names whose spelling is looked at, and their characters
LEAST_SPELT = 4  # characters of a name of which one letter may be wrong
# Names that other servers know, and which are like one of ours.
ELSEWHERE = frozenset({"models", "seed", "speed", "top_a"})
MAX_SCHEMA_PARTS = 8_000  # objects and arrays; twice what the decoder takes, and cheap to refuse here


def refuse(param: str | None, message: str, code: str = "invalid_value") -> NoReturn:
    """Raise the 400 of a value that cannot be taken; `param` is its dotted and bracketed path."""
    raise ApiError(400, message, code=code, param=param)


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
}


def json_type(value: Any) -> str:
    """The JSON name of a value's type, with its article, for messages."""
    return "null" if value is None else _TYPE_NAMES.get(type(value), "an unknown value")


def missing(path: str) -> NoReturn:
    """Raise the 400 of a value that is required and absent."""
    refuse(path, f"Missing required parameter: '{path}'.", "missing_required_parameter")


def member(value: Mapping[str, Any], name: str, shape: Shape, path: str = "") -> Any:
    """The member of this name that the object at `path` must have, in its shape."""
    at = path_of(path, name)
    if value.get(name) is None:
        missing(at)
    return shape(value[name], at)


def mistyped(path: str, wanted: str, value: Any) -> NoReturn:
    """Raise the 400 of a value of another type."""
    refuse(
        path,
        f"Invalid type for '{path}': expected {wanted}, but got {json_type(value)} instead.",
        "invalid_type",
    )


# ------------------------------------------------------------------------------------------------------------
# Bounds

BOUND_CODES: Mapping[tuple[str, str], str] = {
    ("array", "empty"): "empty_array",
    ("array", "below"): "array_below_min_length",
    ("array", "above"): "array_above_max_length",
    ("string", "empty"): "empty_string",
    ("string", "below"): "string_below_min_length",
    ("string", "above"): "string_above_max_length",
    ("object", "above"): "object_above_max_properties",
    ("integer", "below"): "integer_below_min_value",
    ("integer", "above"): "integer_above_max_value",
    ("decimal", "below"): "decimal_below_min_value",
    ("decimal", "above"): "decimal_above_max_value",
}
"""The official codes for a value that is too short, too long, too small or too large, by its kind."""


def check_length(path: str, got: int, kind: str, least: int = 0, most: int | None = None) -> None:
    """Refuse an array or a string (`kind`) with fewer than `least`, or more than `most`, elements or
    characters; an object with more than `most` properties."""
    article = "an" if kind in ("array", "object") else "a"
    found = f"{article} {kind} with length {got}"
    if got < least:
        what, found = (f"{kind} too short", found) if got else (f"empty {kind}", f"an empty {kind}")
        bound, side = f"{article} {kind} with minimum length {least}", "below" if got else "empty"
    elif most is None or got <= most:
        return
    elif kind == "object":
        what, bound, side = "too many properties", f"an object with at most {most} properties", "above"
        found = f"an object with {got} properties"
    else:
        what, bound, side = f"{kind} too long", f"{article} {kind} with maximum length {most}", "above"
    message = f"Invalid '{path}': {what}. Expected {bound}, but got {found} instead."
    refuse(path, message, BOUND_CODES[kind, side])


def check_range(path: str, got: float, kind: str, least: float | None, most: float | None) -> None:
    """Refuse a number (`kind`: integer or decimal) below `least` or above `most`."""
    if least is not None and got < least:
        what, bound, side = "below minimum value", f">= {_written(least)}", "below"
    elif most is not None and got > most:
        what, bound, side = "above maximum value", f"<= {_written(most)}", "above"
    else:
        return
    message = f"Invalid '{path}': {kind} {what}. Expected a value {bound}, but got {_written(got)} instead."
    refuse(path, message, BOUND_CODES[kind, side])


def _written(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def _is_long(number: Any) -> TypeGuard[float]:
    """Whether a number is what JSON's reader makes of an integer that has more than 64 bits."""
    return isinstance(number, float) and number.is_integer() and abs(number) >= 1 << 63


# ------------------------------------------------------------------------------------------------------------
# Shapes as JSON Schema

_SCHEMA = "json_schema"


def described(shape: Shape, schema: Callable[[], Schema]) -> Shape:
    """The same shape, which says what it takes as JSON Schema; `schema` is called when somebody asks."""
    setattr(shape, _SCHEMA, schema)
    return shape


def schema_of(shape: Shape) -> Schema:
    """What a shape takes, as JSON Schema 2020-12; anything where it does not say."""
    schema: Callable[[], Schema] | None = getattr(shape, _SCHEMA, None)
    return schema() if schema is not None else {}


def or_null(schema: Schema) -> Schema:
    """A schema that takes null as well: absent, as everywhere."""
    if not schema:
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


# ------------------------------------------------------------------------------------------------------------
# Leaves


def text(min_length: int = 0, max_length: int | None = None) -> Shape:
    """A string of bounded length, in characters."""

    def shape(value: Any, path: str) -> Any:
        if not isinstance(value, str):
            mistyped(path, "a string", value)
        check_length(path, len(value), "string", min_length, max_length)
        return value

    bounds = {"minLength": min_length or None, "maxLength": max_length}
    return described(shape, lambda: {"type": "string", **_given(bounds)})


def label(min_length: int = 0, max_length: int | None = None) -> Shape:
    """A string of bounded length without NUL characters, which PostgreSQL cannot hold: an id or a name."""

    def shape(value: Any, path: str) -> Any:
        if "\0" in text(min_length, max_length)(value, path):
            refuse(path, f"Invalid '{path}': it must not contain NUL characters.", "invalid_string")
        return value

    return shape


def whole(minimum: int | None = None, maximum: int | None = None) -> Shape:
    """An integer within bounds."""

    def shape(value: Any, path: str) -> Any:
        if _is_long(value):
            check_range(path, value, "integer", minimum, maximum)
        if not isinstance(value, int) or isinstance(value, bool):
            mistyped(path, "an integer", value)
        check_range(path, value, "integer", minimum, maximum)
        return value

    return described(shape, lambda: {"type": "integer", **_given({"minimum": minimum, "maximum": maximum})})


def number(value: Any, path: str) -> Any:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        mistyped(path, "a number", value)
    if isinstance(value, float) and not math.isfinite(value):
        refuse(path, f"Invalid '{path}': expected a finite number.")
    return value


def boolean(value: Any, path: str) -> Any:
    """true or false."""
    if not isinstance(value, bool):
        mistyped(path, "a boolean", value)
    return value


def anything(value: Any, path: str) -> Any:
    """Any JSON value, kept as it is."""
    return value


def mapping(value: Any, path: str) -> Any:
    """Any object, kept as it is."""
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    return value


def limit_parts(written: bytes, path: str, before: int = 0) -> int:
    """Count a JSON Schema's objects and arrays; refuses more than `MAX_SCHEMA_PARTS`, with those `before`."""
    parts = before + written.count(b"{") + written.count(b"[")
    if parts > MAX_SCHEMA_PARTS:
        message = f"Invalid '{path}': {parts} objects and arrays; at most {MAX_SCHEMA_PARTS} are taken."
        refuse(path, message, "invalid_schema")
    return parts


def one_of(*values: str) -> Shape:
    """One of these strings."""

    def shape(value: Any, path: str) -> Any:
        if not isinstance(value, str):
            mistyped(path, "a string", value)
        if value not in values:
            wanted = ", ".join(f"'{allowed}'" for allowed in values)
            refuse(path, f"Invalid value: '{shorten(value)}'. Supported values are: {wanted}.")
        return value

    return described(shape, lambda: {"enum": list(values)})


def shorten(value: str, limit: int = 64) -> str:
    """A client's string, short enough for a message."""
    return value if len(value) <= limit else value[:limit] + "..."


def _given(bounds: Schema) -> Schema:
    """The keywords that have a value."""
    return {keyword: value for keyword, value in bounds.items() if value is not None}


def with_type(schema: Schema, *types: str) -> Schema:
    """The schema of an object, with the values of `type` that it goes by."""
    tag: Schema = {"const": types[0]} if len(types) == 1 else {"enum": list(types)}
    properties = schema.get("properties", {})
    required = [name for name in schema.get("required", ()) if name != "type"]
    return {
        "type": "object",
        "properties": {"type": tag, **{name: each for name, each in properties.items() if name != "type"}},
        "required": ["type", *required],
    }


described(number, lambda: {"type": "number"})
described(boolean, lambda: {"type": "boolean"})
described(mapping, lambda: {"type": "object"})

STRING = text()
NAME = text(1)


# ------------------------------------------------------------------------------------------------------------
# Containers


def array(item: Shape, min_items: int = 0, max_items: int | None = None) -> Shape:
    """An array whose elements all have one shape."""

    def shape(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            mistyped(path, "an array", value)
        check_length(path, len(value), "array", min_items, max_items)
        return [item(element, f"{path}[{index}]") for index, element in enumerate(value)]

    bounds = {"minItems": min_items or None, "maxItems": max_items}
    return described(shape, lambda: {"type": "array", "items": schema_of(item), **_given(bounds)})


def map_of(item: Shape) -> Shape:
    """An object whose values all have one shape."""

    def shape(value: Any, path: str) -> Any:
        mapping(value, path)
        return {key: item(element, f"{path}.{shorten(key)}") for key, element in value.items()}

    return described(shape, lambda: {"type": "object", "additionalProperties": schema_of(item)})


def record(
    required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, **defaults: Any
) -> Shape:
    """An object with known keys: `required` ones, `optional` ones, and `defaults` for those absent.

    Unknown keys are kept, and named as ignored; nulls are dropped. A key that must be there and may be null
    is optional with default None. `type` is read by whoever chose this shape.
    """
    known = {**required, **(optional or {})}
    names = {*known, *defaults, "type"}

    def shape(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            mistyped(path, "an object", value)
        unread(value, names, path)
        out: dict[str, Any] = {}
        for key, element in value.items():
            if element is None:
                continue
            known_shape = known.get(key)
            out[key] = element if known_shape is None else known_shape(element, f"{path}.{key}")
        for key, default in defaults.items():
            if key not in out:
                out[key] = copy(default)
        for key in required:
            if key not in out:
                missing(f"{path}.{key}")
        return out

    def schema() -> Schema:
        properties = {key: schema_of(each) for key, each in required.items()}
        for key, each in (optional or {}).items():
            properties.setdefault(key, or_null(schema_of(each)))
        properties |= {key: {"default": each} for key, each in defaults.items() if key not in known}
        demanded = [key for key in required if key not in defaults]
        return {"type": "object", "properties": properties, **({"required": demanded} if demanded else {})}

    return described(shape, schema)


def closed(shape: Shape, *names: str) -> Shape:
    """The same object with members of these names alone, where an unknown one that was only ignored would
    allow more than its client meant."""

    def strict(value: Any, path: str) -> Any:
        require_members(mapping(value, path), names, path)
        return shape(value, path)

    return described(strict, lambda: {**schema_of(shape), "additionalProperties": False})


def exactly(
    required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, *others: str
) -> Shape:
    """A `record` with these members, those that `others` names (which no shape is given for), and no more."""
    return closed(record(required, optional), *others, *required, *(optional or {}))


def require_members(value: Mapping[str, Any], known: Sequence[str], path: str = "") -> None:
    """Refuse a member of another name, where to ignore it would be to do more than its client meant. Raises
    ApiError 400 `unknown_parameter`."""
    for name, element in value.items():
        if name not in known and element is not None:
            meant = difflib.get_close_matches(name, known, n=1)
            listed = ", ".join(f"'{each}'" for each in known)
            _unknown(path_of(path, shorten(name)), meant, f"The members are {listed}.")


def name_others(value: Mapping[str, Any], known: Collection[str], path: str = "") -> None:
    """Name the members that are not `known` as ignored, and refuse those that are misspelt. Raises ApiError
    400 `unknown_parameter`."""
    require_spelling(value, known, path)
    unread(value, known, path)


def _unknown(path: str, meant: Sequence[str], otherwise: str = "") -> NoReturn:
    hint = f"Did you mean '{meant[0]}'?" if meant else otherwise
    refuse(path, f"Unknown parameter: '{path}'. {hint}", "unknown_parameter")


def require_spelling(value: Mapping[str, Any], known: Collection[str], path: str = "") -> None:
    """Refuse a member that is as good as one of the `known` names: what it asks for would be missing from the
    reply, and only a header would say so. Others may be meant for another server, and pass."""
    strange = (name for name, element in value.items() if name not in known and element is not None)
    for name in islice(strange, MOST_SPELT):
        if len(name) <= LONGEST_SPELT and name not in ELSEWHERE:
            slips = [each for each in known if _is_slip(name, each)]
            meant = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
            if meant := meant or difflib.get_close_matches(name, slips, n=1):
                _unknown(path_of(path, name), meant)


def _is_slip(name: str, meant: str) -> bool:
    """Whether a name has one letter too many, too few, wrong, or in its neighbour's place."""
    shorter = min(len(name), len(meant))
    if shorter < LEAST_SPELT or abs(len(name) - len(meant)) > 1:
        return False
    at = next((i for i in range(shorter) if name[i] != meant[i]), shorter)
    left, right = name[at:], meant[at:]
    swapped = left[:2] == right[1::-1] and left[2:] == right[2:]
    return swapped or left[1:] == right[1:] or left[1:] == right or left == right[1:]


def tagged(shapes: Mapping[str, Shape], aliases: Mapping[str, str] | None = None) -> Shape:
    """An object whose `type` says which shape it has; `aliases` are renamed to the official type first."""
    names = aliases or {}

    def shape(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            mistyped(path, "an object", value)
        kind = value.get("type")
        if kind is None:
            missing(f"{path}.type")
        if not isinstance(kind, str):
            mistyped(f"{path}.type", "a string", kind)
        official = names.get(kind, kind)
        if official not in shapes:
            wanted = ", ".join(f"'{allowed}'" for allowed in shapes)
            refuse(f"{path}.type", f"Invalid value: '{shorten(kind)}'. Supported values are: {wanted}.")
        return shapes[official](value if official == kind else {**value, "type": official}, path)

    def schema() -> Schema:
        kinds = []
        for official, each in shapes.items():
            tags = [official, *(name for name, to in names.items() if to == official)]
            kinds.append(with_type(schema_of(each), *tags))
        return {"anyOf": kinds}

    return described(shape, schema)


def either(as_string: Shape, as_array: Shape) -> Shape:
    """A string or an array, each with its shape."""

    def shape(value: Any, path: str) -> Any:
        if isinstance(value, str):
            return as_string(value, path)
        if isinstance(value, list):
            return as_array(value, path)
        mistyped(path, "a string or an array", value)

    return described(shape, lambda: {"anyOf": [schema_of(as_string), schema_of(as_array)]})


# ------------------------------------------------------------------------------------------------------------
# Pydantic's errors


@dataclass(frozen=True, slots=True)
class Within:
    """The bounds of an integer, both included, in an `Annotated[int, ...]` of a pydantic model. Neither has
    more than 64 bits."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bounded = core_schema.int_schema(ge=self.least, le=self.most)
        return core_schema.no_info_before_validator_function(self._check_long, bounded)

    def _check_long(self, value: Any) -> Any:
        if not _is_long(value):
            return value
        if value > 0:
            raise PydanticKnownError("less_than_equal", {"le": self.most})
        raise PydanticKnownError("greater_than_equal", {"ge": self.least})


_WANTED: Mapping[str, str] = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
"""What was wanted where pydantic says that a value has another type."""


def from_pydantic(error: ValidationError) -> ApiError:
    """The official 400 for the first problem that pydantic found."""
    first = error.errors(include_url=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    try:
        if first["type"] == "missing":
            missing(path)
        _refuse_bounds(path, first["type"], first["input"], first.get("ctx", {}))
        if (wanted := _WANTED.get(first["type"])) is not None:
            mistyped(path, wanted, first["input"])
    except ApiError as official:
        return official
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    message = first["msg"].removeprefix("Value error, ")
    text = f"Invalid '{shorten(path, 200)}': {message[:1].lower()}{message[1:]}."
    return ApiError(400, text, code=code, param=path)


def _refuse_bounds(path: str, problem: str, value: Any, bounds: Mapping[str, Any]) -> None:
    """Refuse a value of which pydantic says that it is out of bounds; nothing for another problem."""
    if problem in ("too_short", "too_long", "string_too_short", "string_too_long"):
        kind = "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"
        check_length(path, len(value), kind, bounds.get("min_length", 0), bounds.get("max_length"))
    if problem in ("greater_than_equal", "less_than_equal"):
        least, most = bounds.get("ge"), bounds.get("le")
        kind = "integer" if isinstance(most if least is None else least, int) else "decimal"
        check_range(path, value, kind, least, most)
