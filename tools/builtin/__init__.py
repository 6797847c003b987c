"""The tools that come with the server, one module each: enough to show the whole loop without a network.

A module has its tools in `TOOLS`, and is found here without being named.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from tools.spec import Registry, ToolSpec


def _tools() -> dict[str, ToolSpec]:
    modules = (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    return {spec.name: spec for module in modules for spec in module.TOOLS}


BUILTIN: Registry = MappingProxyType(_tools())

__all__ = ["BUILTIN"]
