"""Rewrites the keywords of JSON Schema that llguidance lacks, or takes in another sense.

Every text that fits the result fits the original; keywords for which there is no such result are refused. The
semantics are those of JSON Schema 2020-12, and of drafts 4 to 7 where these differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_CEILING, Decimal
from functools import partial
from itertools import combinations, permutations
from math import ceil, comb, inf, nextafter, perm, ulp
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from engine.references import pointed
from engine.structured.formats import FORMATS, IMPLIED, LONGEST, WRITTEN
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
MAX_FINE = 99_999_999_999  # of a number that has such steps, unless a bound lies further out
MAX_INTEGER = 9 * 10**18  # of an integer, and of a number with bounds: readers refuse, or lose, longer ones
MAX_STEP = 2**32 - 1  # of `multipleOf`, without its point
MAX_PLACES = 9  # of `multipleOf`, behind its point
EXACT_DIGITS, EXACT_PLACES = 15, 22  # of a fraction: of others llguidance does not read the nearest float

_SIDES = {1: ("minimum", "exclusiveMinimum"), -1: ("maximum", "exclusiveMaximum")}
_LISTING = frozenset({"enum", "const", "type", "minimum", "maximum", "title", "description", "default"})
_FIXED = frozenset({"enum", "const"})
_LISTED = _FIXED | {"title", "description"}
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
    elif schema.keys() & _FIXED:
        pass  # what a client lists ends, and llguidance takes out what has another form
    elif name in WRITTEN:
        del schema["format"]
        pattern = f"^({WRITTEN[name]})$"
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
    if schema["pattern"] in IMPLIED.get(schema.get("format", ""), ()) and not schema.keys() & _FIXED:
        del schema["pattern"]
        return
    parts = lookaheads(schema["pattern"])
    if parts is None:
        raise refuse("pattern", place, "it has a look-around that is no positive look-ahead at its front")
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
        raise refuse(
            "uniqueItems", place, "its items are not listed: give them an enum, or take a list in its place"
        )
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


def _flag(inclusive: str, exclusive: str) -> Callable[[Schema, Place], None]:
    def rule(schema: Schema, place: Place) -> None:
        """Draft 4 wrote a flag beside the bound."""
        flag = schema[exclusive]
        if isinstance(flag, bool):
            del schema[exclusive]
            if flag and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)

    return rule


def _multiple_of(schema: Schema, place: Place) -> None:
    step, places = schema["multipleOf"], 0
    while step <= MAX_STEP and step % 1:  # as llguidance looks for a step's digits, with the same floats
        step, places = step * 10.0, places + 1
    if step > MAX_STEP or places > MAX_PLACES:
        raise refuse("multipleOf", place, "it has too many digits")


def _type(schema: Schema, place: Place) -> None:
    if schema.keys() & _FIXED:
        return
    if _whole(schema):
        _fill(schema, MAX_INTEGER)
    elif "number" in kinds(schema):
        _end_fractions(schema)


def _end_fractions(schema: Schema) -> None:
    """A number with some bounds gets those that it lacks: within bounds llguidance writes no exponent, but
    digits without end."""
    bounds = _bounds(schema)
    if not bounds and "multipleOf" not in schema:
        return  # written otherwise (`documents`)
    sizes = [abs(each.least) for each in bounds]
    if "multipleOf" not in schema and all(not size or size > 1e-6 for size in sizes):
        # Where all of it lies far out it needs no billionths: there a float has none.
        schema["multipleOf"] = 1 if any(each.least >= MAX_FINE for each in bounds) else LEAST_STEP
    limit = MAX_INTEGER if schema.get("multipleOf", 0) >= 1 else MAX_FINE
    most = limit if all(size < limit for size in sizes) else MAX_INTEGER
    _fill(schema, most)


def _fill(schema: Schema, most: int) -> None:
    """Bounds where there are none."""
    for side, (inclusive, exclusive) in _SIDES.items():
        if inclusive not in schema and exclusive not in schema:
            schema[inclusive] = -side * most


class _Bound(NamedTuple):
    """A bound that a schema has. least: turned so that numbers lie above it; side: -1 where it was turned."""

    least: int | float
    is_open: bool
    keyword: str
    side: int


def _bounds(schema: Schema) -> list[_Bound]:
    """One for each side that has any."""
    found = []
    for side, keywords in _SIDES.items():
        given = [
            _Bound(side * schema[key], key == keywords[1], key, side) for key in keywords if key in schema
        ]
        found += [max(given)] if given else []
    return found


def _narrow(schema: Schema, place: Place) -> None:
    """Bounds are written as inclusive ones of which llguidance loses nothing: it reads them as floats, not
    always the nearest ones, takes 0 to be above an exclusive 0, and fails at more digits than an integer of
    64 bits has."""
    if schema.keys() & _FIXED or "number" not in kinds(schema):
        return
    bounds = _bounds(schema)
    for each in bounds:
        if each.least > MAX_INTEGER:
            raise refuse(each.keyword, place, f"numbers beyond {each.side * MAX_INTEGER} are not written")
    if len(bounds) > 1:
        low, high = bounds[0].least, -bounds[1].least
        if low > high or (low == high and any(each.is_open for each in bounds)):
            return  # llguidance tells that nothing fits
    near = [abs(each.least) / 1000 for each in bounds if 0 < abs(each.least) < 1]
    step = LEAST_STEP if "multipleOf" in schema else min([LEAST_STEP, *near])
    least = _least_whole if _whole(schema) else partial(_least, step=step)
    for each in bounds:
        inclusive, exclusive = _SIDES[each.side]
        schema.pop(exclusive, None)
        schema[inclusive] = each.side * _as_read(
            least(_as_meant(max(each.least, -MAX_INTEGER)), each.is_open)
        )
    if len(bounds) > 1 and schema["minimum"] > schema["maximum"]:
        one, other = (each.keyword for each in bounds)
        raise refuse(one, place, f"no number that can be written lies between it and {other!r}")


def _whole(schema: Schema) -> bool:
    """Whether the numbers of a schema are integers."""
    named = schema.get("type")
    return "integer" in (listed := named if isinstance(named, list) else [named]) and "number" not in listed


def _least_whole(bound: Decimal, is_open: bool) -> Decimal:
    """The least integer above a bound."""
    least = ceil(bound)
    return Decimal(least + (is_open and least == bound))


def _least(bound: Decimal, is_open: bool, step: float) -> Decimal:
    """A bound, or where it is open a number above it that is another one as a float too."""
    return bound + Decimal(max(step, 4 * ulp(bound))) if is_open else bound


def _as_meant(bound: int | float) -> Decimal:
    """A bound as it is written; a float without a fraction as what it stands for, where that is more."""
    written = Decimal(repr(bound))
    return written if bound % 1 else max(written, Decimal(bound))


def _as_read(least: Decimal) -> int | float:
    """The least number from a given one on that llguidance reads as it is written."""
    if least != int(least):
        places = min(EXACT_PLACES, EXACT_DIGITS - 1 - least.adjusted())
        return float(least.quantize(Decimal(1).scaleb(-places), ROUND_CEILING)) or 0
    near = float(least)
    while min(Decimal(near), Decimal(repr(near))) < least:  # as an integer, and as another number
        near = nextafter(near, inf)
    return int(near)


def _all_of(schema: Schema, place: Place) -> None:
    drop_steps(schema)


def drop_steps(schema: Schema) -> None:
    """Take our own steps out of the parts of an `allOf` where a client has given one: it ends fractions too,
    and llguidance loses count of what two very different ones have in common."""
    parts = [part for part in (schema, *schema["allOf"]) if isinstance(part, dict) and "multipleOf" in part]
    if any(part["multipleOf"] != LEAST_STEP for part in parts):
        for part in parts:
            if part["multipleOf"] == LEAST_STEP:
                del part["multipleOf"]


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
        raise refuse("minProperties", place, "the object's properties are not listed, or are too many")


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
    if known <= _FIXED and known:
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


RULES: Sequence[tuple[str, Callable[[Schema, Place], bool | None]]] = (
    ("$ref", _ref),
    ("oneOf", _one_of),
    ("pattern", _pattern),  # the client's own, so before what a format is written as
    ("format", _format),
    ("uniqueItems", _unique),
    ("contains", _contains),
    ("minContains", _counts),
    ("maxContains", _counts),
    ("exclusiveMinimum", _flag("minimum", "exclusiveMinimum")),
    ("exclusiveMaximum", _flag("maximum", "exclusiveMaximum")),
    ("multipleOf", _multiple_of),
    ("type", _type),
    *((bound, _narrow) for keywords in _SIDES.values() for bound in keywords),
    ("minProperties", _min_properties),
    ("maxProperties", _max_properties),
    ("unevaluatedProperties", _unevaluated("unevaluatedProperties", "additionalProperties")),
    ("unevaluatedItems", _unevaluated("unevaluatedItems", "items")),
    ("propertyNames", _property_names),
    ("not", _not),
    ("if", _if),
    ("then", _orphans),
    ("else", _orphans),
    ("dependentRequired", _dependent("dependentRequired")),
    ("dependentSchemas", _dependent("dependentSchemas")),
    ("dependencies", _dependent("dependencies")),
    ("allOf", _all_of),
)
"""Each keyword and what is done where it stands. They change a schema in place, in this order; False where
nothing can fit."""
