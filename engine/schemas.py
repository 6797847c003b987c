"""JSON Schema as the decoder can enforce it.

Owns: rewriting a schema so that llguidance takes it (every text that fits the result fits the original), the
refusal of what cannot be rewritten, by its keyword, and the bounds that keep compiling short. Refuses to
know: dialects, tokens, which schema belongs to which tool. Semantics: JSON Schema 2020-12, with what drafts 4
to 7 wrote otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.types import ConstraintError

Schema = dict[str, Any]

# What json.dumps(value, ensure_ascii=False), so every chat template's `tojson`, writes: what is decoded is
# rendered again character for character. Letters are the escapes it uses (u: control characters, and without
# it values that contain one could not be written); other characters stand as they are.
LAYOUT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": '"\\bfnrtu',
}

# Compiling takes time with the square of an object's properties, 0.15 s for a thousand, before any limit of
# llguidance's own holds; and with the number of subschemas. A step has room for some four states of each
# optional property. The automaton of a long repetition takes half a second where it is first walked.
MAX_SQUARES = 1_000_000
MAX_OPTIONAL = 450
MAX_PARTS = 4_000
MAX_DEPTH = 160
MAX_REPEATS = 20_000
LEAST_STEP = 1e-9  # between numbers that have bounds
MAX_INTEGER = 9 * 10**18  # of an integer without bounds: readers refuse, or lose, longer ones

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_PLAIN = frozenset({"enum", "const", "default", "example", "examples", "required", "type", "x-guidance"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})


def read_schema(text: str) -> Schema:
    """A schema's text as an object; ConstraintError for what is no schema."""
    try:
        schema = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintError("the schema is not a JSON Schema object")
    return schema


def enforceable(schema: Schema) -> str:
    """The text, for llguidance's `%json`, of a schema that can be enforced.

    Raises ConstraintError naming the keyword that cannot be honoured, and where it stands.
    """
    weigh([schema])
    rewritten = _rewrite(schema, "#")
    if rewritten is False:
        raise ConstraintError("nothing fits the schema")
    return json.dumps({**rewritten, "x-guidance": LAYOUT})


def weigh(schemas: list[Schema]) -> None:
    """Raise ConstraintError where schemas that are compiled together would take too long."""
    parts = squares = 0
    pending: list[tuple[Any, int]] = [(schema, 0) for schema in schemas]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConstraintError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        parts += 1
        if isinstance(value, dict):
            listed, required = (value.get(key) or () for key in ("properties", "required"))
            if isinstance(listed, dict) and isinstance(required, list | tuple):
                squares += max(len(listed), len(required)) ** 2
                if len(listed) - len(required) > MAX_OPTIONAL:
                    raise ConstraintError(f"an object has more than {MAX_OPTIONAL} optional properties")
            if isinstance(pattern := value.get("pattern"), str):
                check_repeats(pattern)
            pending += [(part, depth + 1) for part in value.values() if isinstance(part, dict | list)]
        elif isinstance(value, list):
            pending += [(part, depth) for part in value if isinstance(part, dict | list)]
        if squares > MAX_SQUARES:
            raise ConstraintError("the schema has too many properties")
        if parts > MAX_PARTS:
            raise ConstraintError(f"the schema has more than {MAX_PARTS} parts")


def check_repeats(pattern: str) -> None:
    """Raise ConstraintError for a pattern that repeats something too often to be walked in a step."""
    for found in re.finditer(r"\{(\d*)(?:,(\d*))?\}", pattern):
        if any(len(number or "") > 9 or int(number or 0) > MAX_REPEATS for number in found.groups()):
            raise ConstraintError(f"the repetition {found[0][:32]} is of more than {MAX_REPEATS}")


def _refuse(keyword: str, path: str, why: str = "") -> ConstraintError:
    return ConstraintError(f"{keyword!r} at {path} cannot be enforced{why and f': {why}'}")


def _rewrite(schema: Any, path: str) -> Any:
    """A subschema, rewritten; false where nothing fits it."""
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        if key in _PLAIN:
            out[key] = value
        elif key in _NAMED and isinstance(value, dict):
            out[key] = {name: _rewrite(part, f"{path}/{key}/{name}") for name, part in value.items()}
        elif isinstance(value, list):
            out[key] = [_rewrite(part, f"{path}/{key}/{index}") for index, part in enumerate(value)]
        else:
            out[key] = _rewrite(value, f"{path}/{key}")
    for keyword, rule in _RULES.items():
        if keyword in out and rule(out, path) is False:
            return False
    return out


