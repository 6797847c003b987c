"""The command `antiphon`."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Sequence

from server.cli.exit_codes import INTERRUPTED, REFUSED
from server.cli.hangups import note_hangups

UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What a write to standard output fails with where no more goes into its file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C ends it without a traceback from here on, also while
    what it needs is imported, which takes a second; so does an output that nobody reads, or that has no
    room, which is often known only when the last of it is written. A code that says more than this stands."""
    code = 0
    try:
        try:
            args = sys.argv[1:] if argv is None else argv
            if args[:1] == ["serve"] and threading.current_thread() is threading.main_thread():
                note_hangups()  # first of all: what a server needs takes a second to import
            from server.cli.commands import main

            code = main(argv)
            return code
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _write_no_more()
        return code
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        _write_no_more()
        if not code:
            print(f"antiphon: what it says cannot be written: {error.strerror}", file=sys.stderr)
        return code or REFUSED


def _write_no_more() -> None:
    """Lose what is left of the output: the interpreter would fail to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


__all__ = ["main"]
