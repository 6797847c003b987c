"""Hides the secrets of URLs wherever a text is printed."""

from __future__ import annotations

import re

# A password may itself hold slashes, colons and at signs: up to the last at sign all of it is hidden.
_PASSWORD = re.compile(r"(://[^/:@\s]*):[^\n]*@")
# In http a name without a password is one: a token.
_TOKEN = re.compile(r"(https?://)[^/:@\s]+@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;][^=&;#\s]*(?:pass|pwd|secret|token|key|auth|sig)[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE
)


def masked(text: str) -> str:
    """A text with the passwords of the URLs in it hidden: before the host, and in the query."""
    return _PARAMETER.sub(r"\1***", _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text)))
