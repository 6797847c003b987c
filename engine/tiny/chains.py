"""The skill of several calls: one after the other, or two at once."""

from __future__ import annotations

from engine.tiny.dialogue import Call, Json, Message, Turn, says, user
from engine.tiny.offers import (
    SKIES,
    WEATHER,
    Offer,
    Param,
    declare,
    made_up_tool,
    offer,
    offers,
    result_of,
    same_family,
    shown,
)
from engine.tiny.phrases import Link, chains, listed
from engine.tiny.words import Words

CHAINS = chains()
TONGUES = listed("words", "tongues")
JOINS = listed("tools", "joins")
NO_TOOL = "I do not have a tool for that."


def _value(words: Words, kind: str) -> Json:
    rng = words.rng
    if kind == "name":
        return words.name()
    if kind == "phrase":
        return words.phrase(1, 3)
    if kind in ("small", "number"):
        return words.number(2 if kind == "small" else 4)
    if kind == "code":
        return words.scramble().upper()
    if kind == "currency":
        return rng.choice(("euros", "yen", "pounds", "francs", words.made_up()))
    if kind in ("land", "city"):
        return words.city().split(",")[0]
    if kind == "tongue":
        return rng.choice(TONGUES)
    if kind == "sky":
        return rng.choice(SKIES)
    if kind == "path":
        return f"{words.made_up()}.{rng.choice(('txt', 'md', 'py'))}"
    if kind == "clock":
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    if kind == "ok":
        return rng.choice(("ok", "sent", "done"))
    return words.any()


def _link(words: Words, link: Link, known: dict[str, Json]) -> tuple[Json, Call]:
    """A tool of a chain and its call; `known` maps places such as `{0}` and `{r}` to values."""
    arguments = {name: known[place] for name, place in link.parameters.items()}
    params = [
        Param(name, "integer" if isinstance(value, int) else "word") for name, value in arguments.items()
    ]
    name = words.rng.choice(link.names)
    return declare(words, name, link.description, params), Call(name, arguments)


def chain(words: Words) -> tuple[Turn, list[Json]]:
    """A question whose second call needs the first one's result, up to the answer."""
    if words.rng.random() < 0.45:
        return _invented_chain(words)
    known_chain = words.rng.choice(CHAINS)
    known: dict[str, Json] = {f"{{{i}}}": _value(words, kind) for i, kind in enumerate(known_chain.kinds)}
    question = words.rng.choice(known_chain.questions)
    for place, value in known.items():
        question = question.replace(place, shown(value))
    first_tool, first = _link(words, known_chain.first, known)
    known["{r}"] = _value(words, known_chain.first.result)
    second_tool, second = _link(words, known_chain.second, known)
    known["{s}"] = _value(words, known_chain.second.result)
    answer = known_chain.answer
    for place, value in known.items():
        answer = answer.replace(place, shown(value))
    messages = [
        user(question),
        Message("assistant", calls=(first,)),
        Message("tool", shown(known["{r}"])),
        Message("assistant", calls=(second,)),
        Message("tool", shown(known["{s}"])),
        says(answer),
    ]
    return Turn("chain", messages), [first_tool, second_tool]


def _invented_chain(words: Words) -> tuple[Turn, list[Json]]:
    """Two tools that nobody has seen; the question says that the second takes the first one's result."""
    rng = words.rng
    first = offer(words)
    takes = rng.choice((words.made_up(), "value", "input", "id", "key", "code"))
    second_name = f"{rng.choice(('use', 'send', 'store', 'check', 'apply', 'put'))}_{words.made_up()}"
    result: Json = words.any() if rng.random() < 0.6 else words.number(4)
    kind = "integer" if isinstance(result, int) else "word"
    tool = declare(
        words, second_name, rng.choice(("", f"Takes a {takes}.", words.sentence(3, 6))), [Param(takes, kind)]
    )
    then = rng.choice(
        (
            "Then call {n} with the result.",
            "Then use {n} with {p} set to the result.",
            "Then {n} the result.",
            "After that call {n} with what it returns.",
            "Pass the result to {n}.",
        )
    ).format(n=second_name, p=takes)
    end = words.any() if rng.random() < 0.7 else str(words.number(4))
    question = f"{first.question.rstrip('?.! ')}. {then}"
    messages = [
        user(question),
        Message("assistant", calls=(first.call,)),
        Message("tool", shown(result)),
        Message("assistant", calls=(Call(second_name, {takes: result}),)),
        Message("tool", end),
        says(f"The result is {end}."),
    ]
    return Turn("chain", messages), [first.tool, tool]


def _two(words: Words) -> tuple[Offer, Offer]:
    """Two offers of different kinds."""
    while True:
        first, second = offer(words), offer(words)
        if not same_family(first.name, second.name):
            return first, second


def parallel(words: Words) -> tuple[Turn, list[Json]]:
    """One question that takes two calls at once: the same tool twice, or two tools; often with the answer."""
    rng = words.rng
    if rng.random() < 0.5:
        return _two_cities(words)
    first, second = _two(words)
    question = rng.choice(JOINS).format(
        first.question.rstrip("?.! "), second.question[0].lower() + second.question[1:], second.question
    )
    messages = [user(question), Message("assistant", calls=(first.call, second.call))]
    if rng.random() < 0.6:
        (one, told), (other, also) = result_of(words, first), result_of(words, second)
        messages += [Message("tool", one), Message("tool", other), says(f"{told} {also}")]
    return Turn("parallel", messages), [first.tool, second.tool]


def _two_cities(words: Words) -> tuple[Turn, list[Json]]:
    rng = words.rng
    made = offer(words)
    while made.tool["function"]["name"] not in WEATHER.names or len(made.call.arguments) != 1:
        made = offer(words)
    key = next(iter(made.call.arguments))
    first, second = words.city().split(",")[0], words.city().split(",")[0]
    question = rng.choice(
        (
            "What is the weather in {} and {}?",
            "What's the weather like in {} and in {}?",
            "Get the weather in {} and {}.",
            "Compare the weather in {} and {}.",
            "Is it warmer in {} or in {}?",
            "Tell me the weather in {} and {}.",
            "What's the weather in {} and {}?",
            "How is the weather in {} and in {}?",
        )
    ).format(first, second)
    calls = tuple(Call(made.name, {key: city}) for city in (first, second))
    messages = [user(question), Message("assistant", calls=calls)]
    if rng.random() < 0.6:
        skies = [rng.choice(SKIES) for _ in calls]
        messages += [Message("tool", sky) for sky in skies]
        messages += [says(f"The weather in {first} is {skies[0]} and the weather in {second} is {skies[1]}.")]
    return Turn("parallel", messages), [made.tool]


def decline(words: Words) -> tuple[Turn, list[Json]]:
    """A question for a tool that is not among those on offer."""
    asked, *left = offers(words, 2, 5)
    tools = [one.tool for one in left]
    said = [word for word in asked.question.lower().split() if word.isalpha() and len(word) > 2]
    if said and words.rng.random() < 0.5:
        # A name that shares a word with the question makes no tool for it.
        tools[-1] = made_up_tool(words, words.rng.choice(said))[0]
    return Turn("decline", [user(asked.question), says(NO_TOOL)]), tools
