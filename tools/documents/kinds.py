"""Which kind of document a file is: by its first bytes, and where these tell nothing, by its name."""

from __future__ import annotations

import codecs
import re
from pathlib import PurePosixPath
from typing import Literal

from tools.documents.document import Kind, UnreadableDocument

Family = Literal["pdf", "archive", "html", "text"]

_MARKDOWN = frozenset({".md", ".markdown", ".mdx", ".rmd"})
_HTML = frozenset({".html", ".htm", ".xhtml"})
_ARCHIVES: dict[str, Kind] = {
    ".docx": "docx",
    ".docm": "docx",
    ".pptx": "pptx",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
}
# Nothing is gone back on (`*+`): a file of comments would else take time that doubles with each of them.
_BEGINS_AS_HTML = re.compile(
    rb"\s*+(<\?xml[^>]*+>\s*+)?+(<!--((?!-->).)*+-->\s*+)*+(<!doctype\s+html|<html[\s>])", re.I | re.S
)
_SOURCE = frozenset(
    {".php", ".js", ".jsx", ".ts", ".tsx", ".vue", ".svelte", ".py", ".rb", ".java", ".go", ".cs"}
)
"""Of source code, which may begin as HTML does."""

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Characters that no text has. Form feeds and escapes are in some."""

MOST_CONTROLS = 0.002
"""Of a text that is still taken as one."""

HEAD = 4096
"""Bytes of a file that tell its family."""

LIBRARIES: dict[Kind, tuple[str, ...]] = {
    "pdf": ("pypdfium2",),
    "docx": ("mammoth",),
    "pptx": ("pptx",),
    "xlsx": ("openpyxl",),
    "html": ("trafilatura",),
    "image": (
        *("PIL.Image", "PIL.ImageOps", "PIL.PngImagePlugin", "PIL.JpegImagePlugin"),
        *("PIL.WebPImagePlugin", "PIL.GifImagePlugin"),
    ),
}
"""Libraries of each kind that has any, by the names that they are imported by. HTML is read without, too."""


def suffix_of(filename: str) -> str:
    """The ending of a file's name, in small letters, with its dot."""
    return PurePosixPath(filename.replace("\\", "/")).suffix.lower()


def likely_kind(head: bytes, filename: str) -> Kind:
    """Of which kind a file seems to be, so that its library can be loaded. Raises UnreadableDocument."""
    family, suffix = family_of(head, filename), suffix_of(filename)
    if family == "archive":
        return _ARCHIVES.get(suffix, "docx")
    if family == "text":
        return "markdown" if suffix in _MARKDOWN else "text"
    return family


def family_of(head: bytes, filename: str) -> Family:
    """What a file is, by its first HEAD bytes. Raises UnreadableDocument for what is never read."""
    suffix = suffix_of(filename)
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")):
        return "archive"
    if head.startswith(_OLE) or suffix == ".doc":
        message = (
            "This is an Office file of the old binary kind (doc, xls, ppt), or one with a password. Save it"
            " as docx, xlsx, pptx or PDF, without a password."
        )
        raise UnreadableDocument("unsupported_file", message)
    if head.startswith(b"{\\rtf"):
        raise UnreadableDocument("unsupported_file", "RTF files are not read. Save it as docx or PDF.")
    if suffix == ".pdf" or suffix in _ARCHIVES:
        raise UnreadableDocument(
            "invalid_file", f"This is no {suffix[1:]} file, though it has the name of one."
        )
    if suffix in _HTML or (suffix not in _SOURCE and _BEGINS_AS_HTML.match(head)):
        return "html"
    return "text"


def decoded(data: bytes) -> str:
    """A text file's characters: by its mark of UTF-8, UTF-16 or UTF-32, else as UTF-8, else as Windows-1252,
    which Latin-1 is a part of. Raises UnreadableDocument for what is no text."""
    text = _decoded(data)
    sample = text[: 1 << 20]
    if "\x00" in text or len(_CONTROLS.findall(sample)) > MOST_CONTROLS * len(sample):
        message = "This file is neither text nor a document of a kind that can be read."
        raise UnreadableDocument("unsupported_file", message)
    return text


def _decoded(data: bytes) -> str:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    for encoding in ("utf-8", "cp1252"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("latin-1")
