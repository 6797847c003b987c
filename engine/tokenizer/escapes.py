"""Keeps the text that clients write apart from the control tokens that a chat template writes.

A tokenizer finds its added tokens in a rendered prompt wherever they stand, whoever wrote them. So what a
client wrote is escaped before a template sees it: a *break*, one character, goes into everything that would
be found as a control token. A broken `<|im_start|>` is no token, and no template that looks for `</think>`
in a message finds it. `escape_reader` makes the tokenizer that takes the breaks out again, after tokens have
been looked for, so that the model reads the very characters that the client wrote.

Text without control tokens stays as it is, and so do its token ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from engine.dialects import DIALECTS

# Both are printable, because `repr` would spell anything else, and neither is white space nor has a case,
# because templates trim text and change its case.
BREAK = "\u2e00"
QUOTE = "\u2e01"
QUOTED = {QUOTE + "0": BREAK, QUOTE + "1": QUOTE}
"""What stands for a BREAK or QUOTE that a client wrote."""

_TAGS = frozenset[str]().union(*(row.tags for row in DIALECTS))
_MARKER = re.compile(r"\W*[<>\[\]|｜].*\w.*[<>\[\]|｜]\W*", re.DOTALL)
_HTML = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*>")

_NAMES_OF_OURS = frozenset(
    {"role", "content", "text", "type", "name", "id", "index", "function", "arguments", "parameters"}
    | {"tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "description", "strict"}
)
"""Names of fields in messages, calls and tools: templates ask for them, so they are never escaped."""


def control_strings(added: Iterable[AddedToken], templates: Iterable[str] = ()) -> frozenset[str]:
    """The added tokens that mean something to a model beside their text.

    Those are the special ones, the tags of dialects, and whatever looks like a marker (`<|im_start|>`,
    `[INST]`). Added words, white space and elements of HTML are text, unless a template writes them.
    """
    sources = list(templates)

    def controls(token: AddedToken) -> bool:
        text = token.content
        if len(text.strip()) < 2:
            return False
        if token.special or text in _TAGS:
            return True
        if _HTML.fullmatch(text):
            return any(text in source for source in sources)
        return _MARKER.fullmatch(text) is not None

    return frozenset(token.content for token in added if controls(token))


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Escapes:
    """Escapes what clients write. Immutable; safe to use from several threads.

    control: the texts of control tokens; with none, only the two characters of escapes are escaped.
    normalize: what the tokenizer does to a text before it looks for tokens, where it does.
    """

    def __init__(self, control: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        self._control = sorted({text.lower() for text in control})
        self._reversed = sorted(text[::-1] for text in self._control)
        self._longest = max(map(len, self._control), default=0)
        self._first = _cases(text[0] for text in self._control)
        self._last = _cases(text[-1] for text in self._control)
        rests: dict[str, set[str]] = {}
        for text in self._control:
            rests.setdefault(text[0], set()).add(text[1:])
        found = "|".join(f"{re.escape(first)}(?={any_of(rest)})" for first, rest in sorted(rests.items()))
        # Templates change the case of text, so any case counts; `$^` is found nowhere.
        self._found = re.compile(found or "$^", re.IGNORECASE)
        self._normalize = normalize

    def message(self, message: Mapping[str, Any], completed: frozenset[str]) -> dict[str, Any]:
        """A message escaped. What templates make of roles, such as `<|user|>`, are meant to be tokens; a role
        that a client made up is text."""
        found = {
            name: self.text(item, completed) if type(item) is str else self.value(item, completed)
            for name, item in message.items()
        }
        if isinstance(role := message.get("role"), str) and role in _ROLES:
            found["role"] = self._inside(role)
        return found

    def value(self, value: Any, completed: frozenset[str] = frozenset()) -> Any:
        """A copy of plain data with its texts escaped. completed: see `completions`."""
        # Without recursion: arguments of calls may be nested as deeply as JSON can be read.
        found: list[Any] = [None]
        todo: list[tuple[Any, Any, Any]] = [(found, 0, value)]
        while todo:
            place, key, item = todo.pop()
            kind = type(item)
            if kind is str:
                place[key] = self.text(item, completed)
            elif kind is dict:
                names = [self._name(name, completed) for name in item]
                place[key] = new = dict.fromkeys(names)
                todo += [(new, name, inner) for name, inner in zip(names, item.values(), strict=True)]
            elif kind is list:
                place[key] = copy = [None] * len(item)
                todo += [(copy, at, inner) for at, inner in enumerate(item)]
            else:
                place[key] = item
        return found[0]

    def text(self, text: str, completed: frozenset[str] = frozenset()) -> str:
        """A text escaped: itself where nothing in it, at its ends or around it could be a control token."""
        text = self._inside(text)
        # Loops rather than expressions: most texts have neither, and that is to cost next to nothing.
        for char in self._first:
            if char in text:
                text = self._at_borders(text, completed)
                break
        else:
            head = text[: self._longest]
            for char in self._last:
                if char in head or completed or head[:1].isspace():
                    text = self._at_borders(text, completed)
                    break
        return text if self._normalize is None else self._in_normalized(text, completed, self._normalize)

    def _name(self, name: Any, completed: frozenset[str]) -> Any:
        return name if type(name) is not str or name in _NAMES_OF_OURS else self.text(name, completed)

    def _in_normalized(self, text: str, completed: frozenset[str], normalize: Callable[[str], str]) -> str:
        """A text broken everywhere where it becomes a control token by being normalized."""
        normal = normalize(text)
        if normal == text:
            return text
        if not self._found.search(normal) and self._at_borders(normal, completed) == normal:
            return text
        return BREAK.join(["", *_CHARS.findall(text), ""])

    def _inside(self, text: str) -> str:
        """A text with a break in every control token that is wholly in it."""
        if BREAK in text or QUOTE in text:
            text = text.replace(QUOTE, QUOTE + "1").replace(BREAK, QUOTE + "0")
        for char in self._first:
            if char in text:
                return self._found.sub(r"\g<0>" + BREAK, text)
        return text

    def _at_borders(self, text: str, completed: frozenset[str]) -> str:
        """A text broken where it may become a control token with what stands in front of it or behind it."""
        inner = text.strip()  # as templates trim
        found = inner
        if completed and len(inner) < self._longest and inner.lower() in completed:
            found = inner[0] + BREAK + inner[1:]
        head = inner[: self._longest].lower()
        for char in self._last:
            if char in head and _overlaps(head[::-1], char, self._reversed):
                found = BREAK + found
                break
        tail = inner[-self._longest :].lower()
        for char in self._first:
            if char in tail and _overlaps(tail, char, self._control):
                found += BREAK
                break
        return text if found is inner else text.replace(inner, found, 1)

    def completions(self, literals: Iterable[str]) -> frozenset[str]:
        """The texts that a template's own text in front and behind completes to a control token: `think`
        where it prints '<' + KEY + '>'. literals: the texts that it prints."""
        pieces = [piece.lower() for literal in literals for piece in _PLACES.split(literal) if piece]
        heads = {piece[:size] for piece in pieces for size in range(1, min(len(piece), self._longest) + 1)}
        tails = {piece[-size:] for piece in pieces for size in range(1, min(len(piece), self._longest) + 1)}
        found: set[str] = set()
        for text in self._control:
            starts = [at for at in range(1, len(text)) if text[:at] in tails]
            ends = [at for at in range(1, len(text)) if text[at:] in heads]
            found.update(text[start:end] for start in starts for end in ends if start < end)
        return frozenset(found)


_PLACES = re.compile(r"%\(?\w*\)?[sdr]|\{\w*\}")  # what `%` and `format` replace


def is_escaped(text: str) -> bool:
    """Whether there are escapes in a rendered prompt."""
    return BREAK in text or QUOTE in text


def from_ascii_json(text: str) -> str:
    """JSON in ASCII letters with the breaks as they were, and what a client wrote as JSON spells it."""
    return _SPELLED.sub(lambda found: found[1] + (BREAK if found[2] == "0" else rf"\u2e0{found[3]}"), text)


_CHARS = re.compile(f"{QUOTE}[01]|.", re.DOTALL)
# An even number of backslashes in front: none of them is what escapes the next one.
_SPELLED = re.compile(r"(?<!\\)((?:\\\\)*)\\u2e0(?:(0)|1([01]))")


def _cases(chars: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({case for char in chars for case in (char, char.upper())}))


def _overlaps(text: str, first: str, others: Sequence[str]) -> bool:
    """Whether a text ends as one of the others (sorted), which begins with `first`, begins and goes on."""
    at = text.find(first)
    while at >= 0:
        end = text[at:]
        place = bisect_left(others, end)
        if place < len(others) and others[place] == end:
            place += 1
        if place < len(others) and others[place].startswith(end):
            return True
        at = text.find(first, at + 1)
    return False


def any_of(texts: Iterable[str]) -> str:
    """A regex that matches where one of the texts stands, and that reads a place once, however many texts
    there are: `re` would try them one after another."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        if not text:
            return ""
        rests.setdefault(text[0], set()).add(text[1:])
    found = [re.escape(first) + any_of(rest) for first, rest in sorted(rests.items())]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
