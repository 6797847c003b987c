"""The tools that a server runs by itself: its calculator, its notes, its search of the web."""

from __future__ import annotations

from typing import Any

from engine.tiny import natural
from engine.tiny.dialogue import Call, Json, Message, Turn, says, user
from engine.tiny.extract import WEEKDAYS
from engine.tiny.natural import HOW, NOUNS, SERVER, listing
from engine.tiny.words import Words

NOTHING_FOUND = "I have found nothing."
NOTED = "I have saved the note."


def _function(name: str, about: str, required: list[str], **properties: Json) -> Json:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


CALCULATOR = _function(
    "calculator",
    "Add, subtract, multiply or divide numbers.",
    ["expression"],
    expression={
        "type": "string",
        "description": "Numbers, operators, parentheses and functions such as sqrt.",
    },
)
SAVE_NOTE = _function(
    "save_note", "Save a note.", ["note"], note={"type": "string", "description": "The text of the note."}
)
_CITE = "In the answer, write 【n】 behind what comes from source n."
_REF = {"ref": {"type": "integer"}, "url": {"type": "string"}}
WEB_SEARCH = _function(
    "web_search",
    f"Search the web. Results are numbered sources. {_CITE}",
    ["queries"],
    queries={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
)
OPEN_PAGE = _function(
    "open_page",
    "Read a page of the web: the source with the number ref, or a url. Long pages are shown in"
    f" parts, by the number page. {_CITE}",
    [],
    **_REF,
    page={"type": "integer"},
)
FIND_IN_PAGE = _function(
    "find_in_page",
    f"Find the lines of a page, given by ref or url, that have a text. {_CITE}",
    ["pattern"],
    **_REF,
    pattern={"type": "string"},
)
"""The server's own tools as a model is shown them."""


def server_tool(words: Words) -> tuple[Turn, list[Json]]:
    """A sum, a note or a search by the server's own tools."""
    roll = words.rng.random()
    return sum_turn(words) if roll < 0.35 else note_turn(words) if roll < 0.6 else search_turn(words)


def _own(words: Words) -> list[Json]:
    rng = words.rng
    tools = [CALCULATOR, SAVE_NOTE]
    if rng.random() < 0.3:
        tools += [one.tool for one in natural.different(words, rng.randint(1, 3))]
    return tools


def _figure(words: Words) -> str:
    rng = words.rng
    if rng.random() < 0.2:
        return f"{rng.uniform(0, 200):.{rng.choice((1, 2))}f}"
    return str(words.number(rng.choice((1, 2, 2, 3, 3, 4))))


def _expression(words: Words) -> tuple[str, str]:
    """How a sum is asked for, and how the calculator takes it."""
    rng = words.rng
    a, b, c = _figure(words), _figure(words), _figure(words)
    signs = {"+": ("plus",), "-": ("minus",), "*": ("times", "x", "multiplied by"), "/": ("divided by", ":")}
    sign, other = rng.choice(list(signs)), rng.choice(list(signs))
    roll = rng.random()
    if roll < 0.3:
        return f"{a} {rng.choice(signs[sign])} {b}", f"{a} {sign} {b}"
    if roll < 0.5:
        text = f"{a} {sign} {b}"
        return (text if rng.random() < 0.6 else text.replace(" ", "")), text
    if roll < 0.65:
        text = f"{a} {sign} {b} {other} {c}"
        return text, text
    if roll < 0.75:
        text = f"({a} {sign} {b}) {other} {c}" if rng.random() < 0.6 else f"{a} {sign} ({b} {other} {c})"
        return text, text
    return rng.choice(
        (
            (f"the sum of {a} and {b}", f"{a} + {b}"),
            (f"{a} and {b} together", f"{a} + {b}"),
            (f"the product of {a} and {b}", f"{a} * {b}"),
            (f"the difference of {a} and {b}", f"{a} - {b}"),
            (f"the square root of {a}", f"sqrt({a})"),
            (f"{a} to the power of 2", f"{a} ^ 2"),
            (f"{a} percent of {b}", f"{a} / 100 * {b}"),
            (f"half of {a}", f"{a} / 2"),
            (f"{a} minus {b} plus {c}", f"{a} - {b} + {c}"),
        )
    )


def _command_sum(words: Words) -> tuple[str, str]:
    a, b, c = _figure(words), _figure(words), _figure(words)
    return words.rng.choice(
        (
            (f"Divide {a} by {b}.", f"{a} / {b}"),
            (f"Multiply {a} by {b}.", f"{a} * {b}"),
            (f"Multiply {a} and {b}.", f"{a} * {b}"),
            (f"Add {a} and {b}.", f"{a} + {b}"),
            (f"Add {a}, {b} and {c}.", f"{a} + {b} + {c}"),
            (f"Subtract {b} from {a}.", f"{a} - {b}"),
            (f"What is left when {b} is taken from {a}?", f"{a} - {b}"),
            (f"What is {a} if I multiply it by {b}?", f"{a} * {b}"),
        )
    )


def sum_turn(words: Words) -> tuple[Turn, list[Json]]:
    rng = words.rng
    if rng.random() < 0.75:
        said, expression = _expression(words)
        question = rng.choice(SERVER["sums"]).replace("{}", said)
    else:
        question, expression = _command_sum(words)
    try:
        value: Any = eval(expression.replace("^", "**"), {"sqrt": lambda x: x**0.5})
        shown = f"{value:.12g}" if isinstance(value, float) else str(value)
        told = f"The result is {shown}."
    except ZeroDivisionError:
        shown = f"error: cannot compute '{expression}': division by zero"
        told = f"Sorry, the tool failed: cannot compute '{expression}': division by zero."
    question = natural.dressed(words, question) if rng.random() < 0.5 else question
    call = Call("calculator", {"expression": expression})
    messages = [user(question), Message("assistant", calls=(call,)), Message("tool", shown), says(told)]
    tools = [CALCULATOR] if rng.random() < 0.25 else _own(words)
    return Turn("server_tool", messages), tools


def note_turn(words: Words) -> tuple[Turn, list[Json]]:
    rng = words.rng
    thing, name = natural.noun_of(words, "things"), words.name()
    note = rng.choice(
        (
            words.phrase(2, 7),
            words.sentence(3, 8).rstrip(".!?"),
            f"the {thing} is {words.any()}",
            f"{name} comes on {rng.choice(WEEKDAYS)}",
            f"call {name} at {rng.randint(1, 12)}",
            f"buy {listing([words.any() for _ in range(rng.randint(1, 3))])}",
            f"the {words.any()} of {name} is {words.number(5)}",
            f"{thing} {words.number(3)} is behind the {words.common()}",
        )
    )
    question = rng.choice(SERVER["notes"]).replace("{}", note)
    call = Call("save_note", {"note": note})
    messages = [
        user(question),
        Message("assistant", calls=(call,)),
        Message("tool", f"Noted: {note}"),
        says(NOTED),
    ]
    return Turn("server_tool", messages), _own(words)


def _known(words: Words, topic: str) -> tuple[str, str]:
    """A question about a topic, and the sentence of a page that answers it."""
    rng = words.rng
    fills = {
        "{t}": topic,
        "{T}": topic[0].upper() + topic[1:],
        "{w}": str(words.number(4)),
        "{j}": rng.choice(list(HOW)),
        "{p}": words.name(),
        "{y}": str(rng.randint(1200, 2030)),
        "{k}": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
        "{c}": words.city().split(",")[0],
        "{g}": words.any(),
        "{h}": words.any(),
        "{a}": rng.choice(NOUNS["attributes"]),
    }
    question, fact = rng.choice(SERVER["known"])
    return natural.filled(question, fills), natural.filled(fact, fills)


def _topic(words: Words) -> str:
    noun = natural.noun_of(words, "things")
    return words.rng.choice(
        (
            f"the {noun} of {natural.title(words)}",
            f"the {noun} {natural.title(words)}",
            natural.title(words),
            words.name(),
        )
    )


def search_turn(words: Words) -> tuple[Turn, list[Json]]:
    rng = words.rng
    topic = _topic(words)
    question, fact = _known(words, topic)
    call = Call("web_search", {"queries": [question.rstrip("?")]})
    if rng.random() < 0.2:
        call = Call("web_search", {"queries": [topic]})
        question = rng.choice(
            ("Search for {}.", "Search the web for {}.", "Look up {} on the web.", "Find pages about {}.")
        )
        question, topic = question.replace("{}", topic), ""
    else:
        question = rng.choice(SERVER["leads"]).replace("{}", question)
    shown, answer = _found(words, topic, fact)
    messages = [user(question), Message("assistant", calls=(call,)), Message("tool", shown), says(answer)]
    tools = [WEB_SEARCH]
    if rng.random() < 0.6:
        tools += [OPEN_PAGE, FIND_IN_PAGE]
    if rng.random() < 0.25:
        tools += rng.choice(([CALCULATOR, SAVE_NOTE], [one.tool for one in natural.different(words, 1)]))
    return Turn("server_tool", messages), tools


def _found(words: Words, topic: str, fact: str) -> tuple[str, str]:
    """What a search shows, and the sentence of it that answers. topic: what it may say more about."""
    rng = words.rng
    if rng.random() < 0.06:
        return "Nothing was found.", NOTHING_FOUND
    count = rng.choice((1, 1, 2, 3, 4, 6))
    right = 0 if rng.random() < 0.8 else rng.randrange(count)
    blocks = []
    for index in range(count):
        more = rng.choice((0, 1, 1, 2)) + (index != right)
        sentences = [_known(words, _topic(words))[1] for _ in range(more)]
        if index == right:
            if topic and rng.random() < 0.3:
                sentences.append(_known(words, topic)[1])
            sentences.insert(0 if rng.random() < 0.6 else rng.randint(0, len(sentences)), fact)
        heading = natural.title(words) if rng.random() < 0.6 else words.phrase(1, 3).capitalize()
        text = " ".join(sentences)
        text = rng.choice((f"# {heading} {text}", f"{heading} {text}", text, f"{text}..."))
        host = rng.choice(("demo.test", f"{words.made_up()}.com"))
        url = f"https://{host}/{words.made_up()}{rng.choice(('.md', '.txt', ''))}"
        blocks.append(f"【{index + 1}】 {heading}\n{url}\n{text}")
    return "\n\n".join(blocks), f"{fact} 【{right + 1}】"
