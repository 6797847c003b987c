"""Values of a `format`: Python reads every date, time and duration that is written, and all of them end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, TypeAdapter

from engine import (
    Constraint,
    ConstraintError,
    GenerateRequest,
    ReaderParams,
    RenderInput,
    SamplingParams,
    ScriptedEngine,
    Shape,
    Text,
)
from engine.structured.formats import BARE, IMPLIED, LONGEST, WRITTEN
from engine.structured.grammar import allowed_ids
from engine.structured.json_schema import rewrite
from tests.engine.structured.test_call_grammar import UNTOLD, tool_of, written
from tests.engine.structured.test_call_grammar import accepts as accepts_call
from tests.engine.structured.test_grammar import mask_of, tokenizer
from tests.engine.structured.test_shapes import accepts, matcher, walk


def address(text: str) -> str:
    """A mail address, if it is one that pydantic's EmailStr and zod take."""
    local, _, domain = text.partition("@")
    assert 0 < len(local) <= 64 and all(re.fullmatch(r"[\w'+-]+", atom) for atom in local.split("."))
    *labels, top = domain.split(".")
    assert labels and all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", label, re.I) for label in labels)
    assert re.fullmatch("[a-z]{2,}", top, re.I)
    return text


READERS: dict[str, tuple[TypeAdapter[Any], Callable[[str], Any] | None]] = {
    "date": (TypeAdapter(date), date.fromisoformat),
    "time": (TypeAdapter(time), time.fromisoformat),
    "date-time": (TypeAdapter(datetime), datetime.fromisoformat),
    "duration": (TypeAdapter(timedelta), None),
    "email": (TypeAdapter(str), address),
}
MOST = {
    "date": len("2024-02-29"),
    "time": len("23:59:59.999999+23:59"),
    "date-time": len("2024-02-29T23:59:59.999999+23:59"),
    "duration": len("P999999Y999999M999999DT999999H999999M999999S"),
    "email": 62 + 1 + 3 * 42 + 12,
}
TOO_LONG = {"hostname": ".".join(["a" * 50] * 5), "uri": "a:" + "b" * 2082}


class Appointment(BaseModel):
    day: date
    at: time
    made: datetime
    lasts: timedelta
    ends: datetime | None


def shaped(schema: Any) -> Constraint:
    return Constraint(answer=Shape("json", json.dumps(schema)))


def of(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "format": name, **more}


def fits(schema: Any, value: Any) -> bool:
    return accepts("bytes", shaped(schema), json.dumps(value))


def is_read(name: str, text: str) -> None:
    reader, plain = READERS[name]
    value = reader.validate_python(text)
    assert reader.validate_json(json.dumps(text)) == value
    assert plain is None or plain(text) == value
    assert len(text) <= MOST[name]


# -- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "tiny"])
@pytest.mark.parametrize("name", WRITTEN)
def test_python_reads_whatever_is_drawn(name: str, kind: str) -> None:
    for seed in range(40):
        ids = walk(kind, shaped(of(name)), random.Random(seed), limit=MOST[name] + 20)
        assert ids is not None, "it runs on"
        is_read(name, json.loads(tokenizer(kind).decode(ids)))


@pytest.mark.parametrize("name", [*WRITTEN, *LONGEST])
def test_what_goes_on_as_long_as_it_may_ends(name: str) -> None:
    """A model that never closes the text of its own accord."""
    own, rng = tokenizer("bytes"), random.Random(1)
    state, ids = matcher("bytes", shaped(of(name))), list[int]()
    [quote] = own.encode('"')
    while not state.stopped and len(ids) < 3000:
        allowed = allowed_ids(mask_of(state, own.vocab_size)).tolist()
        ending = {quote, *own.eos_token_ids} if ids else set()
        ids.append(rng.choice([each for each in allowed if each not in ending] or allowed))
        state.advance(ids[-1])
    text = json.loads(own.decode([each for each in ids if each not in own.eos_token_ids]))
    assert len(text) <= {**MOST, **LONGEST}[name]
    if name in WRITTEN:
        is_read(name, text)


