"""The skills of tools: made-up and familiar ones on offer, questions for them, calls, results and answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from engine.tiny.dialogue import Call, Json, Message, Turn, dumps, says, user
from engine.tiny.phrases import chains, families, listed
from engine.tiny.words import Words

VERBS = listed("tools", "verbs")
PARAM_NAMES = listed("tools", "parameters")
SKIES = listed("tools", "skies")
# Examples in a description are there to be ignored.
CITY_HINTS = listed("tools", "city_hints")
WEATHER, *FAMILIES = families()
STOCK_RESULTS = ("word", "number", "phrase")


@dataclass(frozen=True)
class Param:
    """A parameter of a tool and how values for it are drawn."""

    name: str
    kind: str
    description: str = ""
    enum: tuple[str, ...] = ()

    def schema(self, rng: random.Random, style: int) -> Json:
        kinds = {"integer": "integer", "number": "number", "boolean": "boolean"}
        out: dict[str, Json] = {"type": kinds.get(self.kind, "string")}
        if self.enum:
            out["enum"] = list(self.enum)
        if style == 1:
            out = {"title": self.name.replace("_", " ").title(), **out}
        if style == 2 or (style == 0 and rng.random() < 0.3):
            plain = f"The {self.name.replace('_', ' ')}."
            out["description"] = rng.choice(CITY_HINTS) if self.kind == "city" else self.description or plain
        return out

    def value(self, words: Words) -> Json:
        rng = words.rng
        if self.enum:
            return rng.choice(self.enum)
        if self.kind == "integer":
            return words.number(rng.randint(1, 5))
        if self.kind == "number":
            return round(rng.uniform(0, 1000), rng.randint(1, 2)) if rng.random() < 0.5 else words.number(3)
        if self.kind == "boolean":
            return rng.random() < 0.5
        if self.kind == "city":
            return words.city()
        if self.kind == "name":
            return words.name()
        if self.kind == "email":
            return f"{words.made_up()}@{words.made_up()}.{rng.choice(('com', 'org', 'net', 'io', 'de'))}"
        if self.kind == "phrase":
            return words.phrase(1, 5)
        return words.any()


def _made_up_parameters(words: Words, noun: str) -> list[Param]:
    """Up to three parameters of different names, none of them `noun`."""
    rng = words.rng
    params: list[Param] = []
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 3))):
        field_name = rng.choice(PARAM_NAMES) if rng.random() < 0.75 else words.made_up()
        if field_name in [p.name for p in params] or field_name == noun:
            continue
        kind = rng.choice(
            (
                "word",
                "word",
                "word",
                "phrase",
                "integer",
                "integer",
                "integer",
                "name",
                "city",
                "number",
                "boolean",
                "enum",
            )
        )
        enum = tuple({words.made_up(): 0 for _ in range(3)}) if kind == "enum" else ()
        params.append(Param(field_name, kind, enum=enum))
    return params


def made_up_tool(words: Words, verb: str = "") -> tuple[Json, list[Param], Callable[[list[str]], str]]:
    """A tool that nobody has seen, and a function that asks for it. verb: what its name says it does."""
    rng = words.rng
    verb = verb or (rng.choice(VERBS) if rng.random() < 0.75 else words.made_up())
    noun = words.made_up() if rng.random() < 0.75 or words.split == "heldout" else words.common()
    style = rng.random()
    name = f"{verb}_{noun}"
    if style < 0.12:
        name = verb + noun.capitalize()
    elif style < 0.2:
        name = f"{noun}_{verb}"
    elif style < 0.28:
        name = noun
    elif style < 0.36:
        name = f"{verb}_{noun}_{words.made_up()}"
    params = _made_up_parameters(words, noun)
    silent: list[Param] = []
    if params and rng.random() < 0.15:
        silent = [
            Param(f"{rng.choice(PARAM_NAMES)}_{words.made_up()}", rng.choice(("word", "integer", "boolean")))
        ]
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun}.",
            f"{verb.capitalize()} a {noun}.",
            f"{verb.capitalize()}s a {noun}.",
            f"Use this to {verb} a {noun}.",
            f"{verb.capitalize()} {noun}",
            f"A tool to {verb} the {noun}.",
            f"{verb.capitalize()} the {noun} of the {words.made_up()}.",
            words.sentence(3, 7),
            "",
        )
    )
    tool = declare(words, name, description, params, silent)

    def ask(values: list[str]) -> str:
        pairs = [f"{p.name} {v}" for p, v in zip(params, values, strict=True)]
        if rng.random() < 0.25:
            pairs = [f"{p.name}={v}" for p, v in zip(params, values, strict=True)]
        elif rng.random() < 0.2:
            pairs = [f"{p.name} is {v}" for p, v in zip(params, values, strict=True)]
        if len(params) == 1 and rng.random() < 0.35:
            pairs = [values[0]]
        listed = ", ".join(pairs[:-1]) + " and " + pairs[-1] if len(pairs) > 1 else "".join(pairs)
        what = rng.choice(
            (f"{verb} the {noun}", f"{verb} a {noun}", f"use {name}", f"call {name}", f"run {name}")
        )
        if description == "" or description[0:3].lower() not in (verb[:3], "use", "a t"):
            what = rng.choice((f"use {name}", f"call {name}", f"call the tool {name}", f"{verb} the {noun}"))
        text = f"{what} {rng.choice(('with', 'for', 'with'))} {listed}" if listed else what
        form = rng.choice(
            ("{}.", "{}.", "Please {}.", "Can you {}?", "{}", "I want to {}.", "Now {}.", "Could you {}?")
        )
        text = form.format(text)
        return text[0].upper() + text[1:] if rng.random() < 0.9 else text

    return tool, params, ask


def declare(
    words: Words, name: str, description: str, params: list[Param], silent: list[Param] | None = None
) -> Json:
    """A tool in the form that chat clients send, in one of the styles they have.

    `silent` parameters are optional ones that no question mentions: calls leave them out.
    """
    rng = words.rng
    style = rng.choice((0, 0, 1, 2))
    if description and rng.random() < 0.12:
        description += " " + words.filler(rng.randint(1, 2))
    every = [*params, *(silent or [])]
    schema: dict[str, Json] = {"type": "object", "properties": {p.name: p.schema(rng, style) for p in every}}
    if params and (silent or rng.random() < 0.85):
        schema["required"] = [p.name for p in params]
    if style == 1:
        schema["title"] = f"{name}_args"
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    function: dict[str, Json] = {"name": name}
    if description:
        function["description"] = description
    if params or rng.random() < 0.7:
        function["parameters"] = schema
    if rng.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Offer:
    """A tool on offer, with a question for it, the call that answers it, and how its result is told."""

    tool: Json
    question: str
    call: Call
    answer: str
    results: tuple[str, ...]

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


def shown(value: Json) -> str:
    """A value as a person types it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def offer(words: Words) -> Offer:
    rng = words.rng
    roll = rng.random()
    if roll < 0.45:
        tool, params, ask = made_up_tool(words)
        values = [p.value(words) for p in params]
        question = ask([shown(v) for v in values])
        call = Call(tool["function"]["name"], {p.name: v for p, v in zip(params, values, strict=True)})
        return Offer(tool, question, call, "The result is {r}.", STOCK_RESULTS)
    family = WEATHER if roll < 0.65 else rng.choice(FAMILIES)
    params = [
        Param(rng.choice(names), kind) for names, kind in zip(family.parameters, family.kinds, strict=True)
    ]
    if len({p.name for p in params}) < len(params):
        return offer(words)
    values = []
    for param in params:
        if param.kind == "path":
            endings = (".py", ".txt", ".md", ".json", " -l", " --help", "/" + words.made_up())
            values.append(words.made_up() + rng.choice(endings))
        elif param.kind == "scramble":
            values.append(words.scramble().upper())
        elif param.kind == "currency":
            values.append(
                rng.choice(("euros", "yen", "pounds", "francs", "rupees", "pesos", words.made_up()))
            )
        else:
            values.append(param.value(words))
    arguments: dict[str, Json] = {p.name: v for p, v in zip(params, values, strict=True)}
    question = rng.choice(family.questions).format(*map(shown, values))
    if family is WEATHER and rng.random() < 0.3:
        # An optional unit, filled only when the question names one; a required one falls back to the first.
        units = rng.choice(
            (
                ("celsius", "fahrenheit"),
                ("celsius", "fahrenheit"),
                ("fahrenheit", "celsius"),
                ("metric", "imperial"),
            )
        )
        unit = Param(rng.choice(("unit", "units")), "enum", enum=units)
        tool = declare(words, rng.choice(family.names), rng.choice(family.descriptions), [*params, unit])
        schema = tool["function"]["parameters"]
        required = rng.random() < 0.3
        schema["required"] = [params[0].name] + ([unit.name] if required else [])
        if rng.random() < 0.4:
            chosen = rng.choice(units)
            question = question.rstrip("?.") + f" in {chosen}" + question[len(question.rstrip("?.")) :]
            arguments[unit.name] = chosen
        elif required:
            arguments[unit.name] = units[0]
    else:
        tool = declare(words, rng.choice(family.names), rng.choice(family.descriptions), params)
    if rng.random() < 0.06:
        question = question[0].lower() + question[1:]
    call = Call(tool["function"]["name"], arguments)
    answer = family.answer
    for index, value in enumerate(values):
        answer = answer.replace(f"{{{index}}}", shown(value))
    return Offer(tool, question, call, answer, family.results)


