"""Files of text: which characters their bytes stand for."""

from __future__ import annotations

import codecs
import re

from tools.documents.document import UnreadableDocument

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROLS = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f]")
"""Characters that no text has. Form feeds and escapes are in some, and backspaces in manual pages."""

_END = "\x1a"
"""What ends a text of DOS."""

MOST_CONTROLS = 0.002
"""Of a text that is still taken as one."""

SAMPLE = 1 << 16
"""Bytes by which an encoding is guessed."""

NULS = 0.5
"""Of every second byte, in UTF-16 without a mark. Its other bytes have none."""

_FOREIGN = (
    *("cp1251", "koi8_r", "cp866", "cp1253", "cp1255", "cp1256", "cp874"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
)
"""Encodings that are guessed: of scripts other than Latin."""

LEAST_LETTERS = 8
"""Different ones in words, of a text whose encoding is guessed."""

MOST_BROKEN = 0.2
"""Of the letters outside of ASCII that stand beside one of ASCII; in a Latin script most do (`Straße`)."""

_WORD = re.compile(r"[^\W\d_a-zA-Z]{2,}")
_LETTER = re.compile(r"[^\W\d_a-zA-Z]")
_BROKEN = re.compile(r"(?<=[a-zA-Z])[^\W\d_a-zA-Z]|[^\W\d_a-zA-Z](?=[a-zA-Z])")


def decoded(data: bytes) -> str:
    """A text file's characters: by its mark of UTF-8, UTF-16 or UTF-32, else as UTF-8, else in an encoding
    of another script than Latin where that is sure, else as Windows-1252, which Latin-1 is a part of. Raises
    UnreadableDocument for what is no text."""
    text = _decoded(data).rstrip(_END)
    sample = text[: 1 << 20]
    if "\x00" in text or len(_CONTROLS.findall(sample)) > MOST_CONTROLS * len(sample):
        message = "This file is neither text nor a document of a kind that can be read."
        raise UnreadableDocument("unsupported_file", message)
    return text


def _decoded(data: bytes) -> str:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if (order := _order_of_utf_16(data[:SAMPLE])) is not None:
        return data.decode(order, "replace")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        # a line has no halves of characters
        sample = data[data.rfind(b"\n", 0, error.start) + 1 :][:SAMPLE]
    if len(sample) == SAMPLE:
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    for encoding in (*_guessed(sample), "cp1252"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("latin-1")


def _order_of_utf_16(sample: bytes) -> str | None:
    """UTF-16 without a mark, by the bytes that are NUL in Latin letters."""
    even, odd = sample[::2], sample[1::2]
    if not even.count(0) and odd.count(0) > NULS * len(odd):
        return "utf-16-le"
    if not odd.count(0) and even.count(0) > NULS * len(even):
        return "utf-16-be"
    return None


def _guessed(sample: bytes) -> list[str]:
    """The encoding of a text in another script than Latin, where one is sure: it fits best, and no other does
    as well."""
    try:
        from charset_normalizer import from_bytes
    except ModuleNotFoundError:  # it comes with the extra `files`, which plain text does not need
        return []
    guesses = []
    for each in from_bytes(
        sample, cp_isolation=[*_FOREIGN], preemptive_behaviour=False, enable_fallback=False
    ):
        text = str(each)
        letters = _LETTER.findall(text)
        foreign = [letter for letter in letters if _is_foreign(letter)]
        if foreign and len(foreign) - len(_BROKEN.findall(text)) >= (1 - MOST_BROKEN) * len(letters):
            num_different = len({*"".join(_WORD.findall(text))})
            share = len(foreign) / sum(not char.isascii() for char in text)
            guesses.append(((each.chaos, -each.coherence, -share), num_different, each.encoding))
    match sorted(guesses):
        case [(fit, num_letters, encoding), *others] if num_letters >= LEAST_LETTERS:
            return [] if others and others[0][0] == fit else [encoding]
    return []


def _is_foreign(letter: str) -> bool:
    """Whether it is of no Latin script, nor half of the width that Japanese has: such letters are single
    bytes, and any text reads as them."""
    return letter > "\u02ff" and not "\uff61" <= letter <= "\uff9f"