async def test_the_scripted_engine_writes_what_a_model_of_pydantic_reads() -> None:
    engine = ScriptedEngine()
    await engine.start()
    try:
        prompt = await engine.render(RenderInput([{"role": "user", "content": "hello"}]))
        request = GenerateRequest(
            "r",
            prompt.ids,
            SamplingParams(seed=1, max_tokens=1000),
            ReaderParams(starts_in=prompt.starts_in),
            shaped(Appointment.model_json_schema()),
        )
        deltas = [delta async for chunk in engine.generate(request) for delta in chunk.deltas]
    finally:
        await engine.close()
    found = Appointment.model_validate_json("".join(each.text for each in deltas if isinstance(each, Text)))
    assert found.made.tzinfo is not None and found.made.year >= 1


# -- what fits -----------------------------------------------------------------------------------------------

DAYS = {
    "good": [
        "0001-01-01",
        "9999-12-31",
        "2024-02-29",
        "2000-02-29",
        "0004-02-29",
        "2023-02-28",
        "2023-04-30",
    ],
    "bad": ["0000-01-01", "0000-02-29", "1900-02-29", "2023-02-29", "2024-02-30", "2023-04-31", "2023-13-01"],
}
CLOCKS = {
    "good": ["00:00:00Z", "23:59:59.123456+23:59", "12:30:00.5-00:00"],
    "bad": [
        "24:00:00Z",
        "23:59:60Z",
        "00:00:00.1234567Z",
        "00:00:00+24:00",
        "00:00:00z",
        "00:00:00",
        "00:00:00.Z",
    ],
}
SPANS = {
    "good": ["P1D", "P1Y2M3DT4H5M6S", "PT86400S", "P0D", "P2W", "P1M2DT3M", "PT1H2M"],
    "bad": ["P", "PT", "P1DT", "P1234567D", "P1Y2D", "P1W2D", "PT1H2S", "p1d", "1D"],
}


@pytest.mark.parametrize("where", ["json", "call"])
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", DAYS["good"], DAYS["bad"]),
        ("time", CLOCKS["good"], CLOCKS["bad"]),
        (
            "date-time",
            [f"2024-02-29T{clock}" for clock in CLOCKS["good"]]
            + [f"{day}T00:00:00Z" for day in DAYS["good"]],
            [f"2024-02-29T{clock}" for clock in CLOCKS["bad"]]
            + [f"{day}T00:00:00Z" for day in DAYS["bad"]]
            + ["2024-02-29t00:00:00Z", "2024-02-29 00:00:00Z", "2024-02-29"],
        ),
        ("duration", SPANS["good"], SPANS["bad"]),
    ],
)
def test_dates_and_times_are_those_that_python_reads(
    name: str, good: list[str], bad: list[str], where: str
) -> None:
    """In JSON, and as the bare text of an argument."""
    row, tool = UNTOLD[0], tool_of(v=of(name))
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
    for text in (*good, *bad):
        written_so = (
            fits(of(name), text)
            if where == "json"
            else accepts_call(row, "bytes", constraint, written(row, v=text), reader)
        )
        assert written_so == (text in good), text
    for text in good:
        is_read(name, text)


def test_every_day_of_the_calendar_fits_and_no_other() -> None:
    pattern = re.compile(WRITTEN["date"])
    for year in ("0000", "0001", "0400", "1900", "2000", "2023", "2024", "2100", "9999"):
        for month in range(14):
            for day in range(34):
                text = f"{year}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                except ValueError:
                    assert not pattern.fullmatch(text), text
                else:
                    assert pattern.fullmatch(text), text


@pytest.mark.parametrize("name", LONGEST)
def test_what_would_run_on_has_an_end(name: str) -> None:
    assert len(TOO_LONG[name]) == LONGEST[name] + 1
    assert fits(of(name), TOO_LONG[name][:-1])
    assert not fits(of(name), TOO_LONG[name])
    assert fits(of(name, maxLength=4000), TOO_LONG[name]), "the client's own bound holds"
    assert rewrite(of(name, minLength=3000))["minLength"] == 3000
    assert "maxLength" not in rewrite(of(name, minLength=3000))


