"""Filters on attributes: what they let through, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import ApiError
from server.vector_stores import FILTER, attributes, compiled

TOLD = {"year": 2024, "lang": "en", "draft": False, "rating": 4.5}


def is_(type: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": type, "key": key, "value": value}


@pytest.mark.parametrize(
    ("filter", "passes"),
    [
        (is_("eq", "year", 2024), True),
        (is_("eq", "year", 2024.0), True),
        (is_("eq", "year", "2024"), False),
        (is_("eq", "draft", 0), False),
        (is_("eq", "draft", False), True),
        (is_("ne", "lang", "de"), True),
        (is_("ne", "absent", "de"), True),
        (is_("gt", "rating", 4), True),
        (is_("gte", "year", 2024), True),
        (is_("lt", "year", 2024), False),
        (is_("lte", "lang", "fr"), True),
        (is_("gt", "draft", False), False),
        (is_("gt", "absent", 1), False),
        (is_("in", "lang", ["de", "en"]), True),
        (is_("nin", "lang", ["de", "en"]), False),
        (is_("nin", "absent", ["x"]), True),
        ({"type": "and", "filters": [is_("eq", "lang", "en"), is_("gt", "year", 2020)]}, True),
        ({"type": "and", "filters": [is_("eq", "lang", "en"), is_("gt", "year", 2030)]}, False),
        ({"type": "or", "filters": [is_("eq", "lang", "de"), is_("lt", "year", 3000)]}, True),
    ],
)  # fmt: skip
def test_a_filter_lets_through(filter: dict[str, Any], passes: bool) -> None:
    assert compiled(FILTER(filter, "filters"))(TOLD) is passes


def nested(depth: int) -> dict[str, Any]:
    filter = is_("eq", "a", 1)
    for _ in range(depth):
        filter = {"type": "and", "filters": [filter]}
    return filter


@pytest.mark.parametrize(
    ("filter", "param"),
    [
        ("x", "filters"),
        ({"key": "a", "value": 1}, "filters.type"),
        (is_("like", "a", 1), "filters.type"),
        ({"type": "eq", "value": 1}, "filters.key"),
        ({"type": "eq", "key": "a"}, "filters.value"),
        (is_("eq", "a", {"b": 1}), "filters.value"),
        (is_("in", "a", 1), "filters.value"),
        (is_("in", "a", []), "filters.value"),
        ({**is_("eq", "a", 1), "x": 1}, "filters.x"),
        ({"type": "or", "filters": []}, "filters.filters"),
        ({"type": "or", "filters": [is_("eq", 1, 1)]}, "filters.filters[0].key"),
        (nested(9), "filters" + ".filters[0]" * 8),
        (
            {"type": "or", "filters": [is_("in", "a", [*range(64)])] * 5},
            "filters.filters[4]",
        ),
    ],
)
def test_a_filter_is_refused_at_its_place(filter: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        FILTER(filter, "filters")
    assert refused.value.param == param


def test_attributes_are_few_and_plain() -> None:
    assert attributes(TOLD, "attributes") == TOLD
    wrong: dict[str, Any]
    for wrong in ({"a": None}, {"a": []}, {"": 1}, {"a": "x" * 513}, {str(n): n for n in range(17)}):
        with pytest.raises(ApiError):
            attributes(wrong, "attributes")
