"""The files of jobs as chunks: their bytes are fetched, read as documents, and cut."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from server.clock import now_us
from storage import MAX_CHUNKS, FileClaim
from tools import Chunk, Document, read_document, split_document

if TYPE_CHECKING:
    from storage import Storage


class Documents:
    """Reads the files of one database."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def chunks(self, job: FileClaim) -> Sequence[Chunk]:
        """The chunks of a job's file; no more than one above those that a file may have. Raises
        UnreadableDocument, and NotFound where the file is gone."""
        file = await self._storage.files.get(job.owner, job.file_id, now_us())
        # A file without a name, of which nothing is left however this process ends.
        with tempfile.TemporaryFile() as copy:
            async for part in self._storage.blobs.open(file.digest):
                await asyncio.to_thread(copy.write, part)
            document = await read_document(copy, file.filename, owner=job.owner)
        return await asyncio.to_thread(_cut, document, job.chunk_tokens, job.chunk_overlap)


def _cut(document: Document, max_tokens: int, overlap_tokens: int) -> list[Chunk]:
    cut = split_document(document, max_tokens=max_tokens, overlap_tokens=overlap_tokens)
    # No database has to hold NUL characters.
    clean = (replace(chunk, text=chunk.text.replace("\0", "")) for chunk in islice(cut, MAX_CHUNKS + 1))
    return [chunk for chunk in clean if chunk.text.strip()]
