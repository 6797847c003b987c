"""Documents as text: PDF, docx, pptx, xlsx, HTML, Markdown and plain text; their cutting into chunks; and
images as pixels.

A document is read in a process of its own, which can reach no network, write no file and start no process,
within limits of time and memory: parsers are fed with the bytes of strangers here.
"""

from __future__ import annotations

from tools.documents.document import (
    Document,
    DocumentPage,
    Pixels,
    ReadersBusy,
    ReadingLimits,
    UnreadableDocument,
)
from tools.documents.reader import (
    parser_version,
    prepare_documents,
    read_document,
    read_image,
    reading_confinement,
    unreadable_kinds,
)
from tools.documents.splitting import Chunk, estimated_tokens, split_document, splitter_version

__all__ = [
    "Chunk",
    "Document",
    "DocumentPage",
    "Pixels",
    "ReadersBusy",
    "ReadingLimits",
    "UnreadableDocument",
    "estimated_tokens",
    "parser_version",
    "prepare_documents",
    "read_document",
    "read_image",
    "reading_confinement",
    "split_document",
    "splitter_version",
    "unreadable_kinds",
]
