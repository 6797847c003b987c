"""Row 34: servers are killed while clients upload, complete, delete and are refused, and while they sweep."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from storage import open_storage
from storage.files import blob_columns
from tests.chaos.driver import ROOT, START_S, Server, free_port, serving
from tests.chaos.report import Form, Report, row, spread
from tests.support.making import now, query

# Forks a server for each line that it is told: so a life begins in a fraction of the time that the imports
# take. The server sweeps all the time, and after seconds what others keep for an hour.
NURSERY = """
import os, sys
import server.process.retention as retention
import server.process.serve, server.process.app, storage.storage, engine.backends
import storage.files.blobs as blobs
from storage.files.verbs import Files
from server.cli import main

retention.EVERY_S = blobs.SWEEP_EVERY_S = 0.2
Files.sweep.__kwdefaults__["grace_s"] = 20.0
for _ in sys.stdin:
    if (child := os.fork()) == 0:
        sys.stdin = open(os.devnull)  # this one has been read
        sys.exit(main())
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""
CLIENTS = 8
LARGEST = 3_000_000
OWNER = "local"


@dataclass(slots=True)
class Filed:
    """What clients know of their files. contents: MD5 by id, of all that were acknowledged. unsure: ids whose
    deletion was asked for without an answer."""

    contents: dict[str, str] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    done: int = 0


