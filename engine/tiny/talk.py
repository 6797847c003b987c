"""The skills of plain conversation: greeting, repeating, small facts, counting, arithmetic and recall."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from engine.tiny.dialogue import Message, Turn, says, user
from engine.tiny.phrases import listed, paired
from engine.tiny.words import Words

UNKNOWN = "I am a very small model and I do not know that."
WHO = "I am Antiphon Tiny, a very small language model."


WELL = "I am well, thank you. How can I help you?"

GREETINGS = paired("greetings")
CLOSINGS = paired("closings")
CAPITALS = paired("capitals")
OPPOSITES = paired("opposites")
SOUNDS = paired("sounds")
COLOURS = paired("colours")
FIXED = paired("fixed")
ADDRESSEES = listed("talk", "addressees")
HOW_ARE_YOU = listed("talk", "how_are_you")
PLAIN_SAY = listed("talk", "say_plain")
EXACT_SAY = listed("talk", "say_exactly")
INTROS = listed("talk", "introductions")
ASK_NAME = listed("talk", "ask_name")
THINGS = listed("talk", "things")
CAPITAL_QUESTIONS = listed("talk", "capital_questions")
OPPOSITE_QUESTIONS = listed("talk", "opposite_questions")
ACKS = listed("talk", "acknowledgements")


def noise(words: Words, text: str) -> str:
    """The small liberties people take when they type."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.08:
        text = text.rstrip("?.!")
    elif roll < 0.14:
        text = text[0].lower() + text[1:]
    elif roll < 0.18:
        text = rng.choice(("Please tell me. ", "A question: ", "OK. ", "Tell me: ")) + text
    return text


