"""What antiphon-small is trained on: families of dialogues over one list of tools, for ever.

A family is a list of tools and conversations that each begin anew with it. Most families are of the everyday
tables; the curriculum of antiphon-tiny gives the rest: invented tools, the server's own, what needs no tool.

Not every answer is learned. How an answer is worded cannot be foretold, so its loss never falls: where each
call had its answer, two thirds of the loss were of that kind, and hid what calls have to be learned from.
With too few of them, a model forgets when to answer, and calls a tool a second time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.small.everyday import WORDS, Arguments, Chain, Table, Tool, is_optional, read_tables, schema_of
from engine.small.lookups import lookup
from engine.tiny import (
    MIX,
    NO_TOOL,
    SYSTEMS,
    Call,
    Dialogue,
    Json,
    Message,
    Turn,
    Words,
    branches,
    greet,
    make_dialogue,
    natural,
    repeat,
    says,
    served,
    user,
)

EVERYDAY, INVENTED, SERVED, TALK = 0.66, 0.09, 0.09, 0.03
"""Shares of families; what is left are single dialogues of antiphon-tiny's skills."""

COMMON = frozenset(WORDS["common"])
"""Words of descriptions that say nothing of what a tool is about."""

TALK_FILE = Path(__file__).with_name("talk.jsonl")

SINGLES: dict[str, float] = {
    **MIX,
    # What a larger model knows by itself, and what the tables show better.
    **dict.fromkeys(("unknown", "fact"), 0.0),
    **dict.fromkeys(("decline", "natural_decline"), 0.03),
    **{"greet": 0.05, "repeat": 0.04, "count": 0.03, "tool": 0.05, "parallel": 0.04, "chain": 0.05},
    **{"natural_chain": 0.15, "server_tool": 0.5, "extract": 0.25},
}


