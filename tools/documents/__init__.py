"""Documents as text: PDF, docx, pptx, xlsx, HTML, Markdown and plain text; their cutting into chunks; and
files of sound as samples, images as pixels.

A document is read in a process of its own, which can reach no network, write no file and start no process,
within limits of time and memory: parsers are fed with the bytes of strangers here.
"""

from __future__ import annotations

from tools.documents.document import (
    BETWEEN_PAGES,
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
    prepare_sounds,
    read_document,
    read_image,
    read_sound,
    reading_confinement,
    unreadable_kinds,
)
from tools.documents.sound import Sound
from tools.documents.splitting import Chunk, chunks_of, estimated_tokens, splitter_version

__all__ = [
    "BETWEEN_PAGES",
    "Chunk",
    "Document",
    "DocumentPage",
    "Pixels",
    "ReadersBusy",
    "ReadingLimits",
    "Sound",
    "UnreadableDocument",
    "chunks_of",
    "estimated_tokens",
    "parser_version",
    "prepare_documents",
    "prepare_sounds",
    "read_document",
    "read_image",
    "read_sound",
    "reading_confinement",
    "splitter_version",
    "unreadable_kinds",
]
