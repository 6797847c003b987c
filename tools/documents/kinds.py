"""Which kind of document a file is: by its first bytes, and where these tell nothing, by its name."""

from __future__ import annotations

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

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
HEAD = 4096
"""Bytes of a file that tell its family."""

LIBRARIES: dict[Kind, tuple[str, ...]] = {
    "pdf": ("pypdfium2",),
    "docx": ("mammoth",),
    "pptx": ("pptx",),
    "xlsx": ("openpyxl",),
    "html": ("trafilatura",),
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