class Forked(Server):
    """A server whose processes are forked."""

    pid_of_life = 0

    async def start(self) -> float:
        if not self.running:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                cwd=ROOT,
                env=self._env,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        assert self._process is not None and self._process.stdin is not None
        self.spawned_at = time.monotonic()
        self._process.stdin.write(b"go\n")
        self.pid_of_life = int(await self._line())
        assert "listens on" in (said := await self._line()), said
        self.up.set()
        return time.monotonic() - self.spawned_at

    async def kill(self) -> None:
        self.up.clear()
        os.kill(self.pid_of_life, signal.SIGKILL)
        while await self._line() != "gone":
            pass
        self.pid_of_life = 0

    async def close(self) -> None:
        if self.pid_of_life:
            await self.kill()
        await super().close()

    async def _line(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        assert line, "the server did not start"
        return line.decode().strip()


@row(
    "34",
    "`kill -9` in uploads, completions, deletions and sweeps of files",
    "every acknowledged file is there, byte-equal; nothing else is on the disk after a sweep; what the owner "
    "stores is the sum of it",
    short=False,  # tests/storage/files/test_blobs.py kills uploads too
)
async def filing(form: Form, report: Report) -> None:
    """100 kills in full, ten on a folder."""
    draw, kills, starts = form.draw("filing"), form.of(3, 100), list[float]()
    num_files = num_done = num_orphans = 0
    while len(starts) < kills:
        flags = ("--engine", "scripted", "--log-level", "error")
        server = Forked(form.folder / f"filing-{len(starts)}", *flags, port=free_port(draw), code=NURSERY)
        filed = Filed()
        async with serving(server):
            crowd = [
                asyncio.create_task(_client(server, filed, random.Random(draw.random())))
                for _ in range(CLIENTS)
            ]
            for _ in range(min(10, kills - len(starts))):
                async with asyncio.timeout(60):
                    goal = filed.done + draw.randrange(1, 5 * CLIENTS)
                    while filed.done < goal:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(draw.uniform(0.0, 0.2))
                await server.kill()
                starts.append(await server.start())
            await asyncio.sleep(0.5)
            for client in crowd:
                client.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            await _compare(server, filed)
            await server.kill()
        report.breaks(filed.wrong)
        num_orphans += await _look(server, filed, report)
        num_files, num_done = num_files + len(filed.contents), num_done + filed.done
        report.so_far(f"{len(starts)} kills")
    report.holds(num_files, "no file was acknowledged")
    report.figure(f"{kills} kills under {CLIENTS} clients, {num_done} requests answered")
    report.figure(f"{num_files} files acknowledged and kept, each byte-equal; {num_orphans} leftovers swept")
    report.figure(f"serving again after {spread(starts)}")


async def _client(server: Server, filed: Filed, draw: random.Random) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        while True:
            await server.up.wait()
            with suppress(httpx.TransportError):  # the server was killed: nothing was acknowledged
                await draw.choices((_file, _upload, _refused, _delete), (4, 4, 2, 3))[0](http, filed, draw)


async def _ask(
    http: httpx.AsyncClient, filed: Filed, method: str, path: str, **asked: object
) -> httpx.Response:
    reply = await http.request(method, path, **asked)  # type: ignore[arg-type]
    filed.done += 1
    if reply.status_code >= 500 and reply.status_code != 503:
        filed.wrong.append(f"{method} {path}: {reply.status_code} {reply.text}")
    return reply


async def _file(http: httpx.AsyncClient, filed: Filed, draw: random.Random) -> None:
    content = draw.randbytes(int(LARGEST * draw.random() ** 4))
    form = {"files": {"file": ("a", content)}, "data": {"purpose": "user_data"}}
    reply = await _ask(http, filed, "POST", "/v1/files", **form)
    if reply.status_code == 200:
        filed.contents[reply.json()["id"]] = _md5(content)


async def _upload(http: httpx.AsyncClient, filed: Filed, draw: random.Random) -> None:
    parts = [draw.randbytes(draw.randrange(1, LARGEST // 20)) for _ in range(draw.randrange(1, 4))]
    begun = {"filename": "u", "purpose": "user_data", "mime_type": "text/plain"}
    body = {**begun, "bytes": sum(map(len, parts))}
    path = f"/v1/uploads/{(await _ask(http, filed, 'POST', '/v1/uploads', json=body)).json().get('id')}"
    ids = [
        (await _ask(http, filed, "POST", f"{path}/parts", files={"data": ("p", part)})).json().get("id")
        for part in parts
    ]
    if draw.random() < 0.2:
        await _ask(http, filed, "POST", f"{path}/cancel")
        return
    md5 = _md5(b"".join(parts))
    if draw.random() < 0.2:
        refused = await _ask(http, filed, "POST", f"{path}/complete", json={"part_ids": ids, "md5": "0" * 32})
        if refused.status_code == 200:
            filed.wrong.append("a file of another MD5 was taken")
    reply = await _ask(http, filed, "POST", f"{path}/complete", json={"part_ids": ids, "md5": md5})
    if reply.status_code == 200:
        filed.contents[reply.json()["file"]["id"]] = md5


async def _refused(http: httpx.AsyncClient, filed: Filed, draw: random.Random) -> None:
    form = {"files": {"file": ("a", draw.randbytes(draw.randrange(1, LARGEST // 4)))}}
    reply = await _ask(http, filed, "POST", "/v1/files", **form)
    if reply.status_code == 200:
        filed.wrong.append("a form without a purpose was taken")


async def _delete(http: httpx.AsyncClient, filed: Filed, draw: random.Random) -> None:
    sure = [*(filed.contents.keys() - filed.unsure)]
    if len(sure) < 4:
        return
    id = draw.choice(sure)
    filed.unsure.add(id)
    reply = await _ask(http, filed, "DELETE", f"/v1/files/{id}")
    if reply.status_code == 200:
        del filed.contents[id]
        filed.unsure.discard(id)


async def _compare(server: Server, filed: Filed) -> None:
    """Every file that was acknowledged and not deleted, as a client gets it."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for id, md5 in filed.contents.items():
            reply = await http.get(f"/v1/files/{id}/content")
            if reply.status_code == 404 and id in filed.unsure:
                continue
            if reply.status_code != 200 or _md5(reply.content) != md5:
                filed.wrong.append(f"file {id}: {reply.status_code}, {len(reply.content)} bytes")


async def _look(server: Server, filed: Filed, report: Report) -> int:
    """What a dead server's folder holds; how many contents a sweep found that no row names."""
    database = server.folder / "antiphon.db"
    folder = server.folder / "antiphon.db.blobs"
    storage = await open_storage(f"sqlite+aiosqlite:///{database}", runner="r")
    try:
        storage.blobs.let_go()
        num = sum([swept.blobs async for swept in storage.files.sweep(now(), grace_s=0)])
        held = (await storage.usage(OWNER)).held
    finally:
        await storage.close()
    named = {
        digest
        for column in blob_columns()
        for (digest,) in query(database, f"SELECT {column.name} FROM {column.table.name}")
    }
    there = {path.name: path.stat().st_size for path in folder.iterdir()}
    report.holds(there.keys() == named, f"{len(there.keys() ^ named)} contents too many or too few")
    for name in there:
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        report.holds(found == name, f"the content {name} is another one")
    rows = query(database, "SELECT digest FROM files") + query(database, "SELECT digest FROM upload_parts")
    total = sum(there.get(digest, 0) for (digest,) in rows)
    report.holds(held == total, f"{held} bytes are counted, and there are {total}")
    ids = {id for (id,) in query(database, "SELECT id FROM files")}
    report.holds(filed.contents.keys() - filed.unsure <= ids, "an acknowledged file is gone")
    return num


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
