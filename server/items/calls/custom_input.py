"""Reads the input of a custom tool out of the JSON arguments that carry it.

The model writes the call as `{"input": "..."}`. The reader takes this text piece by piece as it is generated
and returns what each piece adds to the decoded input. An escape that is cut in two is held until its rest
arrives.
"""

from __future__ import annotations

import json
import re
from typing import Literal

_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|[^u])")
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")


class InputReader:
    """Reads one call's arguments; other arguments than the one `input` are given out as they stand. name: of
    that argument, where it is another one."""

    def __init__(self, name: str = "input") -> None:
        self._name = name
        self._state: Literal["head", "inside", "over", "other"] = "head"
        self._held = ""

    def feed(self, text: str) -> str:
        """More of the arguments' JSON; returns more of the input. Splitting the text anywhere changes nothing
        but what is returned when."""
        self._held += text
        if self._state == "head":
            self._begin()
        if self._state == "inside":
            return self._decode()
        held, self._held = self._held, self._held if self._state == "head" else ""
        return held if self._state == "other" else ""

    def _begin(self) -> None:
        compact = re.sub(r"\s", "", self._held)
        head = f'{{"{self._name}":"'
        if compact.startswith(head):
            self._state = "inside"
            self._held = re.sub(rf'\A\s*\{{\s*"{self._name}"\s*:\s*"', "", self._held)
        elif not head.startswith(compact):
            self._state = "other"

    def _decode(self) -> str:
        out, at = [], 0
        while at < len(self._held):
            if self._held[at] == '"':
                self._state, at = "over", len(self._held)
                break
            found = _PLAIN.match(self._held, at) or _ESCAPE.match(self._held, at)
            if found is None or _HALF.match(self._held, at):
                break  # an escape that is not whole yet
            out.append(found[0] if found[0][0] != "\\" else _unescaped(found[0]))
            at = found.end()
        self._held = self._held[at:]
        return "".join(out)


def _unescaped(escape: str) -> str:
    """What an escape spells; half of a character, or no escape at all, is a replacement character."""
    try:
        text: str = json.loads(f'"{escape}"')
        text.encode()
    except ValueError:
        return "\N{REPLACEMENT CHARACTER}"
    return text
