"""Files of containers: what they are called, and copies of uploaded ones."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

from server.errors import to_api_error
from server.shapes import refuse
from storage import ContainerFile, NotFound, StoredFile
from tools import is_path

if TYPE_CHECKING:
    from storage import Storage


def new_file(
    container_id: str,
    owner: str,
    path: str,
    num_bytes: int,
    digest: str,
    now: int,
    source: str,
    origin: str,
) -> ContainerFile:
    """A file of a container. Its id follows from the container, the path and what it comes from, so that a
    cell that runs again gives its files the same ids."""
    named = hashlib.blake2b(f"{container_id}:{origin}:{path}".encode(), digest_size=24).hexdigest()
    return ContainerFile(f"cfile_{named}", container_id, owner, path, num_bytes, digest, now, source)


def path_of(filename: str, param: str) -> str:
    """The path of a client's file in a container. ApiError 400 for a name that no file there can have."""
    if not is_path(filename) or "/" in filename:
        refuse(param, f"Invalid '{param}': no file of a container can have the name {filename!r}.")
    return filename


async def wanted_files(
    storage: Storage, owner: str, file_ids: Sequence[str], path: str, now: int
) -> dict[str, StoredFile]:
    """Uploaded files that can be copied into a container, by their ids. path: of the list of ids. ApiError
    404 for one that is not there, 400 for one that has the name of another, or one that no file of a
    container can have."""
    found = await storage.files.get_many(owner, file_ids, now)
    ids: dict[str, str] = {}  # by name
    for index, file_id in enumerate(file_ids):
        param = f"{path}[{index}]"
        if file_id not in found:
            _not_found(param, file_id)
        name = path_of(found[file_id].filename, param)
        if (other := ids.setdefault(name, file_id)) != file_id:
            refuse(
                param,
                f"Invalid '{param}': '{file_id}' and '{other}' are both called {name!r}, and a container has "
                "one file of a name. Upload one of them under another name.",
            )
    return {file_id: found[file_id] for file_id in file_ids}


@asynccontextmanager
async def copied(
    storage: Storage, container_id: str, owner: str, files: dict[str, StoredFile], path: str, now: int
) -> AsyncGenerator[dict[str, ContainerFile]]:
    """Copies of uploaded files for a container, by the ids of these, whose contents stay for the block, in
    which the rows are committed. ApiError 404 for one that was deleted meanwhile."""
    copies: dict[str, ContainerFile] = {}
    async with AsyncExitStack() as held:
        for index, (file_id, file) in enumerate(files.items()):
            if not await storage.blobs.touch(file.digest):
                _not_found(f"{path}[{index}]", file_id)
            await held.enter_async_context(storage.blobs.committing(file.digest))
            said = (file.filename, file.num_bytes, file.digest, now, "user", file_id)
            copies[file_id] = new_file(container_id, owner, *said)
        yield copies


def _not_found(param: str, file_id: str) -> NoReturn:
    raise to_api_error(NotFound("file", file_id), param=param)
