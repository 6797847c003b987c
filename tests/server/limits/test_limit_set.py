"""Limits as they are written: strict where somebody types them, and kept as they were given."""

from __future__ import annotations

from typing import Any

import pytest

from server.limits import NONE, LimitSet, changed, load_limits, parse_limits, read_limits


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"request_per_minute": 1}, "did you mean 'requests_per_minute'"),
        ({"models": {"m": {"stored_bytes": 1}}}, "'stored_bytes' is one of everything"),
        ({"requests_per_minute": 0}, "requests_per_minute: .*greater than or equal to 1"),
        ({"requests_per_minute": "60"}, "requests_per_minute: .*valid integer"),
        ({"requests_per_minute": True}, "requests_per_minute: .*valid integer"),
        ({"requests_per_minute": 1.5}, "requests_per_minute: .*valid integer"),
        ({"models": 3}, "models: "),
        ([], "limits: "),
    ],
)
def test_what_is_no_limit_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_limits(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["requests_per_minute"], "not of the form"),
        (["=3"], "not of the form"),
        ([":tokens_per_day=3"], "not of the form"),
        (["token_per_day=3"], "did you mean 'tokens_per_day'"),
        (["m:stored_bytes=3"], "'stored_bytes' is one of everything"),
        (["tokens_per_day=many"], "no whole number"),
        (["tokens_per_day=-1"], "no whole number"),
        (["tokens_per_day=0"], "greater than or equal to 1"),
        (["total_tokens=1.5"], "no whole number"),
        (["total_cost=1,5"], "no number"),
        (["total_cost=0"], "greater than 0"),
        (["m:total_cost=1"], "'total_cost' is one of everything"),
        (["models=3"], "no limit 'models'"),
    ],
)
def test_words_that_are_no_limit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_limits(words)


def test_words_change_what_was_there() -> None:
    before = read_limits({"requests_per_minute": 5, "models": {"a": {"tokens_per_day": 7}, "b": {}}})
    words = [
        "requests_per_minute=none",
        "total_cost=2.5",
        "stored_bytes=9",
        "a:requests_per_day=2",
        "org/x:y:tokens_per_day=1",
    ]
    after = changed(before, parse_limits(words))
    assert after.given() == {
        "stored_bytes": 9,
        "total_cost": 2.5,
        "models": {"a": {"tokens_per_day": 7, "requests_per_day": 2}, "org/x:y": {"tokens_per_day": 1}},
    }
    assert load_limits(after.dump()) == after
    assert changed(after, parse_limits(["a:tokens_per_day=none"])).models["a"].tokens_per_day is None


def test_nothing_is_stored_as_nothing() -> None:
    assert (NONE.dump(), load_limits(None)) == (None, NONE)
    assert read_limits({"models": {"a": {}}}).dump() is None


def test_limits_of_a_newer_version_do_not_keep_the_server_from_its_work() -> None:
    found = load_limits(b'{"tokens_per_year":1,"tokens_per_day":2,"models":{"a":{"dreams":1}}}')
    assert found.given() == {"tokens_per_day": 2}


def test_an_owners_own_limit_replaces_the_default() -> None:
    defaults = LimitSet(requests_per_minute=5, tokens_per_day=6)
    own = LimitSet(requests_per_minute=50)
    assert own.over(defaults).given() == {"requests_per_minute": 50, "tokens_per_day": 6}


@pytest.mark.parametrize(("written", "bytes"), [("64K", 65_536), ("2M", 2_097_152), ("1g", 2**30), ("7", 7)])
def test_stored_bytes_are_written_as_in_settings(written: str, bytes: int) -> None:
    assert parse_limits([f"stored_bytes={written}"]) == {"stored_bytes": bytes}
    with pytest.raises(ValueError, match="no whole number"):
        parse_limits(["requests_per_day=2M"])
