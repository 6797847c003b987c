"""Tools as people have them: what is asked of them in many wordings, with arguments of every type.

Where `offers` has kinds of tools that are known by heart, the tools here are put together from lists of
things, attributes and verbs, so that hardly one occurs twice, and declared as the SDKs declare them.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tiny.dialogue import Call, Json, Message, dumps, says, user
from engine.tiny.extract import WEEKDAYS
from engine.tiny.words import Words

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("natural.toml").read_text(encoding="utf-8"))
NOUNS: dict[str, list[str]] = _TABLES["nouns"]
VERBS = NOUNS["verbs"]
ASKS: dict[str, list[str]] = _TABLES["asks"]
FORMS: dict[str, list[str]] = _TABLES["forms"]
FAILURES: dict[str, list[str]] = _TABLES["failures"]
SERVER: dict[str, list[Any]] = _TABLES["server"]
PAIRS: dict[str, list[str]] = _TABLES["pairs"]
HOW: dict[str, str] = _TABLES["how"]


@dataclass(frozen=True)
class Asked:
    """A tool, a question for it, and the call that answers it.

    `noun`: what it is about; `value`: how the question names it, empty where there is nothing to name;
    `key`: the parameter that takes it; `wanted`: the attribute that is asked for, where it is one;
    `more`: further questions for the tool, with their calls.
    """

    tool: Json
    question: str
    call: Call
    noun: str
    value: str = ""
    key: str = ""
    wanted: str = ""
    more: tuple[tuple[str, Call], ...] = ()

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


# --------------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True)
class Slot:
    """A parameter, its JSON schema, its value in the call, and how the question tells it (it may not)."""

    name: str
    schema: Json
    value: Json
    told: str = ""
    optional: bool = False


def _titled(name: str, schema: Json) -> Json:
    """A schema as pydantic writes it: with titles, also inside."""
    out = {"title": name.replace("_", " ").title(), **schema}
    if schema.get("type") == "array":
        out = {"items": schema["items"], "title": out["title"], "type": "array"}
    return out


def _nested(slot: Slot, defs: dict[str, Json]) -> Json:
    """A schema whose objects stand under `$defs`, as pydantic has them."""

    def model(fields: Json) -> Json:
        name = slot.name.title().replace("_", "").rstrip("s")
        properties = {key: _titled(key, value) for key, value in fields["properties"].items()}
        defs[name] = {
            "properties": properties,
            "required": list(properties),
            "title": name,
            "type": "object",
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    if slot.schema.get("type") == "object":
        return model(slot.schema)
    if slot.schema.get("type") == "array" and slot.schema["items"].get("type") == "object":
        return _titled(slot.name, {"type": "array", "items": model(slot.schema["items"])})
    return _titled(slot.name, slot.schema)


def _pydantic(name: str, slots: list[Slot], title: str, strict: bool) -> Json:
    defs: dict[str, Json] = {}
    properties = {}
    for slot in slots:
        one = _nested(slot, defs)
        if slot.optional:
            title_of = one.pop("title", None)
            one = {"anyOf": [one, {"type": "null"}], **({"title": title_of} if title_of else {})}
        properties[slot.name] = one
    out: dict[str, Json] = {"$defs": defs} if defs else {}
    out |= {"properties": properties, "required": [s.name for s in slots], "title": title, "type": "object"}
    if strict:
        out["additionalProperties"] = False
    return out


def _by_hand(rng: random.Random, slots: list[Slot]) -> Json:
    properties = {}
    for slot in slots:
        one = dict(slot.schema)
        if slot.optional:
            one["type"] = [one["type"], "null"]
            if "enum" in one:
                one["enum"] = [*one["enum"], None]
        if rng.random() < 0.3:
            one["description"] = f"The {slot.name.replace('_', ' ')}."
        properties[slot.name] = one
    out: dict[str, Json] = {"type": "object", "properties": properties}
    if slots or rng.random() < 0.5:
        out["required"] = [slot.name for slot in slots]
    if rng.random() < 0.6:
        out["additionalProperties"] = False
    return out


def declare(words: Words, name: str, about: str, slots: list[Slot]) -> Json:
    """A function with a description, its parameters laid out as one of the usual SDKs does it."""
    rng = words.rng
    style = rng.random()
    if style < 0.35:
        title = rng.choice((name, f"{name}_args", name.title().replace("_", "")))
        parameters = _pydantic(name, slots, title, True)
    elif style < 0.5:
        parameters = _pydantic(name, slots, f"{name}Arguments", False)
        if slots and rng.random() < 0.5:
            lines = [f"    {slot.name}: The {slot.name.replace('_', ' ')}." for slot in slots]
            about = "\n".join([about, "", "Args:", *lines])
    else:
        parameters = _by_hand(rng, slots)
    function: dict[str, Json] = {"name": name, "description": about, "parameters": parameters}
    if not slots and rng.random() < 0.15:
        del function["parameters"]
    return {"type": "function", "function": function}


# -------------------------------------------------------------------------------------------------- wording


def dressed(words: Words, text: str, value: str = "") -> str:
    """A question with what people put around it, and as they type it; its `value` stays as it is."""
    rng = words.rng
    if not value or not text.startswith(value):
        text = text[0].upper() + text[1:]
    if rng.random() < 0.14:
        text = f"{rng.choice(FORMS['before'])} {text}"
    if rng.random() < 0.07:
        text = f"{text} {rng.choice(FORMS['behind'])}"
    roll = rng.random()
    if roll < 0.06 and not (value and text.startswith(value)):
        text = text[0].lower() + text[1:]
    elif roll < 0.11:
        text = text.rstrip(".?!")
    return text


def _order(words: Words, text: str) -> str:
    """A command as people give it."""
    rng = words.rng
    if rng.random() < 0.5:
        return dressed(words, text + rng.choice((".", ".", ".", "", "!")))
    return dressed(words, rng.choice(FORMS["polite"]).replace("{}", text))


def listing(some: list[str], last: str = "and") -> str:
    """Words as a person lists them."""
    return f"{', '.join(some[:-1])} {last} {some[-1]}" if len(some) > 1 else some[0]


def noun_of(words: Words, table: str) -> str:
    """A thing to ask about; now and then one that does not exist, and always in what is held out."""
    if words.split == "heldout" or words.rng.random() < 0.25:
        return words.made_up() + ("s" if table == "plurals" else "")
    return words.rng.choice(NOUNS[table])


def _snake(text: str) -> str:
    return text.replace(" ", "_")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


def _named(words: Words, *names: str) -> str:
    """One of several names for a tool, in one of the usual spellings."""
    name = _snake(words.rng.choice(names))
    return _camel(name) if words.rng.random() < 0.08 else name


def title(words: Words) -> str:
    """The name of a thing: one to three invented words with capitals."""
    count = words.rng.choice((1, 1, 1, 2, 2, 3))
    draw = words.glued if words.rng.random() < 0.5 else lambda: words.made_up().capitalize()
    name = " ".join(draw() for _ in range(count))
    return words.rng.choice(("Dr. ", "St. ", "Mrs. ", "Mr. ")) + name if words.rng.random() < 0.06 else name


def _which(words: Words) -> tuple[Json, Json, str]:
    """Which one: the schema, the value, and how it is told."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.3:
        number = words.number(rng.choice((1, 2, 2, 3, 4, 5)))
        return {"type": "integer"}, number, str(number)
    if roll < 0.6:
        value = title(words)
    elif roll < 0.75:
        value = words.name()
    elif roll < 0.87:
        value = words.city().split(",")[0]
    elif roll < 0.94:
        value = words.scramble().upper()
    else:
        value = words.any()
    return {"type": "string"}, value, value


