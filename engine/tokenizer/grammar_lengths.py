"""How long a text can be that a small grammar or a regex describes: counted generously, or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

MAX_SOURCE = 4096  # characters of a regex or grammar that is looked at
MAX_DEPTH = 32  # of rules and brackets in each other


def longest_match(pattern: str) -> float:
    """Characters of a regex's longest match, or more: as many as are written, times all that repeats.

    Infinite where a class or a name is not closed, and where the regex is long. In time with its length.
    """
    if len(pattern) > MAX_SOURCE:
        return math.inf
    found = list(_PART.finditer(pattern))
    if any(part["open"] is not None or part[0] in ("*", "+") for part in found):
        return math.inf
    parts = [part[0] for part in found]
    times = 1.0
    for part in parts:
        if (repeated := _REPEAT.fullmatch(part)) is not None:
            least, comma, most = repeated.groups()
            times *= float(most or (math.inf if comma else least))
    return times * sum(_REPEAT.fullmatch(part) is None for part in parts)


def longest_text(grammar: str) -> float:
    """Characters of the longest text of a grammar, Lark or GBNF, or more.

    Infinite where it holds anything but names, strings, regexes, brackets, alternatives and `?`, where it is
    recursive, and where it is long.
    """
    rules = _rules(grammar) if len(grammar) <= MAX_SOURCE else {}
    start = "root" if "::=" in grammar else "start"
    return _Lengths(rules).of_rule(start, 0)


_REPEAT = re.compile(r"\{(\d+)(,?)(\d*)\}")
# A property's name and all; a class; one of them that is not closed, and all behind it, lest that is looked
# through once for every bracket; an escape; a repetition; any other character.
_PART = re.compile(
    r"\\[pP]\{[^}]*\}|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>(?:\\[pP]\{|\[).*)|\\.|\{\d++,?+\d*+\}|.",
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
