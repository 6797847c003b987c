"""What happens around the tools of `natural`: several calls, errors, nothing that fits, further questions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from engine.tiny import natural
from engine.tiny.chains import NO_TOOL
from engine.tiny.dialogue import Call, Json, Message, Turn, says, user
from engine.tiny.natural import FAILURES, FORMS, HOW, NOUNS, Asked, Slot
from engine.tiny.offers import offers
from engine.tiny.served import server_tool
from engine.tiny.talk import CLOSINGS, greet, repeat
from engine.tiny.words import Words

Made = tuple[Turn, list[Json]]
"""A turn, and every tool on offer."""


def with_others(words: Words, needed: list[Asked], most: int = 4) -> list[Json]:
    """The tools that are needed, and often others about something else."""
    rng = words.rng
    tools = [one.tool for one in needed]
    taken = {one.name for one in needed}
    about = {one.noun for one in needed}
    count = rng.choice((0, 0, 1, 1, 2, 3, most)) if rng.random() < 0.95 else 8
    if needed[0].wanted and rng.random() < 0.35:
        # Another tool for the same things: the noun alone does not tell which is meant.
        other = natural.lookup(words, natural.noun_of(words, "attributes"), needed[0].noun)
        if other.wanted not in ("", needed[0].wanted) and other.name not in taken:
            taken.add(other.name)
            tools.append(other.tool)
    while count > 0:
        count -= 1
        if rng.random() < 0.15:
            tool = offers(words, 1, 1)[0].tool
        else:
            other = natural.any_asked(words)
            if other.noun in about:
                continue
            about.add(other.noun)
            tool = other.tool
        if tool["function"]["name"] not in taken:
            taken.add(tool["function"]["name"])
            tools.append(tool)
    return tools


# ---------------------------------------------------------------------------------------------------- calls


def natural_call(words: Words) -> Made:
    """One call, and mostly the answer."""
    asked = natural.any_asked(words)
    return told_by("natural", words, asked), with_others(words, [asked])


def natural_arguments(words: Words) -> Made:
    """A call with arguments of any type: lists, objects, choices, booleans."""
    asked = natural.command(words)
    return told_by("natural_arguments", words, asked), with_others(words, [asked])


def no_parameters(words: Words) -> Made:
    """A call without arguments."""
    asked = natural.parameterless(words)
    return told_by("no_parameters", words, asked), with_others(words, [asked])


def told_by(skill: str, words: Words, asked: Asked) -> Turn:
    messages = natural.messages_of(asked, *natural.result(words))
    return Turn(skill, messages if words.rng.random() < 0.6 else messages[:2])


def natural_parallel(words: Words) -> Made:
    """One request that takes two calls at once."""
    if words.rng.random() < 0.45:
        (first, second), question = _twice(words)
        needed = [first] if first.name == second.name else [first, second]
        turn = called_together(words, question, first, second)
    else:
        needed = natural.different(words, 2)
        turn = joined(words, *needed)
    return turn, with_others(words, needed, 3)


def joined(words: Words, first: Asked, second: Asked) -> Turn:
    """Two questions asked in one breath."""
    one, other = first.question.rstrip("?.! "), second.question
    form = words.rng.choice(
        ("{0}, and {1}", "{0}? And {1}", "{0}. {2}", "{0} and {1}", "{0}. Also {1}", "{0}, and also {1}")
    )
    return called_together(words, form.format(one, other[0].lower() + other[1:], other), first, second)


def called_together(words: Words, question: str, first: Asked, second: Asked) -> Turn:
    """Both calls at once, and mostly the answer from both results."""
    messages = [user(question), Message("assistant", calls=(first.call, second.call))]
    if words.rng.random() < 0.65:
        (one, told), (other, also) = natural.result(words), natural.result(words)
        messages += [Message("tool", one), Message("tool", other), says(f"{told} {also}")]
    return Turn("natural_parallel", messages)


def _twice(words: Words) -> tuple[list[Asked], str]:
    """One tool for two things, or two tools for the same thing: what is asked, and how."""
    rng = words.rng
    first = natural.lookup(words)
    while first.question.count(first.value) != 1:
        first = natural.lookup(words)
    if first.wanted and rng.random() < 0.4:
        wanted = natural.noun_of(words, "attributes")
        which = (_schema_of(first), first.call.arguments[first.key], first.value)
        second = natural.lookup(words, wanted, first.noun, which)
        if wanted != first.wanted and second.name != first.name:
            fills = {"{a}": first.wanted, "{b}": wanted, "{n}": first.noun, "{v}": first.value}
            question = natural.filled(rng.choice(FORMS["twice"]), fills)
            return [first, second], natural.dressed(words, question, first.value)
    return for_two(words, first)


def for_two(words: Words, first: Asked) -> tuple[list[Asked], str]:
    """The tool of `first`, whose question names its value once, asked for that value and for another one."""
    rng = words.rng
    second = _other_value(words, first)
    fills = {"{0}": first.value, "{1}": second.value, "{n}": first.noun, "{a}": first.wanted}
    if first.wanted and rng.random() < 0.6:
        question = natural.filled(rng.choice(FORMS["two"]), fills)
        return [first, second], natural.dressed(words, question, first.value)
    both = natural.filled(rng.choice(FORMS["both"]), fills)
    return [first, second], first.question.replace(first.value, both)


def _schema_of(asked: Asked) -> Json:
    """The type of the parameter that names what is asked about."""
    return {"type": "integer" if isinstance(asked.call.arguments[asked.key], int) else "string"}


def _other_value(words: Words, asked: Asked) -> Asked:
    """The same tool for another thing of the same kind."""
    value = natural.another(words, asked.call.arguments[asked.key])
    call = Call(asked.name, {**asked.call.arguments, asked.key: value})
    return replace(asked, call=call, value=str(value))


def natural_chain(words: Words) -> Made:
    """A call whose result is an argument of the next one."""
    turn, needed = chained(words)
    return turn, with_others(words, needed, 3)


def chained(words: Words) -> tuple[Turn, list[Asked]]:
    """Two calls, the second of which takes what the first has given, and both their tools."""
    rng = words.rng
    entity = (
        words.made_up()
        if rng.random() < 0.3 or words.split == "heldout"
        else rng.choice(NOUNS["roles"] + NOUNS["things"])
    )
    first = natural.lookup(words, entity, natural.noun_of(words, "things"))
    shown = _result_value(words)
    if rng.random() < 0.3:
        return _then_do(words, first, entity, shown)
    wanted = natural.noun_of(words, "attributes")
    adjective = ""
    if rng.random() < 0.15:
        adjective, wanted = rng.choice(list(HOW.items()))
    second = natural.lookup(words, wanted, entity, ({"type": "string"}, shown, shown))
    question = rng.choice(FORMS["chain_ask"])
    if adjective:
        question = rng.choice(
            ("How {j} is the {a} of {v}?", "How {j} is the {a} of the {n} {v}?", "Is the {a} of {v} {j}?")
        )
    for mark, text in (
        ("{a}", entity),
        ("{b}", wanted),
        ("{n}", first.noun),
        ("{v}", first.value),
        ("{j}", adjective),
    ):
        question = question.replace(mark, text)
    return _two_steps(words, natural.dressed(words, question, first.value), first, second, shown)


def _result_value(words: Words) -> str:
    """A result that the next call takes as it is."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.35:
        return natural.title(words)
    if roll < 0.6:
        return words.name()
    if roll < 0.8:
        return f"{words.scramble().upper()}-{words.number(4)}" if rng.random() < 0.6 else words.scramble()
    return words.any()


