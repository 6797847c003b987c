"""Vector stores: what reading files costs streams beside it, and what a hybrid search takes.

`python -m benchmarks.ingestion beside` starts a server with the shipped model, which generates 8 streams all
the time. In every second window of time it reads pages of text into a vector store; the window after it, of
the same length, has the streams alone. Printed are chunks a second, and the characters of both windows: an
event has more of them the more tokens there are.

`python -m benchmarks.ingestion query` stores 100,000 chunks of 200 words with vectors of 384 dimensions in
10,000 files, and asks for both: the wall time and the processor's time of searches, without that of a model
for the query.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from benchmarks.crowd import run
from server.clock import now_us
from server.config import SHIPPED_EMBEDDER
from server.vector_stores import Asked, Kind, Payer, Searcher
from server.vector_stores.vectors import as_bytes
from storage import NewChunk, NewStoreFile, NewVectorStore, Storage, open_storage

STREAMS, PAGE = 8, 2000
"""PAGE: characters."""

CHUNKS, FILES, DIMENSIONS, WORDS = 100_000, 10_000, 384, 40_000
OWNER = "bench"


# ------------------------------------------------------------------------------------------------------------
# Beside streams


async def beside(port: int, pages: int, pairs: int, files: int, embedder: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--data", folder]
        server = await asyncio.create_subprocess_exec(
            *argv, "--embedding-model", embedder, "--log-level", "error", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            await server.stdout.readline()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                await _beside(http, pages, pairs, files)
        finally:
            server.terminate()
            await server.wait()


async def _beside(http: aiohttp.ClientSession, pages: int, pairs: int, files: int) -> None:
    characters = [0]
    streams = [asyncio.create_task(_stream(http, characters, seed)) for seed in range(STREAMS)]
    per_pair, draw = pages // pairs, random.Random(1)
    ratios, speeds = [], []
    await asyncio.sleep(5)  # until all of them are under way
    for pair in range(pairs):
        ids = [await _upload(http, per_pair // files, draw) for _ in range(files)]
        store = (await _json(http, "POST", "/v1/vector_stores", {}))["id"]
        before, began = characters[0], time.perf_counter()
        await _json(http, "POST", f"/v1/vector_stores/{store}/file_batches", {"file_ids": ids})
        while (await _json(http, "GET", f"/v1/vector_stores/{store}"))["status"] == "in_progress":
            await asyncio.sleep(0.25)
        took = time.perf_counter() - began
        with_it = (characters[0] - before) / took
        before, began = characters[0], time.perf_counter()
        await asyncio.sleep(took)
        alone = (characters[0] - before) / (time.perf_counter() - began)
        chunks = sum([await _num_chunks(http, store, id) for id in ids])
        ratios.append(with_it / alone)
        speeds.append(chunks / took)
        print(
            f"pair {pair}: {per_pair} pages, {chunks} chunks in {took:.1f} s: {speeds[-1]:.0f} a second;"
            f" {with_it:.0f} characters a second beside it, {alone:.0f} alone",
            flush=True,
        )
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    print(
        f"{statistics.median(speeds):.0f} chunks a second;"
        f" streams {(statistics.median(ratios) - 1) * 100:+.1f}% (medians of {pairs} pairs)"
    )


async def _stream(http: aiohttp.ClientSession, characters: list[int], seed: int) -> None:
    while True:
        body = {
            "input": "Say the numbers.",
            "stream": True,
            "store": False,
            "seed": seed,
            "max_output_tokens": 400,
            "min_tokens": 400,
            "ignore_eos": True,
        }
        async with http.post("/v1/responses", json=body) as reply:
            delta = False
            async for line in reply.content:
                if delta:
                    characters[0] += len(json.loads(line.removeprefix(b"data: "))["delta"])
                delta = line.startswith(b"event: response.output_text.delta")


async def _upload(http: aiohttp.ClientSession, pages: int, draw: random.Random) -> str:
    words = [f"word{draw.randrange(WORDS)}" for _ in range(pages * PAGE // 10)]
    lines = (" ".join(words[start : start + 12]) for start in range(0, len(words), 12))
    form = aiohttp.FormData({"purpose": "assistants"})
    form.add_field("file", "\n\n".join(lines).encode(), filename="pages.txt")
    async with http.post("/v1/files", data=form) as reply:
        id: str = (await reply.json())["id"]
        return id


async def _num_chunks(http: aiohttp.ClientSession, store: str, file: str) -> int:
    count, after = 0, ""
    while True:
        page = await _json(http, "GET", f"/v1/vector_stores/{store}/files/{file}/content{after}")
        count += len(page["data"])
        if not page["has_more"]:
            return count
        after = f"?page={page['next_page']}"


async def _json(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with http.request(method, path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


# ------------------------------------------------------------------------------------------------------------
# Searches


class Drawn:
    """An embedder that draws its vectors, so that what a model takes is left out."""

    identity, dimensions = "drawn", DIMENSIONS

    def __init__(self) -> None:
        self._draw = np.random.default_rng(2)

    async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> Any:
        return self._draw.standard_normal((len(texts), DIMENSIONS), np.float32)


async def query(url: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = await open_storage(url or f"sqlite+aiosqlite:///{folder}/bench.db", runner="bench")
        words = await _fill(storage)
        searcher = Searcher(storage, Drawn())
        cold = (await _searched(searcher, words, (500, 2000, 8000), 1))[0][0]
        print(f"the first search, which loads the vectors: {cold:.0f} ms")
        for name, ranks in (
            ("3 rare words", (500, 2000, 8000)),
            ("8 words, half of them common", (10, 20, 40, 80, 160, 320, 640, 1280)),
            ("5 words, three of them in every chunk", (0, 1, 5, 500, 2000)),
        ):
            walls, busy = await _searched(searcher, words, ranks, 60)
            p50, p95 = walls[len(walls) // 2], walls[int(len(walls) * 0.95)]
            print(f"{name}: p50 {p50:.0f} ms, p95 {p95:.0f} ms; processor {statistics.median(busy):.0f} ms")
        await storage.close()


async def _fill(storage: Storage) -> list[str]:
    """A store of CHUNKS chunks in FILES files; their words, the most frequent first."""
    draw, letters = np.random.default_rng(1), random.Random(1)
    shares = 1 / np.arange(1, WORDS + 1) ** 1.05
    shares /= shares.sum()
    words = ["".join(letters.choices("abcdefghijklmnop", k=4 + n % 7)) + f"{n % 10}" for n in range(WORDS)]
    stores, per_file = storage.vector_stores, CHUNKS // FILES
    await stores.make_nearest()
    new = NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}", None, "drawn", DIMENSIONS)
    await stores.create(new, [NewStoreFile(f"file-{n}", "a.txt", 800, 400) for n in range(FILES)])
    began = time.perf_counter()
    while (job := await stores.claim(now_us())) is not None:
        drawn = draw.choice(WORDS, (per_file, 200), p=shares)
        vectors = draw.standard_normal((per_file, DIMENSIONS), np.float32)
        chunks = [
            NewChunk(n, 1, " ".join(words[index] for index in row), 270, as_bytes(vectors[n]))
            for n, row in enumerate(drawn)
        ]
        await stores.add_chunks(job, chunks, b"d", "drawn")
        await stores.finish(job)
        stores.let_go(job)
    while await stores.take_over():
        pass
    print(f"{CHUNKS} chunks stored in {time.perf_counter() - began:.0f} s", flush=True)
    return words


async def _searched(
    searcher: Searcher, words: Sequence[str], ranks: Sequence[int], times: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of searches, sorted: by the wall's clock, and of the processor."""
    asked = Asked(["vs_1"], [" ".join(words[rank] for rank in ranks)], 8)
    walls, busy = [], []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        await searcher.search(Payer(OWNER), asked)
        walls.append((time.perf_counter() - wall) * 1e3)
        busy.append((time.process_time() - cpu) * 1e3)
    return sorted(walls), sorted(busy)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    streams = commands.add_parser("beside")
    streams.add_argument("--port", type=int, default=21300)
    streams.add_argument("--pages", type=int, default=10_000, help="in all pairs together")
    streams.add_argument("--files", type=int, default=25, help="in each pair")
    streams.add_argument("--pairs", type=int, default=4)
    streams.add_argument("--embedding-model", default=SHIPPED_EMBEDDER, help="none: words alone")
    asked = commands.add_parser("query")
    asked.add_argument("--db", help="the URL of an empty PostgreSQL database; default: SQLite")
    given = parser.parse_args()
    if given.command == "query":
        run(query(given.db))
    else:
        run(beside(given.port, given.pages, given.pairs, given.files, given.embedding_model))


if __name__ == "__main__":
    main()
