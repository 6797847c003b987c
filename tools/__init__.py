"""Tools that a model may call: what a tool is, those that come with the server, and how a call is run."""

from __future__ import annotations

from tools.builtin import BUILTIN, LABEL
from tools.runtime import ToolResult, execute
from tools.spec import ToolSpec

__all__ = ["BUILTIN", "LABEL", "ToolResult", "ToolSpec", "execute"]
