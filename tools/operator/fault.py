"""What can be wrong with tools of the operator."""

from __future__ import annotations

import re

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolsError(Exception):
    """The operator's tools cannot be offered; the message names the tool, and the file and its line or the
    entry point that it comes from."""


class ToolFault(Exception):
    """What is wrong with one tool, without its name."""


def check_name(name: str) -> None:
    """ToolFault for a name that a model cannot call."""
    if not _NAME.fullmatch(name):
        raise ToolFault("a tool's name has at most 64 letters, digits, underscores and dashes")
