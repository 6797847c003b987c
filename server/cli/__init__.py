"""The command `antiphon`."""

from __future__ import annotations

from collections.abc import Sequence

from server.cli.exit_codes import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C ends it without a traceback from here on, also while
    what it needs is imported, which takes a second."""
    try:
        from server.cli.commands import main

        return main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


__all__ = ["main"]
