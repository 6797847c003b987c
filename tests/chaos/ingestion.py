"""Rows 31a and 31b: servers are killed while they read files into vector stores.

The same few texts are put into many stores. A server that nobody disturbs reads each of them once, and says
which chunks every file of every store must have in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from server.access import LOCAL_OWNER
from server.clock import now_us
from storage import StoredFile, open_storage
from tests.chaos.database import copied
from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History
from tests.chaos.report import Form, Report, row, spread
from tests.support.making import check, put_bytes, query
from tests.support.postgres import postgres_server

TEXTS = 8
FLAGS = ("--engine", "scripted", "--log-level", "error")
CUTTING = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 30}}
SLICED = 0.3  # share of stores that are filled by a batch
EARLY = 0.4  # share of the kills that come as soon as anything moves; never two in a row
LEASE_S = 2.0

Chunks = frozenset[tuple[int, str]]
"""Positions and texts."""

_CHUNKS = """
SELECT f.store_id, f.file_id, f.status, c.id, c.text FROM vector_store_files f
LEFT JOIN vector_chunks c ON c.id / 32768 = f.store_number * 4194304 + f.number
"""


def text_of(number: int) -> str:
    """A text of some dozens of chunks; each is another one."""
    told = "tells of the tide, the moon and the bay."
    return "\n\n".join(f"Paragraph {line} of text {number} {told}" for line in range(900))


async def prepare(url: str) -> None:
    """Put the files into a database, from which stores take them."""
    storage = await open_storage(url, runner="preparing")
    for number in range(TEXTS):
        data = text_of(number).encode()
        blob = await put_bytes(storage.blobs, data)
        file = StoredFile(
            f"file-{number}", LOCAL_OWNER, f"{number}.txt", "assistants", len(data), blob.digest, now_us()
        )
        await storage.files.create(file)
    await storage.close()


class Shelves:
    """The stores of one row, and what must be in them."""

    def __init__(self, client: Client, draw: random.Random, report: Report) -> None:
        self._client, self._draw, self._report = client, draw, report
        self.stores: dict[str, frozenset[str]] = {}

    async def add(self, files: int) -> None:
        """One more store, with files that are to be read: it is made with them, or a batch brings them."""
        number = len(self.stores)
        ids = [f"file-{n}" for n in self._draw.sample(range(TEXTS), files)]
        cut = {"chunking_strategy": CUTTING}
        batched = self._draw.random() < SLICED
        body = cut if batched else {"file_ids": ids, **cut}
        made = (await self._client.sure("POST", "/v1/vector_stores", body, key=f"store-{number}")).json
        if batched:
            path = f"/v1/vector_stores/{made['id']}/file_batches"
            await self._client.sure("POST", path, {"file_ids": ids, **cut}, key=f"batch-{number}")
        self.stores[made["id"]] = frozenset(ids)

    async def counted(self) -> tuple[int, int, int]:
        """How many files are in progress and completed, and the bytes of all chunks."""
        open_, done, size = 0, 0, 0
        after = ""
        while True:
            page = (await self._client.sure("GET", f"/v1/vector_stores?limit=100{after}")).json
            for store in page["data"]:
                open_ += store["file_counts"]["in_progress"]
                done += store["file_counts"]["completed"]
                size += store["usage_bytes"]
            if not page["has_more"]:
                return open_, done, size
            after = f"&after={page['last_id']}"

    async def moving(self, *, files: int) -> None:
        """Wait until chunks have been stored, and so many files read to their ends."""
        _, done, size = await self.counted()
        async with asyncio.timeout(180):
            while True:
                open_, now_done, now_size = await self.counted()
                if not open_:
                    await self.add(3)
                if now_size > size and now_done >= done + files:
                    return
                await asyncio.sleep(0.05)

    async def read(self) -> None:
        """Wait until nothing is in progress."""
        async with asyncio.timeout(600):
            while (await self.counted())[0]:
                await asyncio.sleep(0.2)

    def compare(self, database: Path | str, expected: dict[str, Chunks]) -> int:
        """Check every file of every store; how many chunks there are."""
        found: dict[tuple[str, str], set[tuple[int, str]]] = {}
        total = 0
        for store, file, status, id, text in query(database, _CHUNKS):
            self._report.holds(status == "completed", f"{file} of {store} is {status}")
            found.setdefault((store, file), set()).add((id % 32768, text))
            total += 1
        wanted = {(store, file) for store, files in self.stores.items() for file in files}
        self._report.holds(found.keys() == wanted, f"other files: {found.keys() ^ wanted}")
        for (store, file), chunks in found.items():
            self._report.holds(chunks == expected[file], f"{file} of {store} has other chunks")
        name = "vector_words" if isinstance(database, str) else "vector_words_docsize"
        [(words,)] = query(database, f"SELECT count(*) FROM {name}")
        self._report.holds(words == total, f"{total} chunks, and the words of {words}")
        check(database)
        return total


async def undisturbed(form: Form, report: Report) -> dict[str, Chunks]:
    """The chunks of each file, as a server reads them that nobody kills."""
    draw = form.draw("quiet")
    folder = form.folder / "quiet"
    folder.mkdir(mode=0o700, parents=True)
    await prepare(f"sqlite+aiosqlite:///{folder}/antiphon.db")
    server = Server(folder, *FLAGS, port=free_port(draw))
    async with serving(server), Client([server], History(), draw) as client:
        shelves = Shelves(client, draw, report)
        await shelves.add(TEXTS)
        await shelves.read()
        await server.kill()
    with copied(folder) as database:
        rows = query(database, _CHUNKS)
    return {
        f"file-{n}": frozenset((id % 32768, text) for _, file, _, id, text in rows if file == f"file-{n}")
        for n in range(TEXTS)
    }


async def killing(
    servers: list[Server], shelves: Shelves, draw: random.Random, report: Report, kills: int
) -> Counter[str]:
    """Kill one of the servers again and again while files are read; what was in progress at the kills."""
    caught: Counter[str] = Counter()
    fruitless = False
    for number in range(kills):
        if (await shelves.counted())[0] < 6:
            await shelves.add(draw.randint(2, TEXTS))
        # A file of which three lives in a row store nothing is given up: so no two such follow each other.
        early = not fruitless and draw.random() < EARLY
        await shelves.moving(files=0 if early else 3)
        fruitless = early
        await asyncio.sleep(draw.uniform(0.0, 0.4))
        caught["kills"] += 1
        caught["files"] += (await shelves.counted())[0]
        victim = draw.choice(servers)
        await victim.kill()
        await victim.start()
        if number % 10 == 9:
            report.so_far(f"{number + 1} kills")
    return caught


CRITERION = (
    "the chunks of every file of every store, and the counts of every store, equal those of an "
    "uninterrupted run"
)


@row(
    "31a",
    "`kill -9` while files are read into vector stores",
    CRITERION,
    short=False,  # tests/server/vector_stores/test_ingester.py kills a server too
)
async def kill_reader(form: Form, report: Report) -> None:
    """60 kills in full, 2 in short."""
    expected = await undisturbed(form, report)
    draw = form.draw("sqlite")
    folder = form.folder / "data"
    folder.mkdir(mode=0o700)
    await prepare(f"sqlite+aiosqlite:///{folder}/antiphon.db")
    server = Server(folder, *FLAGS, port=free_port(draw))
    async with serving(server), Client([server], History(), draw) as client:
        shelves = Shelves(client, draw, report)
        caught = await killing([server], shelves, draw, report, form.of(2, 60))
        await shelves.read()
        await server.kill()
    with copied(folder) as database:
        chunks = shelves.compare(database, expected)
    _tell(report, shelves, caught, chunks, server.started_in)


@row(
    "31b",
    "the same to one of two replicas on PostgreSQL",
    CRITERION,
    short=False,
)
async def kill_replica(form: Form, report: Report) -> None:
    """40 kills in full, 2 in short."""
    expected = await undisturbed(form, report)
    draw = form.draw("replicas")
    with postgres_server() as postgres:
        url = await postgres.fresh()
        await prepare(url)
        flags = (*FLAGS, "--db", url, "--lease-s", str(LEASE_S))
        pair = [Server(form.folder / f"replica-{n}", *flags, port=free_port(draw)) for n in range(2)]
        async with serving(*pair), Client(pair, History(), draw) as client:
            shelves = Shelves(client, draw, report)
            caught = await killing(pair, shelves, draw, report, form.of(2, 40))
            await shelves.read()
        chunks = shelves.compare(url, expected)
    _tell(report, shelves, caught, chunks, [took for each in pair for took in each.started_in])


def _tell(report: Report, shelves: Shelves, caught: Counter[str], chunks: int, started: list[float]) -> None:
    files = sum(map(len, shelves.stores.values()))
    report.figure(f"{caught['kills']} kills, {caught['files']} files in progress at them")
    report.figure(f"{files} files of {len(shelves.stores)} stores, {chunks} chunks: all as they should be")
    report.figure(f"listening again after {spread(started)}")
