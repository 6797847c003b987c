"""Doors that load what they offer when it is first asked for (PEP 562).

A package whose modules import something heavy (torch, numpy, llguidance) would load all of it for a name that
needs none of it. Its door has `__getattr__ = late(__name__, {module: names})`, with imports beside it
for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late(door: str, offered: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a door: `offered` are the names by the module that has them.

    Nothing is kept: a name that is replaced in its module is replaced at the door too.
    """
    homes = {name: module for module, names in offered.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