def closed(words: Words, make: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """A (question, answer) of a closed set, whose exact question belongs to this split."""
    for _ in range(60):
        question, answer = make()
        if (zlib.crc32(question.encode()) % 7 == 0) == (words.split == "heldout"):
            return question, answer
    return question, answer


def greet(words: Words) -> Turn:
    rng = words.rng

    def make() -> tuple[str, str]:
        if rng.random() < 0.2:
            text, answer = rng.choice(list(CLOSINGS.items()))
            return text + rng.choice(
                ("", ".", "!", ", Antiphon!", ", bye!" if "thank" in text.lower() else "!")
            ), answer
        text, answer = rng.choice(list(GREETINGS.items()))
        text += rng.choice(ADDRESSEES) + rng.choice(("", ".", "!", "!", "!!", ",", " :)"))
        if rng.random() < 0.2:
            text, answer = text + " " + rng.choice(HOW_ARE_YOU), WELL
        elif rng.random() < 0.1:
            text, answer = rng.choice(HOW_ARE_YOU), WELL
        case = rng.random()
        text = text.lower() if case < 0.2 else text.upper() if case < 0.23 else text
        return text, answer

    question, answer = closed(words, make)
    return Turn("greet", [user(question), says(answer)])


def repeat(words: Words) -> Turn:
    rng = words.rng
    roll = rng.random()
    if roll < 0.45:
        target = words.phrase(1, 2) if rng.random() < 0.6 else words.phrase(2, 6)
        if words.split == "train" and rng.random() < 0.1:
            target = rng.choice(
                ("hello world", "hello", "hi", "Hello, world", "hello there", "yes", "no", "ok", "pong")
            )
        form = rng.choice(PLAIN_SAY)
        if rng.random() < 0.2:
            form = form.replace("{}", rng.choice(('"{}"', "'{}'")))
    elif roll < 0.95:
        target = words.sentence(1, 9) if rng.random() < 0.5 else words.phrase(1, 8)
        form = rng.choice(EXACT_SAY)
        if rng.random() < 0.15:
            form = form.replace("{}", '"{}"')
    else:
        word, times = words.any(), rng.randint(2, 6)
        form, target = f"Repeat the word {word} {times} times.", " ".join([word] * times)
    return Turn("repeat", [user(form.replace("{}", target)), says(target)])


def fact(words: Words, fixed: bool = True) -> Turn:
    """A question of a closed set and its answer; `fixed`: also of those that are asked in one way only."""
    rng = words.rng

    def make() -> tuple[str, str]:
        if not fixed or rng.random() < 0.6:
            question, answer, _ = _known(words)
        else:
            question, answer = rng.choice(list(FIXED.items()))
        return noise(words, question), answer

    question, answer = closed(words, make)
    return Turn("fact", [user(question), says(answer)])


def one_word_fact(words: Words) -> Turn:
    """A question of a closed set, answered with the one word that matters."""

    def make() -> tuple[str, str]:
        question, _, word = _known(words)
        while " " in word:
            question, _, word = _known(words)
        return noise(words, question), word

    question, answer = closed(words, make)
    return Turn("fact", [user(question), says(answer)])


def _known(words: Words) -> tuple[str, str, str]:
    """A question of a closed set, its answer, and the answer's one word."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.5:
        land, city = rng.choice(list(CAPITALS.items()))
        return rng.choice(CAPITAL_QUESTIONS).format(land), f"The capital of {land} is {city}.", city
    if roll < 0.7:
        thing, answer = rng.choice(list(COLOURS.items()))
        colour = rng.choice(("colour", "color"))
        question = rng.choice(
            (
                f"What {colour} is {thing}?",
                f"What is the {colour} of {thing}?",
                f"Which {colour} is {thing}?",
            )
        )
        return question, answer, answer.rstrip(".").rpartition(" ")[2]
    if roll < 0.9:
        word, other = rng.choice(list(OPPOSITES.items()))
        return rng.choice(OPPOSITE_QUESTIONS).format(word), f"The opposite of {word} is {other}.", other
    animal, sound = rng.choice(list(SOUNDS.items()))
    question = rng.choice(
        ("What does a {} say?", "What sound does a {} make?", "Which sound does a {} make?")
    )
    return question.format(animal), f"A {animal} says {sound}.", sound


def unknown(words: Words) -> Turn:
    rng = words.rng
    x, y = words.made_up(), words.made_up()
    if rng.random() < 0.4:
        x = words.common()
    question = rng.choice(
        (
            f"What is the {x} of {y}?",
            f"Who wrote {x} {y}?",
            f"Explain {x} {y}.",
            f"Why is {x} {y}?",
            f"What is {x}?",
            f"When was {y} {x} born?",
            f"Who is {y.capitalize()}?",
            f"How does a {x} {y} work?",
            f"Where is {y}?",
            f"What do you think about {x}?",
            f"How many {x} are in {y}?",
            f"Describe {x} {y}.",
            f"Translate {x} to {y}.",
            f"Write an essay about {x}.",
            f"What happened in {rng.randint(1000, 2030)}?",
            f"Is {x} better than {y}?",
            f"What is the weather in {words.city()}?",
            f"What time is it in {words.city()}?",
            f"How tall is {y.capitalize()}?",
            f"What's the weather like in {words.city()}?",
            f"How do I {x} a {y}?",
            f"Who won the {x} {y}?",
            f"What is the capital of {y.capitalize()}?",
            f"Summarize the {x} {y}.",
            f"Solve the {x} {y} problem.",
            f"Fix the {x} in {y}.py.",
            f"What is the meaning of {x}?",
            f"How old is {y.capitalize()}?",
            "What is the meaning of life?",
            "Who is the president?",
            "What day is it today?",
            "Explain quantum physics.",
        )
    )
    return Turn("unknown", [user(noise(words, question)), says(UNKNOWN)])


def count(words: Words) -> Turn:
    rng = words.rng
    top = (
        rng.randint(2, 20)
        if rng.random() < 0.88
        else rng.choice((25, 30, 40, 50, 64, 75, 100, rng.randint(21, 100)))
    )
    first = 1
    roll = rng.random()
    if roll < 0.12:
        first = rng.randint(2, 90)
        top = first + rng.randint(1, 10)
    if roll > 0.9 and top <= 20:
        question = rng.choice(
            (f"Count down from {top} to 1.", f"Count backwards from {top} to 1.", f"Count down from {top}.")
        )
        numbers = list(range(top, 0, -1))
    else:
        forms = [
            "Count from {a} to {b}.",
            "Count from {a} to {b}",
            "Please count from {a} to {b}.",
            "Count {a} to {b}.",
            "Write the numbers from {a} to {b}.",
            "List the numbers from {a} to {b}.",
            "Print the numbers {a} to {b}.",
            "Count slowly from {a} to {b}.",
            "Can you count from {a} to {b}?",
            "Say the numbers from {a} to {b}.",
        ]
        if first == 1:
            forms += ["Count to {b}.", "Count to {b}", "Count up to {b}.", "Can you count to {b}?"]
        question = rng.choice(forms).format(a=first, b=top)
        numbers = list(range(first, top + 1))
    return Turn("count", [user(question), says(", ".join(map(str, numbers)))])


def worked(a: int, sign: str, b: int) -> tuple[str, int]:
    """A sum, difference or product of small numbers, digit by digit as on paper, and its result."""
    if sign in "x*":
        return f"{a} {sign} {b} = {a * b}", a * b
    (tens, ones), (more_tens, more_ones) = divmod(a, 10), divmod(b, 10)
    if sign == "+":
        steps = [f"{ones} + {more_ones} = {ones + more_ones}"]
        carry = (ones + more_ones) // 10
        if tens or more_tens:
            parts = [str(part) for part in (tens, more_tens, carry) if part]
            high = tens + more_tens + carry
            steps.append(" + ".join(parts) + (f" = {high}" if len(parts) > 1 else ""))
        return ", ".join(steps), a + b
    borrow = ones < more_ones
    steps = [f"{ones + 10 * borrow} - {more_ones} = {ones + 10 * borrow - more_ones}"]
    if tens:
        parts = [str(tens)] + [str(part) for part in (more_tens, int(borrow)) if part]
        high = tens - more_tens - borrow
        steps.append(" - ".join(parts) + (f" = {high}" if len(parts) > 1 else ""))
    return ", ".join(steps), a - b


def arithmetic(words: Words, thinking: bool) -> Turn:
    """A few small problems in a row, each with a thought."""
    rng = words.rng
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        messages += _problem(words, thinking)
    return Turn("arithmetic", messages)


def _problem(words: Words, thinking: bool) -> list[Message]:
    rng = words.rng
    roll = rng.random()
    if not thinking:
        a, b, sign = rng.randint(0, 10), rng.randint(0, 10), "+"
        thought, result = "", a + b
    else:
        if roll < 0.5:
            a, b, sign = rng.randint(0, 99), rng.randint(0, 99), "+"
            if rng.random() < 0.25:
                a, b = a % 10, b % 10
        elif roll < 0.75:
            a, b, sign = rng.randint(0, 10), rng.randint(0, 10), rng.choice("xx*")
        else:
            b, sign = rng.randint(0, 60), "-"
            a = rng.randint(b, 99) if rng.random() < 0.7 else b % 10 + rng.randint(0, 10)
            b = min(a, b)
        thought, result = worked(a, sign, b)
    form = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "Calculate {}.",
            "How much is {}?",
            "What's {}?",
            "{} = ?",
            "{}",
            "Compute {}.",
        )
    )
    expression = f"{a} {sign} {b}"
    asked = expression
    spoken = {"+": "plus", "-": "minus", "x": "times", "*": "times"}
    if rng.random() < 0.2:
        asked = expression.replace(" ", "")
    elif rng.random() < 0.15:
        asked = f"{a} {spoken[sign]} {b}"
    return [user(form.format(asked)), says(f"{expression} = {result}.", thought)]


# ---------------------------------------------------------------------------------------------- recall


def told_name(words: Words, name: str) -> list[Message]:
    """The user says their name; the assistant takes note."""
    rng = words.rng
    answer = says(f"Nice to meet you, {name}!")
    if rng.random() < 0.2:
        answer = says(rng.choice(ACKS).replace("{}", name), learn=False)
    return [user(rng.choice(INTROS).replace("{}", name)), answer]


def small_talk(words: Words, thinking: bool) -> list[Message]:
    """A turn that has nothing to do with the rest."""
    rng = words.rng
    roll = rng.random()
    if roll < 0.35:
        turn = repeat(words)
    elif roll < 0.6:
        turn = fact(words)
    elif roll < 0.7:
        turn = greet(words)
    elif roll < 0.85:
        turn = unknown(words)
    elif roll < 0.93:
        return _problem(words, thinking)
    else:
        return [
            user(words.sentence()),
            says(rng.choice(("OK.", "I see.", words.sentence(2, 8))), learn=False),
        ]
    return turn.messages


ASK_THING = ("What is my {}?", "What's my {}?", "Do you remember my {}?", "Tell me my {}.", "What was my {}?")


def between(words: Words) -> int:
    """Turns between what is told and the question for it: mostly few, up to ten."""
    rng = words.rng
    return rng.choice((0, 1, 1, 2, 2, 3)) if rng.random() < 0.65 else rng.randint(3, 10)


def recall_name(words: Words, thinking: bool) -> Turn:
    rng = words.rng
    name = words.name()
    messages = told_name(words, name)
    if rng.random() < 0.12:
        messages = small_talk(words, thinking) + messages
    for _ in range(between(words)):
        messages += small_talk(words, thinking)
    if rng.random() < 0.08:
        name = words.name()
        messages += [
            user(
                rng.choice(("Actually, my name is {}.", "No, my name is {}.", "Now call me {}.")).replace(
                    "{}", name
                )
            )
        ]
        messages += [says(f"Nice to meet you, {name}!")]
    messages += [user(rng.choice(ASK_NAME)), says(f"Your name is {name}.")]
    return Turn("recall_name", messages)


def recall_thing(words: Words, thinking: bool) -> Turn:
    rng = words.rng
    things = rng.sample(THINGS, rng.randint(1, 4))
    messages: list[Message] = []
    values: dict[str, str] = {}
    for thing in things:
        number = "number" in thing or thing == "code"
        values[thing] = str(words.number(6)) if number else words.any()
        form = rng.choice(
            ("My {} is {}.", "My {} is {}.", "Remember: my {} is {}.", "Please remember that my {} is {}.")
        )
        messages += [
            user(form.format(thing, values[thing])),
            says(f"I will remember that your {thing} is {values[thing]}."),
        ]
    for _ in range(between(words)):
        messages += small_talk(words, thinking)
    if rng.random() < 0.08:
        messages += [user(rng.choice(ASK_NAME)), says("I do not know your name.")]
        return Turn("recall_none", messages)
    for asked in rng.sample(things, rng.randint(1, len(things))):
        form = rng.choice(ASK_THING)
        messages += [user(form.format(asked)), says(f"Your {asked} is {values[asked]}.")]
    return Turn("recall_thing", messages)