def _then_do(words: Words, first: Asked, entity: str, shown: str) -> tuple[Turn, list[Asked]]:
    """Something is done with what the first tool says: a message is sent to it, a visit is booked there."""
    rng = words.rng
    verb = rng.choice(
        ("book", "send", "call", "invite", "assign", "notify", "pay", "visit", "order", "reserve", "email")
    )
    thing = natural.noun_of(words, "things")
    guest = words.name() if rng.random() < 0.5 else natural.title(words)
    other = rng.choice(("guest", "person", "text", "subject", natural.noun_of(words, "things")))
    key = rng.choice((entity, entity, "to", "target")).replace(" ", "_")
    slots = [Slot(key, {"type": "string"}, shown)]
    with_guest = rng.random() < 0.7 and other != key
    if with_guest:
        slots.insert(rng.randint(0, 1), Slot(other, {"type": "string"}, guest))
    name = f"{verb}_{thing}"
    about = rng.choice((f"{verb.capitalize()} a {thing} with a {entity}.", f"{verb.capitalize()} a {thing}."))
    tool = natural.declare(words, name, about, slots)
    for_guest = f" for {guest}" if with_guest else ""
    question = rng.choice(
        (
            f"Find the {entity} of {first.value} and {verb} a {thing}{for_guest} there.",
            f"{verb} a {thing}{for_guest} with the {entity} of {first.value}.",
            f"Look up the {entity} of {first.value}, then {verb} a {thing}{for_guest}.",
            f"I want to {verb} a {thing}{for_guest} with the {entity} of {first.value}.",
            f"{verb} a {thing}{for_guest} for the {entity} of the {first.noun} {first.value}.",
            f"Who is the {entity} of {first.value}? Then {verb} a {thing}{for_guest}.",
        )
    )
    call = Call(name, {slot.name: slot.value for slot in slots})
    second = Asked(tool, "", call, thing, guest)
    return _two_steps(words, natural.dressed(words, question, first.value), first, second, shown)


