"""Finds the strings that open tool calls, for a dialect's formats and the tools on offer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from engine.dialects import CallMarks


class Opening(NamedTuple):
    """A string that begins calls in one of some layouts.

    tag: it is a tag in front of the calls; otherwise it is the front of the first call. anywhere: also in the
    middle of a text, otherwise only where a turn begins. `lead`: the template prints it in front.
    """

    string: str
    layouts: tuple[CallMarks, ...]
    tag: bool = True
    anywhere: bool = True
    lead: str = ""


def openings(layouts: Iterable[CallMarks], names: Iterable[str]) -> tuple[Opening, ...]:
    """All openings; `names` are those of the tools that were offered: where no tag tells, they do."""
    layouts, names = tuple(layouts), tuple(names)
    found = []
    for string in dict.fromkeys(layout.open for layout in layouts if layout.open):
        own = tuple(layout for layout in layouts if layout.open == string)
        found.append(Opening(string, own, lead=own[0].lead))
    for string in dict.fromkeys(layout.each_open for layout in layouts if layout.each_open):
        own = tuple(layout for layout in layouts if layout.each_open == string)
        found.append(Opening(string, own, tag=False, lead=own[0].lead))
    bare = tuple(layout for layout in layouts if layout.bare)
    if bare:
        found.append(Opening("[", bare, tag=False, anywhere=False))
    for kind, front, named in (("object", "{", '{{"name": {quoted}'), ("python", "", "[{name}(")):
        own = tuple(layout for layout in bare if layout.kind == kind)
        if own and front:
            found.append(Opening(front, own, tag=False, anywhere=False))
        for name in names if own else ():
            string = named.format(name=name, quoted=json.dumps(name, ensure_ascii=False))
            found.append(Opening(string, own, tag=False, lead=own[0].lead))
    return tuple(found)
