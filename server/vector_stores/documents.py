"""The files of jobs as chunks: their bytes are fetched, and read and cut in a process of its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from server.clock import now_us
from storage import MAX_CHUNKS, FileClaim
from tools import Chunk, Document, ReadingLimits, chunks_of, read_document

if TYPE_CHECKING:
    from storage import Storage


LIMITS = ReadingLimits(cpu_s=60, wall_s=240.0, max_chunks=MAX_CHUNKS + 1)
"""Of one file, which is read and cut: most texts of 16 million characters are cut in a second, odd ones in a
minute."""


class Documents:
    """Reads the files of one database."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def chunks(self, job: FileClaim) -> Sequence[Chunk]:
        """The chunks of a job's file; no more than one above those that a file may have. Raises
        UnreadableDocument, and NotFound where the file is gone."""
        file = await self._storage.files.get(job.owner, job.file_id, now_us())
        LIMITS.require_size(file.num_bytes)  # before a copy takes room on the disk
        limits = replace(LIMITS, chunk_tokens=job.chunk_tokens, chunk_overlap=job.chunk_overlap)
        # A file without a name, of which nothing is left however this process ends.
        with tempfile.TemporaryFile() as copy:
            async for part in self._storage.blobs.open(file.digest):
                await asyncio.to_thread(copy.write, part)
            document = await read_document(copy, file.filename, owner=job.owner, limits=limits)
        return await asyncio.to_thread(_chunks, document)


def _chunks(document: Document) -> list[Chunk]:
    return [chunk for chunk in chunks_of(document) if chunk.text.strip()]