def _two_steps(
    words: Words, question: str, first: Asked, second: Asked, shown: str
) -> tuple[Turn, list[Asked]]:
    if second.name == first.name:
        return chained(words)
    text, answer = natural.result(words)
    messages = [
        user(question),
        Message("assistant", calls=(first.call,)),
        Message("tool", shown),
        Message("assistant", calls=(second.call,)),
        Message("tool", text),
        says(answer),
    ]
    return Turn("natural_chain", messages), [first, second]


# -------------------------------------------------------------------------------------------- when it fails


def tool_error(words: Words) -> Made:
    """A tool fails: the model says so, or tries again where the error says how."""
    asked = natural.any_asked(words)
    return failing(words, asked), with_others(words, [asked], 2)


def failing(words: Words, asked: Asked) -> Turn:
    """A question whose call fails at first or for good."""
    rng = words.rng
    first = [user(asked.question), Message("assistant", calls=(asked.call,))]
    roll = rng.random()
    if roll < 0.7:
        text, answer = natural.failure(words, asked)
        messages = [*first, Message("tool", text), says(answer)]
    elif roll < 0.87 or not asked.value or not isinstance(asked.call.arguments.get(asked.key), str):
        why = rng.choice(FAILURES["again"])
        text = rng.choice(("Error: {}", "error: {}", '{{"error": "{}"}}', "{}")).format(why)
        again, answer = natural.result(words)
        if rng.random() < 0.3:
            again, answer = text, f"Sorry, the tool failed: {why}."
        messages = [*first, Message("tool", text), first[1], Message("tool", again), says(answer)]
    else:
        meant = _other_value(words, asked)
        why = rng.choice(
            (
                f"unknown {asked.noun} '{asked.value}'. Did you mean '{meant.value}'?",
                f"not found. Did you mean '{meant.value}'?",
                f"no {asked.noun} {asked.value}; did you mean {meant.value}?",
                f"{asked.value} does not exist, use '{meant.value}' instead",
            )
        )
        text = rng.choice(("Error: ", "error: ", "")) + why
        again, answer = natural.result(words)
        messages = [
            *first,
            Message("tool", text),
            Message("assistant", calls=(meant.call,)),
            Message("tool", again),
            says(answer),
        ]
    return Turn("tool_error", messages)


def natural_decline(words: Words) -> Made:
    """No tool does what is asked; or nothing is asked that needs one."""
    rng = words.rng
    if rng.random() < 0.25:
        turn = (greet if rng.random() < 0.6 else repeat)(words)
        return Turn("natural_decline", turn.messages), with_others(words, [natural.any_asked(words)])
    asked = natural.any_asked(words)
    said = asked.question.lower()
    tools = [tool for tool in with_others(words, [natural.any_asked(words)]) if not named_in(tool, said)]
    if not tools:
        return natural_decline(words)
    return Turn("natural_decline", [user(asked.question), says(NO_TOOL)]), tools