# ------------------------------------------------------------------------------------------------ questions


def lookup(
    words: Words, attribute: str = "", noun: str = "", which: tuple[Json, Json, str] | None = None
) -> Asked:
    """A question about something with a name or a number.

    What is asked, of which kind of thing, and `which` (schema, value, how it is told) are drawn if not given.
    """
    rng = words.rng
    noun = noun or noun_of(words, "things")
    schema, value, told = which or _which(words)
    adjective, many = "", ""
    roll = rng.random()
    kind = "attribute"
    if attribute:
        kind = "attribute" if roll < 0.8 else "who"
    elif roll < 0.15:
        adjective, attribute = rng.choice(list(HOW.items()))
        kind = "how"
    elif roll < 0.27:
        many = noun_of(words, "plurals")
        attribute, kind = f"number of {many}", "many"
    elif roll < 0.45:
        kind = "thing"
        attribute = rng.choice(("status", "details", "state", "info", "location", "place"))
    elif roll < 0.6:
        kind = "who"
        attribute = rng.choice(NOUNS["roles"])
    else:
        attribute = noun_of(words, "attributes")
    n, a = noun, attribute
    names = [f"get_{a}", f"{n}_{a}", f"get_{n}_{a}", f"find_{a}", f"{a}_of", f"{a}_of_{n}", f"lookup_{n}_{a}"]
    if many:
        names = [f"count_{many}", f"number_of_{many}", f"{n}_{many}", f"{many}_of", f"get_{many}_count"]
    elif kind == "thing":
        names = [
            f"get_{n}",
            f"check_{n}",
            f"inspect_{n}",
            f"{n}_info",
            f"{n}_{a}",
            f"where_is_{n}",
            f"show_{n}",
        ]
    about = rng.choice(
        (
            f"Get the {a} of a {n}.",
            f"The {a} of a {n}.",
            f"Returns the {a} of a {n}.",
            f"Look up the {a} of a {n}.",
            f"Tells the {a} of the given {n}.",
            f"Find the {a} of a {n} by its name.",
            f"The {a} of the {n}.",
            f"{n.capitalize()} to {a}.",
            f"For a {n}: its {a}.",
        )
    )
    if kind in ("how", "many", "thing", "who") and rng.random() < 0.4:
        about = {
            "how": f"How {adjective} a {n} is.",
            "many": f"How many {many} a {n} has.",
            "thing": rng.choice((f"How a {n} is doing.", f"Where a {n} is now.", f"Get a {n}.")),
            "who": f"Who is the {a} of a {n}.",
        }[kind]
    key = rng.choice((n, n, n, f"{n}_name" if isinstance(value, str) else f"{n}_id", "name", "id"))
    key = _snake(key)
    name = _named(words, *names)
    tool = declare(words, name, about, [Slot(key, schema, value)])

    def ask(value: Json) -> tuple[str, Call]:
        fills = {"{a}": a, "{n}": n, "{v}": str(value), "{j}": adjective, "{p}": many}
        return dressed(words, filled(rng.choice(ASKS[kind]), fills), str(value)), Call(name, {key: value})

    question, call = ask(value)
    more = tuple(ask(another(words, value)) for _ in range(2))
    return Asked(tool, question, call, n, told, key, a if kind == "attribute" else "", more)


