"""Hides what must not be printed: the secrets of URLs, and what would steer a terminal."""

from __future__ import annotations

import re

# A password may itself hold slashes, colons and at signs: up to the last at sign all of it is hidden.
_PASSWORD = re.compile(r"(://[^/:@\s]*):[^\n]*@")
# In http a name without a password is one: a token.
_TOKEN = re.compile(r"(https?://)[^/:@\s]+@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;][^=&;#\s]*(?:pass|pwd|secret|token|key|auth|sig)[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE
)

_BEFORE_HOST = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_QUERY = re.compile(r"[?#].*", re.DOTALL)

_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def masked(text: str) -> str:
    """A text with the passwords of the URLs in it hidden: before the host, and in the query."""
    return _PARAMETER.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text)))


def bare(address: str) -> str:
    """An address that may be malformed with everything hidden before its host, and its whole query."""
    return _QUERY.sub("?***", _BEFORE_HOST.sub(lambda found: f"{found[1] or ''}***@", address))


def printable(text: str) -> str:
    """A text without what would steer a terminal: models and other people write it."""
    return _STEERS.sub("", text)


def one_line(text: str) -> str:
    """The same with spaces for line breaks and tabs, so that no part of it passes for a line of its own."""
    return printable(text).replace("\n", " ").replace("\t", " ")