# ------------------------------------------------------------------------------------------------------------
# A rule for each keyword that llguidance lacks, or takes in another sense: it changes the schema in place, or
# returns False where nothing can fit. Rules run in the table's order.


def _also(schema: Schema, *branches: Any) -> None:
    """One of these must hold as well."""
    schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": list(branches)}]


def _ref(schema: Schema, path: str) -> None:
    target = schema["$ref"]
    if not isinstance(target, str) or not target.startswith("#"):
        raise _refuse("$ref", path, "it leads outside of the schema, and nothing is fetched")


def _format(schema: Schema, path: str) -> None:
    # An annotation by the standard; where it is known, it is enforced all the same.
    if schema["format"] not in _FORMATS:
        del schema["format"]


def _unique(schema: Schema, path: str) -> None:
    most = schema.get("maxItems")
    if schema["uniqueItems"] is True and not (isinstance(most, int) and most < 2):
        raise _refuse("uniqueItems", path)
    del schema["uniqueItems"]


def _contains(schema: Schema, path: str) -> None:
    if schema.get("minContains") != 0 or "maxContains" in schema:
        raise _refuse("contains", path)
    del schema["contains"]


def _counts(schema: Schema, path: str) -> None:
    for key in ("minContains", "maxContains"):  # they mean nothing without `contains`
        schema.pop(key, None)


def _exclusive(bound: str, exclusive: str) -> Callable[[Schema, str], None]:
    def rule(schema: Schema, path: str) -> None:
        """Draft 4 wrote a flag beside the bound."""
        flag = schema[exclusive]
        if isinstance(flag, bool):
            del schema[exclusive]
            if flag and bound in schema:
                schema[exclusive] = schema.pop(bound)

    return rule


def _type(schema: Schema, path: str) -> None:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if schema.keys() & {"enum", "const"}:
        return
    if "number" in kinds:
        bounds = [schema[key] for key in _BOUNDS if isinstance(schema.get(key), int | float)]
        # Within bounds llguidance writes no exponents, but digits without end.
        if bounds and "multipleOf" not in schema and all(not each or abs(each) > 1e-6 for each in bounds):
            schema["multipleOf"] = LEAST_STEP
        return
    if "integer" not in kinds:
        return
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = -MAX_INTEGER
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = MAX_INTEGER


def _min_properties(schema: Schema, path: str) -> None:
    least, required = schema["minProperties"], schema.get("required")
    if isinstance(required, list) and isinstance(least, int) and least <= len(required):
        del schema["minProperties"]
    elif isinstance(least, int) and least > 1:
        # The same name may be written twice, and counts once.
        raise _refuse("minProperties", path, "it is more than the number of required properties")


def _not(schema: Schema, path: str) -> bool:
    opposite = _negated(schema.pop("not"), schema)
    if opposite is None:
        raise _refuse("not", path)
    if opposite is False:
        return False
    _also(schema, opposite)
    return True


def _if(schema: Schema, path: str) -> bool:
    condition = schema.pop("if")
    then, other = schema.pop("then", True), schema.pop("else", True)
    if then in (True, {}) and other in (True, {}):
        return True
    opposite = _negated(condition, schema)
    if opposite is None:
        raise _refuse("if", path, "its condition cannot be turned round")
    branches = [{"allOf": [condition, then]}] if then is not False else []
    branches += [{"allOf": [opposite, other]}] if False not in (opposite, other) else []
    if not branches:
        return False
    _also(schema, *branches)
    return True


def _orphans(schema: Schema, path: str) -> None:
    for key in ("then", "else"):  # they mean nothing without `if`
        schema.pop(key, None)


def _dependent(keyword: str) -> Callable[[Schema, str], None]:
    def rule(schema: Schema, path: str) -> None:
        """With one property come others, or a whole schema."""
        dependencies = schema.pop(keyword)
        if not isinstance(dependencies, dict):
            raise _refuse(keyword, path)
        for name, what in dependencies.items():
            needs = {"required": [name, *what]} if isinstance(what, list) else {"required": [name]}
            with_it = needs if isinstance(what, list) else {"allOf": [needs, what]}
            _also(schema, {"properties": {name: False}}, with_it)

    return rule


