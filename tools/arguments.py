"""Arguments against the JSON Schema of their tool, and schemas against the rules of JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tools.spec import ToolError, ToolSpec

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

MAX_FAULTS = 3
"""So many faults of a call are told at once."""

MAX_FAULT = 300
"""Characters of one fault; some quote the whole value."""


def prepare_arguments() -> None:
    """Load what the first call would otherwise load on the event loop, for 0.2 s (measured)."""
    import_module("jsonschema")


class SchemaFault(ValueError):
    """A schema that arguments cannot be checked against; the message says why."""


def load_arguments(arguments: str) -> dict[str, Any]:
    """The arguments as a mapping, whatever the schema; ToolError for what is no JSON object."""
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as exc:
        raise ToolError(f"the arguments are not valid JSON: {exc}") from None
    if not isinstance(given, dict):
        raise ToolError("the arguments must be a JSON object")
    return given


def parse_arguments(spec: ToolSpec, arguments: str) -> dict[str, Any]:
    """The arguments as a mapping that fits the tool's schema; ToolError says what does not."""
    given = load_arguments(arguments)
    try:
        faults = sorted(_validator(spec.parameters).iter_errors(given), key=lambda fault: fault.json_path)
    except RecursionError:
        raise ToolError("the arguments are nested too deeply") from None
    if faults:
        raise ToolError("; ".join(map(_words, faults[:MAX_FAULTS])))
    return given


def _words(fault: ValidationError) -> str:
    where = (
        "the arguments" if fault.json_path == "$" else f"the argument {fault.json_path.removeprefix('$.')!r}"
    )
    known = fault.schema.get("properties", {}) if isinstance(fault.schema, Mapping) else {}
    listed = f"; there are {', '.join(known) or 'none'}" if fault.validator == "additionalProperties" else ""
    message = fault.message if len(fault.message) <= MAX_FAULT else f"{fault.message[:MAX_FAULT]}..."
    return (
        f"{where} do not fit: {message}{listed}"
        if fault.json_path == "$"
        else f"{where} does not fit: {message}"
    )


def check_schema(schema: Mapping[str, Any]) -> None:
    """SchemaFault for what is no JSON Schema of an object, or refers to what is not in it."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        json.dumps(schema, allow_nan=False)
        validator = validator_for(schema, default=Draft202012Validator)
        validator.check_schema(schema, format_checker=validator.FORMAT_CHECKER)
    except (TypeError, ValueError):
        raise SchemaFault("it holds a value that JSON does not have, such as a date") from None
    except SchemaError as error:
        raise SchemaFault(f"{error.json_path}: {error.message}") from None
    if schema.get("type") != "object":
        raise SchemaFault('the type must be "object": arguments have names')
    if (missing := _unlisted(schema)) is not None:
        raise SchemaFault(
            f"no call can fit: {missing!r} is required, and no property of that name is allowed"
        )
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            raise SchemaFault(f"{reference!r} refers to nothing in the schema") from None


def _unlisted(schema: Any) -> str | None:
    """A property that an object must have and may not have; also of an object in it that must be there."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return None
    properties, required = schema.get("properties", {}), schema.get("required", ())
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    for name in required:
        if name not in properties:
            if closed:
                return str(name)
        elif (missing := _unlisted(properties[name])) is not None:
            return missing
    return None


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif key not in ("const", "enum", "default", "examples"):
                yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _validator(schema: Mapping[str, Any]) -> Validator:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    rules = extend(validator_for(schema, default=Draft202012Validator), {"uniqueItems": unique_items})
    # A registry of its own: without one, a reference to a URL would be fetched.
    made: Validator = rules(schema, registry=Registry())
    return made


def unique_items(_validator: Any, wanted: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """The rule `uniqueItems` of JSON Schema. The library's own compares each value with each other one where
    they cannot be sorted, and the model may write thousands."""
    from jsonschema import ValidationError

    if wanted and isinstance(instance, list):
        seen = set()
        for item in instance:
            if (text := json.dumps(_plain(item), sort_keys=True)) in seen:
                told = f"{text[:MAX_FAULT]} stands in it more than once"
                yield ValidationError(f"the list has non-unique elements: {told}")
                return
            seen.add(text)


def _plain(value: Any) -> Any:
    """A JSON value in which numbers that are equal are written alike."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
