"""The command `antiphon`."""

from __future__ import annotations

from server.cli.commands import main

__all__ = ["main"]
