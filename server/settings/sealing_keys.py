"""Keys that the operator gives to seal what clients keep, in place of those that the database holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

SECRET_BYTES = 64
"""Of a key: AES-SIV takes two keys of 256 bits."""

_KEY = re.compile(rf"[0-9A-Fa-f]{{{2 * SECRET_BYTES}}}", re.ASCII)
_EXPECTED = (
    f"expected {2 * SECRET_BYTES} hexadecimal digits, as `openssl rand -hex {SECRET_BYTES}` prints them"
)


def read_sealing_keys(texts: Sequence[str]) -> tuple[bytes, ...]:
    """Keys in their order. ValueError, which shows none of them, for a text that is no key, and for one that
    is there twice."""
    for number, text in enumerate(texts, 1):
        if not _KEY.fullmatch(text):
            raise ValueError(f"key {number}: {_EXPECTED}; it has {len(text)} characters")
    found = tuple(map(bytes.fromhex, texts))
    if len(set(found)) < len(found):
        raise ValueError("a key is there twice")
    return found


def read_sealing_key_file(file: Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line; blank lines, and those that begin with #, say nothing. ValueError for a
    file that cannot be read, that holds no key, or that holds something else."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"the file of sealing keys {file} cannot be read: {said}") from None
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"the file of sealing keys {file} holds no key")
    try:
        return read_sealing_keys(keys)
    except ValueError as error:
        raise ValueError(f"the file of sealing keys {file}: {error}") from None
