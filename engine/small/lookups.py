"""Chains that are made up: what a tool takes is told by something else, which another tool knows.

"Move 40 euros to {account}" becomes "Move 40 euros to the account of Marta", beside a tool that tells the
account of a person. So every tool of the tables can be the second of a chain, and none is learned by heart.
"""

from __future__ import annotations

import random
import re

from engine.small.everyday import WORDS, Chain, Request, Table, Tool

DETERMINED = re.compile(
    r"(?:[\w-]|\b(?:a|an|my|our|your|his|her|their|this|that|no|any|some|case|file) )$", re.IGNORECASE
)
"""What cannot stand before words such as "the account of Marta"."""

Place = re.Match[str]
"""Where a request tells a parameter."""


def lookup(rng: random.Random, table: Table) -> Chain:
    """A chain of a made-up tool and one of the table's."""
    second, link, asks = _second(rng, table)
    what, source = link.replace("_", " "), second.source[link]
    values = table.values[source]
    if source in table.names:
        values = [*values, *(table.unheard(rng) for _ in range(len(values) // 4))]
    key, keys, type_of_key = _key(rng, table, second, link)
    kind = key.replace("_", " ")
    things = [f"{{{key}}}", f"{{{key}}}", f"the {kind} {{{key}}}"]
    thing = f"{kind} {{{key}}}" if type_of_key == "whole" else rng.choice(things)
    said = {"w": what, "k": kind, "a": f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}", "t": thing}
    said["d"] = rng.choice(WORDS["described"]).format(**said)
    names = [name.format(w=link, k=key) for name in rng.sample(WORDS["names"], len(WORDS["names"]))]
    first = Tool(
        next(name for name in names if name not in table.tools),
        _upper(rng.choice(WORDS["about"]).format(**said)),
        takes={key: type_of_key},
        source={key: keys},
        asks=[Request(_upper(one.format(**said))) for one in rng.sample(WORDS["questions"], 4)],
        gives=values,
        answers=[_upper(one.format(**said)) for one in WORDS["answers"]],
        also=[Request(one.format(t=f"{{{key}}}")) for one in WORDS["also"]],
        two=[Request(one.format(**said, t1=f"{{{key}}}", t2=f"{{{key}2}}")) for one in WORDS["two"]],
        unable=[],
        each=[],
    )
    chosen = rng.sample(asks, min(6, len(asks)))
    return Chain(
        first,
        second,
        link,
        values,
        asks=[Request(_both(rng, *one, said), one[0].given) for one in chosen],
        then=[Request(_with(*one, _this(rng, said)), one[0].given) for one in chosen],
    )


def _second(rng: random.Random, table: Table) -> tuple[Tool, str, list[tuple[Request, Place]]]:
    """A tool, a parameter of it, and the requests that can tell this parameter by other words."""
    while True:
        tool = rng.choice(list(table.tools.values()))
        links = [name for name, spec in tool.takes.items() if spec == "text" and name not in WORDS["vague"]]
        if links:
            link = rng.choice(links)
            asks = [(request, place) for request in tool.asks if (place := _place(request.say, link))]
            if asks:
                return tool, link, asks


def _place(say: str, link: str) -> Place | None:
    if say.count(f"{{{link}}}") != 1:
        return None
    found = re.search(rf"(?:\b[Tt]he )?\{{{link}\}}(?!'s|[\w-])", say)
    return found if found and not DETERMINED.search(say[: found.start()]) else None


def _key(rng: random.Random, table: Table, second: Tool, link: str) -> tuple[str, str, str]:
    """By what the link is looked up: a parameter's name, the source of its values, and its type."""
    if rng.random() < 0.35:
        numbered = [noun for noun in WORDS["numbered"] if noun not in second.takes]
        return rng.choice(numbered), rng.choice(("1-30", "1-99", "1-400", "1900-2020")), "whole"
    known = {
        name: tool.source[name]
        for tool in table.tools.values()
        for name, spec in tool.takes.items()
        if spec == "text" and name not in WORDS["vague"] and name not in second.takes
    }
    key = rng.choice([name for name, source in known.items() if source != second.source[link]])
    return key, known[key], "text"


def _with(request: Request, place: Place, words: str) -> str:
    """A request with other words for one of its parameters."""
    return _upper(request.say[: place.start()] + words + request.say[place.end() :])


def _this(rng: random.Random, said: dict[str, str]) -> str:
    return rng.choice(WORDS["this"]).format(**said)


def _both(rng: random.Random, request: Request, place: Place, said: dict[str, str]) -> str:
    """A request that wants the second call and tells what only the first one can make use of."""
    roll = rng.random()
    if roll < 0.4:
        return _with(request, place, said["d"])
    if roll < 0.55:
        text = _with(request, place, said["t"])
        return f"{text} {rng.choice(WORDS['hints']).format(**said)}" if rng.random() < 0.6 else text
    rest = _with(request, place, _this(rng, said))
    inside = rest if re.match(r"I\b|\{", rest) else rest[0].lower() + rest[1:]
    form = rng.choice(WORDS["find"]) + rng.choice(WORDS["then"]) if roll < 0.8 else rng.choice(WORDS["ask"])
    return _upper(form.format(**said, r=inside, R=rest))


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
