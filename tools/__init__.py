"""The tools' door: what a model may do.

Tools as data, those that come with the server, and one way to run them that never raises. Knows nothing of
engines, storage and HTTP.
"""

from __future__ import annotations

from tools.builtin import BUILTIN
from tools.runtime import ToolResult, execute
from tools.spec import Registry, ToolError, ToolSpec

__all__ = ["BUILTIN", "Registry", "ToolError", "ToolResult", "ToolSpec", "execute"]
