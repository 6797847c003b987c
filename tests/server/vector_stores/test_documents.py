"""Files of jobs as chunks: what is left of a document where the process ends while it is read."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import pytest

from server.clock import now_us
from server.vector_stores import documents
from storage import NewStoreFile, NewVectorStore, Storage, StoredFile, open_storage
from tests.support.making import OWNER, RUNNER, url
from tools import Document, read_document


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

    async def read(source: IO[bytes], filename: str, *, owner: str) -> Document:
        named.extend(folder.rglob("*"))
        return await read_document(source, filename, owner=owner)

    monkeypatch.setattr(documents, "read_document", read)
    content = b"A secret of the bay."
    blob = await storage.blobs.put_bytes(content)
    await storage.files.create(
        StoredFile("file-1", OWNER, "a.txt", "assistants", len(content), blob.digest, now_us())
    )
    await storage.vector_stores.create(
        NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}"), [NewStoreFile("file-1", "a.txt", 800, 400)]
    )
    job = await storage.vector_stores.claim(now_us())
    assert job is not None
    [chunk] = await documents.Documents(storage).chunks(job)
    assert chunk.text == content.decode() and named == [] == [*folder.iterdir()]
