"""Writes the arguments of a call as rules in Lark, for formats that do not write them as JSON.

A rule says which properties a call has, in which order, and how the value of each is written: as bare text
where the parser reads it as a string, else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

from engine.dialects import CallMarks
from engine.parsing import TEXT, Shapes, gemma_call, python_call, xml_call
from engine.structured.formats import BARE
from engine.structured.json_documents import document
from engine.structured.regexes import ANY, MAX_REPEATS, searched, spelled
from engine.structured.schema_algebra import Schema, kinds, resolved, values
from engine.types import ConstraintError, ToolShape

MAX_BRANCHES = 64  # that the choices of one schema may come to
MAX_DEPTH = 8  # of references and choices that are looked through

_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,60}/"


class Fields(NamedTuple):
    """The properties of an object. rest: the schema of further ones."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    rest: Any


class Texts(NamedTuple):
    """Strings: those listed, or all that match terms of Lark and are neither too short nor too long."""

    listed: tuple[str, ...] | None = None
    terms: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None


class ArgumentWriter:
    """Writes the arguments of one model's calls. spell: a fixed text as Lark, tags as their tokens. shapes:
    the tools as the reader knows them. `rules` are what the expressions refer to."""

    def __init__(
        self,
        marks: CallMarks,
        spell: Callable[[str], str],
        token_id: Callable[[str], int | None],
        shapes: Shapes,
    ) -> None:
        self._marks = marks
        self._spell = spell
        self._token_id = token_id
        self._shapes = shapes
        self._reads_key = {"tags": xml_call.reads_key, "keyed": gemma_call.reads_key}.get(
            marks.kind, python_call.reads_key
        )
        self._whole: Schema = {}
        self._ends: tuple[str, ...] = ()  # of a value
        self.rules: list[str] = []

    def write(self, tool: ToolShape, schema: Schema) -> str:
        """The arguments of a tool whose schema was rewritten; ConstraintError for what cannot be written."""
        if not self._reads_name(tool.name):
            raise ConstraintError(f"a tool named {tool.name!r} cannot be called in this model's dialect")
        self._whole = schema
        if self._marks.parameters is not None:
            self._ends = xml_call.value_ends(self._marks, custom=tool.input is not None)
        elif self._marks.quote:
            self._ends = (self._marks.quote,)
        found = [self._sequence(tool.name, each) for each in _fields(schema, schema)]
        options = [each or '""' for each in found if each is not None]
        if not options:
            raise ConstraintError("nothing that fits the schema can be written in this model's dialect")
        return f"( {' | '.join(options)} )"

    def before(self, key: str) -> str:
        """What stands in front of the value of an argument, whatever value."""
        if (marks := self._marks.parameters) is None:
            return f"{key}:" if self._marks.kind == "keyed" else f"{key}="
        named = f'"{key}"' if marks.quoted else key
        return f"{marks.open}{named}{'' if marks.kinds else self._opening}"

    def front(self, *, text: bool) -> str:
        """What stands between that and a value that is a text, or JSON, where it is not the same."""
        if (marks := self._marks.parameters) is None:
            return self._marks.quote if text else ""
        return f"{marks.kinds[not text]}{self._opening}" if marks.kinds else ""

    @property
    def _opening(self) -> str:
        marks = self._marks.parameters
        assert marks is not None
        return f"{marks.key_close}{marks.gap}{marks.value_open}{marks.pad}"

    def _reads_name(self, name: str) -> bool:
        if self._marks.kind == "tags":
            return xml_call.reads_name(name, in_tag=bool(self._marks.each_open))
        return gemma_call.reads_name(name) if self._marks.kind == "keyed" else python_call.reads_name(name)

    def _rule(self, body: str, name: str, *, lazy: bool = False) -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    # -- a row of arguments ----------------------------------------------------------------------------------

    def _sequence(self, tool: str, fields: Fields) -> str | None:
        """Properties in the order of the schema; None where one that is required cannot be written."""
        each: list[tuple[str, bool]] = []
        for key, part in fields.properties.items():
            value = self._value(part, self._shapes.types(tool, key)) if self._reads_key(key) else None
            if value is not None:
                each.append((f"{self._spell(self.before(key))} {value}", key in fields.required))
            elif key in fields.required:
                return None
        more = self._others(tool, fields)
        if self._marks.kind == "tags":
            row = [argument if needed else f"({argument})?" for argument, needed in each]
            return " ".join([*row, *([f"({more})*"] if more else [])])
        # With separators: what follows an argument, and what may come first.
        comma = '","' if self._marks.kind == "keyed" else '", "'
        behind = self._rule(f"({comma} {more})*" if more else '""', "behind")
        first = self._rule(f"({more} {behind})?" if more else '""', "first")
        for argument, needed in reversed(each):
            one = f"{argument} {behind}"
            behind, first = (
                self._rule(f"{comma} {one}" if needed else f"({comma} {argument})? {behind}", "behind"),
                self._rule(one if needed else f"{one} | {first}", "first"),
            )
        return first

    def _others(self, tool: str, fields: Fields) -> str:
        """An argument that the schema does not list; nothing where there is none to write. One that is free
        to come stays away where others are listed."""
        if fields.rest is False or (fields.rest in (True, {}) and fields.properties):
            return ""
        free = fields.rest in (True, {})
        value = self._value(fields.rest, None)
        known = [*fields.properties, *(() if free else self._shapes.parameters(tool))]
        if value is None:
            return ""
        unlike = f" & ~/({'|'.join(map(spelled, known))})/" if known else ""
        key = self._rule(_KEY + unlike, "KEY")
        before, _, behind = self.before("\0").partition("\0")
        return f"{self._spell(before)} {key} {self._spell(behind)} {value}"

    # -- a value ---------------------------------------------------------------------------------------------

    def _value(self, part: Any, types: frozenset[str] | None) -> str | None:
        """A value and what stands around it, so that it is read as one that fits; None where there is
        none."""
        if part is False:
            return None
        if self._marks.kind == "python":
            return self._json(part)
        any_text = part in (True, {}) and (types is None or "string" not in types)
        texts = any_text or (types is not None and "string" in types)
        marks = self._marks.parameters
        told = marks is None or marks.kinds is not None
        ways = [self._text(part, types, any_text, told) if texts else ""]
        ways += [self._json(part)] if not texts or (told and types != TEXT) else []
        return f"( {' | '.join(filter(None, ways))} )" if any(ways) else None

    def _json(self, part: Any) -> str:
        """A value as JSON."""
        close = "" if self._marks.kind == "keyed" else self._close
        schema = part if isinstance(part, dict) else {}
        body = document(schema, self._whole, f"value_{len(self.rules)}", self.rules)
        return self._placed(self._rule(body, "value"), close, text=False)

    def _text(self, part: Any, types: frozenset[str] | None, any_text: bool, told: bool) -> str:
        """A value as a bare text, nothing where there is none. told: the layout tells texts from other
        values."""
        nullable, null = types is not None and "null" in types, _takes_null(part, self._whole)
        found = [Texts()] if any_text else _texts(part, self._whole)
        terms = [term for each in found if (term := self._term(each, told or null or not nullable))]
        terms += ['"null"'] if nullable and null and not told else []
        if not terms:
            return ""
        # What closes a text is the end of its own lexeme, or the text would swallow it; a token cannot be.
        close, tags = self._close, self._marks.tags
        tokens = [at for tag in tags if self._token_id(tag) is not None and (at := close.find(tag)) >= 0]
        at = min(tokens, default=len(close))
        text = self._rule(f"( {' | '.join(terms)} ) {_quoted(close[:at])}".rstrip(), "TEXT")
        if at == len(close):  # a token after it asks for an end that is sure
            text = self._rule(text, "text", lazy=True)
        return self._placed(text, close[at:], text=True)

    @property
    def _close(self) -> str:
        """What closes a text."""
        marks = self._marks.parameters
        return self._marks.quote if marks is None else marks.pad + marks.close

    def _placed(self, value: str, close: str, *, text: bool) -> str:
        marks = self._marks.parameters
        behind = f"{close}{'' if marks is None else marks.after}"
        return " ".join(filter(None, [self._spell(self.front(text=text)), value, self._spell(behind)]))

    def _term(self, texts: Texts, null: bool) -> str:
        """Texts as a term of Lark: none holds what ends a value, or a line break that the reader takes off,
        or reads as null where that is another value."""
        marks = self._marks.parameters
        most = "" if texts.most is None else texts.most
        length = f"/(?s:.){{{texts.least},{most}}}/" if texts.least or most != "" else f"/{ANY}/"
        if texts.listed is not None:
            kept = [_quoted(each) or '""' for each in texts.listed if self._stays(each, texts)]
            length = f"( {' | '.join(kept)} )"
            if not kept:
                return ""
        unlike = [f"{ANY}({'|'.join(map(spelled, self._ends))}){ANY}"]
        unlike += [f"\\n{ANY}", f"{ANY}\\n"] if marks and marks.strip and not marks.pad else []
        unlike += [] if null else ["\\s*null\\s*"]
        return " & ".join([length, *texts.terms, *(f"~/{each}/" for each in unlike)])

    def _stays(self, text: str, texts: Texts) -> bool:
        """Whether a listed text is as long as it should be, and can be written."""
        fits = texts.least <= len(text) and (texts.most is None or len(text) <= texts.most)
        return fits and not any(end in text for end in self._ends)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


