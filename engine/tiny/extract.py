"""The skill of reading: fields found in a text, written as JSON under a schema.

The schema is in a message, or its fields are only named, or it is the request's answer format alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.tiny.dialogue import Json, Message, Turn, dumps, says, user
from engine.tiny.phrases import listed, records
from engine.tiny.words import Words

PARAM_NAMES = listed("tools", "parameters")
WEEKDAYS = listed("words", "weekdays")
MONTHS = listed("words", "months")
RECORDS = records()
"""Kinds of text about one thing: `{key}` stands where the value of a field is told."""


@dataclass(frozen=True)
class Fact:
    """A field of a schema and what the text says of it."""

    key: str
    schema: Json
    value: Json
    told: str


def day(words: Words) -> str:
    rng = words.rng
    roll = rng.random()
    if roll < 0.45:
        return rng.choice(WEEKDAYS)
    if roll < 0.75:
        return f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"


def _text(draw: Callable[[Words], str]) -> Callable[[Words], tuple[Json, Json, str]]:
    def make(words: Words) -> tuple[Json, Json, str]:
        value = draw(words)
        return {"type": "string"}, value, value

    return make


def _number(low: int, high: int) -> Callable[[Words], tuple[Json, Json, str]]:
    def make(words: Words) -> tuple[Json, Json, str]:
        value = words.rng.randint(low, high)
        return {"type": "integer"}, value, str(value)

    return make


def _price(words: Words) -> tuple[Json, Json, str]:
    value = words.rng.randint(1, 99) + words.rng.randint(1, 99) / 100
    return {"type": "number"}, value, str(value)


def _names(words: Words) -> tuple[Json, Json, str]:
    names = [words.name() for _ in range(words.rng.randint(1, 4))]
    return {"type": "array", "items": {"type": "string"}}, names, _listed(names)


def _words(words: Words) -> tuple[Json, Json, str]:
    some = [words.any() for _ in range(words.rng.randint(1, 4))]
    return {"type": "array", "items": {"type": "string"}}, some, _listed(some)


def _listed(some: list[str]) -> str:
    return ", ".join(some[:-1]) + " and " + some[-1] if len(some) > 1 else some[0]


KINDS: dict[str, Callable[[Words], tuple[Json, Json, str]]] = {
    "name": _text(lambda words: words.name()),
    "city": _text(lambda words: words.city().split(",")[0]),
    "word": _text(lambda words: words.any()),
    "phrase": _text(lambda words: words.phrase(1, 3)),
    "title": _text(lambda words: words.phrase(2, 3).title()),
    "code": _text(lambda words: words.scramble().upper()),
    "email": _text(
        lambda words: f"{words.made_up()}@{words.made_up()}.{words.rng.choice(('com', 'org', 'net'))}"
    ),
    "date": _text(day),
    "names": _names,
    "words": _words,
    "age": _number(1, 99),
    "count": _number(1, 40),
    "year": _number(1800, 2035),
    "number": _number(0, 99_999),
    "price": _price,
}


def _invented(words: Words) -> tuple[str, list[Fact]]:
    """A text that names each of a few fields and tells its value."""
    rng = words.rng
    keys: list[str] = []
    for _ in range(rng.randint(1, 5)):
        key = rng.choice(PARAM_NAMES) if rng.random() < 0.6 else words.made_up()
        if rng.random() < 0.15:
            key += "_" + words.made_up()
        if key not in keys:
            keys.append(key)
    facts = []
    for key in keys:
        if rng.random() < 0.12:
            value = rng.random() < 0.5
            facts.append(Fact(key, {"type": "boolean"}, value, "true" if value else "false"))
        else:
            schema, what, told = KINDS[
                rng.choice(("word", "word", "name", "city", "phrase", "number", "count", "code", "words"))
            ](words)
            facts.append(Fact(key, schema, what, told))
    told_in = rng.sample(facts, len(facts))
    form = rng.choice(("The {k} is {v}.", "{k}: {v}", "{k} = {v}", "The {k} is {v}.", "Its {k} is {v}."))
    lines = [
        form.format(k=fact.key.replace("_", " ") if "The" in form else fact.key, v=fact.told)
        for fact in told_in
    ]
    between = (" ", " ", "\n") if form.endswith(".") else ("; ", "\n", "\n")
    return rng.choice(between).join(lines), facts


def _record(words: Words) -> tuple[str, list[Fact], str]:
    """A text of a known kind, all or some of its fields, and what the thing is called."""
    rng = words.rng
    record = rng.choice(RECORDS)
    text = rng.choice(record.texts)
    facts = []
    for key, kind in record.fields.items():
        if f"{{{key}}}" in text:
            schema, value, told = KINDS[kind](words)
            text = text.replace(f"{{{key}}}", told)
            facts.append(Fact(rng.choice(record.keys.get(key, [key])), schema, value, told))
    if len(facts) > 2 and rng.random() < 0.2:
        facts.remove(rng.choice(facts))
    if rng.random() < 0.3:
        rng.shuffle(facts)
    return text, facts, record.name


def schema_of(rng: random.Random, facts: list[Fact], name: str) -> Json:
    """A schema as pydantic, zod or a person would write it."""
    titled = rng.random() < 0.4
    properties = {
        fact.key: ({"title": fact.key.replace("_", " ").title()} if titled else {}) | fact.schema
        for fact in facts
    }
    out: dict[str, Json] = {
        "type": "object",
        "properties": properties,
        "required": [fact.key for fact in facts],
    }
    if titled:
        out = {"properties": properties, "required": out["required"], "title": name.title(), "type": "object"}
    if rng.random() < 0.5:
        out["additionalProperties"] = False
    return out


def extract(words: Words) -> Turn:
    """One text and its fields as JSON."""
    rng = words.rng
    if rng.random() < 0.4:
        text, facts = _invented(words)
        name = "information"
    else:
        text, facts, name = _record(words)
    schema = schema_of(rng, facts, name)
    answer = dumps({fact.key: fact.value for fact in facts})
    listed_keys = ", ".join(fact.key for fact in facts)
    roll = rng.random()
    told = rng.random() < 0.5
    system = ""
    if roll < 0.3:
        ask = rng.choice(
            (
                "Extract the {n} as JSON with this schema: {s}\n\n{t}",
                "Extract the fields of this schema:\n{s}\n\nText: {t}",
                "{t}\n\nAnswer with JSON that fits this schema: {s}",
                "Fill in this JSON schema: {s}\n\nText: {t}",
            )
        )
    elif roll < 0.5:
        system = rng.choice(
            (
                "Extract the {n} as JSON. Schema: {s}",
                "Answer with JSON that fits this schema: {s}",
                "You extract data. Reply only with JSON of this schema:\n{s}",
            )
        )
        ask = "{t}"
    elif roll < 0.7:
        ask = rng.choice(
            (
                "Extract {k} as JSON: {t}",
                "Extract the fields {k} from this text as JSON.\n\n{t}",
                "Give me {k} as JSON.\n{t}",
                "Read this and answer with JSON (keys: {k}): {t}",
            )
        )
    else:
        told = True
        if rng.random() < 0.7:
            system = rng.choice(
                (
                    "Extract the {n} information.",
                    "Extract the {n}.",
                    "Extract the {n} from the text.",
                    "You extract data.",
                )
            )
            ask = "{t}"
        else:
            ask = rng.choice(
                ("Extract the {n}: {t}", "Extract the {n} information: {t}", "Read this as JSON: {t}")
            )
    fill = {"{n}": name, "{s}": dumps(schema), "{k}": listed_keys}
    for mark, value in fill.items():
        ask, system = ask.replace(mark, value), system.replace(mark, value)
    messages = [Message("system", system)] if system else []
    messages += [user(ask.replace("{t}", text)), says(answer)]
    return Turn("extract" if roll < 0.7 else "extract_format", messages, schema=schema, told=told)