def filled(text: str, fills: dict[str, str]) -> str:
    """A wording with what stands for its marks."""
    for mark, value in fills.items():
        text = text.replace(mark, value)
    return text


def another(words: Words, old: Json) -> Json:
    """Another value of the same kind: a number, or a name."""
    value: Json = old
    while value == old:
        if isinstance(old, int):
            value = words.number(len(str(old)))
        else:
            value = title(words) if words.rng.random() < 0.6 else words.name()
    return value


def parameterless(words: Words) -> Asked:
    """A question for a tool that takes nothing."""
    rng = words.rng
    kind = rng.choice(("plural", "plural", "number", "state", "gauge", "role", "press"))
    adjective, attribute = rng.choice(list(HOW.items()))
    verb = ""
    if kind in ("plural", "number"):
        n = noun_of(words, "plurals")
        names, about = {
            "plural": ([f"list_{n}", f"get_{n}", f"show_{n}", f"all_{n}", f"{n}"], f"List the {n}."),
            "number": ([f"count_{n}", f"free_{n}", f"number_of_{n}"], f"How many {n} there are."),
        }[kind]
    elif kind == "role":
        n = noun_of(words, "roles")
        names, about = [f"get_{n}", f"current_{n}", f"who_is_{n}", f"{n}_today"], f"Tells who the {n} is."
    else:
        n = noun_of(words, "single")
        verb = rng.choice(("restart", "start", "stop", "reset", "test", "clean", "refresh", "check", "empty"))
        names, about = {
            "state": ([f"{n}_status", f"{n}_state", f"get_{n}", f"check_{n}"], f"The state of the {n}."),
            "gauge": ([f"{n}_{attribute}", f"get_{n}_{attribute}"], f"The {attribute} of the {n}."),
            "press": ([f"{verb}_{n}", f"{verb}_the_{n}", f"{n}_{verb}"], f"{verb.capitalize()} the {n}."),
        }[kind]
    if rng.random() < 0.3:
        about = rng.choice((f"Get {n}.", f"About the {n}.", f"{about} No arguments.", f"Today's {n}."))
    name = _named(words, *names)
    fills = {"{p}": n, "{n}": n, "{j}": adjective, "{a}": attribute, "{v}": verb}
    question, *more = (dressed(words, filled(text, fills)) for text in rng.sample(ASKS[kind], 3))
    call = Call(name, {})
    return Asked(
        declare(words, name, about, []), question, call, n, more=tuple((text, call) for text in more)
    )


