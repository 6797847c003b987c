"""How long a text can be that a small grammar or a regex describes: counted generously, or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

MAX_SOURCE = 4096  # characters of a regex or grammar that is looked at
MAX_DEPTH = 32  # of rules and brackets in each other


def longest_match(pattern: str) -> float:
    """Characters of a regex's longest match, or more.

    Infinite where a repetition has no end, where a class, a name or a bracket is not closed, where the regex
    is written with comments (the flag `x`), and where it is long. In time with its length.
    """
    if len(pattern) > MAX_SOURCE:
        return math.inf
    outer: list[tuple[float, float]] = []
    longest = before = last = 0.0  # of the alternatives, of what stands before the last atom, of that atom
    for part in _PART.finditer(pattern):
        said = part[0]
        if part["open"] is not None or "x" in (part["flags"] or ""):
            return math.inf
        if said == "|":
            longest, before, last = max(longest, before + last), 0.0, 0.0
        elif said.startswith("("):
            outer.append((longest, before + last))
            longest = before = last = 0.0
        elif said == ")":
            if not outer:
                return math.inf
            inner = max(longest, before + last)
            (longest, before), last = outer.pop(), inner
        elif (most := _most(said)) is not None:
            last = last * most if last and most else 0.0
        else:
            before, last = before + last, float(said not in _WIDTHLESS)
    return math.inf if outer else max(longest, before + last)


def _most(said: str) -> float | None:
    """How often a repetition repeats at most; None for any other part of a regex. What makes one lazy repeats
    nothing."""
    if said in ("*", "+"):
        return math.inf
    if said == "?":
        return 1.0
    repeated = _REPEAT.fullmatch(said)
    if repeated is None:
        return None
    least, comma, most = repeated.groups()
    return float(most or (math.inf if comma else least))


def longest_text(grammar: str) -> float:
    """Characters of the longest text of a grammar, Lark or GBNF, or more.

    Infinite where it holds anything but names, strings, regexes, brackets, alternatives and `?`, where it is
    recursive, and where it is long.
    """
    rules = _rules(grammar) if len(grammar) <= MAX_SOURCE else {}
    start = "root" if "::=" in grammar else "start"
    return _Lengths(rules).of_rule(start, 0)


_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_WIDTHLESS = frozenset({"^", "$", r"\A", r"\z", r"\Z", r"\b", r"\B"})
# A property's name and all; a class; one of them that is not closed, and all behind it, lest that is looked
# through once for every bracket; an escape; a bracket with what it says of its group; a repetition; any other
# character.
_PART = re.compile(
    r"\\[pP]\{[^}]*\}|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>(?:\\[pP]\{|\[).*)"
    r"|\\(?:x[\dA-Fa-f]{2}|u[\dA-Fa-f]{4}|U[\dA-Fa-f]{8}|[xuU]\{[\dA-Fa-f]{1,8}\})|\\."
    r"|\((?:\?(?:P?<\w*>|(?P<flags>[A-Za-z-]*):?))?|\{(?:\d++,?+\d*+|,\d++)\}|.",
    re.DOTALL,
)
# A comment or white space; a string; a regex; the name that a rule begins with; another; anything else. With
# a string or regex that is not closed that is the rest of the line, lest each quote has it looked through.
_TOKEN = re.compile(
    r'(?P<skip>//.*|#.*|\s+)|(?P<text>"(?:\\.|[^"\\\n])*+"i?)|/(?P<regex>(?:\\.|[^/\\\n])++)/[a-z]*'
    r"""|[?!]?(?P<head>[A-Za-z_][\w-]*+)\s*+(?:::=|:)|(?P<name>[A-Za-z_][\w-]*+)|(?P<mark>["/].*|.)"""
)

_Token = tuple[str, str]
"""A group of `_TOKEN`, and what stands there."""


def _rules(grammar: str) -> dict[str, list[_Token]]:
    """The rules by their names; none where a name has two, or anything stands before the first one."""
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] = []
    for found in _TOKEN.finditer(grammar):
        kind = found.lastgroup or ""
        if kind == "head":
            if found["head"] in rules:
                return {}
            body = rules[found["head"]] = []
        elif kind != "skip":
            if not rules:
                return {}
            body.append((kind, found[kind]))
    return rules


class _Lengths:
    def __init__(self, rules: dict[str, list[_Token]]) -> None:
        self._rules = rules
        self._known: dict[str, float] = {}

    def of_rule(self, name: str, depth: int) -> float:
        if name not in self._known:
            self._known[name] = math.inf  # while it is looked at: what comes back to it has no end
            body = self._rules.get(name)
            if body is not None:
                self._known[name] = self._of_alternatives(iter(body), depth + 1)
        return self._known[name]

    def _of_alternatives(self, tokens: Iterator[_Token], depth: int) -> float:
        """Of what stands up to the closing bracket, or the end."""
        longest = length = 0.0
        for kind, said in tokens:
            if depth > MAX_DEPTH:
                return math.inf
            if said == "|":
                longest, length = max(longest, length), 0.0
            elif said in (")", "]"):
                break
            elif said in ("(", "["):
                length += self._of_alternatives(tokens, depth + 1)
            elif kind == "text":
                length += len(said)
            elif kind == "regex":
                length += longest_match(said)
            elif kind == "name":
                length += self.of_rule(said, depth + 1)
            elif said != "?":
                return math.inf
        return max(longest, length)
