"""Tools of everyday life and how people ask for them, read from the tables beside this module.

A table has named lists of values, tools, and chains of two tools. `tables/README.md` describes its format.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from engine.tiny import Json, natural

TABLES = Path(__file__).with_name("tables")
WORDS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)
SLOT = re.compile(r"\{([a-z_0-9.]+)\}")
REFUSAL = re.compile(
    r"\b(?:refused|rejected|denied|declined|fail\w*|error|unknown|offline|off|missing|cannot|can't|could|not|"
    r"no|nobody|nothing|none|too|full|passed|busy|invalid|expired|closed|cancelled|unavailable|already|only)\b",
    re.IGNORECASE,
)
"""Results that may mean that nothing was done."""
TYPES = {"text": "string", "whole": "integer", "number": "number", "yes": "boolean"}

Arguments = dict[str, Json]

COINED = 0.4
"""How many of the names in requests are ones that nobody has heard."""


class TableError(Exception):
    """A table says something that cannot be drawn from; the message names the tool and the text."""


@dataclass(frozen=True)
class Request:
    """What a user says, with slots in braces, and the arguments that its words imply."""

    say: str
    given: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: str | Mapping[str, Any]) -> Request:
        return cls(entry) if isinstance(entry, str) else cls(entry["say"], entry.get("with", {}))

    def slots(self) -> list[str]:
        """Names of the parameters that the text tells, in their order."""
        return [slot.split(".")[0] for slot in SLOT.findall(self.say)]


@dataclass(frozen=True)
class Tool:
    """A tool: its parameters by name in the words of the table, the sources of their values, its texts."""

    name: str
    about: str
    takes: Mapping[str, Any]
    source: Mapping[str, Any]
    asks: Sequence[Request]
    gives: Sequence[str]
    answers: Sequence[str]
    also: Sequence[Request]
    two: Sequence[Request]
    unable: Sequence[str]
    each: Sequence[str]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Tool:
        requests = {key: [Request.read(one) for one in table.get(key, [])] for key in ("asks", "also", "two")}
        return cls(
            table["name"],
            table["about"],
            table["takes"],
            table.get("from", {}),
            gives=table["gives"],
            answers=table["answers"],
            unable=table.get("unable", []),
            each=table.get("each", []),
            **requests,
        )


@dataclass(frozen=True)
class Chain:
    """Two tools, the second of which takes as `link` what the first one gives: one of `values`.

    `asks` want both in one request, `then` the second after the first has answered.
    """

    first: Tool
    second: Tool
    link: str
    values: Sequence[str]
    asks: Sequence[Request]
    then: Sequence[Request]


def coined(rng: random.Random) -> str:
    """A name that nobody has heard, so that names are copied and not remembered."""
    words = [
        "".join(rng.choices(WORDS["syllables"], k=rng.choice((2, 2, 2, 3))))
        for _ in range(rng.choice((1, 1, 1, 2)))
    ]
    return " ".join(
        word.capitalize()
        + rng.choice(("", "", "n", "s", "ck", "ff", "th", "ld", "rt", "x", "tz", "sk", "gh"))
        for word in words
    )


def grafted(rng: random.Random, words: Sequence[str]) -> str:
    """The beginning of one word and the end of another: coined names have the sound of their syllables, by
    which a model could go on with them instead of copying; these sound like anything."""
    first, last = rng.sample(words, 2)
    return first[: rng.randint(2, len(first) - 1)] + last[rng.randint(1, len(last) - 2) :]


def _are_names(texts: Sequence[str]) -> bool:
    """Whether most of these are names, as of towns and people; lists of numbers and codes are none."""
    capital = sum(text[0].isupper() and not any(letter.isdigit() for letter in text) for text in texts)
    return capital > 0.85 * len(texts)


def is_optional(spec: Any) -> bool:
    return isinstance(spec, str) and spec.endswith("?")


def schema_of(spec: Any) -> Json:
    """The JSON schema of a parameter in the words of a table."""
    if isinstance(spec, list):
        return {"type": "array", "items": schema_of(spec[0])}
    if isinstance(spec, Mapping):
        properties = {key: schema_of(value) for key, value in spec.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    spec = spec.removesuffix("?")
    return {"type": "string", "enum": spec.split("|")} if "|" in spec else {"type": TYPES[spec]}


class Table:
    """One file of tools that may stand beside each other. Raises TableError."""

    def __init__(self, path: Path) -> None:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        self.values: dict[str, list[str]] = read["values"]
        self.names = {key for key, texts in self.values.items() if _are_names(texts)}
        named = (word for key in self.names for text in self.values[key] for word in text.split())
        self.words = sorted({word for word in named if len(word) > 3 and word.isalpha()})
        self.tools = {one["name"]: Tool.read(one) for one in read["tools"]}
        self.chains = [
            Chain(
                self.tools[one["first"]],
                self.tools[one["second"]],
                one["link"],
                self.values[one["values"]],
                [Request.read(ask) for ask in one["asks"]],
                [Request.read(ask) for ask in one.get("then", [])],
            )
            for one in read.get("chains", [])
        ]

    # ------------------------------------------------------------------------------------------------ values

    def _draw(self, rng: random.Random, spec: Any, source: Any) -> Json:
        """A value of a parameter."""
        if isinstance(spec, list):
            return self._several(rng, spec[0], source)
        if isinstance(spec, Mapping):
            return {key: self._draw(rng, value, source[key]) for key, value in spec.items()}
        spec = spec.removesuffix("?")
        if "|" in spec:
            return rng.choice(spec.split("|"))
        if spec == "text":
            if source in self.names and rng.random() < COINED:
                return self.unheard(rng)
            return rng.choice(self.values[source])
        low, high = source.split("-")
        if spec == "whole":
            return rng.randint(int(low), int(high))
        return round(rng.uniform(float(low), float(high)), rng.choice((1, 1, 2)))

    def unheard(self, rng: random.Random) -> str:
        """A name that stands in no list: of syllables, or of the words of names that do."""
        if len(self.words) < 2 or rng.random() < 0.5:
            return coined(rng)
        more = f" {grafted(rng, self.words)}" if rng.random() < 0.25 else ""
        return f"{grafted(rng, self.words).capitalize()}{more.title()}"

    def _draw_other(self, rng: random.Random, tool: Tool, name: str, known: Arguments) -> Json:
        """A value that no parameter of the same source has: nobody goes from a town to the same town."""
        spec, source = tool.takes[name], tool.source.get(name)
        taken = [known[other] for other in tool.takes if other in known and tool.source.get(other) == source]
        value = self._draw(rng, spec, source)
        while spec == "text" and value in taken:
            value = self._draw(rng, spec, source)
        return value

    def _several(self, rng: random.Random, spec: Any, source: Any) -> list[Json]:
        """Two to five values; objects differ in their first field."""
        found: dict[Json, Json] = {}
        wanted = rng.choice((2, 2, 3, 3, 4, 5))
        while len(found) < wanted:
            value = self._draw(rng, spec, source)
            found.setdefault(next(iter(value.values())) if isinstance(value, dict) else value, value)
        return list(found.values())

    def _fill(self, rng: random.Random, tool: Tool, say: str, arguments: Arguments) -> str:
        """A text with its slots filled in."""

        def told(found: re.Match[str]) -> str:
            name, _, inner = found[1].partition(".")
            value = arguments[name][inner] if inner else arguments[name]
            if isinstance(value, list):
                return natural.listing([self._line(rng, tool, one) for one in value])
            return str(value)

        return SLOT.sub(told, say)

    def _line(self, rng: random.Random, tool: Tool, value: Json) -> str:
        """One value of a list, as a person says it."""
        if not isinstance(value, dict):
            return str(value)
        return SLOT.sub(lambda found: str(value[found[1]]), rng.choice(tool.each))

    # ---------------------------------------------------------------------------------------------- requests

    def ask(
        self,
        rng: random.Random,
        tool: Tool,
        request: Request,
        known: Mapping[str, Json] | None = None,
    ) -> tuple[str, Arguments]:
        """What the user says, and the arguments of the call. known: arguments that are settled already."""
        arguments: Arguments = {**(known or {})}
        for name in request.slots():
            if name not in tool.takes:
                raise TableError(f"{tool.name} has no parameter {name}: {request.say!r}")
            if name not in arguments:
                arguments[name] = self._draw_other(rng, tool, name, arguments)
        arguments |= request.given
        return self._fill(rng, tool, request.say, arguments), self._complete(tool, request.say, arguments)

    def _complete(self, tool: Tool, say: str, arguments: Arguments) -> Arguments:
        """The arguments in the order of the parameters; those left out are null where they may be."""
        if strange := arguments.keys() - tool.takes.keys():
            raise TableError(f"{tool.name} does not take {sorted(strange)}: {say!r}")
        for name, spec in tool.takes.items():
            if name not in arguments and not is_optional(spec):
                raise TableError(f"{tool.name} needs {name}, which is not told: {say!r}")
        return {name: arguments.get(name) for name in tool.takes}

    def ask_for_two(
        self, rng: random.Random, tool: Tool, request: Request
    ) -> tuple[str, Arguments, Arguments]:
        """One request for two values of a parameter, `{name}` and `{name2}`: what is said, and both calls."""
        doubled = [
            slot.removesuffix("2")
            for slot in request.slots()
            if slot.endswith("2") and slot not in tool.takes and slot.removesuffix("2") in tool.takes
        ]
        if len(doubled) != 1:
            raise TableError(f"{tool.name}: one parameter is doubled, not {doubled}: {request.say!r}")
        name = doubled[0]
        first, second = self._several(rng, tool.takes[name], tool.source[name])[:2]
        say = request.say.replace(f"{{{name}2}}", str(second))
        text, arguments = self.ask(rng, tool, Request(say, request.given), {name: first})
        return text, arguments, {**arguments, name: second}

    def ask_again(
        self, rng: random.Random, tool: Tool, request: Request, before: Arguments
    ) -> tuple[str, Arguments]:
        """A second request that renews some of the arguments of the one before."""
        return self.ask(rng, tool, request, {k: v for k, v in before.items() if k not in request.slots()})

    def ask_chain(
        self, rng: random.Random, chain: Chain, request: Request
    ) -> tuple[str, Arguments, str, Arguments]:
        """What is said, the arguments of the first call, its result, and the arguments of the second."""
        first, second = chain.first, chain.second
        slots = request.slots()
        if chain.link in slots and chain.link not in first.takes:
            raise TableError(f"{first.name}: the link {chain.link} is told: {request.say!r}")
        if strange := set(slots) - first.takes.keys() - second.takes.keys():
            raise TableError(f"neither {first.name} nor {second.name} takes {strange}: {request.say!r}")

        def arguments(tool: Tool, known: Arguments) -> Arguments:
            told = [name for name in tool.takes if name in slots and name not in known]
            drawn = {name: self._draw(rng, tool.takes[name], tool.source.get(name)) for name in told}
            implied = {name: value for name, value in request.given.items() if name in tool.takes}
            return self._complete(tool, request.say, {**drawn, **implied, **known})

        result = rng.choice(chain.values)
        one = arguments(first, {})
        both = {name: one[name] for name in second.takes if name in slots and name in one}
        two = arguments(second, {**both, chain.link: result})
        told = {**two, **one}
        # Where a list of objects is told, it is told in the words of its own tool.
        owner = first if any(isinstance(one.get(name), list) for name in slots) else second
        return self._fill(rng, owner, request.say, told), one, result, two

    def ask_then(self, rng: random.Random, chain: Chain, result: str) -> tuple[str, Arguments]:
        """A request for the second tool, when the first one has said `result`."""
        return self.ask(rng, chain.second, rng.choice(chain.then), {chain.link: result})

    # ----------------------------------------------------------------------------------------------- answers

    def result(self, rng: random.Random, tool: Tool, arguments: Arguments) -> tuple[str, str]:
        """What the tool gives back, and what the assistant says then."""
        shown = rng.choice(tool.gives)
        return shown, self.answer(rng, tool, arguments, shown)

    def answer(self, rng: random.Random, tool: Tool, arguments: Arguments, shown: str) -> str:
        """What the assistant says when the tool has given `shown`."""
        known = {name: value for name, value in arguments.items() if value is not None}

        def fits(answer: str) -> bool:
            return all(slot == "gives" or slot.split(".")[0] in known for slot in SLOT.findall(answer))

        fitting = [answer for answer in tool.answers if fits(answer)]
        if not fitting or REFUSAL.search(shown):  # most answers say that it has worked
            fitting = ["The result is {gives}."]
        text = self._fill(rng, tool, rng.choice(fitting), {**known, "gives": shown})
        return text[0].upper() + text[1:]


@cache
def read_tables() -> tuple[Table, ...]:
    """All tables, read once."""
    return tuple(Table(path) for path in sorted(TABLES.glob("*.toml")))


def attempts(table: Table) -> Iterator[tuple[str, Callable[[random.Random], object]]]:
    """Everything of a table that can be drawn, each with its text: what a test goes through."""
    for tool in table.tools.values():
        for request in tool.asks:
            yield request.say, partial(table.ask, tool=tool, request=request)
        for request in tool.two:
            yield request.say, partial(table.ask_for_two, tool=tool, request=request)
        for request in tool.also:
            yield request.say, partial(_ask_twice, table, tool, request)
    for chain in table.chains:
        for request in chain.asks:
            yield request.say, partial(table.ask_chain, chain=chain, request=request)
        for request in chain.then:
            yield request.say, partial(table.ask, tool=chain.second, request=request, known={chain.link: "X"})


def _ask_twice(table: Table, tool: Tool, request: Request, rng: random.Random) -> tuple[str, Arguments]:
    _, before = table.ask(rng, tool, tool.asks[0])
    return table.ask_again(rng, tool, request, before)