def _property_names(schema: Schema, path: str) -> None:
    """Names that must look like something: listed properties that do not are taken out, others must match a
    pattern."""
    names = schema.pop("propertyNames")
    if names is True or not names or names == {"type": "string"}:
        return
    if not isinstance(names, dict) or "patternProperties" in schema:
        raise _refuse("propertyNames", path)
    rest, known = schema.pop("additionalProperties", True), set(names) - {"type", "description", "title"}
    if known <= {"enum", "const"} and known:
        allowed = [names["const"]] if "const" in names else names["enum"]
        listed = schema.get("properties", {})
        schema["properties"] = {name: listed.get(name, rest) for name in allowed if isinstance(name, str)} | {
            name: False for name in listed if name not in allowed
        }
        schema["additionalProperties"] = False
        return
    if known == {"pattern"}:
        pattern = names["pattern"]
    elif known <= {"minLength", "maxLength"}:
        pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    else:
        raise _refuse("propertyNames", path)
    try:
        fits = re.compile(pattern)
    except re.error:
        raise _refuse("propertyNames", path, f"{pattern!r} is no pattern") from None
    schema["properties"] = {
        name: part if fits.search(name) else False for name, part in schema.get("properties", {}).items()
    }
    schema["patternProperties"] = {pattern: rest}
    schema["additionalProperties"] = False


def _unevaluated(keyword: str, plain: str) -> Callable[[Schema, str], None]:
    def rule(schema: Schema, path: str) -> None:
        value = schema.pop(keyword)
        if value in (True, {}):
            return
        if schema.keys() & _COMBINING:
            raise _refuse(keyword, path, "other keywords beside it evaluate properties too")
        schema.setdefault(plain, value)

    return rule


_RULES: Mapping[str, Callable[[Schema, str], bool | None]] = {
    "$ref": _ref,
    "format": _format,
    "uniqueItems": _unique,
    "contains": _contains,
    "minContains": _counts,
    "maxContains": _counts,
    "exclusiveMinimum": _exclusive("minimum", "exclusiveMinimum"),
    "exclusiveMaximum": _exclusive("maximum", "exclusiveMaximum"),
    "type": _type,
    "minProperties": _min_properties,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "propertyNames": _property_names,
    "not": _not,
    "if": _if,
    "then": _orphans,
    "else": _orphans,
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "dependencies": _dependent("dependencies"),
}


# ------------------------------------------------------------------------------------------------------------
# Negation


def _negated(schema: Any, beside: Schema) -> Any:
    """The opposite of a schema, for values that fit `beside`; None where it cannot be written."""
    if schema in (True, {}) or schema is False:
        return schema not in (True, {})
    if not isinstance(schema, dict):
        return None
    keys = schema.keys() - {"description", "title", "$comment"}
    if keys == {"type"}:
        return _other_types(schema["type"])
    if keys == {"const"} or keys == {"enum"}:
        unwanted = [schema["const"]] if "const" in schema else schema["enum"]
        known = _values(beside)
        if known is None:
            return None
        return {"enum": left} if (left := [value for value in known if value not in unwanted]) else False
    if keys == {"required"} and len(schema["required"]) == 1:
        return {"properties": {schema["required"][0]: False}}
    if keys <= {"properties", "required", "type"} and len(schema.get("properties", ())) == 1:
        return _other_property(schema, beside)
    return None


def _other_types(named: Any) -> Any:
    unwanted = named if isinstance(named, list) else [named]
    if "integer" in unwanted and "number" not in unwanted:
        return None  # numbers that are no integers
    left = [kind for kind in _TYPES if kind not in unwanted]
    return {"type": left} if left else False


def _values(schema: Schema) -> list[Any] | None:
    """All values that fit a schema, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [False, True] if schema.get("type") == "boolean" else None


def _other_property(schema: Schema, beside: Schema) -> Any:
    """The opposite of "this property fits that", in objects."""
    [(name, part)] = schema["properties"].items()
    required = schema.get("required", [])
    if beside.get("type") != "object" or not set(required) <= {name}:
        return None
    own = beside.get("properties", {}).get(name, {})
    opposite = _negated(part, own if isinstance(own, dict) else {})
    if opposite is None:
        return None
    branches: list[Any] = [] if opposite is False else [{"properties": {name: opposite}, "required": [name]}]
    if required and name not in beside.get("required", ()):
        branches.append({"properties": {name: False}})  # what is required may be missing
    return {"anyOf": branches} if branches else False