# ------------------------------------------------------------------------------------------------------------
# Schemas taken apart


def _choices(schema: Schema, root: Schema) -> list[list[Any]]:
    """What must hold beside a schema's own keywords: one of each of these lists."""
    target, groups = schema.get("$ref"), [[part] for part in schema.get("allOf", ())]
    if isinstance(target, str):
        groups.append([_found(target, root)])
    return [*groups, *([schema["anyOf"]] if "anyOf" in schema else [])]


def _found(target: str, root: Schema) -> Any:
    found = resolved({"$ref": target}, root)
    if isinstance(found, dict) and found.get("$ref") == target:
        raise ConstraintError(f"'$ref' to {target} leads nowhere")
    return found


def _bounded(found: list[Any], depth: int) -> None:
    if len(found) > MAX_BRANCHES or depth > MAX_DEPTH:
        raise ConstraintError(
            "the schema's choices are too many, or nested too deep, for this model's dialect"
        )


def _fields(schema: Any, root: Schema, depth: int = 0) -> list[Fields]:
    """The objects that fit a schema: one of these."""
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return [Fields({}, frozenset(), True)]
    if "object" not in kinds(schema):
        return []
    for keyword in ("patternProperties", "minProperties", "maxProperties", "enum", "const"):
        if keyword in schema:
            raise ConstraintError(f"{keyword!r} cannot be enforced among arguments in this model's dialect")
    rest = schema.get("additionalProperties", True)
    required = frozenset(schema.get("required", ()))
    listed = {**schema.get("properties", {})}
    found = [Fields(listed | {name: rest for name in required if name not in listed}, required, rest)]
    for group in _choices(schema, root):
        others = [each for choice in group for each in _fields(choice, root, depth + 1)]
        found = [_both(one, other) for one, other in product(found, others)]
        _bounded(found, depth)
    return [each for each in found if not any(each.properties[name] is False for name in each.required)]