def named_in(tool: Json, said: str) -> bool:
    """Whether a question shares a word with a tool's name, which could mean that tool."""
    parts = re.findall(r"[A-Z]?[a-z]+", tool["function"]["name"])
    return any(part.lower().rstrip("s") in said for part in parts if len(part) > 3)


def rounds(words: Words) -> Made:
    """A long conversation over the same tools: most of them are asked for, some twice, and one fails."""
    rng = words.rng
    needed = natural.different(words, rng.choice((1, 2, 2, 3)))
    asked = [(one, one.question, one.call) for one in needed]
    asked += [(one, question, call) for one in needed for question, call in one.more if rng.random() < 0.8]
    rng.shuffle(asked)
    messages: list[Message] = []
    for one, question, call in asked[: rng.randint(3, 6)]:
        failed = rng.random() < 0.1
        text, answer = natural.failure(words, one) if failed else natural.result(words)
        messages += natural.messages_of(replace(one, question=question, call=call), text, answer)
        if rng.random() < 0.1:
            messages += [user(rng.choice(FORMS["again"])), says(answer)]
    if rng.random() < 0.25:
        foreign = natural.any_asked(words)
        if not any(named_in(one.tool, foreign.question.lower()) for one in needed):
            messages += [user(foreign.question), says(NO_TOOL)]
    return Turn("rounds", messages), with_others(words, needed, 2)


