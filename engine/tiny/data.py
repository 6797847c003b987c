"""The seeded curriculum: dialogues in the chat format, made up by plain Python.

`dialogues(seed, split)` yields them for ever; `tokenizer_corpus` is the text the tokenizer is learned from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from engine.tiny.chains import chain, decline, parallel
from engine.tiny.dialogue import Dialogue, Json, Message, Turn, render, says, user
from engine.tiny.extract import extract
from engine.tiny.manners import follow
from engine.tiny.offers import Offer, offers, same_family, use_tool
from engine.tiny.phrases import listed
from engine.tiny.situations import SITUATIONS, branches
from engine.tiny.talk import (
    arithmetic,
    count,
    fact,
    greet,
    recall_name,
    recall_thing,
    repeat,
    small_talk,
    told_name,
    unknown,
)
from engine.tiny.words import COMMON, Split, Words

SYSTEMS = listed("talk", "systems")
MIX: dict[str, float] = {
    "greet": 0.04,
    "repeat": 0.08,
    "fact": 0.08,
    "unknown": 0.03,
    "count": 0.06,
    "arithmetic": 0.1,
    "recall_name": 0.04,
    "recall_thing": 0.07,
    "tool": 0.22,
    "no_tool": 0.04,
    "decline": 0.1,
    "parallel": 0.1,
    "chain": 0.1,
    "extract": 0.2,
    "follow": 0.1,
    "natural": 0.06,
    "natural_arguments": 0.24,
    "no_parameters": 0.04,
    "natural_parallel": 0.12,
    "natural_chain": 0.3,
    "natural_decline": 0.14,
    "tool_error": 0.08,
    "follow_up": 0.1,
    "server_tool": 0.25,
    "rounds": 0.18,
}
"""How often a dialogue is made to show each skill, relative to the others."""
PLAIN: dict[str, Callable[[Words], Turn]] = {
    "greet": greet,
    "repeat": repeat,
    "fact": fact,
    "unknown": unknown,
    "count": count,
    "extract": extract,
    "follow": follow,
}
THINKING: dict[str, Callable[[Words, bool], Turn]] = {
    "arithmetic": arithmetic,
    "recall_name": recall_name,
    "recall_thing": recall_thing,
}
TOOLED: dict[str, Callable[[Words], tuple[Turn, list[Json]]]] = {
    "chain": chain,
    "parallel": parallel,
    "decline": decline,
}


def make_dialogue(words: Words, skill: str, long_text: float = 0.08) -> Dialogue:
    """One dialogue whose last turn shows `skill` (a key of `MIX`)."""
    rng = words.rng
    thinking = rng.random() > 0.05
    tools: list[Json] = []
    if skill in THINKING:
        turn = THINKING[skill](words, thinking)
    elif skill in PLAIN:
        turn = PLAIN[skill](words)
    elif skill in SITUATIONS:
        turn, tools = SITUATIONS[skill](words)
    elif skill in TOOLED:
        turn, tools = TOOLED[skill](words)
        if skill != "decline":
            tools += _others(words, tools)
    else:
        made = offers(words)
        tools = [one.tool for one in made]
        turn = _several(words, made) if skill == "tool" else _without(words)
    messages = turn.messages
    # With tools at hand a plain question may be one for a tool, and a system message may change every answer,
    # so only harmless turns come before those.
    if skill not in ("recall_name", "recall_thing", "follow", "extract") and rng.random() < 0.22:
        for _ in range(rng.randint(1, 2)):
            earlier = small_talk(words, thinking) if rng.random() < 0.8 else told_name(words, words.name())
            messages = (repeat(words).messages if tools else earlier) + messages
    if messages[0].role == "system":
        pass
    elif rng.random() < 0.35:
        system = rng.choice(SYSTEMS) if rng.random() < 0.7 else words.sentence(3, 15)
        if rng.random() < long_text:
            system += "\n\n" + words.filler(round(3 * 60 ** rng.random()))
        messages = [Message(rng.choice(("system", "system", "developer")), system), *messages]
    elif rng.random() < long_text * 0.7:
        messages = [user(words.filler(round(2 * 60 ** rng.random()))), says("OK.", learn=False), *messages]
    rng.shuffle(tools)
    return Dialogue(turn.skill, tuple(messages), tuple(tools), thinking, turn.schema, turn.told)


def _several(words: Words, made: list[Offer]) -> Turn:
    """A question for the first tool, and often others for other tools before it, each up to its answer."""
    before: list[Message] = []
    for other in made[1:]:
        if words.rng.random() < 0.4:
            before += use_tool(words, other, whole=True).messages
    turn = use_tool(words, made[0])
    return Turn(turn.skill, [*before, *turn.messages])


def _without(words: Words) -> Turn:
    """A turn that needs no tool although there are some."""
    roll = words.rng.random()
    turn = (greet if roll < 0.4 else repeat)(words)
    return Turn("no_tool", turn.messages)


def _others(words: Words, tools: list[Json]) -> list[Json]:
    """Further tools beside those that are needed, up to five in all."""
    names = [tool["function"]["name"] for tool in tools]
    room = words.rng.randint(0, 5 - len(tools))
    extra = offers(words, 1, room) if room else []
    return [one.tool for one in extra if not any(same_family(one.name, name) for name in names)]


def families(seed: int, long_text: float = 0.08, branched: float = 0.06) -> Iterator[list[Dialogue]]:
    """Dialogues for training for ever, together those that share their system message and their tools.

    branched: how often they are several; otherwise they are one of the mix. Several have ten times the tokens
    to learn that one has, so a small share of them is much of what is learned.
    """
    rng = random.Random(f"{seed}/families")
    words = Words(rng, "train")
    skills, weights = list(MIX), list(MIX.values())
    while True:
        if rng.random() >= branched:
            yield [make_dialogue(words, rng.choices(skills, weights)[0], long_text)]
            continue
        turns, tools = branches(words)
        rng.shuffle(tools)
        thinking = rng.random() > 0.05
        system = [Message("system", rng.choice(SYSTEMS))] if rng.random() < 0.3 else []
        yield [Dialogue(turn.skill, (*system, *turn.messages), tuple(tools), thinking) for turn in turns]


def dialogues(seed: int, split: Split, skill: str | None = None) -> Iterator[Dialogue]:
    """Dialogues for ever: the whole mix, or one key of it."""
    rng = random.Random(f"{seed}/{split}/{skill}")
    words = Words(rng, split)
    skills, weights = list(MIX), list(MIX.values())
    while True:
        yield make_dialogue(words, skill or rng.choices(skills, weights)[0])


def tokenizer_corpus(seed: int, count_of: int) -> Iterator[str]:
    """Text to learn the byte-pair merges from: training dialogues, common words and invented ones."""
    words = Words(random.Random(f"{seed}/tokenizer"), "train")
    source = dialogues(seed, "train")
    for index in range(count_of):
        yield "".join(text for text, _ in render(next(source)))
        if index % 2 == 0:
            yield " ".join(words.made_up() for _ in range(12)) + " " + words.name() + " " + words.city()
        if index % 20 == 0:
            sample = words.rng.sample(COMMON, 40)
            yield " ".join(sample + [word.capitalize() for word in sample[:15]])
