"""Checks the arguments of a call against the schema of an MCP tool, which may be anybody's.

The check must end soon, whatever the schema says: patterns are left to the server, which wrote them, because
Python's regular expressions can take forever; references resolve within the schema only, and so many of them
at most; and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.arguments import load_arguments
from tools.spec import ToolError

MAX_REFERENCES = 10_000
"""Followed in one check; a few lines of schema can ask for 2 to the power of their number."""


def read_arguments(schema: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """The arguments as a mapping that fits the schema; ToolError tells the model what does not."""
    given = load_arguments(arguments)
    if (misfit := _misfit(schema, given)) is not None:
        raise ToolError(misfit)
    return given


class _TooMany(Exception):
    """The schema's references lead to more references than are followed."""


def _misfit(schema: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """The first thing in which arguments do not fit a schema; None where there is none, or where nobody can
    say: the server decides then."""
    from jsonschema.exceptions import UnknownType
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        # Without a registry of its own, the library would fetch references from the network.
        validator = _validator()(dict(schema), registry=Registry())
        error = next(validator.iter_errors(given), None)
    except (Unresolvable, UnknownType, _TooMany, RecursionError, ArithmeticError):
        return None
    except (TypeError, ValueError, AttributeError, KeyError):  # the library assumes a schema that is one
        return None
    if error is None:
        return None
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"the arguments do not fit the tool's schema{place and f' at {place}'}: {error.message[:500]}"


def _validator() -> Any:
    """Draft 2020-12 without patterns, for one check: it counts references."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    rules = Draft202012Validator.VALIDATORS
    left = MAX_REFERENCES

    def unread(*_: Any) -> None:
        return None

    def reference(validator: Any, target: Any, instance: Any, schema: Any) -> Iterator[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooMany
        yield from rules["$ref"](validator, target, instance, schema) or ()

    def additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:  # what those match is no additional property
            yield from rules["additionalProperties"](validator, allowed, instance, schema) or ()

    unheeded = ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef")
    own = {name: unread for name in unheeded}
    return extend(Draft202012Validator, {**own, "$ref": reference, "additionalProperties": additional})
