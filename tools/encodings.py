"""Texts as they come from elsewhere: in encodings that are read at once, and without halves of characters."""

from __future__ import annotations

import codecs

_FAMILIES = (
    "ascii",
    "utf-8",
    "utf-16",
    "iso8859",
    "cp",
    "koi8",
    "mac",
    "gb",
    "big5",
    "euc",
    "shift",
    "iso2022",
    "tis",
)
"""What names of encodings begin with in which pages are written. Python knows others that are none: some are
no characters, and decoding `punycode` takes time that grows with the square of the length."""


def read_text(data: bytes, encoding: str | None) -> str:
    """What bytes say in the encoding that a reply names, in UTF-8 where it names none that is read."""
    try:
        name = codecs.lookup(encoding or "utf-8").name
    except (LookupError, ValueError):
        name = "utf-8"
    return data.decode(name if name.startswith(_FAMILIES) else "utf-8", "replace")


def well_formed(text: str) -> str:
    """A text without halves of characters. JSON and names of files may have them, UTF-8 and so our own JSON
    may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