# ------------------------------------------------------------------------------------------------- commands


def _clock(words: Words) -> str:
    rng = words.rng
    return rng.choice((f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}", f"{rng.randint(1, 12)} pm"))


def _text(names: str, draw: Callable[[Words], str], *told: str) -> Callable[[Words], Slot]:
    def make(words: Words) -> Slot:
        value = draw(words)
        name = words.rng.choice(names.split())
        return Slot(name, {"type": "string"}, value, words.rng.choice(told).replace("{}", value))

    return make


def _amount(names: str, kind: str, *told: str) -> Callable[[Words], Slot]:
    def make(words: Words) -> Slot:
        rng = words.rng
        value: float = words.number(rng.choice((1, 2, 2, 3)))
        if kind == "number" and rng.random() < 0.75:
            value = round(rng.uniform(0, 100), rng.choice((1, 1, 2)))
        name = rng.choice(names.split())
        return Slot(name, {"type": kind}, value, rng.choice(told).replace("{}", str(value)))

    return make


def _choice(words: Words) -> Slot:
    """One of a few words that the schema names."""
    rng = words.rng
    pool = rng.choice(
        (NOUNS["materials"], ["small", "medium", "large"], ["low", "normal", "high"], NOUNS["goods"])
    )
    if words.split == "heldout" or rng.random() < 0.4:
        pool = [words.made_up() for _ in range(4)]
    options = rng.sample(pool, min(len(pool), rng.randint(2, 4)))
    value = rng.choice(options)
    name = rng.choice(("size", "mode", "kind", "quality", "style", "priority", "level", "color", "variant"))
    told = rng.choice(
        (f"with {name} {value}", f"in {value}", f", {value} please", f"({value})", f", {name} {value}")
    )
    return Slot(name, {"type": "string", "enum": options}, value, told)


def _things(words: Words) -> list[str]:
    """Two to five words for a list, of one sort."""
    rng = words.rng
    count = rng.choice((1, 2, 2, 3, 3, 3, 4, 5))
    roll = rng.random()
    if words.split == "heldout" or roll < 0.45:
        draw = rng.choice((words.name, words.made_up, lambda: title(words), words.any))
        return [draw() for _ in range(count)]
    return rng.sample(NOUNS[rng.choice(("materials", "goods", "plurals"))], count)


def _list_of_words(words: Words) -> Slot:
    rng = words.rng
    values = _things(words)
    name = rng.choice(
        (
            "items",
            "names",
            "tags",
            "words",
            "people",
            "members",
            "guests",
            "parts",
            "topics",
            "fields",
            "labels",
        )
    )
    if rng.random() < 0.3:
        name = words.made_up() + "s"
    told = rng.choice(
        ("with {}", "for {}", "of {}", ": {}", f", {name}: {{}}", "with the {n} {}", "from {}", "{}")
    )
    schema: Json = {"type": "array", "items": {"type": "string"}}
    text = ", ".join(values) if rng.random() < 0.25 else listing(values)
    return Slot(name, schema, values, told.replace("{n}", name).replace("{}", text))


def _list_of_numbers(words: Words) -> Slot:
    rng = words.rng
    kind = rng.choice(("integer", "integer", "number"))
    values: list[Json] = [words.number(rng.randint(1, 3)) for _ in range(rng.randint(2, 5))]
    if kind == "number":
        values = [round(rng.uniform(0, 100), rng.choice((1, 2))) if rng.random() < 0.7 else v for v in values]
    name = rng.choice(("numbers", "values", "ids", "scores", "amounts", "data", "prices", "points"))
    text = listing([str(value) for value in values])
    told = rng.choice(("with {}", "of {}", "for {}", ": {}", "{}", f", {name} {{}}")).replace("{}", text)
    return Slot(name, {"type": "array", "items": {"type": kind}}, values, told)


def _list_of_objects(words: Words) -> Slot:
    """Lines of an order and the like: a word and a number each."""
    rng = words.rng
    word, count = (
        rng.choice(
            ("item", "name", "product", "article", "thing", "sku", "title", "person", words.made_up())
        ),
        rng.choice(("quantity", "count", "amount", "number", "qty", "table", "place", "score")),
    )
    turned = rng.random() < 0.3
    objects, told = [], []
    for thing in _things(words)[: rng.choice((1, 2, 2, 3))]:
        number = rng.randint(1, 60)
        pair = {word: thing, count: number}
        objects.append({key: pair[key] for key in ((count, word) if turned else (word, count))})
        told.append((thing, number))
    form = rng.choice(
        (
            "{c} {w}",
            "{c} {w}",
            "{c} x {w}",
            "{w} x {c}",
            f"{{w}} with {count} {{c}}",
            f"{{w}} in {count} {{c}}",
        )
    )
    text = listing([form.replace("{c}", str(number)).replace("{w}", thing) for thing, number in told])
    fields = {word: {"type": "string"}, count: {"type": "integer"}}
    properties = {key: fields[key] for key in objects[0]}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    name = rng.choice(("items", "lines", "entries", "positions", "products", "places", "rows", "goods"))
    lead = rng.choice(("{}", "{}", "with {}", ": {}", "for {}")).replace("{}", text)
    return Slot(name, {"type": "array", "items": schema}, objects, lead)


def _object(words: Words) -> Slot:
    """Two fields of one thing: an address, a person, a size."""
    rng = words.rng
    number = rng.randint(1, 99)
    kind = rng.choice(("address", "person", "place", "size", "thing"))
    fields: dict[str, Json]
    if kind == "address":
        street = f"{words.made_up().capitalize()} {rng.choice(('Street', 'Road', 'Lane', 'Avenue'))} {number}"
        fields = {"street": street, "city": words.city().split(",")[0]}
        told = rng.choice(("to {0} in {1}", "at {0}, {1}", "to {0}, {1}"))
    elif kind == "person":
        fields = {"name": words.name(), "age": number}
        told = rng.choice(
            ("for {0}, {1} years old", "for {0} ({1})", "of {0}, age {1}", "for {0} of {1} years")
        )
    elif kind == "place":
        fields = {"room": title(words), "floor": number}
        told = rng.choice(("in {0} on floor {1}", "in room {0}, floor {1}"))
    elif kind == "size":
        fields = {"width": number, "height": rng.randint(1, 99)}
        told = rng.choice(("of {0} by {1}", "of width {0} and height {1}", "{0} x {1}"))
    else:
        one, two = words.made_up(), words.made_up()
        fields = {one: words.any(), two: rng.randint(1, 999)}
        told = rng.choice((f"with {one} {{0}} and {two} {{1}}", f"of {one} {{0}}, {two} {{1}}"))
    properties = {key: {"type": "integer" if isinstance(v, int) else "string"} for key, v in fields.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    for index, value in enumerate(fields.values()):
        told = told.replace(f"{{{index}}}", str(value))
    return Slot(kind if rng.random() < 0.7 else words.made_up(), schema, fields, told)


def _left_out(words: Words) -> Slot:
    """A parameter that may be null, and is: nobody mentions it."""
    rng = words.rng
    name = rng.choice(
        ("comment", "unit", "filter", "locale", "limit", "offset", "format", "deadline", "reason")
    )
    return Slot(name, {"type": rng.choice(("string", "integer"))}, None, optional=True)


def _flag(words: Words) -> Slot:
    """A boolean that a word in the request makes true; without the word it is false."""
    rng = words.rng
    name = rng.choice(
        ("urgent", "express", "private", "express", "quiet", "gift", "insured", "recurring", "frozen")
    )
    if words.split == "heldout" or rng.random() < 0.3:
        name = words.made_up()
    said = rng.random() < 0.55
    told = rng.choice(("{}", ", {}", "as {}", ", make it {}", "({})")).replace("{}", name) if said else ""
    return Slot(name, {"type": "boolean"}, said, told)


SLOTS: list[Callable[[Words], Slot]] = [
    _text("recipient person guest customer user assignee to", lambda w: w.name(), "for {}", "to {}"),
    _text("city place location town", lambda w: w.city().split(",")[0], "in {}", "in {}", "to {}", "near {}"),
    _text("date day when", lambda w: w.rng.choice(WEEKDAYS), "on {}", "on {}", "for {}"),
    _text("time start at", _clock, "at {}"),
    _text("title name label", title, "called {}", "named {}", "with the title {}", "{}"),
    _text(
        "message text note content reason", lambda w: w.phrase(2, 6), "saying {}", "with the text {}", ": {}"
    ),
    _text("source origin sender", title, "from {}"),
    _amount("minutes duration length", "integer", "for {} minutes", "of {} minutes"),
    _amount("hours duration", "integer", "for {} hours"),
    _amount("count quantity number copies people", "integer", "{} times", "for {} people", "with {} copies"),
    _amount("degrees temperature target", "integer", "to {} degrees", "at {} degrees"),
    _amount("price amount budget limit", "number", "for {} dollars", "up to {} dollars", "with {} euros"),
    _amount("weight kilograms load", "number", "of {} kilograms", "weighing {} kg", ", it weighs {} kg"),
    _amount("litres volume distance", "number", "with {} litres", "{} litres", "of {} km"),
    _choice,
    _choice,
    _list_of_words,
    _list_of_words,
    _list_of_words,
    _list_of_numbers,
    _list_of_objects,
    _list_of_objects,
    _object,
    _object,
    _flag,
    _left_out,
    _left_out,
]


def _command(words: Words) -> Asked:
    """Something to be done, with one to three arguments of any type."""
    rng = words.rng
    verb = words.made_up() if rng.random() < 0.12 else rng.choice(VERBS)
    noun = noun_of(words, "things")
    slots: list[Slot] = []
    for draw in rng.sample(SLOTS, rng.choice((1, 1, 2, 2, 3))):
        slot = draw(words)
        if slot.name not in [one.name for one in slots]:
            slots.append(slot)
    told = sorted((slot.told for slot in slots if slot.told), key=lambda text: text.startswith(":"))
    things = [slot for slot in slots if slot.told and slot.schema["type"] == "array" and len(slots) == 1]
    article = rng.choice(("a", "the", "a", "the new"))
    head = verb if things and rng.random() < 0.4 else f"{verb} {article} {noun}"
    tail = rng.random()
    if things and head == verb and tail < 0.6:
        # "Put 3 lamps and 2 chairs into the box."
        told = [
            re.sub(r"^(with|for|of|from|:|, \w+:?) ", "", told[0]),
            rng.choice(("into", "to", "in")) + f" the {noun}",
        ]
    text = head
    for one in told:
        text += one if one[0] in ":,;" else f" {one}"
    if rng.random() < 0.15:
        rng.shuffle(slots)
    name = _named(words, f"{verb}_{noun}", f"{verb}_{noun}", verb, f"{noun}_{verb}", f"{verb}_a_{noun}")
    about = rng.choice(
        (f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} {noun}s.", f"{verb.capitalize()}s a {noun}.")
    )
    tool = declare(words, name, about, slots)
    plain = ":" in text or text.endswith((")", "please"))
    question = dressed(words, text + "") if plain else _order(words, text)
    return Asked(tool, question, _call(name, slots), noun)


def _switch(words: Words) -> Asked:
    """A verb that stands for true, or its opposite for false."""
    rng = words.rng
    flag, (yes, no) = rng.choice(list(PAIRS.items()))
    noun = noun_of(words, rng.choice(("things", "single")))
    schema, value, told = _which(words)
    wanted = rng.random() < 0.5
    key = _snake(rng.choice((noun, "name", "room", "id", "target")))
    where = rng.choice(
        (f"the {noun} {told}", f"{noun} {told}", f"the {noun} in {told}", f"the {noun} of {told}", told)
    )
    verb = yes if wanted else no
    if " " in verb and rng.random() < 0.5:
        first, second = verb.split(" ")
        text = f"{first} {where} {second}"
    else:
        text = f"{verb} {where}"
    name = _named(
        words,
        f"set_{noun}",
        f"{yes}_{noun}",
        f"set_{noun}_{flag}",
        f"switch_{noun}",
        f"move_{noun}",
        f"{noun}_control",
    )
    about = rng.choice(
        (f"{yes.capitalize()} or {no} a {noun}.", f"Sets a {noun}.", f"Set whether a {noun} is {flag}.")
    )
    slots = [Slot(key, schema, value), Slot(flag, {"type": "boolean"}, wanted)]
    tool = declare(words, name, about, slots)
    return Asked(tool, _order(words, text), Call(name, {key: value, flag: wanted}), noun)


def _countable(words: Words) -> Asked:
    """So many of something, often of a kind that the schema names: three large rooms."""
    rng = words.rng
    verb, noun = rng.choice(VERBS), noun_of(words, "goods")
    count = rng.randint(1, 60)
    many = noun if count == 1 else f"{noun}s"
    name = _named(words, f"{verb}_{noun}s", f"{verb}_{noun}", verb, f"{noun}_{verb}")
    number = rng.choice(
        ("count", "quantity", "amount", "number", f"{_snake(noun)}s", "pieces_of", "how_many")
    )
    slots = [Slot(number, {"type": "integer"}, count)]
    said = f"{count} {many}"
    if rng.random() < 0.65:
        kind = _choice(words)
        slots.insert(rng.randint(0, 1), kind)
        said = rng.choice(
            (
                f"{count} {kind.value} {many}",
                f"{count} {many}, {kind.value}",
                f"{count} of the {kind.value} {many}",
            )
        )
    if rng.random() < 0.25:
        slots.append(_flag(words))
        said = f"{said} {slots[-1].told}".rstrip()
    text = rng.choice(
        (f"{verb} {said}", f"{verb} {said}", f"we need {said}, so {verb} them", f"I'd like {said}: {verb}")
    )
    tool = declare(
        words, name, rng.choice((f"{verb.capitalize()} {noun}s.", f"{verb.capitalize()} a {noun}.")), slots
    )
    return Asked(tool, dressed(words, text + rng.choice((".", "", "!"))), _call(name, slots), noun)


def _call(name: str, slots: list[Slot]) -> Call:
    return Call(name, {slot.name: slot.value for slot in slots})


def _handed_over(words: Words) -> Asked:
    """Something with a name is given to or done with somebody: two values, neither announced."""
    rng = words.rng
    verb = rng.choice(
        ("give", "send", "show", "hand", "bring", "assign", "sell", "offer", "pass", "read", "mail", "sing")
    )
    noun, role = (
        noun_of(words, "things"),
        rng.choice((*NOUNS["roles"], "person", "friend", "to", "receiver", "name")),
    )
    if words.split == "heldout":
        role = words.made_up()
    schema, value, told = _which(words)
    person = words.name() if rng.random() < 0.6 else title(words)
    slots = [Slot(_snake(noun), schema, value), Slot(_snake(role), {"type": "string"}, person)]
    if slots[0].name == slots[1].name:
        return _handed_over(words)
    text = rng.choice(
        (
            f"{verb} {told} to {person}",
            f"{verb} the {noun} {told} to {person}",
            f"{verb} {person} the {noun} {told}",
            f"{verb} {person} {told}",
            f"{person} needs {told}. {verb.capitalize()} it",
            f"{person} asked for the {noun} {told}, so {verb} it",
            f"{verb} {noun} {told} with {person}",
            f"{verb} {person} at {told}",
        )
    )
    if rng.random() < 0.25:
        kind = _choice(words)
        slots.append(kind)
        text += f" {kind.told}" if kind.told[0] != "," else kind.told
    elif rng.random() < 0.2:
        sender = title(words)
        slots.append(Slot("sender", {"type": "string"}, sender))
        text += f" from {sender}"
    if rng.random() < 0.5:
        slots.reverse()
    name = _named(words, f"{verb}_{noun}", verb, f"{noun}_{verb}", f"{verb}_to_{role}")
    about = rng.choice((f"{verb.capitalize()} a {noun} to a {role}.", f"{verb.capitalize()}s a {noun}."))
    tool = declare(words, name, about, slots)
    return Asked(tool, dressed(words, text + rng.choice((".", ".", ""))), _call(name, slots), noun)


def command(words: Words) -> Asked:
    """Something to be done, with arguments of any type."""
    roll = words.rng.random()
    if roll < 0.65:
        return _command(words)
    return _countable(words) if roll < 0.76 else _handed_over(words) if roll < 0.88 else _switch(words)


def any_asked(words: Words) -> Asked:
    """A question or a command of any of these kinds."""
    roll = words.rng.random()
    return lookup(words) if roll < 0.45 else command(words) if roll < 0.8 else parameterless(words)


def different(words: Words, count: int) -> list[Asked]:
    """`count` of them whose tools are about different things and have different names."""
    made: list[Asked] = []
    while len(made) < count:
        one = any_asked(words)
        if one.noun not in [other.noun for other in made] and one.name not in [other.name for other in made]:
            made.append(one)
    return made


# -------------------------------------------------------------------------------------------------- results


def _value_of(words: Words) -> str:
    """A short result."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.2:
        return str(words.number(5))
    if roll < 0.32:
        unit = rng.choice(
            ("cm", "km", "minutes", "hours", "dollars", "degrees", "kg", "%", "m", "days", "pieces")
        )
        number = words.number(3) if rng.random() < 0.7 else round(rng.uniform(0, 100), 1)
        return f"{number} {unit}"
    if roll < 0.42:
        lead = rng.choice(("at ", "", "", "until ", "from ", "on Monday at ", "every day at "))
        return lead + f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    if roll < 0.55:
        return title(words)
    if roll < 0.66:
        return words.name()
    if roll < 0.76:
        return words.phrase(2, 5)
    if roll < 0.84:
        return f"{words.scramble().upper()}-{words.number(3)}"
    if roll < 0.92:
        return listing([words.any() for _ in range(rng.randint(2, 3))])
    return words.any()


OK = ("ok", "done", "OK", "Done.", "true", "success", "Success", '{"ok": true}', '{"success": true}')


def result(words: Words) -> tuple[str, str]:
    """What a tool gives back, and what the assistant then says."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.08:
        return rng.choice(OK), "Done."
    if roll < 0.2:
        text = words.sentence(3, 9).rstrip("!?.") + "."
        return text, text
    if roll < 0.28:
        values = [words.any() for _ in range(rng.randint(1, 4))]
        return dumps(values), f"The result is {listing(values)}."
    if roll < 0.38:
        keys = {
            words.made_up() if rng.random() < 0.4 else rng.choice(NOUNS["attributes"]): 0
            for _ in range(rng.randint(1, 3))
        }
        found: dict[str, Json] = {
            _snake(key): words.number(3) if rng.random() < 0.5 else words.any() for key in keys
        }
        told = listing([f"the {key} is {value}" for key, value in found.items()])
        return dumps(found), told[0].upper() + told[1:] + "."
    text = _value_of(words)
    return text, f"The result is {text}."


def failure(words: Words, asked: Asked) -> tuple[str, str]:
    """The error of the tool that was asked, and what the assistant then says."""
    return failure_of(words, asked.noun, asked.name, asked.value)


def failure_of(words: Words, noun: str, name: str, value: str = "") -> tuple[str, str]:
    """An error of the tool `name`, which is about `noun`, and what the assistant then says."""
    rng = words.rng
    why = rng.choice(FAILURES["reasons"]) if rng.random() < 0.75 else words.phrase(2, 6)
    why = filled(why, {"{n}": noun, "{v}": value or words.any(), "{t}": name})
    return _as_error(rng, why), f"Sorry, the tool failed: {why}."


def _as_error(rng: random.Random, why: str) -> str:
    form = rng.choice(
        (
            "Error: {}",
            "Error: {}",
            "error: {}",
            "error: {}",
            "Error: {}.",
            "ValueError: {}",
            "ToolError: {}",
            "An error occurred while running the tool. Please try again. Error: {}",
            "Error executing tool: {}",
            "HTTP 500: {}",
            "failed: {}",
            "json",
            "status",
        )
    )
    if form == "json":
        return dumps({"error": why})
    if form == "status":
        return dumps({"status": "error", "message": why})
    return form.replace("{}", why)


def messages_of(asked: Asked, result_text: str, answer: str) -> list[Message]:
    """A question up to its answer."""
    return [
        user(asked.question),
        Message("assistant", calls=(asked.call,)),
        Message("tool", result_text),
        says(answer),
    ]
