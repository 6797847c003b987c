"""Runs cells in containers: brings what storage has of a container into the sandbox, and what a cell has
changed back, to be stored with the outcome. Commands of a shell are run as cells, too."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from server.clock import now_us
from server.containers.figures import LIFETIME, MEMORY_LIMITS, memory_limit, room_of, session_of
from server.containers.files import copied, new_file, wanted_files
from server.containers.shell import SPARE_S, Commands
from server.errors import ApiError, to_api_error
from storage import (
    ContainerChange,
    ContainerFile,
    ContainerFull,
    NotFound,
    PathTaken,
    StorageUnavailable,
    StoredContainer,
)
from tools import (
    DATA,
    NO_CODE,
    RUN_CODE,
    RUN_SHELL,
    TURN_S,
    CellLimits,
    CellResult,
    Moment,
    Outcome,
    Registry,
    Sandbox,
    SandboxError,
    ToolError,
    ToolResult,
    ToolSpec,
    Workspace,
    Write,
)

if TYPE_CHECKING:
    from server.config import Config
    from server.limits import Limiter
    from server.quota import Quota
    from storage import Storage

log = logging.getLogger("antiphon.containers")

PIECE_BYTES = 1 << 20
STARTING_S = 120.0
"""Seconds that a call may take besides its turn and its cell: to bring the files, and to start a session."""
WATCH_S = 5.0
"""Seconds after which the session of a container ends at the latest that has expired, or was deleted by
another process."""
MAX_GIVEN = 100
"""Files of clients that each call is known to have found, so that answers can link to them."""
MAX_SHOWN = 32 * 1024
"""Characters of a cell's logs that the model is shown; clients can read all of them."""

GONE = "The container has expired, or was deleted: its files and variables are gone."
RENEWED = (
    "[the earlier container has expired or was deleted, with its files and variables: this is a new one]"
)

Told = Callable[[CellResult, Sequence[str]], tuple[str, Mapping[str, Any]]]
"""What the model is shown of a cell that has changed these files, and what is kept of it besides."""


def cell_limits(config: Config) -> CellLimits:
    """What code may use, by the settings."""
    return CellLimits(
        cell_s=config.sandbox_cell_s,
        memory_bytes=config.sandbox_memory_bytes,
        data_bytes=config.max_container_bytes,
    )


def no_cells(why: str) -> Registry:
    """What the registry has in the place of tools that run code where no sandbox was found."""

    async def refuse() -> str:
        raise ToolError(f"Code cannot be run here: {why}.")

    shape: Mapping[str, Any] = {"type": "object", "properties": {}}
    return {NO_CODE: ToolSpec(NO_CODE, why, shape, refuse, offered_by="code_interpreter", strict=False)}


