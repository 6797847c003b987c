"""The agent loops that the shipped models are judged by: well formed, held out, and judged as they say."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from benchmarks.loops import FILE, World, Wrong, check_answer, same, tool_of

ENGINE = Path(__file__).parents[3] / "engine"
LISTS = [*(ENGINE / "tiny").glob("*.toml"), *(ENGINE / "small").rglob("*.toml")]
LOOPS: dict[str, Any] = tomllib.loads(FILE.read_text("utf-8"))
TURNS = [turn for loop in LOOPS["loops"] for turn in (loop, loop.get("then")) if turn]
CALLS = [call for turn in TURNS for call in (*turn.get("does", ()), *turn.get("may", ()))]
CHOICES = {"mild", "medium", "strong"}
"""Values that a schema names, so that nobody has to know them."""


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from value.split("|")
    else:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from texts(each)


def plain(value: Any) -> Any:
    """The first of alternative values."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    first = value.split("|")[0] if isinstance(value, str) else value
    return None if first == "null" else first


def test_there_are_twenty_loops_of_each_kind() -> None:
    assert set(Counter(loop["kind"] for loop in LOOPS["loops"]).values()) == {20}
    assert len(LOOPS["loops"]) == 180


def test_every_expected_call_fits_its_tool() -> None:
    for name, arguments, *_ in CALLS:
        parameters = tool_of(name, LOOPS["tools"][name])["parameters"]
        jsonschema.validate(plain(arguments), parameters)
        assert parameters["additionalProperties"] is False


def test_tools_questions_and_values_are_not_in_the_curriculum() -> None:
    assert len(LISTS) == 27
    tables = [tomllib.loads(file.read_text("utf-8")) for file in LISTS]
    listed = {text.casefold() for table in tables for text in texts(table)}
    assert not {turn["ask"].casefold() for turn in TURNS if "does" in turn} & listed
    assert not set(LOOPS["tools"]) & listed
    values = {text.casefold() for _, arguments, *_ in CALLS for text in texts(arguments)}
    assert not values & listed - CHOICES


@pytest.mark.parametrize(
    ("given", "wanted", "fits"),
    [
        ("the elbe", "Elbe|the Elbe", True),
        ("Elbe river", "Elbe|the Elbe", False),
        (True, 1, False),
        (7.0, 7, True),
        (["a", "B"], ["A", "b"], True),
        (["a"], ["a", "b"], False),
        ({"item": "a", "count": 2}, {"item": "a|as", "count": 2}, True),
        ({"item": "a"}, {"item": "a", "count": 2}, False),
        (None, "null", True),
        ("x", "null", False),
    ],
)
def test_arguments_are_compared_by_what_they_mean(given: Any, wanted: Any, fits: bool) -> None:
    assert same(given, wanted) is fits


def test_a_call_is_answered_once_and_no_other_is() -> None:
    world = World([["f", {"a": 1}, "one"]], [["f", {"a": 2}, "two"]])
    assert (world.answer("f", '{"a": 2}'), world.answer("f", '{"a": 1}')) == ("two", "one")
    for arguments in ('{"a": 1}', '{"a": 3}', "{"):
        with pytest.raises(Wrong):
            world.answer("f", arguments)


def test_an_answer_holds_what_it_has_to_and_ends() -> None:
    check_answer("It leaves at 17:40.", ["17:40|twenty to six", "leaves"])
    for text in ("It leaves soon.", "17:40 leaves " * 50):
        with pytest.raises(Wrong):
            check_answer(text, ["17:40", "leaves"])
