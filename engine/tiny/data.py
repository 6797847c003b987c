"""The seeded curriculum: dialogues in the chat format, made up by plain Python.

`dialogues(seed, split)` yields them for ever; `tokenizer_corpus` is the text the tokenizer is learned from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from engine.tiny.dialogue import Dialogue, Message, Turn, render, says, user
from engine.tiny.offers import Offer, answers_open_questions, offers, two_calls, use_tool
from engine.tiny.phrases import listed
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
    "greet": 0.06,
    "repeat": 0.18,
    "fact": 0.12,
    "unknown": 0.05,
    "count": 0.04,
    "arithmetic": 0.08,
    "recall_name": 0.11,
    "recall_thing": 0.06,
    "tool": 0.27,
    "two_calls": 0.02,
    "no_tool": 0.05,
}
"""How often a dialogue is made to show each skill."""


def make_dialogue(words: Words, skill: str, long_text: float = 0.08) -> Dialogue:
    """One dialogue whose last turn shows `skill` (a key of `MIX`)."""
    rng = words.rng
    thinking = rng.random() > 0.05
    tools: list[Offer] = []
    before: list[Message] = []
    if skill == "tool":
        tools = offers(words)
        turn = use_tool(words, tools[0])
        if turn.skill == "tool_answer" and rng.random() < 0.15:
            before, turn = turn.messages, use_tool(words, rng.choice(tools))
    elif skill == "two_calls":
        turn, tools = two_calls(words)
    elif skill == "no_tool":
        tools = offers(words)
        # What nobody knows about the weather, the time or a capital, a tool on offer may well know.
        open_ended = answers_open_questions(tools)
        turn = rng.choice((greet, repeat, repeat, fact, greet if open_ended else unknown))(words)
        turn = Turn("no_tool", turn.messages)
    elif skill == "recall_name":
        turn = recall_name(words, thinking)
    elif skill == "recall_thing":
        turn = recall_thing(words, thinking)
    elif skill == "arithmetic":
        turn = arithmetic(words, thinking)
    else:
        turn = {"greet": greet, "repeat": repeat, "fact": fact, "unknown": unknown, "count": count}[skill](
            words
        )
    if not skill.startswith("recall") and rng.random() < 0.22:
        for _ in range(rng.randint(1, 2)):
            earlier = small_talk(words, thinking) if rng.random() < 0.8 else told_name(words, words.name())
            # With tools at hand a plain question may be one for a tool, so only harmless turns come before.
            before = (repeat(words).messages if tools else earlier) + before
    messages = [*before, *turn.messages]
    if rng.random() < 0.4:
        system = rng.choice(SYSTEMS) if rng.random() < 0.7 else words.sentence(3, 15)
        if rng.random() < long_text:
            system += "\n\n" + words.filler(round(3 * 60 ** rng.random()))
        messages.insert(0, Message(rng.choice(("system", "system", "developer")), system))
    elif rng.random() < long_text * 0.7:
        messages = [user(words.filler(round(2 * 60 ** rng.random()))), says("OK.", learn=False), *messages]
    rng.shuffle(tools)
    return Dialogue(turn.skill, tuple(messages), tuple(t.tool for t in tools), thinking)


def dialogues(
    seed: int, split: Split, skill: str | None = None, long_text: float = 0.08
) -> Iterator[Dialogue]:
    """Dialogues for ever: the whole mix, or one key of it."""
    rng = random.Random(f"{seed}/{split}/{skill}")
    words = Words(rng, split)
    skills, weights = list(MIX), list(MIX.values())
    while True:
        yield make_dialogue(words, skill or rng.choices(skills, weights)[0], long_text)


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