class Cells:
    """Runs the cells of all containers, and ends the sessions of those that are gone."""

    def __init__(
        self, storage: Storage, sandbox: Sandbox, quota: Quota, limiter: Limiter, public_url: str | None
    ) -> None:
        self._storage = storage
        self._sandbox = sandbox
        self._quota = quota
        self._limiter = limiter
        self._public_url = (public_url or "").rstrip("/")
        self._room = room_of(sandbox.limits)
        self._at_work = Counter[str]()  # cells that run, by container
        self._watching: asyncio.Task[None] | None = None
        self._tidying = set[asyncio.Task[None]]()

    def tools(self) -> Registry:
        """What runs cells and, where the sandbox has processes, commands of a shell."""
        common: dict[str, Any] = {
            "timeout_s": TURN_S + STARTING_S + self._sandbox.limits.cell_s,
            "strict": False,
            "stops": True,
        }
        text: Mapping[str, Any] = {"type": "string"}
        place = {
            **dict.fromkeys(("owner", "call", "key"), text),
            "at": {"type": "integer"},
            "container": {"type": "object"},
        }
        code = {"type": "object", "properties": {"code": text, **place}}
        found = ToolSpec(
            RUN_CODE,
            self._sandbox.about,
            code,
            self.run,
            offered_by="code_interpreter",
            idempotent=self._sandbox.exact,
            close=self.close,
            **common,
        )
        if self._sandbox.tier == "monty":
            return {RUN_CODE: found}
        action = {
            "commands": {"type": "array", "items": text},
            **{name: {"type": ["integer", "null"]} for name in ("timeout_ms", "max_output_length")},
        }
        shell = {"type": "object", "properties": {**action, **place}}
        about = "The commands run on Linux, in bash where it is there. There is no internet."
        commands = ToolSpec(RUN_SHELL, about, shell, self.run_commands, offered_by="shell", **common)
        return {RUN_CODE: found, RUN_SHELL: commands}

    async def close(self) -> None:
        """End all sessions."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*self._tidying, return_exceptions=True)
        await self._sandbox.close()

    @property
    def num_live(self) -> int:
        """Sessions that live."""
        return self._sandbox.num_live

    @property
    def num_at_work(self) -> int:
        """Cells that run."""
        return self._at_work.total()

    async def end(self, container_id: str) -> None:
        """End the session of a container that is gone."""
        await self._sandbox.end(container_id)

    async def run(
        self, code: str, owner: str, call: str, at: int, container: Mapping[str, Any], key: str = ""
    ) -> ToolResult:
        """Run a cell. call: the id of its item. at: when its run began, in microseconds. container: as
        `placed` says it. key: id of the API key that a new container counts as use of. Raises ToolError."""

        def told(result: CellResult, files: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
            return _shown(result, files), {}

        return await self._cell(code, owner, Moment(at / 1e6, call), container, key, told)

    async def run_commands(
        self,
        commands: Sequence[str],
        owner: str,
        call: str,
        at: int,
        container: Mapping[str, Any],
        key: str = "",
        timeout_ms: int | None = None,
        max_output_length: int | None = None,
    ) -> ToolResult:
        """Run commands of a shell, one after the other, in the same session. timeout_ms, max_output_length:
        as the model has asked for them. Raises ToolError."""
        most_s = max(1.0, self._sandbox.limits.cell_s - SPARE_S)
        seconds = most_s if timeout_ms is None else min(timeout_ms / 1000, most_s)
        cell = Commands(commands, seconds, max_output_length)

        def told(result: CellResult, _files: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
            return "", {"output": cell.outputs(result)}

        return await self._cell(cell.code, owner, Moment(at / 1e6, call), container, key, told)

    async def _cell(
        self, code: str, owner: str, moment: Moment, container: Mapping[str, Any], key: str, told: Told
    ) -> ToolResult:
        id = container["container_id"]
        loaded: list[tuple[StoredContainer, tuple[ContainerFile, ...], int]] = []
        renewed = False

        async def load() -> Workspace:
            nonlocal renewed
            renewed = await self._made(owner, container, key) and bool(container.get("renews"))
            await self._give(owner, container)
            found, files, state = await self._whole(owner, id)
            loaded.append((found, files, len(state or b"")))
            held = {file.path: (file.digest, file.num_bytes) for file in files}
            memory = MEMORY_LIMITS.get(found.memory_limit)
            return Workspace(id, owner, found.version, held, state, found.cells, memory)

        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="containers")
        self._at_work[id] += 1
        try:
            outcome = await self._sandbox.run(code, id, owner, load, moment, self._fetch)
        except SandboxError as fault:
            if loaded:
                await self._whole(owner, id)  # its session may have been ended because it is gone
            raise ToolError(f"The code could not be run: {fault}.") from None
        finally:
            self._at_work[id] -= 1
        [(found, files, state_bytes)] = loaded
        result = outcome.result
        if renewed:
            result = replace(result, logs=f"{RENEWED}\n{result.logs}")
        try:
            change = await self._change(outcome, found, files, state_bytes, moment.seed)
            new = [file.path for file in change.files if file.path not in result.images]
            shown, kept = told(result, new)
            kept = {**self._kept(result, found, files, change), **kept}
            await self._still_there(owner, id, change)
        except BaseException:
            outcome.let_go()
            raise
        digests = {file.path: file.digest for file in files if file.path not in change.removed}
        digests |= {file.path: file.digest for file in change.files}

        def settle(stored: bool) -> None:
            if stored:
                outcome.keep(found.version + 1, digests)
                self._settled(change.files)
            else:
                outcome.let_go()
                self._storage.blobs.let_go()  # its rows may be on their way: a sweep finds what none names

        return ToolResult(output=shown, kept=kept, effects=(change,), settle=settle)

    # -- what goes in ----------------------------------------------------------------------------------------

    async def _made(self, owner: str, container: Mapping[str, Any], key: str) -> bool:
        """Use a container, or make one that nobody has named, with its first call; True where it was."""
        id, now = container["container_id"], now_us()
        await self._storage.containers.use((id,), now)
        if container["type"] != "auto":
            return False
        limit = memory_limit(container.get("memory_limit"), self._sandbox.limits)
        made = StoredContainer(id, owner, "auto", now, now, LIFETIME, limit)
        spent = session_of(owner, key, now)
        return await self._storage.containers.create(made, room=self._room, spent=spent)

    async def _whole(
        self, owner: str, id: str
    ) -> tuple[StoredContainer, tuple[ContainerFile, ...], bytes | None]:
        """A container as storage has it. Raises ToolError."""
        try:
            return await self._storage.containers.whole(owner, id, now_us())
        except NotFound:
            raise ToolError(GONE) from None

    async def _give(self, owner: str, container: Mapping[str, Any]) -> None:
        """Put those files of the request into a container that it was not given yet."""
        id, now = container["container_id"], now_us()
        if not (file_ids := container.get("file_ids")):
            return
        try:
            given = (await self._storage.containers.get(owner, id, now)).given
            new = [file_id for file_id in file_ids if file_id not in given]
            wanted = await wanted_files(self._storage, owner, new, "file_ids", now)
            num_bytes = sum(file.num_bytes for file in wanted.values())
            await self._quota.require_later(owner, num_bytes, self._limiter)
            async with copied(self._storage, id, owner, wanted, "file_ids", now) as copies:
                await self._storage.containers.give(owner, id, copies, now, self._room)
        except (ApiError, ContainerFull, PathTaken) as fault:
            why = to_api_error(fault).message
            raise ToolError(f"The files of the request cannot be put into the container: {why}") from None
        except NotFound:
            raise ToolError(GONE) from None

    async def _fetch(self, digest: str, write: Write) -> None:
        async with aclosing(self._storage.blobs.open(digest)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(write, piece)

    # -- what comes out --------------------------------------------------------------------------------------

    async def _change(
        self,
        outcome: Outcome,
        found: StoredContainer,
        files: Sequence[ContainerFile],
        state_bytes: int,
        call: str,
    ) -> ContainerChange:
        """What a cell has changed, its files' contents in storage. state_bytes: of the session before it."""
        result, before = outcome.result, {file.path: file for file in files}
        sizes = await asyncio.to_thread(_sizes, outcome, before, result.changed)
        grown = max(0, len(result.state or b"") - state_bytes)
        try:
            await self._quota.require_later(found.owner, sum(sizes.values()) + grown, self._limiter)
        except ApiError as full:
            raise ToolError(f"The files of this code cannot be stored: {full.message}") from None
        now, changed = now_us(), list[ContainerFile]()
        try:
            for path, size in sizes.items():
                try:
                    blob = await self._storage.blobs.put(_pieces(outcome, path, size))
                except OSError:
                    continue  # what it has become since is no file of the container
                said = (path, blob.num_bytes, blob.digest, now, "assistant", call)
                changed.append(new_file(found.id, found.owner, *said))
        except BaseException:
            self._settled(changed)
            raise
        removed = tuple(path for path in result.removed if path in before)
        return ContainerChange(found.id, found.owner, now, result.state, tuple(changed), removed)

    async def _still_there(self, owner: str, id: str, change: ContainerChange) -> None:
        """Raises ToolError where a container went while its cell ran."""
        try:
            await self._storage.containers.get(owner, id, now_us())
        except BaseException as fault:
            self._settled(change.files)
            if isinstance(fault, NotFound):
                raise ToolError(GONE) from None
            raise

    def _settled(self, put: Sequence[ContainerFile]) -> None:
        """The rows of files that were put are committed, or will never be: what no row names goes."""

        async def tidy() -> None:
            for file in put:
                await self._storage.blobs.release(file.digest)

        task = asyncio.create_task(tidy(), name="contents of cells")
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    def _kept(
        self,
        result: CellResult,
        found: StoredContainer,
        files: Sequence[ContainerFile],
        change: ContainerChange,
    ) -> dict[str, Any]:
        """What is kept of a cell with its item."""
        ids = {file.path: file.id for file in (*files, *change.files)}
        outputs: list[dict[str, Any]] = [{"type": "logs", "logs": result.logs}] if result.logs else []
        outputs += [
            {"type": "image", "url": f"{self._public_url}/v1/containers/{found.id}/files/{ids[path]}/content"}
            for path in result.images
            if path in ids
        ]
        given = [file for file in files if file.source == "user"][:MAX_GIVEN]
        known = {file.path: file for file in (*given, *change.files)}.values()
        told = [{"container_id": found.id, "file_id": file.id, "path": file.path} for file in known]
        return {"outputs": outputs, "container_files": told}

    # -- containers that are gone ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Put off the expiry of containers whose cells run, and end the sessions of those that are gone."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.look()
            except StorageUnavailable as error:
                log.warning("nobody knows which containers are gone: %s", error)

    async def look(self) -> None:
        """One look at which containers are gone. Raises StorageUnavailable."""
        self._at_work = +self._at_work
        if self._at_work:
            await self._storage.containers.use([*self._at_work], now_us())
        if here := self._sandbox.keys:
            there = await self._storage.containers.alive(here, now_us())
            for id in here:
                if id not in there:
                    await self._sandbox.end(id)


def _sizes(outcome: Outcome, before: Mapping[str, ContainerFile], paths: Sequence[str]) -> Mapping[str, int]:
    """The bytes of those files that are not what they were before."""
    sizes = {}
    for path in paths:
        try:
            descriptor = outcome.open(path)
        except OSError:
            continue  # it has become something else since
        with open(descriptor, "rb") as file:
            size, known = os.fstat(descriptor).st_size, before.get(path)
            same_size = known is not None and known.num_bytes == size
            if same_size and hashlib.file_digest(file, "sha256").hexdigest() == known.digest:  # type: ignore[union-attr]
                continue
        sizes[path] = size
    return sizes


async def _pieces(outcome: Outcome, path: str, size: int) -> AsyncGenerator[bytes]:
    """The first bytes of a file. Raises OSError where it is none any more."""
    descriptor = outcome.open(path)  # here: nobody closes what a generator that never began was given
    try:
        while size > 0 and (piece := await asyncio.to_thread(os.read, descriptor, min(size, PIECE_BYTES))):
            size -= len(piece)
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