def _both(one: Fields, other: Fields) -> Fields:
    names = dict.fromkeys((*one.properties, *other.properties))
    properties = {
        name: _and(one.properties.get(name, one.rest), other.properties.get(name, other.rest))
        for name in names
    }
    return Fields(properties, one.required | other.required, _and(one.rest, other.rest))


def _and(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}) or other in (True, {}):
        return other if one in (True, {}) else one
    return {"allOf": [one, other]}


def _texts(schema: Any, root: Schema, depth: int = 0) -> list[Texts]:
    """The strings that fit a schema: one of these."""
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return [Texts()]
    if "string" not in kinds(schema):
        return []
    if schema.get("minLength", 0) > MAX_REPEATS:
        raise ConstraintError(f"'minLength' of more than {MAX_REPEATS} cannot be enforced")
    listed = values(schema) if schema.keys() & {"enum", "const"} else None
    pattern, form = schema.get("pattern"), BARE.get(schema.get("format", ""))
    own = Texts(
        None if listed is None else tuple(each for each in listed if isinstance(each, str)),
        (*([f"/{searched(pattern)}/"] if pattern is not None else []), *([f"/{form}/"] if form else [])),
        schema.get("minLength", 0),
        schema.get("maxLength"),
    )
    found = [own]
    for group in _choices(schema, root):
        others = [each for choice in group for each in _texts(choice, root, depth + 1)]
        found = [_common(one, other) for one, other in product(found, others)]
        _bounded(found, depth)
    return found


def _common(one: Texts, other: Texts) -> Texts:
    listed = one.listed
    if other.listed is not None:
        listed = tuple(each for each in other.listed if listed is None or each in listed)
    ends = [each.most for each in (one, other) if each.most is not None]
    return Texts(
        listed,
        one.terms + other.terms,
        max(one.least, other.least),
        min(ends, default=None),
    )


def _takes_null(schema: Any, root: Schema) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    listed = values(schema) if schema.keys() & {"enum", "const"} else None
    own = "null" in kinds(schema) and (listed is None or None in listed)
    return own and all(any(_takes_null(each, root) for each in group) for group in _choices(schema, root))