def result_of(words: Words, made: Offer) -> tuple[str, str]:
    """What the tool gives back, and what the assistant then says."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.06:
        why = (
            words.phrase(1, 4)
            if rng.random() < 0.6
            else rng.choice(("not found", "timeout", "permission denied"))
        )
        return f"Error: {why}", f"Sorry, the tool failed: {why}."
    kind = rng.choice(made.results)
    degrees = rng.randint(-15, 40)
    if roll < 0.28:
        keys = rng.sample(
            ("status", "value", "count", "temperature", "condition", "name", "total", "id", words.made_up()),
            rng.randint(1, 3),
        )
        values: dict[str, Json] = {}
        for key in keys:
            numeric = key in ("count", "temperature", "total", "id") or (
                key == "value" and rng.random() < 0.5
            )
            values[key] = words.number(3) if numeric else words.any()
        told = [f"the {key} is {value}" for key, value in values.items()]
        text = ", ".join(told[:-1]) + " and " + told[-1] if len(told) > 1 else told[0]
        return dumps(values), text[0].upper() + text[1:] + "."
    if roll < 0.42:
        text = words.sentence(3, 9).rstrip("!?.") + "."
        if kind == "weather":
            text = rng.choice(
                (
                    "It is {s} in {c}.",
                    "The weather in {c} is {s}.",
                    "{s}, {d} degrees in {c}.",
                    "It is {d} degrees and {s} in {c}.",
                )
            ).format(s=rng.choice(SKIES), c=next(iter(made.call.arguments.values())), d=degrees)
        return text, text
    if kind == "weather":
        text = rng.choice(SKIES) if rng.random() < 0.8 else words.phrase(1, 2)
        text = rng.choice(("{}", "{}", "{}", "{}, {} degrees", "{} and {} degrees", "{}, {}°C")).format(
            text, degrees
        )
    elif kind == "degrees":
        text = rng.choice(("{} degrees", "{}°C", "{} C", "{}")).format(degrees)
    elif kind == "time":
        text = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    elif kind == "number":
        text = str(words.number(6))
    elif kind == "ok":
        text = rng.choice(("ok", "done", "sent", "success", "true", "OK", "Done"))
    elif kind == "phrase":
        text = words.phrase(2, 5)
    else:
        text = words.any()
    return text, made.answer.replace("{r}", text)


def offers(words: Words, low: int = 1, high: int = 5) -> list[Offer]:
    """`low` to `high` different tools; the first is the one that will be asked for."""
    made: list[Offer] = []
    rng = words.rng
    wanted = rng.randint(low, high) if rng.random() < 0.6 else rng.randint(low, min(high, 3))
    while len(made) < wanted:
        one = offer(words)
        # Two tools of the same family would make the question ambiguous.
        if not any(same_family(one.name, other.name) for other in made):
            made.append(one)
    return made


@cache
def _alike() -> list[set[str]]:
    """Names of tools that do the same: those of a family, and of the links of chains that share one."""
    sets = [set(family.names) for family in (WEATHER, *FAMILIES)]
    for link in (link for chain in chains() for link in (chain.first, chain.second)):
        near = [names for names in sets if names & set(link.names)]
        for names in near:
            names.update(link.names)
        if not near:
            sets.append(set(link.names))
    return sets


def same_family(one: str, other: str) -> bool:
    """Whether two names are of the same kind of tool, or the same."""
    return one == other or any({one, other} <= names for names in _alike())


def use_tool(words: Words, made: Offer, whole: bool = False) -> Turn:
    """The question and the call; half the time, or when `whole`, also the result and the answer."""
    messages = [user(made.question), Message("assistant", calls=(made.call,))]
    if not whole and words.rng.random() < 0.45:
        return Turn("tool_call", messages)
    result, answer = result_of(words, made)
    return Turn("tool_answer", [*messages, Message("tool", result), says(answer)])
