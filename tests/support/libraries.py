"""Files and vector stores inside a test: files are put into storage, and readings are waited for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import count

import httpx

from server.access import LOCAL_OWNER
from server.clock import now_us
from server.vector_stores import Kind, Payer
from storage import StoredFile
from tests.support.making import put_bytes
from tests.support.running import Running
from tests.support.wire import Json

_NUMBERS = count()

TIDES = """# Tides of the bay

The spring tide is highest two days after the full moon. It floods the lower quay.

# Harbour rules

Boats keep to the right and sound their horn at the second buoy.
"""


async def put_file(running: Running, name: str, data: bytes | str, owner: str = LOCAL_OWNER) -> str:
    """Stores a file of an owner; returns its id."""
    storage, content = running.context.storage, data.encode() if isinstance(data, str) else data
    blob = await put_bytes(storage.blobs, content)
    id = f"file-{next(_NUMBERS)}"
    await storage.files.create(StoredFile(id, owner, name, "assistants", len(content), blob.digest, now_us()))
    return id


async def read_through(http: httpx.AsyncClient, store: str) -> Json:
    """A store once all of its files are read, or refused."""
    async with asyncio.timeout(60):
        while True:
            found: Json = (await http.get(f"/v1/vector_stores/{store}")).json()
            if found["status"] != "in_progress":
                return found
            await asyncio.sleep(0.02)


async def new_store(running: Running, http: httpx.AsyncClient, **files: bytes | str) -> str:
    """A store with these files, read; `tides_md` becomes `tides.md`."""
    ids = [await put_file(running, name.replace("_", "."), data) for name, data in files.items()]
    made = await http.post("/v1/vector_stores", json={"name": "shelf", "file_ids": ids})
    assert made.status_code == 200, made.text
    id: str = made.json()["id"]
    await read_through(http, id)
    return id


class WordVectors:
    """An embedder that knows some words as directions, and gives every other text a direction of its own."""

    identity = "words-1"
    dimensions = 8
    is_table = False

    def __init__(self, *groups: Sequence[str]) -> None:
        self._groups = groups
        self.kinds: list[Kind] = []
        self.payers: list[Payer] = []

    async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
        self.kinds.append(kind)
        self.payers.append(payer)
        return [self._vector(text.lower()) for text in texts]

    def _vector(self, text: str) -> list[float]:
        vector = [float(any(word in text for word in group)) for group in self._groups]
        noise = hashlib.blake2b(text.encode(), digest_size=self.dimensions).digest()
        return [
            (vector[index] if index < len(vector) else 0.0) + byte / 2560 for index, byte in enumerate(noise)
        ]
