"""Which keywords of a schema nothing heeds, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured import unheeded
from engine.structured.json_schema import rewrite
from engine.structured.keywords import MAX_UNHEEDED

ANNOTATED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "urn:a",
    "$comment": "c",
    "title": "t",
    "description": "d",
    "default": {"propertys": 1},
    "examples": [{"propertys": 1}],
    "deprecated": True,
    "readOnly": True,
    "x-order": ["a"],
    "type": "object",
    "discriminator": {"propertyName": "kind", "mapping": {}},
    "properties": {"propertys": {"type": "string", "format": "date", "enum": ["2020-01-01"]}},
    "required": ["propertys"],
}

CASES: list[tuple[Any, list[tuple[str | int, ...]]]] = [
    (ANNOTATED, []),
    ({"type": "object", "propertys": {"a": {"typ": "string"}}}, [("propertys",)]),
    ({"properties": {"a": {"typ": "string"}, "b": {"nullable": True}}}, [("properties", "a", "typ"),
                                                                          ("properties", "b", "nullable")]),
    ({"anyOf": [{"a": 1}, {"not": {"b": 1}}], "items": [{"c": 1}]}, [("anyOf", 0, "a"), ("items", 0, "c"),
                                                                       ("anyOf", 1, "not", "b")]),
    ({"items": {"maxLen": 3}, "$defs": {"n": {"min": 1}}}, [("items", "maxLen"), ("$defs", "n", "min")]),
    ({"type": "string", "format": "ipv5"}, [("format",)]),
    ({"properties": {"format": {"type": "string"}}}, []),
    # A reference gives a place a meaning, whatever it is called, and what stands there is a schema.
    ({"$ref": "#/parts/a~1b", "parts": {"a/b": {"typ": 1}, "unused": {"typ": 1}}}, [("parts", "a/b", "typ")]),
    ({"$ref": "#/parts/1", "parts": [0, {"minimun": 1}]}, [("parts", 1, "minimun")]),
    ({"$ref": "#/nowhere", "parts": {}}, [("parts",)]),
    ({"$ref": f"#/parts/{'9' * 5000}", "parts": [{"minimun": 1}]}, [("parts",)]),
    ({"$ref": "#", "x": 1}, [("x",)]),
    (True, []),
    (None, []),
    ({"properties": 3, "anyOf": "x", "items": None, "$ref": 3}, []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "paths"), CASES)
def test_what_nothing_heeds_is_told_by_its_path(schema: Any, paths: list[tuple[str | int, ...]]) -> None:
    assert [each.path for each in unheeded(schema)] == paths


@pytest.mark.parametrize(
    ("written", "meant"),
    [("propertys", "properties"), ("require", "required"), ("maxlength", "maxLength"), ("frobnicate", None)],
)
def test_a_misspelt_keyword_is_near_to_what_was_meant(written: str, meant: str | None) -> None:
    [found] = unheeded({written: 1})
    assert (found.meant(), found.known) == (meant, False)


def test_what_is_told_of_leaves_the_grammar_as_it_was() -> None:
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}}
    told = [each.path[0] for each in unheeded({**plain, "propertys": {}, "nullable": True})]
    assert told == ["propertys", "nullable"]
    kept = rewrite({**plain, "propertys": {}, "nullable": True})
    assert {key: value for key, value in kept.items() if key not in told} == rewrite(plain)


def test_what_is_told_of_one_schema_is_bounded() -> None:
    deep: dict[str, Any] = {f"unheard{number}": 1 for number in range(100_000)}
    for _ in range(900):
        deep = {"not": deep}
    found = unheeded(deep)
    assert len(found) == MAX_UNHEEDED and len(found[0].path) == 901
