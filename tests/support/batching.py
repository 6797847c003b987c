"""Inputs of batches, and what comes of them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from server.clock import now_us
from storage import Storage, StoredFile
from tests.support.making import put_bytes

Json = dict[str, Any]


def line(custom_id: str, url: str, body: Json, **changed: Any) -> str:
    """A line of an input."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changed})


def responses(num: int, text: str = "say {}") -> list[str]:
    """Lines for Responses, with the custom ids r0, r1 and so on."""
    return [line(f"r{n}", "/v1/responses", {"input": text.format(n)}) for n in range(num)]


def chats(num: int, text: str = "say {}") -> list[str]:
    """The same for chat completions."""
    bodies = ({"messages": [{"role": "user", "content": text.format(n)}]} for n in range(num))
    return [line(f"r{n}", "/v1/chat/completions", body) for n, body in enumerate(bodies)]


async def input_file(
    storage: Storage, lines: Iterable[str], *, owner: str = "local", purpose: str = "batch"
) -> str:
    """A file of these lines; its id."""
    data = "\n".join(lines).encode()
    blob = await put_bytes(storage.blobs, data)
    file = StoredFile(
        id=f"file-{secrets.token_hex(12)}",
        owner=owner,
        filename="input.jsonl",
        purpose=purpose,
        num_bytes=blob.num_bytes,
        digest=blob.digest,
        created_at=now_us(),
    )
    await storage.files.create(file)
    return file.id


async def lines_of(storage: Storage, file_id: str | None, *, owner: str = "local") -> list[Json]:
    """The lines of an output or error file; none where there is no file."""
    if file_id is None:
        return []
    file = await storage.files.get(owner, file_id, now_us())
    assert file.purpose == "batch_output"
    return [json.loads(each) for each in (await storage.blobs.read(file.digest)).splitlines()]
