"""The operator's own tools: programs and endpoints from a file, functions of installed packages."""

from __future__ import annotations

from pathlib import Path

from tools.operator.fault import ToolsError
from tools.operator.functions import installed_tools, tool
from tools.operator.tools_file import read_tools
from tools.spec import Registry, ToolSpec

__all__ = ["ToolsError", "operator_tools", "tool"]


def operator_tools(file: Path | None, taken: Registry) -> dict[str, ToolSpec]:
    """All tools of the operator by their names, those of a file first.

    taken: tools whose names are no longer free. Raises ToolsError.
    """
    found: dict[str, ToolSpec] = {}
    sources = [(str(file), read_tools(file))] if file is not None else []
    sources.append(("an installed package", installed_tools()))
    for source, specs in sources:
        for spec in specs:
            if spec.name in found or spec.name in taken:
                raise ToolsError(f"{source}: there are two tools named {spec.name!r}")
            found[spec.name] = spec
    return found
