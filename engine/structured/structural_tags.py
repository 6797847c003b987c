"""Writes structural tags as rules in Lark: texts in which the parts between tags have a shape.

The format is XGrammar's structural tag (xgrammar.mlc.ai/docs/tutorials/structural_tag), and its older form
with `structures` and `triggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.structured.json_documents import document
from engine.structured.json_schema import rewrite, weigh
from engine.structured.regexes import ANY, spelled
from engine.types import ConstraintError

SOME = "(.|\\n)+"
Object = Mapping[str, Any]


class TagWriter:
    """Writes one structural tag. spelled: a fixed text as Lark, tags as their tokens. client: the grammar of
    a regex or of a client's own. `rules` and `grammars` are what the expression refers to."""

    def __init__(self, spelled: Callable[[str], str], client: Callable[[str, str], str]) -> None:
        self._spelled = spelled
        self._client = client
        self._kinds: Mapping[str, Callable[[Object], str]] = {
            "const_string": lambda form: self._spelled(_text(form, "value")),
            "json_schema": self._json,
            "regex": lambda form: self._nested("regex", _text(form, "pattern")),
            "grammar": lambda form: self._nested("lark", _text(form, "grammar")),
            "sequence": lambda form: " ".join(map(self.write, _list(form, "elements"))) or '""',
            "or": lambda form: f"( {' | '.join(map(self.write, _list(form, 'elements')))} )",
            "any_text": lambda form: self._free(_excluded(form)),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    @classmethod
    def read(cls, source: str, spelled: Callable[[str], str], client: Callable[[str, str], str]) -> TagWriter:
        """The writer of a structural tag's JSON text, its expression under the rule `start`."""
        writer, form = cls(spelled, client), json.loads(source)
        weigh([form])
        if "structures" in form:
            tags = [
                {"begin": each.get("begin"), "end": each.get("end", ""), "content": _schema(each)}
                for each in _objects(form, "structures")
            ]
            form = {"format": {"type": "triggered_tags", "triggers": form.get("triggers"), "tags": tags}}
        inner = form.get("format", form) if form.get("type", "structural_tag") == "structural_tag" else form
        writer.rules.insert(0, f"start: {writer.write(inner)}")
        return writer

    def write(self, form: Any) -> str:
        """A format object as an expression. Raises ConstraintError."""
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise ConstraintError(f"a structural tag has no format of type {kind!r}; known: {known}")
        return self._kinds[kind](form)

    # -- kinds -----------------------------------------------------------------------------------------------

    def _rule(self, body: str, name: str = "part", options: str = "") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _json(self, form: Object) -> str:
        schema = form.get("json_schema", form.get("schema"))
        if form.get("style", "json") != "json" or not isinstance(schema, dict | bool):
            raise ConstraintError("a structural tag's json_schema must be an object, in the style of JSON")
        rewritten = rewrite({} if schema is True else _object(schema))
        return self._rule(document(rewritten, rewritten, f"part_{len(self.rules)}", self.rules))

    def _nested(self, kind: str, source: str) -> str:
        name = f"nested_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": self._client(kind, source)})
        return f"@{name}"

    def _free(self, excluded: Sequence[str]) -> str:
        unwanted = f" & ~/{ANY}({'|'.join(map(spelled, excluded))}){ANY}/" if excluded else ""
        return self._rule(f"/{SOME}/{unwanted}", "TEXT") + "?"

    def _tag(self, form: Object) -> str:
        begin, content = self._spelled(_text(form, "begin")), form.get("content")
        ends = _texts(form, "end") or [""]
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            unwanted = _excluded(content)
            return f"{begin} ( {' | '.join(self._until(each, [*unwanted, *ends]) for each in ends)} )"
        closed = " | ".join(self._spelled(each) or '""' for each in ends)
        return f"{begin} {self.write(content)}" + (f" ( {closed} )" if any(ends) else "")

    def _triggered(self, form: Object) -> str:
        triggers, tags = _texts(form, "triggers"), _objects(form, "tags")
        if not triggers or not all(triggers):
            raise ConstraintError("a structural tag's 'triggers' must be texts that are not empty")
        options = []
        for trigger in triggers:
            own = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if own:
                rests = [self._tag({**tag, "begin": tag["begin"][len(trigger) :]}) for tag in own]
                options.append((trigger, f"( {' | '.join(rests)} )"))
        if not all(_text(tag, "begin").startswith(tuple(triggers)) for tag in tags):
            raise ConstraintError("every tag must begin with one of the triggers")
        found = " | ".join(f"{self._until(trigger, triggers)} {rest}" for trigger, rest in options)
        first = " | ".join(f"{self._spelled(trigger)} {rest}" for trigger, rest in options)
        rest = self._free(triggers)
        if form.get("at_least_one"):
            return f"( {first} )" if form.get("stop_after_first") else f"( {first} ) ( {found} )* {rest}"
        return f"( {found} | {rest} )" if form.get("stop_after_first") else f"( {found} )* {rest}"

    def _until(self, mark: str, marks: Sequence[str]) -> str:
        """Any text up to a mark, which it includes, and without another."""
        if self._spelled(mark).startswith("<["):
            return f"{self._free(marks)} {self._spelled(mark)}"
        others = [each for each in marks if each != mark]
        unwanted = f" & ~/{ANY}({'|'.join(map(spelled, others))}){ANY}/" if others else ""
        terminal = self._rule(f"/{ANY}{spelled(mark)}/{unwanted}", "HEAD")
        return self._rule(terminal, "head", "[lazy]")

    def _separated(self, form: Object) -> str:
        tags = " | ".join(map(self._tag, _objects(form, "tags")))
        one = self._rule(tags)
        separator = "" if form.get("separator") is None else self._spelled(_text(form, "separator"))
        more = "" if form.get("stop_after_first") else f" ({separator} {one})*"
        return f"{one}{more}" if form.get("at_least_one") else f"( {one}{more} )?"


def _schema(structure: Object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": structure.get("schema", {})}


def _text(form: Object, key: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise ConstraintError(f"a structural tag's {key!r} must be a text")
    return value


def _list(form: Object, key: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not value:
        raise ConstraintError(f"a structural tag's {key!r} must be a list that is not empty")
    return value


def _objects(form: Object, key: str) -> list[Object]:
    value = _list(form, key)
    if not all(isinstance(each, dict) for each in value):
        raise ConstraintError(f"a structural tag's {key!r} must be a list of objects")
    return value


def _texts(form: Object, key: str) -> list[str]:
    """A text, or a list of texts, as a list; empty where there is none."""
    value = form.get(key)
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConstraintError(f"a structural tag's {key!r} must be a text or a list of texts")
    return found


def _excluded(form: Object) -> list[str]:
    return _texts(form, "excluded_str") or _texts(form, "excludes")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConstraintError("nothing fits the schema")
    return value
