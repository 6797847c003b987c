"""Rewrites the keywords of JSON Schema that llguidance lacks, or takes in another sense.

Every text that fits the result fits the original; keywords for which there is no such result are refused. The
semantics are those of JSON Schema 2020-12, and of drafts 4 to 7 where these differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations
from math import comb, perm
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from engine.references import pointed
from engine.structured.formats import FORMATS, LONGEST, TIMES
from engine.structured.regexes import found, lookaheads, unreadable
from engine.structured.schema_algebra import (
    Schema,
    apart,
    kinds,
    opposite,
    refused,
    resolved,
    told,
    values,
)
from engine.types import ConstraintError

MAX_BRANCHES = 64  # that one keyword may be written as
MAX_ARRAYS = 2_000  # of items that do not repeat, written out
PLACES = 8  # of an array's first items, where one that it must contain may stand
LEAST_STEP = 1e-9  # between numbers that have bounds
MAX_FINE = 99_999_999_999  # of a number that has such steps: twenty digits in all
MAX_INTEGER = 9 * 10**18  # of an integer without bounds: readers refuse, or lose, longer ones

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LISTING = frozenset({"enum", "const", "type", "minimum", "maximum", "title", "description", "default"})
_LISTED = frozenset({"enum", "const", "title", "description"})
_NARROWING = frozenset({"pattern", "allOf", "$ref"})  # llguidance may fail to combine them with a long bound
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})


class Place(NamedTuple):
    """Where a subschema stands in the client's."""

    root: Schema
    path: tuple[str | int, ...]
    steps: Iterator[int]  # that comparing schemas may take, for all of the client's together
    anchors: frozenset[str] = frozenset()  # names that references may have besides paths

    def below(self, *names: str | int) -> Place:
        return self._replace(path=(*self.path, *names))


def refuse(keyword: str, place: Place, why: str = "") -> ConstraintError:
    return ConstraintError(f"{keyword!r} cannot be enforced{why and f': {why}'}", place=place.path)


def _also(schema: Schema, *branches: Any) -> None:
    """One of these must hold as well."""
    schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": list(branches)}]


def _ref(schema: Schema, place: Place) -> None:
    target = schema["$ref"]
    if not target.startswith("#"):
        raise refuse("$ref", place, "it leads outside of the schema, and nothing is fetched")
    found = pointed(target, place.root)
    if found is None and target[1:] not in place.anchors:
        raise refuse("$ref", place, f"nothing in the schema stands at {target[:128]!r}")
    if found is not None and not isinstance(found, dict | bool):
        raise refuse("$ref", place, f"what stands at {target[:128]!r} is no schema")
    schema["$ref"] = quote(unquote(target), safe="#/~!$&'()*+,;=:@?")


def _format(schema: Schema, place: Place) -> None:
    # An annotation by the standard; where it is known, it is enforced all the same.
    name = schema["format"]
    if name not in FORMATS:
        del schema["format"]
    elif schema.keys() & {"enum", "const"}:
        pass  # what a client lists ends, and llguidance takes out what has another form
    elif name in TIMES:
        del schema["format"]
        pattern = f"^({TIMES[name]})$"
        if "pattern" not in schema:
            schema["pattern"] = pattern
        else:
            # With its type, or it would say something of numbers too (`documents`).
            typed = {"type": schema["type"]} if "type" in schema else {}
            schema["allOf"] = [*schema.get("allOf", ()), {**typed, "pattern": pattern}]
    elif name in LONGEST and schema.get("minLength", 0) <= LONGEST[name] and not schema.keys() & _NARROWING:
        schema.setdefault("maxLength", LONGEST[name])


def _one_of(schema: Schema, place: Place) -> bool:
    """One of several and no second one: each, without those that it may overlap."""
    branches, root = schema.pop("oneOf"), place.root
    if len(branches) > MAX_BRANCHES**2 // 8:
        raise refuse("oneOf", place, "it has too many schemas")
    listed = [own for branch in branches if (own := values(branch)) is not None and branch.keys() <= _LISTED]
    if len(listed) == len(branches):
        fitting = Counter(text for own in listed for text in set(map(told, own)))
        once = [each for own in listed for each in own if fitting[told(each)] == 1]
        _also(schema, {"enum": once})
        return bool(once)
    exclusive = []
    for index, branch in enumerate(branches):
        beside = {**schema, **own} if isinstance(own := resolved(branch, root), dict) else schema
        others = (other for at, other in enumerate(branches) if at != index)
        needs = [
            opposite(resolved(other, root), beside)
            for other in others
            if not apart(branch, other, root, place.steps)
        ]
        if None in needs:
            raise refuse("oneOf", place, "more than one of its schemas may fit")
        if False not in needs:
            exclusive.append({"allOf": [branch, *needs]} if needs else branch)
    if "anyOf" in schema:
        _also(schema, *exclusive)
    else:
        schema["anyOf"] = exclusive
    return bool(exclusive)


