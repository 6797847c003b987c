"""Texts between a command and its terminal: what cannot be read or shown in its encoding is replaced."""

from __future__ import annotations

import io
import sys


def replace_what_has_no_character() -> None:
    """Have the standard streams replace what their encoding has no character for, such as an é in Latin-1
    that is read as UTF-8: by default they end the command."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a program that calls the command may have put others there
            stream.reconfigure(errors="replace")


def as_text(argument: str) -> str:
    """An argument that is said to somebody, read in the same way. The name of a file is none: it may be any
    bytes, which Python keeps as halves of characters."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
