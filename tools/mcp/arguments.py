"""Checks the arguments of a call against the schema of an MCP tool, which may be anybody's.

The check must end soon, whatever the schema says: patterns are left to the server, which wrote them, because
Python's regular expressions can take forever; references resolve within the schema only; so many rules are
applied at most; and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.arguments import load_arguments, unique_items
from tools.spec import ToolError

MAX_STEPS = 100_000
"""Of one check, each a rule that is applied to a value, or a member of such a rule: about half a second. A
few lines of schema can ask for 2 to the power of their number."""


def read_arguments(schema: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """The arguments as a mapping that fits the schema; ToolError tells the model what does not."""
    given = load_arguments(arguments)
    if (misfit := _misfit(schema, given)) is not None:
        raise ToolError(misfit)
    return given


class _TooMany(Exception):
    """The schema asks for more steps than are gone."""


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
    """Draft 2020-12 without patterns, for one check: it counts its steps."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    rules = {**Draft202012Validator.VALIDATORS, "uniqueItems": unique_items}
    left = MAX_STEPS

    def unread(*_: Any) -> None:
        return None

    def counted(rule: Any) -> Any:
        def apply(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
            nonlocal left
            left -= 1 + (len(wanted) if isinstance(wanted, list | dict) else 0)
            if left < 0:
                raise _TooMany
            yield from rule(validator, wanted, instance, schema) or ()

        return apply

    def additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:  # what those match is no additional property
            yield from rules["additionalProperties"](validator, allowed, instance, schema) or ()

    unheeded = ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef")
    own = {name: counted(rule) for name, rule in {**rules, "additionalProperties": additional}.items()}
    return extend(Draft202012Validator, {**own, **dict.fromkeys(unheeded, unread)})