def _pattern(schema: Schema, place: Place) -> None:
    parts = lookaheads(schema["pattern"])
    if parts is None:
        raise refuse("pattern", place, "it has a look-around that is no look-ahead at its front")
    for each in parts:
        if (why := unreadable(each)) is not None:
            raise refuse("pattern", place, why)
    *conditions, schema["pattern"] = parts
    if conditions:
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": each} for each in conditions)]


def _arrays(schema: Schema, *branches: Schema) -> None:
    """One of these must hold for arrays; of other types there may be anything."""
    others = [kind for kind in kinds(schema) if kind != "array"]
    _also(schema, *({"type": "array", **each} for each in branches), *([{"type": others}] if others else []))


def _unique(schema: Schema, place: Place) -> bool:
    """Arrays without repetition are written out: in every order where these are few, else in that of the
    values."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if schema.pop("uniqueItems") is not True or (isinstance(most, int) and most < 2):
        return True
    if (listed := values(schema)) is not None:
        schema["enum"] = [
            each for each in listed if not isinstance(each, list) or len(_distinct(each)) == len(each)
        ]
        schema.pop("const", None)
        return bool(schema["enum"])
    items = resolved(schema.get("items"), place.root)
    known = values(items)
    if known is None or items.keys() - _LISTING or "prefixItems" in schema:
        raise refuse("uniqueItems", place, "its items are no list of known values")
    known = _distinct([each for each in known if not refused(each, items)])
    sizes = range(least, min(len(known), most if isinstance(most, int) else len(known)) + 1)
    if sum(perm(len(known), size) for size in sizes) <= MAX_ARRAYS:
        arrays = [list(each) for size in sizes for each in permutations(known, size)]
    elif sum(comb(len(known), size) for size in sizes) <= MAX_ARRAYS:
        arrays = [list(each) for size in sizes for each in combinations(known, size)]
    else:
        raise refuse("uniqueItems", place, "its items have too many values")
    for key in ("items", "minItems", "maxItems"):
        schema.pop(key, None)
    _arrays(schema, *([{"enum": arrays}] if arrays else []))
    return bool(arrays) or kinds(schema) != ("array",)


def _distinct(listed: list[Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for each in listed:
        found.setdefault(told(each), each)
    return list(found.values())


def _contains(schema: Schema, place: Place) -> bool:
    """One that it must contain stands at one of the first places."""
    wanted, least = schema.pop("contains"), schema.get("minContains", 1)
    most, longest = schema.get("maxContains"), schema.get("maxItems", PLACES)
    if least == 0 and most is None:
        return True
    if not isinstance(least, int) or most is not None or "prefixItems" in schema:
        raise refuse("contains", place)
    places = min(longest, PLACES)
    if not 0 < comb(places, least) <= MAX_BRANCHES:
        raise refuse("contains", place, "there are too many places, or none, for what it wants")
    items = schema.get("items", True)
    here = wanted if items in (True, {}) else {"allOf": [items, wanted]}
    _arrays(
        schema,
        *(
            {
                "prefixItems": [here if index in chosen else items for index in range(chosen[-1] + 1)],
                "items": items,
                "minItems": chosen[-1] + 1,
            }
            for chosen in combinations(range(places), least)
        ),
    )
    return True


def _counts(schema: Schema, place: Place) -> None:
    for key in ("minContains", "maxContains"):  # they mean nothing without `contains`
        schema.pop(key, None)


def _exclusive(bound: str, exclusive: str) -> Callable[[Schema, Place], None]:
    def rule(schema: Schema, place: Place) -> None:
        """Draft 4 wrote a flag beside the bound."""
        flag = schema[exclusive]
        if isinstance(flag, bool):
            del schema[exclusive]
            if flag and bound in schema:
                schema[exclusive] = schema.pop(bound)

    return rule


def _type(schema: Schema, place: Place) -> None:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if schema.keys() & {"enum", "const"}:
        return
    if "number" in kinds:
        _end_fractions(schema)
        return
    if "integer" not in kinds:
        return
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = -MAX_INTEGER
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = MAX_INTEGER


def _end_fractions(schema: Schema) -> None:
    """A number with some bounds gets those that it lacks: within bounds llguidance writes no exponent, but
    digits without end."""
    bounds = [schema[key] for key in _BOUNDS if isinstance(schema.get(key), int | float)]
    if not bounds and "multipleOf" not in schema:
        return  # written otherwise (`documents`)
    largest = max(map(abs, bounds), default=0)
    if "multipleOf" not in schema and all(not each or abs(each) > 1e-6 for each in bounds):
        # What lies far out needs no billionths: there a float has none.
        schema["multipleOf"] = LEAST_STEP if largest < MAX_FINE else 1
    limit = MAX_INTEGER if schema.get("multipleOf", 0) >= 1 else MAX_FINE
    most = limit if largest < limit else 10 * largest
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = -most
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = most


def _min_properties(schema: Schema, place: Place) -> None:
    """So many of the optional properties are required."""
    least, required = schema["minProperties"], schema.get("required") or []
    missing = least - len(required) if isinstance(least, int) else 0
    optional = [name for name in _listed(schema) if name not in required]
    if missing <= 0:
        del schema["minProperties"]
    elif 0 < comb(len(optional), missing) <= MAX_BRANCHES:
        del schema["minProperties"]
        _also(schema, *({"required": list(each)} for each in combinations(optional, missing)))
    elif least > 1:
        # Of names that nobody listed the same may be written twice, and counts once.
        raise refuse("minProperties", place, "too few of its properties, or too many, are listed")


def _max_properties(schema: Schema, place: Place) -> None:
    """So many of the optional properties are left out, and there are no others."""
    most, required, listed = schema["maxProperties"], schema.get("required") or [], _listed(schema)
    optional = [name for name in listed if name not in required]
    unlisted = "patternProperties" in schema or set(required) - set(listed)
    if not isinstance(most, int) or not optional or unlisted:
        return
    surplus = len(listed) - most
    if surplus > 0 and not 0 < comb(len(optional), surplus) <= MAX_BRANCHES:
        raise refuse("maxProperties", place, "too many of its properties are optional, or none")
    del schema["maxProperties"]
    schema["additionalProperties"] = False
    if surplus > 0:
        left_out = combinations(optional, surplus)
        _also(schema, *({"properties": dict.fromkeys(each, False)} for each in left_out))


def _listed(schema: Schema) -> list[str]:
    return [name for name, part in schema.get("properties", {}).items() if part is not False]


def _not(schema: Schema, place: Place) -> bool:
    other = opposite(schema.pop("not"), schema)
    if other is None:
        raise refuse("not", place)
    if other is False:
        return False
    _also(schema, other)
    return True


def _if(schema: Schema, place: Place) -> bool:
    condition = schema.pop("if")
    then, other = schema.pop("then", True), schema.pop("else", True)
    if then in (True, {}) and other in (True, {}):
        return True
    without = opposite(condition, schema)
    if without is None:
        raise refuse("if", place, "its condition cannot be turned round")
    branches = [{"allOf": [condition, then]}] if then is not False else []
    branches += [{"allOf": [without, other]}] if False not in (without, other) else []
    if not branches:
        return False
    _also(schema, *branches)
    return True


def _orphans(schema: Schema, place: Place) -> None:
    for key in ("then", "else"):  # they mean nothing without `if`
        schema.pop(key, None)


def _dependent(keyword: str) -> Callable[[Schema, Place], None]:
    def rule(schema: Schema, place: Place) -> None:
        """With one property come others, or a whole schema."""
        dependencies = schema.pop(keyword)
        if not isinstance(dependencies, dict):
            raise refuse(keyword, place)
        for name, what in dependencies.items():
            needs = {"required": [name, *what]} if isinstance(what, list) else {"required": [name]}
            with_it = needs if isinstance(what, list) else {"allOf": [needs, what]}
            _also(schema, {"properties": {name: False}}, with_it)

    return rule


def _property_names(schema: Schema, place: Place) -> None:
    """Names that must look like something: listed properties that do not are taken out, others must match a
    pattern."""
    names = schema.pop("propertyNames")
    if names is True or not names or names == {"type": "string"}:
        return
    if not isinstance(names, dict) or "patternProperties" in schema:
        raise refuse("propertyNames", place)
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
        raise refuse("propertyNames", place)
    listed = schema.get("properties", {})
    fits = {name: found(pattern, name) for name in listed}
    if None in fits.values():
        raise refuse("propertyNames", place, f"{pattern!r} is no pattern")
    schema["properties"] = {name: part if fits[name] else False for name, part in listed.items()}
    schema["patternProperties"] = {pattern: rest}
    schema["additionalProperties"] = False


def _unevaluated(keyword: str, plain: str) -> Callable[[Schema, Place], None]:
    def rule(schema: Schema, place: Place) -> None:
        value = schema.pop(keyword)
        if value in (True, {}):
            return
        if schema.keys() & _COMBINING:
            raise refuse(keyword, place, "other keywords beside it evaluate properties too")
        schema.setdefault(plain, value)

    return rule


RULES: Mapping[str, Callable[[Schema, Place], bool | None]] = {
    "$ref": _ref,
    "oneOf": _one_of,
    "pattern": _pattern,  # the client's own, so before what a format is written as
    "format": _format,
    "uniqueItems": _unique,
    "contains": _contains,
    "minContains": _counts,
    "maxContains": _counts,
    "exclusiveMinimum": _exclusive("minimum", "exclusiveMinimum"),
    "exclusiveMaximum": _exclusive("maximum", "exclusiveMaximum"),
    "type": _type,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
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
"""They change a schema in place, in this order; False where nothing can fit."""
