"""Parses regular expressions, and writes them in the form that Lark takes.

It finds alternatives, groups and anchors, and refuses patterns that are too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark

from engine.types import ConstraintError

ANY = "(.|\\n)*"
MAX_REPEATS = 20_000  # the automaton of a longer repetition takes half a second where it is first walked
MAX_SHORTEST = 50_000  # characters: of a longer text the lexer has more states than it may (`grammar.LIMITS`)
MAX_FIXED = 1 << 14  # characters of a given text: each of its tokens takes 0.3 ms for 1,000 that are to come


def check_pattern(pattern: str) -> None:
    """Raise ConstraintError for a regex that repeats something too often to be walked in a step, or that
    only texts fit which are too long to be written."""
    check_repeats(pattern)
    if shortest_match(pattern) > MAX_SHORTEST:
        raise ConstraintError(f"no text of at most {MAX_SHORTEST} characters fits its repetitions")


def check_fixed(text: str) -> None:
    """Raise ConstraintError for a text that is to be written as it stands, and is too long for that."""
    if len(text) > MAX_FIXED:
        raise ConstraintError(f"the text {text[:32]!r}... has more than {MAX_FIXED} characters")


def shortest_match(pattern: str) -> int:
    """Characters of a regex's shortest match, or fewer: what it only looks at counts as nothing."""
    open_groups: list[tuple[list[int], bool]] = [([0], False)]  # the alternatives; whether it only looks
    last = 0  # of what a repetition would repeat
    for part in _ATOM.finditer(pattern):
        alternatives, looks = open_groups[-1]
        if (repeated := part["repeated"]) is not None:
            least = 0 if repeated in "*?" else 1 if repeated == "+" else int(part["least"] or 0)
            alternatives[-1] += (least - 1) * last
            last *= least
            continue
        last = 0
        if part["opens"] is not None:
            open_groups.append(([0], _AROUND.match(part["opens"]) is not None))
            continue
        if part[0] == "|":
            alternatives.append(0)
            continue
        if part[0] == ")" and len(open_groups) > 1:
            open_groups.pop()
            last = 0 if looks else min(alternatives)
            alternatives = open_groups[-1][0]
        elif part["nothing"] is None:
            last = 1
        alternatives[-1] += last
    return min(open_groups[0][0])


def check_repeats(pattern: str) -> None:
    """Raise ConstraintError for a pattern that repeats something too often to be walked in a step."""
    for found in re.finditer(r"\{(\d*)(?:,(\d*))?\}", pattern):
        if any(len(number or "") > 9 or int(number or 0) > MAX_REPEATS for number in found.groups()):
            raise ConstraintError(f"the repetition {found[0][:32]} is of more than {MAX_REPEATS}")


def spelled(text: str) -> str:
    """A text as a regex between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def whole(pattern: str) -> str:
    """A regex that a whole text matches, between slashes."""
    return _between_slashes("|".join(core for _, core, _ in _alternatives(pattern)))


def searched(pattern: str) -> str:
    """A regex that is found in a text, as one of the whole text between slashes; classes such as `\\d` are
    ASCII, as in JSON Schema. ConstraintError for anchors that stand within it."""
    parts = []
    for head, core, tail in _alternatives(pattern):
        if any(char in "^$" for char, _ in _outside(core)):
            raise ConstraintError(f"the pattern {pattern[:64]!r} has an anchor in its middle")
        parts.append(f"{'' if head else ANY}({core}){'' if tail else ANY}")
    return _between_slashes(regex_to_lark("|".join(parts), "dw"))


def found(pattern: str, text: str) -> bool | None:
    """Whether a regex is found in a text, in time with the text's length; None where it is none."""
    try:
        matcher = LLMatcher(_bytes(), f"start: /{searched(pattern)}/", log_level=0)
    except ConstraintError:
        return None
    if matcher.is_error():
        return None
    said = list(text.encode())
    return (
        matcher.validate_tokens(said) == len(said) and matcher.consume_tokens(said) and matcher.is_accepting()
    )


def unreadable(pattern: str) -> str | None:
    """Why a regex is none that can be enforced in JSON; None where it can."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(_bytes(), f"start: %json {schema}", log_level=0)
    if not matcher.is_error():
        return None
    said = matcher.get_error()
    if "lookarounds not supported" in said:
        return "it has an anchor, or the edge of a word, in its middle"
    told = re.search(r"error: (.*)", said) or re.search(r"JSON schema: (.*)", said)
    return "nothing matches it" if told is None or "is empty" in said else told[1]


class _Bytes:
    """A vocabulary of bytes, as `TokenizerWrapper` asks for one."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def lookaheads(pattern: str) -> list[str] | None:
    """Patterns that must all be found, for one that begins with conditions on what follows: `^(?=A)B` is
    `^(?:A)` and `^B`. None where it looks around in any other way."""
    if len(list(_alternatives(pattern))) > 1 or not pattern.startswith("^(?="):
        return [pattern] if "(?" not in pattern or not _AROUND.search(pattern) else None
    conditions, rest = [], pattern[1:]
    while rest.startswith("(?="):
        end = next((at for char, at in _outside(rest[1:], depth=1) if char == ")"), None)
        if end is None:
            return None
        conditions.append(f"^(?:{rest[3 : end + 1]})")
        rest = rest[end + 2 :]
    conditions.append(f"^{rest}")
    return None if any(map(_AROUND.search, conditions)) else conditions


def _alternatives(pattern: str) -> Iterator[tuple[bool, str, bool]]:
    """Each alternative without its anchors, and whether it had one in front and one behind."""
    cuts = [-1, *(at for char, at in _outside(pattern) if char == "|"), len(pattern)]
    for start, end in pairwise(cuts):
        part = pattern[start + 1 : end]
        head = part.startswith("^")
        tail = any(char == "$" and at == len(part) - 1 for char, at in _outside(part))
        yield head, part[head : len(part) - tail], tail


def _outside(pattern: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Every `|` that stands in no group, `)` that closes none, and `^` and `$` anywhere, with their places;
    escapes and classes aside. depth: of groups that are open before it."""
    for found in _PARTS.finditer(pattern):
        match found[0]:
            case "(":
                depth += 1
            case ")":
                depth -= 1
                if depth == 0:
                    yield ")", found.start()
            case "|" if depth == 0:
                yield "|", found.start()
            case "^" | "$":
                yield found[0], found.start()


def _between_slashes(regex: str) -> str:
    return re.sub(r"\\.|/|\n", lambda each: _AS_LARK.get(each[0], each[0]), regex, flags=re.DOTALL)


_AS_LARK = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]", re.DOTALL)
_AROUND = re.compile(r"\(\?<?[=!]")
# A repetition, lazy or not; what stands for no character; the beginning of a group; its end, or a bar; an
# escape, a class, or any other character.
_ATOM = re.compile(
    r"(?P<repeated>\{(?P<least>\d*)(?:,\d*)?\}|[*+?])\??|(?P<nothing>\(\?[a-zA-Z-]+\)|[$^]|\\[bBAzZ])"
    r"|(?P<opens>\((?:\?(?:<?[=!]|P?<\w+>|[a-zA-Z-]*:))?)|[)|]"
    r"|\\[pPxu]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
