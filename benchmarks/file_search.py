"""File search: whether the page with the answer is found, and how fast stores are written and searched.

`python -m benchmarks.file_search quality facts FOLDER` reads the HTML pages of FOLDER into a store, and
asks the questions of a table of `file_search.toml`: how often is the page with the answer among the first
five passages? The folder is `usr/share/doc/git-doc` of Debian's package `git-doc`, from `apt-get download`
and `dpkg-deb -x`. `quality pdf_facts FILE` does the same with `usr/share/doc/gnuplot/gnuplot.pdf` of
`gnuplot-doc`: how often do the first five passages have the words of the page that answer? `asked` and
`pdf_asked` are for `usr/share/doc/postgresql-doc-15/html` and `usr/share/doc/octave/octave.pdf`.

`python -m benchmarks.file_search quality words FOLDER` asks for five words, drawn by chance, of a sentence of
each of 100 pages: what a search by words finds for certain, vectors must not hide.

`python -m benchmarks.file_search speed` stores 100,000 chunks of 200 words, whose frequencies are those of a
language (Zipf's law), and searches them for questions of rare, common and mixed words. It also says how long
commits of others had to wait for the writing thread meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.crowd import run
from server.clock import now_us
from server.config import SHIPPED_EMBEDDER
from storage import NewChunk, NewStoreFile, NewVectorStore, Storage, open_storage
from tests.support.libraries import new_store, put_file
from tests.support.running import http_client, running_app
from tests.support.wire import Json
from tools.documents import read_document

WORDS, CHUNKS, PER_FILE, BATCH = 40_000, 100_000, 1000, 16
OWNER = "bench"


Answer = str | list[Any]
"""The name of an HTML page; or a list of two: the number of a page of a PDF, and words of it."""


async def quality(path: Path, questions: dict[str, list[Answer]], embedder: str) -> None:
    if path.is_dir():
        sources, pages = sorted(path.rglob("*.html")), 0
    else:
        sources, pages = [path], await _checked(path, questions)
    with tempfile.TemporaryDirectory() as data:
        async with (
            running_app(Path(data), embedding_model=embedder) as running,
            http_client(running) as http,
        ):
            store = await new_store(running, http)
            ids = [await put_file(running, source.name, source.read_bytes()) for source in sources]
            began = time.perf_counter()
            await http.post(f"/v1/vector_stores/{store}/file_batches", json={"file_ids": ids})
            while (await http.get(f"/v1/vector_stores/{store}")).json()["status"] == "in_progress":
                await asyncio.sleep(0.2)
            shown = (await http.get(f"/v1/vector_stores/{store}")).json()
            took = time.perf_counter() - began
            count = pages or len(sources)
            print(f"{count} pages, {shown['usage_bytes']:,} bytes of chunks, read in {took:.1f} s")
            first, five, times = 0, 0, []
            for question, answers in questions.items():
                began = time.perf_counter()
                body = {"query": question, "max_num_results": 5}
                found = (await http.post(f"/v1/vector_stores/{store}/search", json=body)).json()["data"]
                times.append(time.perf_counter() - began)
                good = [_answers(hit, answers) for hit in found]
                first += any(good[:1])
                five += any(good)
                if not any(good):
                    print(f"  not found: {question!r}, but {', '.join(dict.fromkeys(map(_shown, found)))}")
            count = len(questions)
            print(f"{five} of {count} ({five / count:.0%}) in the first five, {first} the very first")
            print(f"a search took {statistics.median(times) * 1e3:.1f} ms (median)")


async def _words_of_sentences(path: Path) -> dict[str, list[Answer]]:
    """Five words of a sentence of each of 100 pages, and the name of the page."""
    chance = random.Random(1)
    questions: dict[str, list[Answer]] = {}
    pages = sorted(path.rglob("*.html"))
    for page in chance.sample(pages, len(pages)):
        text = _in_a_line(
            "\n".join(each.text for each in (await read_document(page.read_bytes(), page.name)).pages)
        )
        sentences = [each.split() for each in re.findall(r"[A-Z][^.?!]{60,300}[.?!]", text)]
        sentences = [words for words in sentences if len(words) > 8]
        if sentences:
            questions[" ".join(chance.sample(chance.choice(sentences), 5))] = [page.name]
        if len(questions) == 100:
            break
    return questions


async def _checked(path: Path, questions: dict[str, list[Answer]]) -> int:
    """How many pages a PDF has. Ends the program where a page lacks its answer, as in another edition."""
    document = await read_document(path.read_bytes(), path.name)
    texts = {page.number: _in_a_line(page.text) for page in document.pages}
    for answers in questions.values():
        for answer in answers:
            if isinstance(answer, str) or answer[1] not in texts.get(answer[0], ""):
                raise SystemExit(f"these are not questions about this {path.name}: it lacks {answer}")
    return len(texts)


def _answers(hit: Json, answers: list[Answer]) -> bool:
    """Whether a passage is of a page that answers, or has words of it: a chunk of a PDF may span pages."""
    text = _in_a_line(hit["content"][0]["text"])
    return any(
        hit["filename"] == answer if isinstance(answer, str) else answer[1] in text for answer in answers
    )


def _shown(hit: Json) -> str:
    """What is found in the place of an answer: an HTML page, or where a passage of a PDF begins."""
    name: str = hit["filename"]
    return name if name.endswith(".html") else repr(_in_a_line(hit["content"][0]["text"])[:40])


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


async def speed() -> None:
    rng = np.random.default_rng(1)
    shares = 1 / np.arange(1, WORDS + 1) ** 1.05
    shares /= shares.sum()
    letters = random.Random(1)
    words = ["".join(letters.choices("abcdefghijklmnop", k=4 + n % 7)) + f"{n % 10}" for n in range(WORDS)]
    with tempfile.TemporaryDirectory() as folder:
        storage = await open_storage(f"sqlite+aiosqlite:///{folder}/bench.db", runner="bench")
        stores = storage.vector_stores
        files = [NewStoreFile(f"file-{n}", "a.txt", 800, 400) for n in range(CHUNKS // PER_FILE)]
        await stores.create(NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}"), files)
        waits: list[float] = []
        others = asyncio.create_task(_others(storage, waits))
        began, writing = time.perf_counter(), 0.0
        while (job := await stores.claim(now_us())) is not None:
            for start in range(0, PER_FILE, BATCH):
                size = min(BATCH, PER_FILE - start)
                drawn = rng.choice(WORDS, (size, 200), p=shares)
                texts = [" ".join(words[index] for index in row) for row in drawn]
                wrote = time.perf_counter()
                await stores.add_chunks(
                    job, [NewChunk(start + n, 1, t, 270) for n, t in enumerate(texts)], b"d"
                )
                writing += time.perf_counter() - wrote
            await stores.finish(job)
        others.cancel()
        took = time.perf_counter() - began
        print(f"{CHUNKS / writing:,.0f} chunks/s written ({took:.0f} s with making them)")
        waits.sort()
        print(
            f"a commit beside it: median {statistics.median(waits) * 1e3:.1f} ms,"
            f" p99 {waits[int(len(waits) * 0.99)] * 1e3:.1f} ms, longest {waits[-1] * 1e3:.1f} ms"
        )
        [store] = await stores.searched(OWNER, ["vs_1"], now_us())
        for name, ranks in (
            ("3 rare words", (500, 2000, 8000)),
            ("6 words, one of them common", (100, 500, 2000, 8000, 300, 900)),
            ("8 words, half of them common", (10, 20, 40, 80, 160, 320, 640, 1280)),
            ("2 common words", (50, 200)),
            ("5 words, three of them in every chunk", (0, 1, 5, 500, 2000)),
        ):
            took_ms = await _searched(storage, store.number, [words[rank] for rank in ranks])
            print(f"{name}: {took_ms:.1f} ms of a processor")
        await storage.close()


async def _others(storage: Storage, waits: list[float]) -> None:
    """What a stream commits meanwhile."""
    while True:
        began = time.perf_counter()
        await storage.touch_keys({"key_none": 1})
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.005)


async def _searched(storage: Storage, number: int, words: Sequence[str]) -> float:
    """Milliseconds of the processor that a search takes."""
    times = []
    for _ in range(7):
        began = time.process_time()
        await storage.vector_stores.search([number], " ".join(words), (), only=False, most=50)
        times.append(time.process_time() - began)
    return statistics.median(times) * 1e3


async def _quality(given: argparse.Namespace) -> None:
    if given.questions == "words":
        questions = await _words_of_sentences(given.path)
    else:
        questions = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[given.questions]
    await quality(given.path, questions, given.embedding_model)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("quality")
    asked.add_argument("questions", help="a table of file_search.toml, or words")
    asked.add_argument("path", type=Path, help="a folder of HTML pages, or a PDF")
    asked.add_argument("--embedding-model", default=SHIPPED_EMBEDDER, help="none: search by words alone")
    commands.add_parser("speed")
    given = parser.parse_args()
    if given.command == "speed":
        run(speed())
    else:
        run(_quality(given))


if __name__ == "__main__":
    main()
