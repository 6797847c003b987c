"""Defines what a scripted engine says: the steps of a script, and the default script.

The default script, `obey`, carries out the directives in the last user message, one a line; it repeats any
other message:

    say TEXT             TEXT
    count N              1 2 3 ... N
    random N             N words drawn by (seed, choice, generation)
    call NAME {JSON}     a call of NAME
    think TEXT then REST a reasoning block, then REST (a directive or text)
    tick MS              from here on one chunk every MS milliseconds
    fail TEXT            the request fails with TEXT

After tool outputs it says what they were. Blocks in tags, `<system-reminder>` for instance, that agents put
in front of a message or behind it are no part of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from engine.types import GenerateRequest, RequestFailed


@dataclass(frozen=True, slots=True)
class Say:
    """Emit this text, tags included. `whole`: as one chunk, however the engine cuts others."""

    text: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold until `release` is set; `reached` is set when the generation gets here."""

    release: asyncio.Event
    reached: asyncio.Event | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise `error`; one that is not an EngineError arrives as RequestFailed."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Tick:
    """From here on, one chunk every `seconds`."""

    seconds: float


Step = Say | Wait | Fail | Tick
Script = Callable[[GenerateRequest, str], Iterable[Step]]

_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_REMINDER = re.compile(r"<([a-z]+-[a-z]+)>.*?</\1>\s*", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_DIRECTIVE = re.compile(r"(say|count|random|call|think|tick|fail)\s+(.+)")
_WORDS = ("red", "green", "blue", "amber", "teal", "plum", "gold", "grey", "pink", "lime", "rust", "jade")


def obey(request: GenerateRequest, prompt: str) -> Iterator[Step]:
    """The default script: read the last user message of a ChatML prompt (or the prompt itself) and obey
    it."""
    turns = _USER_TURN.findall(prompt)
    message = _REMINDER.sub("", turns[-1] if turns else prompt)
    if outputs := _TOOL_RESPONSE.findall(message):
        yield Say("The tool said: " + "; ".join(outputs))
    elif _DIRECTIVE.match(message.strip()):
        said, border = False, ""
        for line in message.strip().split("\n"):
            border = "\n" if said else ""  # lines are said one below the other
            for step in _steps_of(request, line.strip()):
                if isinstance(step, Say):
                    step, said, border = Say(border + step.text), True, ""
                yield step
    else:
        yield Say(f"You said: {message.strip()}")


def _steps_of(request: GenerateRequest, line: str) -> Iterator[Step]:
    directive = _DIRECTIVE.match(line)
    if directive is None:
        yield Say(line)
        return
    verb, rest = directive.groups()
    number = min(int(rest), request.sampling.max_tokens) if rest.isdecimal() and len(rest) < 10 else 0
    match verb:
        case "count":
            yield Say(" ".join(str(index) for index in range(1, number + 1)))
        case "random":
            yield Say(" ".join(_draw(request, index) for index in range(number)))
        case "call":
            name, _, arguments = rest.partition(" ")
            inside = f'{{"name": {_json(name)}, "arguments": {_layout(arguments)}}}'
            yield Say(f"<tool_call>\n{inside}\n</tool_call>")
        case "think":
            thought, _, answer = rest.partition(" then ")
            yield Say(f"<think>\n{thought}\n</think>\n\n")
            yield from _steps_of(request, answer)
        case "tick":
            yield Tick(number / 1000)
        case "fail":
            yield Fail(RequestFailed(rest))
        case _:
            yield Say(rest)


def _draw(request: GenerateRequest, index: int) -> str:
    key = f"{request.sampling.seed} {request.choice} {request.generation} {index}"
    return _WORDS[blake2b(key.encode(), digest_size=1).digest()[0] % len(_WORDS)]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _layout(arguments: str) -> str:
    """Arguments in the layout that templates print; text that is not JSON stays as it is."""
    try:
        return _json(json.loads(arguments or "{}"))
    except ValueError:
        return arguments
