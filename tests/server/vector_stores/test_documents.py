"""Files of jobs as chunks: what is left of a document where the process ends while it is read, and what one
may take."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from server.clock import now_us
from server.vector_stores import documents
from storage import FileClaim, NewStoreFile, NewVectorStore, Storage, StoredFile, open_storage
from tests.support.making import OWNER, RUNNER, put_bytes, url
from tools import Document, ReadingLimits, UnreadableDocument, read_document


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()


async def test_a_document_has_no_name_on_the_disk_while_it_is_read(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing of it is left where the process is killed in this moment."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    named: list[Path] = []

    async def read(source: IO[bytes], filename: str, *, owner: str, limits: ReadingLimits) -> Document:
        named.extend(folder.rglob("*"))
        return await read_document(source, filename, owner=owner, limits=limits)

    monkeypatch.setattr(documents, "read_document", read)
    content = b"A secret of the bay."
    job = await _job(storage, content, len(content))
    [chunk] = await documents.Documents(storage).chunks(job)
    assert chunk.text == content.decode() and named == [] == [*folder.iterdir()]


async def test_a_file_that_is_too_large_is_not_copied(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(storage.blobs, "open", copied.append)
    job = await _job(storage, b"The begin of much.", (128 << 20) + 1)
    with pytest.raises(UnreadableDocument, match="larger than 128 MiB") as raised:
        await documents.Documents(storage).chunks(job)
    assert raised.value.code == "too_large" and copied == []


async def test_a_file_that_takes_long_to_cut_is_given_up(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LIMITS", replace(documents.LIMITS, cpu_s=1))
    content = (("x" + "\u2028" * 999) * 3000).encode()  # five minutes
    job = await _job(storage, content, len(content))
    with pytest.raises(UnreadableDocument, match="more than 1 seconds of a processor"):
        await documents.Documents(storage).chunks(job)


async def _job(storage: Storage, content: bytes, num_bytes: int) -> FileClaim:
    """The claim on a file of a store. num_bytes: which it is said to have."""
    blob = await put_bytes(storage.blobs, content)
    await storage.files.create(
        StoredFile("file-1", OWNER, "a.md", "assistants", num_bytes, blob.digest, now_us())
    )
    await storage.vector_stores.create(
        NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}"), [NewStoreFile("file-1", "a.md", 800, 400)]
    )
    job = await storage.vector_stores.claim(now_us())
    assert job is not None
    return job
