"""The tools' door: what a model may do.

Kinds of tools as data, the tools that come with the server, and one way to run them that never raises. Knows
nothing of engines, storage and HTTP.
"""

from __future__ import annotations

from tools.builtin import BUILTIN, LABEL
from tools.runtime import ToolResult, execute
from tools.spec import Kind, ToolSpec

__all__ = ["BUILTIN", "LABEL", "Kind", "ToolResult", "ToolSpec", "execute"]
