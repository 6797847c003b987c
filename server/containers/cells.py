"""Runs cells in containers: brings what storage has of a container into the sandbox, and what a cell has
changed back, to be stored with the outcome."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from server.clock import now_us
from server.containers.figures import LIFETIME, MEMORY_LIMITS
from server.errors import ApiError
from storage import BlobTooLarge, ContainerChange, ContainerFile, NotFound, StoredContainer
from tools import (
    DATA,
    RUN_CODE,
    CellLimits,
    CellResult,
    Moment,
    Outcome,
    Sandbox,
    SandboxError,
    ToolError,
    ToolResult,
    ToolSpec,
    Workspace,
    Write,
    is_path,
)

if TYPE_CHECKING:
    from server.config import Config
    from server.quota import Quota
    from storage import Storage

log = logging.getLogger("antiphon.containers")

PIECE_BYTES = 1 << 20
STARTING_S = 120.0
"""Seconds that a call may take besides its cell: to bring the files, and to start a session."""
MAX_GIVEN = 100
"""Files of clients that each call is known to have found, so that answers can link to them."""
MAX_SHOWN = 32 * 1024
"""Characters of a cell's logs that the model is shown; clients can read all of them."""


def cell_limits(config: Config) -> CellLimits:
    """What code may use, by the settings."""
    return CellLimits(
        cell_s=config.sandbox_cell_s,
        memory_bytes=config.sandbox_memory_bytes,
        data_bytes=config.max_container_bytes,
    )


