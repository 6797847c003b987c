"""Scans a call whose keys and values stand between tags.

The name and the arguments, written as JSON, are given out as the text comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from engine.dialects import CallMarks
from engine.parsing.coercion import TEXT, Shapes, json_of, written
from engine.parsing.json_call import MAX_HEADER, Status
from engine.parsing.tag_search import first_of, partial


class TaggedScanner:
    """A name, then each argument as a key and a value between tags; see `Scanner`.

    A value whose parameter is a string comes out as it is written; any other when it has ended, because only
    then is it known what it is.
    """

    in_arguments = False  # the rest of a broken call is not JSON

    def __init__(self, marks: CallMarks, shapes: Shapes) -> None:
        assert marks.parameters is not None
        self._tags = marks.parameters
        self._shapes = shapes
        self._own_tag = bool(marks.each_open)  # the name stands inside a tag of the call's own
        self._ends = tuple(end for end in (marks.each_close, marks.close) if end)
        self._marks = marks
        self._value_ends: tuple[str, ...] = ()
        self.status: Status = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._expects: Literal["name", "argument", "key", "opening", "value"] = "name"
        self._arguments: list[str] = []
        self._num_arguments = 0
        self._key = ""
        self._value: list[str] = []
        self._is_text: bool | None = None  # what the layout says of the value, where it does
        self._streams = False  # the value is a string, whatever it reads
        self._may_be_json = False
        self._reads: Literal["text", "json", "string"] = "text"  # in JSON's strings tags are text
        self._seen = 0  # characters behind a tag in a string that has not ended
        self._begun = False  # the line break in front of the value is dealt with

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    @property
    def _name_alone(self) -> bool:
        """Whether nothing but an unknown name tells that this is a call."""
        return self.name not in self._shapes.names and not self._num_arguments

    def feed(self, text: str) -> int:
        at, expects = 0, None
        while self.status == "more" and expects != self._expects:
            expects = self._expects
            at = _READ[expects](self, text, at)
        return at

    # Each reads on from `at`, returns how far it came, and expects something else when it has found what it
    # looked for.

    def _read_name(self, text: str, at: int) -> int:
        found = first_of(text, (">",) if self._own_tag else (self._tags.open, *self._ends), at)
        end = found[0] if found else len(text)
        if end - at > MAX_HEADER:
            self.status = "bad"
        if found is None or self.status == "bad":
            return at
        name = (_NAME_IN_TAG if self._own_tag else _NAME).fullmatch(text, at, end)
        if name is None:
            self.status = "bad"
            return at
        self.name, self._expects = name[1], "argument"
        return end + self._own_tag

    def _read_argument(self, text: str, at: int) -> int:
        """The next argument's opening, or the end; whatever else stands there is skipped, but makes no call
        of a tool that nobody offered."""
        tags = (self._tags.open, *self._ends)
        found = first_of(text, tags, at)
        start, tag = found or (partial(text, tags, at), "")
        if self._name_alone and text[at:start].strip():
            self.status = "bad"
            return at
        if found is None:
            return start
        if tag == self._tags.open:
            self._expects = "key"
            return start + len(tag)
        self._arguments.append("}" if self._num_arguments else "{}")
        self.arguments_whole, self.status = True, "closed"
        return start

    def _read_key(self, text: str, at: int) -> int:
        # A tag's name that nobody closed ends with its line.
        found = first_of(text, (self._tags.key_close, "\n") if self._own_tag else (self._tags.key_close,), at)
        end, close = found or (len(text), "")
        if end - at > MAX_HEADER:
            self.status = "bad"
        if found is None or self.status == "bad":
            return at
        said = text[at:end].strip()
        match = _KEY.fullmatch(said)
        self._key = match[1] if match else said
        kinds = [kind.strip() in said for kind in self._tags.kinds or ()]
        self._is_text = kinds[0] if any(kinds) else None
        self._expects = "opening" if self._tags.value_open else "value"
        self._begin_value()
        return end + len(close)

    def _read_opening(self, text: str, at: int) -> int:
        body = text[at:].lstrip()
        if self._tags.value_open.startswith(body) and body != self._tags.value_open:
            return at
        self._expects = "value"  # models leave the tag out now and then
        opening = self._tags.value_open if body.startswith(self._tags.value_open) else ""
        return len(text) - len(body) + len(opening)

    def _read_value(self, text: str, at: int) -> int:
        if not self._begun:
            front = at + (self._tags.strip and text[at : at + 1] == "\n")
            if front >= len(text):
                return at
            self._begun, at = True, front
            self._reads = "json" if self._may_be_json and text[at] in '[{"' else "text"
        while True:
            start, at = at, self._outside_strings(text, at)
            self._keep(text[start:at])
            if self._reads == "string":
                return at
            found = first_of(text, self._value_ends, at)
            if found is None:
                ends = self._value_ends
                ready = partial(text, (*ends, "\n" + self._tags.close) if self._tags.strip else ends, at)
                self._keep(text[at:ready])
                return ready
            end, tag = found
            ends_call = tag.lstrip() != self._marks.close or self._another(text[end + len(tag) :])
            if ends_call is None:
                self._keep(text[at:end])
                return end
            if ends_call:
                break
            self._keep(text[at : end + len(tag)])
            at = end + len(tag)
        closed = tag == self._tags.close
        self._keep(text[at : end - (closed and self._tags.strip and end > at and text[end - 1] == "\n")])
        self._end_value()
        self._expects = "argument"
        return end + (len(tag) if closed else 0)

    def _another(self, behind: str) -> bool | None:
        """Whether another call follows; None where that is not known yet."""
        behind, opening = behind.lstrip(), self._marks.open
        return None if behind != opening and opening.startswith(behind) else behind.startswith(opening)

    def _outside_strings(self, text: str, at: int) -> int:
        """Where the search for the closing tag goes on: after the strings of a value that is JSON.

        A value with a string that does not end on its line was no JSON.
        """
        ends = self._value_ends
        while self._reads != "text":
            if self._reads == "json":
                quote, tag = text.find('"', at), first_of(text, ends, at)
                if quote < 0 or (tag is not None and tag[0] < quote):
                    break
                at, self._reads = quote + 1, "string"
            match = _IN_STRING.match(text, at + self._seen)
            assert match is not None
            end, after = match.end(), text[match.end() : match.end() + 2]
            if after not in ("", "\\"):
                at, self._reads = (end + 1, "json") if after[0] == '"' else (at, "text")
                self._seen = 0
                continue
            # A tag, or the beginning of one, may yet end the value. What stands behind a tag is held for as
            # long as the string, and not walked through again with every piece.
            tag = (at, "") if self._seen else first_of(text[:end], ends, at)
            self._seen = end - tag[0] if tag else 0
            return tag[0] if tag else partial(text[:end], ends, at)
        return at

    def _begin_value(self) -> None:
        types = self._shapes.types(self.name or "", self._key)
        is_text = self._is_text and (types is None or "string" in types)
        if self._is_text is None:
            is_text = types is not None and "string" in types and "null" not in types
        self._streams = bool(is_text)
        self._may_be_json = not is_text and (types is None or "string" not in types)
        self._value_ends = value_ends(self._marks, custom=self._shapes.is_custom(self.name or ""))
        self._begun = False
        self._arguments.append(f"{', ' if self._num_arguments else '{'}{written(self._key)}: ")
        self._arguments.append('"' if self._streams else "")
        self._num_arguments += 1

    def _keep(self, text: str) -> None:
        if self._streams:
            self._arguments.append(written(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        if self._streams:
            self._arguments.append('"')
        else:
            types, text = self._shapes.types(self.name or "", self._key), "".join(self._value)
            told = self._is_text is not None and (types is None or "string" in types)
            value = json_of(text, None if told else types)
            self._arguments.append(written(text) if types == TEXT and value[0] != '"' else value)
            self._value.clear()


_READ: dict[str, Callable[[TaggedScanner, str, int], int]] = {
    "name": TaggedScanner._read_name,
    "argument": TaggedScanner._read_argument,
    "key": TaggedScanner._read_key,
    "opening": TaggedScanner._read_opening,
    "value": TaggedScanner._read_value,
}


def value_ends(marks: CallMarks, *, custom: bool) -> tuple[str, ...]:
    """What ends a value: its closing tag, and where a model has forgotten it, on a line of its own the next
    argument or the end of the call. An end without a tag of the call's own is one where another call follows,
    or nothing. The input of a `custom` tool ends at its closing tag alone."""
    assert marks.parameters is not None
    if custom:
        return (marks.parameters.close,)
    behind = (
        (f"\n{marks.each_close}\n{marks.close}",) if marks.each_close else (f"\n{marks.close}", marks.close)
    )
    return marks.parameters.close, f"\n{marks.parameters.open}", *behind


def reads_name(name: str, *, in_tag: bool) -> bool:
    """Whether a tool of this name can be called; in_tag: the name stands inside a tag of the call's own."""
    match = (_NAME_IN_TAG if in_tag else _NAME).fullmatch(name)
    return match is not None and match[1] == name and len(name) < MAX_HEADER // 2


def reads_key(key: str) -> bool:
    """Whether an argument of this name can be given."""
    match = _KEY.fullmatch(key.strip())
    return match is not None and match[1] == key and len(key) < MAX_HEADER // 2


# What stands in a string of JSON, of which a line break is no part, up to its end or the text's.
_IN_STRING = re.compile(r'(?:[^"\\\n]++|\\[^\n])*+')
_NAME = re.compile(r"""\s*+([^\s<>{}\[\]"']++)\s*+""")
# Models add attributes that nobody asked for. Repetitions are possessive: no match may go back and try again.
_NAME_IN_TAG = re.compile(r"""\s*+["']?([^\s<>"']++)["']?[^<>]*+""")
_KEY = re.compile(r"""["']?([^"'<>]+?)["']?(?:\s++\w++=[^>]*+)?""")  # without white space around it