def follow_up(words: Words) -> Made:
    """A second question, which only makes sense after the first."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.3:
        return _and_this_one(words)
    if roll < 0.5:
        return _and_then(words)
    asked = natural.any_asked(words)
    text, answer = natural.result(words) if rng.random() < 0.85 else natural.failure(words, asked)
    messages = natural.messages_of(asked, text, answer)
    if roll < 0.7:
        messages += [user(rng.choice(FORMS["again"])), says(answer)]
    elif roll < 0.78:
        thanks, welcome = rng.choice(list(CLOSINGS.items()))
        messages += [user(thanks + rng.choice((".", "!", ""))), says(welcome)]
    else:
        later = natural.any_asked(words)
        while later.noun == asked.noun or later.name == asked.name:
            later = natural.any_asked(words)
        more = told_by("follow_up", words, later).messages
        return Turn("follow_up", [*messages, *more]), with_others(words, [asked, later], 2)
    return Turn("follow_up", messages), with_others(words, [asked], 2)


def _and_this_one(words: Words) -> Made:
    """The same for another thing, or the very same once more."""
    asked = natural.lookup(words)
    return and_another(words, asked), with_others(words, [asked], 2)


def and_another(words: Words, asked: Asked) -> Turn:
    """A question by `lookup`, and then the same for another thing."""
    rng = words.rng
    meant = _other_value(words, asked)
    form = rng.choice(FORMS["more"]).replace("{v}", meant.value).replace("{n}", asked.noun)
    text, answer = natural.result(words) if rng.random() < 0.85 else natural.failure(words, asked)
    if rng.random() < 0.12:
        meant, form = (
            asked,
            rng.choice(("Check again, please.", "Try again.", "Look again.", "Once again: is it still so?")),
        )
    second, told = natural.result(words)
    messages = [
        *natural.messages_of(asked, text, answer),
        user(form),
        Message("assistant", calls=(meant.call,)),
        Message("tool", second),
        says(told),
    ]
    return Turn("follow_up", messages)


def _and_then(words: Words) -> Made:
    """The second tool takes what the first has said."""
    rng = words.rng
    entity = natural.noun_of(words, "things")
    first = natural.lookup(words, entity, natural.noun_of(words, "things"))
    shown = _result_value(words)
    wanted = natural.noun_of(words, "attributes")
    second = natural.lookup(words, wanted, entity, ({"type": "string"}, shown, shown))
    if second.name == first.name:
        return _and_then(words)
    question = rng.choice(
        (
            f"And what is its {wanted}?",
            f"Which {wanted} is that?",
            f"And the {wanted}?",
            f"What is the {wanted} of that?",
            f"And which {wanted} does it have?",
            f"Get the {wanted} of it.",
            f"What about the {wanted} of that {entity}?",
            f"Now its {wanted}, please.",
            f"And the {wanted} of the {entity}?",
        )
    )
    text, answer = natural.result(words)
    messages = [
        *natural.messages_of(first, shown, f"The result is {shown}."),
        user(question),
        Message("assistant", calls=(second.call,)),
        Message("tool", text),
        says(answer),
    ]
    return Turn("follow_up", messages), with_others(words, [first, second], 2)


# ------------------------------------------------------------------------- many conversations over one list


def branches(words: Words) -> tuple[list[Turn], list[Json]]:
    """Turns that each begin a conversation of its own, and the tools that all of them are offered.

    Most of a document with tools is their list, which carries no loss. Asked many things, one list teaches as
    much as many lists, and only what is asked tells which tool is meant, and how many calls.
    """
    rng = words.rng
    needed = natural.different(words, rng.choice((1, 2, 2, 3, 4)))
    turns, silent = [], []
    if rng.random() < 0.75:
        turn, steps = chained(words)
        if not _meet(steps, needed):
            turns.append(turn)
            needed += [one for one in steps if one.question]
            silent += [one for one in steps if not one.question]
    turns += [_asked_once(words, one) for one in needed]
    for _ in range(min(3, len(needed) * (len(needed) - 1) // 2)):
        turns.append(joined(words, *(_other_wording(words, one) for one in rng.sample(needed, 2))))
    lookups = [one for one in needed if one.key and one.value and one.question.count(one.value) == 1]
    for one in lookups:
        if rng.random() < 0.5:
            pair, question = for_two(words, one)
            turns.append(called_together(words, question, *pair))
        if rng.random() < 0.35:
            turns.append(and_another(words, one))
    turns += [failing(words, one) for one in rng.sample(needed, min(len(needed), rng.randint(1, 2)))]
    turns.append(_then_another(words, needed))
    tools = [one.tool for one in (*needed, *silent)]
    foreign = natural.any_asked(words)
    if not any(named_in(tool, foreign.question.lower()) for tool in tools):
        turns.append(Turn("natural_decline", [user(foreign.question), says(NO_TOOL)]))
    if rng.random() < 0.3:
        turns.append(Turn("no_tool", (greet if rng.random() < 0.5 else repeat)(words).messages))
    rng.shuffle(turns)
    return turns, tools


def _meet(some: list[Asked], others: list[Asked]) -> bool:
    """Whether tools of the one could be meant where those of the other are asked for."""
    return any(
        one.noun == other.noun
        or one.name == other.name
        or named_in(one.tool, other.question.lower())
        or named_in(other.tool, one.question.lower())
        for one in some
        for other in others
    )


def _other_wording(words: Words, asked: Asked) -> Asked:
    """The same tool, asked in these or in other words, where there are some."""
    question, call = words.rng.choice(((asked.question, asked.call), *asked.more))
    return replace(asked, question=question, call=call)


def _asked_once(words: Words, asked: Asked) -> Turn:
    return told_by("natural", words, _other_wording(words, asked))


def _then_another(words: Words, needed: list[Asked]) -> Turn:
    """A question and, after its answer, another one or the wish to hear it again."""
    rng = words.rng
    first = _other_wording(words, rng.choice(needed))
    text, answer = natural.result(words)
    messages = natural.messages_of(first, text, answer)
    if len(needed) == 1 or rng.random() < 0.3:
        return Turn("follow_up", [*messages, user(rng.choice(FORMS["again"])), says(answer)])
    later = _other_wording(words, rng.choice([one for one in needed if one.name != first.name]))
    return Turn("follow_up", [*messages, *told_by("natural", words, later).messages])


SITUATIONS: dict[str, Callable[[Words], Made]] = {
    "natural": natural_call,
    "natural_arguments": natural_arguments,
    "no_parameters": no_parameters,
    "natural_parallel": natural_parallel,
    "natural_chain": natural_chain,
    "natural_decline": natural_decline,
    "tool_error": tool_error,
    "follow_up": follow_up,
    "rounds": rounds,
    "server_tool": server_tool,
}
"""Key of the mix -> what makes a turn of it."""