# -- beside other keywords -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (of("date", pattern="^2"), ["2024-01-01"], ["1024-01-01", "2"]),
        (of("date", pattern="^(?=.*-02-)2"), ["2024-02-01"], ["2024-01-01", "1024-02-01"]),
        (of("date-time", maxLength=20), ["2024-01-01T00:00:00Z"], ["2024-01-01T00:00:00.5Z"]),
        (of("date-time", minLength=21), ["2024-01-01T00:00:00.5Z"], ["2024-01-01T00:00:00Z"]),
        (of("date", allOf=[{"pattern": "^2"}, {"pattern": "1$"}]), ["2024-01-01"], ["2024-01-02", "2"]),
        ({"allOf": [of("date"), {"pattern": "^2"}]}, ["2024-01-01"], ["1024-01-01", "2"]),
        ({"anyOf": [of("date"), {"type": "null"}]}, ["2024-01-01", None], ["2024-02-30"]),
        ({"type": ["string", "null"], "format": "date", "pattern": "^2"}, ["2024-01-01", None], ["x", 1]),
        ({"format": "date"}, ["2024-01-01", 5, None, [1]], ["x", "0000-01-01"]),
        ({"format": "date", "pattern": "^2"}, ["2024-01-01", 1e9], ["x", "1024-01-01"]),
        ({"type": "integer", "format": "time"}, [7], ["00:00:00Z"]),
        ({"$ref": "#/$defs/d", "$defs": {"d": of("date")}}, ["2024-01-01"], ["0000-01-01"]),
        (of("date", default="x", examples=["y"]), ["2024-01-01"], ["x", "y"]),
        # What is listed is the client's own, and fits by the standard.
        (of("date-time", const="2024-01-01t00:00:00z"), ["2024-01-01t00:00:00z"], ["2024-01-01T00:00:00Z"]),
        (of("date", enum=["x", "2024-01-01"]), ["2024-01-01"], ["x", "2024-01-02"]),
        # With a bound besides, llguidance cannot tell whether anything fits both.
        (of("email", pattern="@example"), ["a@example.org"], ["a@b"]),
        (of("email", const="a@" + "b" * 300), ["a@" + "b" * 300], ["a@b"]),
        (of("email"), ["o'brien.x@m-1.example.co.uk"], ["a@b", "a..b@c.de", ".a@c.de", "a" * 63 + "@c.de"]),
        *((of("email", pattern=each), ["a.b@c.de"], ["a@b", ".a@c.de"]) for each in IMPLIED["email"]),
        *((of("duration", pattern=each), ["P1DT2H"], ["P", "P1W2D"]) for each in IMPLIED["duration"]),
        ({"oneOf": [{"const": "never"}, of("date")]}, ["never", "2024-01-01"], ["x"]),
        ({"type": "object", "propertyNames": {"format": "date"}}, [{"2024-01-01": 1}], [{"x": 1}]),
    ],
)  # fmt: skip
def test_a_format_beside_other_keywords(schema: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert fits(schema, value), value
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)
    for value in bad:
        assert not fits(schema, value), value


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (of("date", pattern="^(?!a)b"), "'pattern' cannot be enforced"),
        ({"not": of("date")}, "'not' cannot be enforced"),
        ({"if": of("date"), "then": {"maxLength": 3}}, "'if' cannot be enforced"),
        ({"oneOf": [of("date"), of("time")]}, "'oneOf' cannot be enforced"),
        ({"type": "object", "propertyNames": of("uri")}, "'propertyNames' cannot be enforced"),
        ({"type": "string", "format": 3}, "'format' cannot be enforced: its value has another form"),
        (of("date", maxLength=9), "nothing fits the schema"),
        (of("date", pattern="^x"), "nothing fits the schema"),
    ],
)
def test_a_refusal_names_the_keyword(schema: Any, told: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(told)):
        matcher("bytes", shaped(schema))


def test_many_dates_are_still_compiled() -> None:
    names = [f"p{number}" for number in range(400)]
    schema = {"type": "object", "properties": {name: of("date-time") for name in names}, "required": names}
    assert matcher("bytes", shaped(schema)).allows(tokenizer("bytes").encode("{")[0])


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "date": "2024-02-29",
        "time": "10:00:00Z",
        "date-time": "2024-02-29T10:00:00Z",
        "duration": "P1DT2H",
        "email": "a.b@c-d.org",
        "hostname": "a.example.org",
        "ipv4": "10.0.0.255",
        "ipv6": "fe80:0:0:0:0:0:0:1",
        "uuid": "0b5c6ad4-0000-4000-8000-0123456789ab",
        "uri": "https://a.org/b/c.html",
    }.items(),
)
def test_a_value_of_each_format_fits_in_json_and_outside_of_it(name: str, text: str) -> None:
    row, tool = UNTOLD[0], tool_of(v=of(name))
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
    assert name in BARE
    assert fits(of(name), text) and not fits(of(name), f"{text} ")
    assert accepts_call(row, "bytes", constraint, written(row, v=text), reader)
    assert not accepts_call(row, "bytes", constraint, written(row, v=f"{text} "), reader)
