"""What the model calls, one module a tool: the items of its calls and outputs, and what offers them."""

from __future__ import annotations

from server.items.calls.custom_input import InputReader

__all__ = ["InputReader"]
