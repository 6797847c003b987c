"""What the model calls, one module a tool: the items of its calls and outputs, and what offers them."""

from __future__ import annotations

from server.items.calls.custom_input import InputReader
from server.items.calls.function_tools import as_flat, each_tool, function_name, limit_tools, shown_name

__all__ = ["InputReader", "as_flat", "each_tool", "function_name", "limit_tools", "shown_name"]