class Everyday:
    """Draws families of one table's tools."""

    def __init__(self, words: Words, tables: Sequence[Table]) -> None:
        self.words, self.rng, self.tables = words, words.rng, tables

    def family(self) -> tuple[list[Turn], list[Json]]:
        """Turns that each begin a conversation, and the tools that all of them are offered."""
        rng = self.rng
        table = rng.choice(self.tables)
        chains = rng.sample(table.chains, rng.choice((0, 1, 1, 2, 2)))
        made_up = {one.first.name: one for one in (lookup(rng, table), lookup(rng, table))}
        chains += list(made_up.values())[: rng.choice((0, 1, 2, 2))]
        tools = {tool.name: tool for chain in chains for tool in (chain.first, chain.second)}
        more = max(1, rng.randint(1, 5) - len(tools))
        tools |= {tool.name: tool for tool in rng.sample(list(table.tools.values()), more)}
        offered = list(tools.values())
        turns = [self.chain(table, chain) for chain in chains for _ in range(rng.randint(2, 5))]
        for tool in offered:
            turns += [self.single(table, tool, offered) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        turns += [self.at_once(table, offered) for _ in range(min(4, len(offered)))]
        if rng.random() < 0.67:
            turns.append(self.failing(table, rng.choice(offered)))
        turns += [self.unable(table, offered) for _ in range(rng.choice((1, 2, 2, 3)))]
        if rng.random() < 0.4:
            turns.append(small_talk(self.words))
        rng.shuffle(turns)
        declared = [declare(self.words, tool) for tool in offered]
        if rng.random() < 0.15:
            declared += [one.tool for one in natural.different(self.words, rng.randint(1, 2))]
        return turns, declared

    def single(self, table: Table, tool: Tool, offered: Sequence[Tool] = ()) -> Turn:
        """One call, or one with its answer and mostly a further question."""
        rng = self.rng
        messages, arguments = self._asked(table, tool)
        if rng.random() < 0.6:
            roll = rng.random()
            messages += self._answered(table, tool, arguments, learn=roll >= 0.75)
            if tool.also and roll < 0.4:
                text, renewed = table.ask_again(rng, tool, rng.choice(tool.also), arguments)
                messages += [user(self._typed(text, renewed)), _calling((tool, renewed))]
                if rng.random() < 0.3:
                    messages += self._answered(table, tool, renewed)
            elif roll < 0.5:
                messages += [user(rng.choice(natural.FORMS["again"])), says(messages[-1].content)]
            elif roll < 0.55:
                messages += [user(rng.choice(WORDS["once_more"])), _calling((tool, arguments))]
            elif roll < 0.6:
                messages += [user(rng.choice(WORDS["thanks"])), says("You are welcome!")]
            elif offered and roll < 0.75:
                messages += self.single(table, rng.choice(offered)).messages
        return Turn("everyday", messages)

    def at_once(self, table: Table, offered: Sequence[Tool]) -> Turn:
        """Two calls at once: one tool for two things, or two tools."""
        rng = self.rng
        tool = rng.choice(offered)
        other = rng.choice(offered)
        if tool.two and (other is tool or rng.random() < 0.45):
            text, first, second = table.ask_for_two(rng, tool, rng.choice(tool.two))
            calls = [(tool, first), (tool, second)]
        elif other is not tool:
            said, first = table.ask(rng, tool, rng.choice(tool.asks))
            also, second = table.ask(rng, other, rng.choice(other.asks))
            text, calls = self._in_one_breath(said, also, second), [(tool, first), (other, second)]
        else:
            return self.single(table, tool)
        messages = [user(self._typed(text, *(arguments for _, arguments in calls))), _calling(*calls)]
        if rng.random() < 0.4:
            results = [table.result(rng, one, arguments) for one, arguments in calls]
            messages += [Message("tool", shown) for shown, _ in results]
            messages.append(says(" ".join(answer for _, answer in results)))
        return Turn("everyday_parallel", messages)

    def chain(self, table: Table, chain: Chain) -> Turn:
        """A call that needs what another one gives, asked for in one sentence, in two, or in two requests."""
        rng = self.rng
        roll = rng.random()
        if chain.then and roll < 0.25:
            messages, arguments = self._asked(table, chain.first)
            shown = rng.choice(chain.values)
            answer = table.answer(rng, chain.first, arguments, shown)
            messages += [Message("tool", shown), says(answer, learn=False)]
            text, last = table.ask_then(rng, chain, shown)
            messages += [user(self._typed(text, last)), _calling((chain.second, last))]
        else:
            if chain.then and roll < 0.5:
                shown = rng.choice(chain.values)
                text, arguments = table.ask(rng, chain.first, rng.choice(chain.first.asks))
                then, last = table.ask_then(rng, chain, shown)
                text = f"{text.rstrip('?.! ')}{rng.choice(('. ', '? ', '. Then: ', ' - and then: '))}{then}"
            else:
                text, arguments, shown, last = table.ask_chain(rng, chain, rng.choice(chain.asks))
            messages = [user(self._typed(text, arguments, last)), _calling((chain.first, arguments))]
            messages += [Message("tool", shown), _calling((chain.second, last))]
        if rng.random() < 0.4:
            messages += self._answered(table, chain.second, last)
        return Turn("everyday_chain", messages)

    def failing(self, table: Table, tool: Tool) -> Turn:
        """A call that fails for good, or at first."""
        rng = self.rng
        messages, arguments = self._asked(table, tool)
        if rng.random() < 0.2:
            again = Message("tool", f"Error: {rng.choice(natural.FAILURES['again'])}")
            messages += [again, messages[1], *self._answered(table, tool, arguments)]
        else:
            told = [(name, value) for name, value in arguments.items() if isinstance(value, str)]
            noun, value = rng.choice(told) if told else ("entry", "")
            shown, answer = natural.failure_of(self.words, noun.replace("_", " "), tool.name, value)
            messages += [Message("tool", shown), says(answer)]
        return Turn("everyday_error", messages)

    def unable(self, table: Table, offered: Sequence[Tool]) -> Turn:
        """What no tool on offer does."""
        rng = self.rng
        near = rng.choice(offered).unable
        if near and rng.random() < 0.5:
            text = rng.choice(near)
        else:
            other = rng.choice([one for one in self.tables if one is not table])
            tool = rng.choice(list(other.tools.values()))
            while any(_subject(tool) & _subject(one) for one in offered):
                tool = rng.choice(list(other.tools.values()))
            text, _ = other.ask(rng, tool, rng.choice(tool.asks))
        return Turn("everyday_decline", [user(text), says(NO_TOOL)])

    def _asked(self, table: Table, tool: Tool) -> tuple[list[Message], Arguments]:
        text, arguments = table.ask(self.rng, tool, self.rng.choice(tool.asks))
        return [user(self._typed(text, arguments)), _calling((tool, arguments))], arguments

    def _answered(self, table: Table, tool: Tool, arguments: Arguments, learn: bool = True) -> list[Message]:
        shown, answer = table.result(self.rng, tool, arguments)
        return [Message("tool", shown), says(answer, learn=learn)]

    def _typed(self, text: str, *arguments: Arguments) -> str:
        """As people type it; what the arguments have of it stays as it is."""
        values = [value for each in arguments for value in _texts(each)]
        if self.rng.random() < 0.1 and not text.startswith(tuple(values)):
            text = text[0].lower() + text[1:]
        if self.rng.random() < 0.08 and not text.endswith(tuple(values)):
            text = text.rstrip(".?!")
        return text

    def _in_one_breath(self, first: str, second: str, arguments: Arguments) -> str:
        joined = self.rng.choice(
            ("{0}, and {1}", "{0}? And {1}", "{0}. {2}", "{0} and {1}", "{0}. Also {1}", "{0}, and also {1}")
        )
        kept = second.startswith(tuple(_texts(arguments)))
        lowered = second if kept else second[0].lower() + second[1:]
        return joined.format(first.rstrip("?.! "), lowered, second)


def _texts(value: Json) -> list[str]:
    """All texts inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts(one)]


def _subject(tool: Tool) -> set[str]:
    """The words by which a tool could be meant."""
    return {*re.findall(r"[a-z]{4,}", f"{tool.name} {tool.about}".lower())} - COMMON


def declare(words: Words, tool: Tool) -> Json:
    """A tool of a table as one of the usual SDKs declares it."""
    slots = [
        natural.Slot(name, schema_of(spec), None, "", is_optional(spec)) for name, spec in tool.takes.items()
    ]
    return natural.declare(words, tool.name, tool.about, slots)


def _calling(*calls: tuple[Tool, Arguments]) -> Message:
    return Message("assistant", calls=tuple(Call(tool.name, arguments) for tool, arguments in calls))


def small_talk(words: Words) -> Turn:
    """What needs no tool, where there are some."""
    return Turn("no_tool", (greet if words.rng.random() < 0.6 else repeat)(words).messages)


def servers_own(words: Words, everyday: Everyday) -> tuple[list[Turn], list[Json]]:
    """Sums and notes, or searches, by the tools that a server runs itself."""
    rng = words.rng
    if rng.random() < 0.55:
        tools = [served.CALCULATOR, served.SAVE_NOTE]
        kinds = [
            served.sum_turn if rng.random() < 0.6 else served.note_turn for _ in range(rng.randint(6, 10))
        ]
        turns = [kind(words)[0] for kind in kinds]
        if rng.random() < 0.4:
            table = rng.choice(everyday.tables)
            others = rng.sample(list(table.tools.values()), 2)
            tools += [declare(words, tool) for tool in others]
            turns += [everyday.single(table, tool) for tool in others]
    else:
        tools = [served.WEB_SEARCH]
        tools += [served.OPEN_PAGE, served.FIND_IN_PAGE] if rng.random() < 0.7 else []
        turns = [served.search_turn(words)[0] for _ in range(rng.randint(3, 5))]
    if rng.random() < 0.4:
        turns.append(small_talk(words))
    return turns, tools


def read_talk() -> list[tuple[str | None, str, str]]:
    """(system message, question, answer) of plain questions, answered by the base model itself."""
    lines = [json.loads(line) for line in TALK_FILE.read_text(encoding="utf-8").splitlines()]
    return [(line["system"], line["q"], line["a"]) for line in lines]


def families(seed: int) -> Iterator[list[Dialogue]]:
    """Dialogues for ever, together those that share their system message and their tools."""
    rng = random.Random(f"{seed}/small")
    words = Words(rng, "train")
    everyday, talk = Everyday(words, read_tables()), read_talk()
    skills, weights = list(SINGLES), list(SINGLES.values())
    while True:
        if rng.random() < TALK:
            system, question, answer = rng.choice(talk)
            before = [Message("system", system)] if system else []
            yield [Dialogue("talk", (*before, user(question), says(answer)))]
            continue
        roll = rng.random()
        if roll < EVERYDAY:
            turns, tools = everyday.family()
        elif roll < EVERYDAY + INVENTED:
            turns, tools = branches(words)
        elif roll < EVERYDAY + INVENTED + SERVED:
            turns, tools = servers_own(words, everyday)
        else:
            yield [make_dialogue(words, rng.choices(skills, weights)[0], 0.02)]
            continue
        rng.shuffle(tools)
        head = [Message("system", rng.choice(SYSTEMS))] if rng.random() < 0.5 else []
        yield [Dialogue(turn.skill, (*head, *turn.messages), tuple(tools)) for turn in turns]
