"""The skill of following a system message: how answers look, and who gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.tiny.dialogue import Message, Turn, says, user
from engine.tiny.phrases import listed, paired
from engine.tiny.talk import count, fact, greet, one_word_fact
from engine.tiny.words import Words

UPPER = listed("manners", "upper")
LOWER = listed("manners", "lower")
ONE_WORD = listed("manners", "one_word")
ENDING = listed("manners", "ending")
BEGINNING = listed("manners", "beginning")
ALWAYS = listed("manners", "always")
PERSONA = listed("manners", "persona")
ASK_WHO = paired("persona_questions")


def _plain(words: Words) -> Turn:
    """A turn whose answer is one of a closed set, so that training has seen its words in any case."""
    roll = words.rng.random()
    if roll < 0.7:
        return fact(words, fixed=False)
    return greet(words) if roll < 0.9 else count(words)


def _changed(turn: Turn, change: Callable[[str], str]) -> list[Message]:
    *before, last = turn.messages
    return [*before, replace(last, content=change(last.content))]


def _wrapped(words: Words, change: Callable[[str], str], turns: int) -> list[Message]:
    """Plain turns whose answers are changed."""
    return [message for _ in range(turns) for message in _changed(_plain(words), change)]


def _rule(words: Words, roll: float, turns: int) -> tuple[str, list[Message]]:
    """A rule for the system message, drawn by `roll` (0 to 1), and turns that keep to it."""
    rng = words.rng
    if roll < 0.34:
        return rng.choice(UPPER), _wrapped(words, str.upper, turns)
    if roll < 0.41:
        return rng.choice(LOWER), _wrapped(words, str.lower, turns)
    if roll < 0.71:
        system = rng.choice(ONE_WORD)
        return system, [message for _ in range(turns) for message in one_word_fact(words).messages]
    if roll < 0.83:
        word = words.common()
        if roll < 0.77:
            system = rng.choice(ENDING).replace("{}", word)
            return system, _wrapped(words, lambda text: f"{text} {word}", turns)
        system = rng.choice(BEGINNING).replace("{}", word)
        return system, _wrapped(words, lambda text: f"{word} {text}", turns)
    if roll < 0.9:
        phrase = words.phrase(1, 4)
        return rng.choice(ALWAYS).replace("{}", phrase), _wrapped(words, lambda _: phrase, turns)
    name = words.name()
    system, messages = rng.choice(PERSONA).replace("{}", name), []
    for _ in range(turns - 1):
        messages += (greet if rng.random() < 0.5 else count)(words).messages
    question, answer = rng.choice(list(ASK_WHO.items()))
    return system, [*messages, user(question), says(answer.replace("{}", name))]


def follow(words: Words) -> Turn:
    """A system message and one to three turns that keep to it."""
    rng = words.rng
    roll = rng.random()
    system, messages = _rule(words, roll, rng.choice((1, 1, 2, 3)))
    extra = rng.random()
    if extra < 0.2:
        system = "You are a helpful assistant. " + system
    elif extra < 0.26:
        system += " Be polite."
    return Turn("follow", [Message("system", system), *messages])