class Cells:
    """Runs the cells of all containers."""

    def __init__(self, storage: Storage, sandbox: Sandbox, quota: Quota, public_url: str | None) -> None:
        self._storage = storage
        self._sandbox = sandbox
        self._quota = quota
        self._public_url = (public_url or "").rstrip("/")

    def tool(self) -> ToolSpec:
        """What runs a cell, as the registry has it."""
        text: Mapping[str, Any] = {"type": "string"}
        properties = {
            **dict.fromkeys(("code", "owner", "call"), text),
            "at": {"type": "integer"},
            "container": {"type": "object"},
        }
        return ToolSpec(
            RUN_CODE,
            self._sandbox.about,
            {"type": "object", "properties": properties},
            self.run,
            offered_by="code_interpreter",
            idempotent=self._sandbox.exact,
            timeout_s=self._sandbox.limits.cell_s + STARTING_S,
            strict=False,
            stops=True,
            close=self._sandbox.close,
        )

    async def run(
        self, code: str, owner: str, call: str, at: int, container: Mapping[str, Any]
    ) -> ToolResult:
        """Run a cell. call: the id of its item. at: when its run began, in microseconds. container: as
        `placed` says it. Raises ToolError."""
        id = container["container_id"]
        loaded: list[tuple[StoredContainer, tuple[ContainerFile, ...]]] = []

        async def load() -> Workspace:
            found, files, state = await self._found(owner, container)
            loaded.append((found, files))
            held = {file.path: (file.digest, file.num_bytes) for file in files}
            memory = MEMORY_LIMITS.get(found.memory_limit)
            return Workspace(id, owner, found.version, held, state, found.cells, memory)

        try:
            outcome = await self._sandbox.run(code, id, owner, load, Moment(at / 1e6, call), self._fetch)
        except SandboxError as fault:
            raise ToolError(f"The code could not be run: {fault}.") from None
        [(found, files)] = loaded
        try:
            change, kept = await self._changes(outcome, found, files, call)
        except BaseException:
            outcome.let_go()
            raise
        digests = {file.path: file.digest for file in files if file.path not in change.removed}
        digests |= {file.path: file.digest for file in change.files}

        def settle(stored: bool) -> None:
            if stored:
                outcome.keep(found.version + 1, digests)
            else:
                outcome.let_go()

        result = outcome.result
        shown = _shown(result, [file.path for file in change.files if file.path not in result.images])
        return ToolResult(output=shown, kept=kept, effects=(change,), settle=settle)

    async def _found(
        self, owner: str, container: Mapping[str, Any]
    ) -> tuple[StoredContainer, tuple[ContainerFile, ...], bytes | None]:
        """A container as storage has it. One that nobody has named is made with its first call."""
        id, now = container["container_id"], now_us()
        try:
            return await self._storage.containers.whole(owner, id, now)
        except NotFound:
            if container["type"] != "auto":
                message = "The container has expired, or was deleted: its files and variables are gone."
                raise ToolError(message) from None
        limit = container.get("memory_limit") or "1g"
        made = StoredContainer(id, owner, "auto", now, now, LIFETIME, limit)
        sources = await self._storage.files.get_many(owner, container.get("file_ids") or (), now)
        files = [
            new_file(id, owner, file.filename, file.num_bytes, file.digest, now, "user", file.id)
            for file in sources.values()
        ]
        try:
            await self._quota.require(owner, sum(file.num_bytes for file in files))
        except ApiError as full:
            raise ToolError(full.message) from None
        for file in files:
            await self._storage.blobs.touch(file.digest)
        await self._storage.containers.create(made, _one_a_path(files))
        return await self._storage.containers.whole(owner, id, now_us())

    async def _fetch(self, digest: str, write: Write) -> None:
        async with aclosing(self._storage.blobs.open(digest)) as pieces:
            async for piece in pieces:
                write(piece)

    async def _changes(
        self, outcome: Outcome, found: StoredContainer, files: Sequence[ContainerFile], call: str
    ) -> tuple[ContainerChange, dict[str, Any]]:
        """What a cell has changed, its files' contents in storage; and what is kept of it with its item."""
        result, before = outcome.result, {file.path: file for file in files}
        now, changed = now_us(), list[ContainerFile]()
        for path in result.changed:
            try:
                descriptor = outcome.open(path)
                blob = await self._storage.blobs.put(
                    _pieces(descriptor), limit=self._sandbox.limits.data_bytes
                )
            except (OSError, BlobTooLarge):
                continue  # what it has become since is no file of the container
            if path not in before or before[path].digest != blob.digest:
                changed.append(
                    new_file(found.id, found.owner, path, blob.num_bytes, blob.digest, now, "assistant", call)
                )
        try:
            await self._quota.require(found.owner, sum(file.num_bytes for file in changed))
        except ApiError as full:
            raise ToolError(f"The files of this code cannot be stored: {full.message}") from None
        removed = tuple(path for path in result.removed if path in before)
        change = ContainerChange(found.id, found.owner, now, result.state, tuple(changed), removed)
        ids = {path: file.id for path, file in before.items()} | {file.path: file.id for file in changed}
        outputs: list[dict[str, Any]] = [{"type": "logs", "logs": result.logs}] if result.logs else []
        outputs += [
            {"type": "image", "url": f"{self._public_url}/v1/containers/{found.id}/files/{ids[path]}/content"}
            for path in result.images
            if path in ids
        ]
        given = [file for file in files if file.source == "user"][:MAX_GIVEN]
        known = {file.path: file for file in (*given, *changed)}.values()
        told = [{"container_id": found.id, "file_id": file.id, "path": file.path} for file in known]
        return change, {"outputs": outputs, "container_files": told, "opened": found.cells == 0}


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


def _one_a_path(files: Sequence[ContainerFile]) -> list[ContainerFile]:
    """The files with paths that a container can have; of one path the last one."""
    return [*{file.path: file for file in files if is_path(file.path)}.values()]


async def _pieces(descriptor: int) -> AsyncGenerator[bytes]:
    """The bytes behind a descriptor, which is closed after them."""
    try:
        while piece := await asyncio.to_thread(os.read, descriptor, PIECE_BYTES):
            yield piece
    finally:
        os.close(descriptor)


def _shown(result: CellResult, files: Sequence[str]) -> str:
    """What the model is shown of a cell."""
    logs = result.logs
    if len(logs) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        logs = f"{logs[:half]}\n[cut: {len(logs) - MAX_SHOWN} characters]\n{logs[-half:]}"
    told = [logs.rstrip("\n")] if logs else []
    told += [f"[the user sees the image {DATA}/{path}]" for path in result.images]
    if files:
        told.append(f"[new or changed files: {', '.join(f'{DATA}/{path}' for path in files)}]")
    return "\n".join(told) or "[the code printed nothing]"
