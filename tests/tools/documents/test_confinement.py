"""A parser in the hands of a stranger does no harm: not to the server, nor to other documents."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.documents import Document, ReadersBusy, ReadingLimits, UnreadableDocument
from tools.documents.child_process import CUT, FRAME
from tools.documents.reader import DOCUMENTS, PLACES, Nursery, Reader
from tools.landlock import landlock_version
from tools.priority import NICENESS
from tools.sandbox.processes import below

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]

LANDLOCK = f"Landlock {landlock_version()}"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are of Linux")


def hostile() -> Reader[Document]:
    return Reader(Nursery("tests.tools.documents.hostile_parser", (str(HERE),)), DOCUMENTS)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader[Document]]:
    reader = hostile()
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def reader_without_bubblewrap() -> Iterator[Reader[Document]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "which", lambda _: None)
        reader = hostile()
        reader.start()
    yield reader
    reader.close()


async def error_of(
    reader: Reader[Document], told: str, limits: ReadingLimits | None = None
) -> tuple[str, str]:
    with pytest.raises(UnreadableDocument) as raised:
        await reader.read(told.encode(), "a.txt", limits=limits or ReadingLimits())
    return raised.value.code, raised.value.message


async def text_of(reader: Reader[Document], told: str) -> str:
    return (await reader.read(told.encode(), "a.txt")).text


@LINUX
async def test_under_bubblewrap_nothing_can_be_reached(reader: Reader[Document]) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    assert await text_of(reader, "attempt") == ""
    assert reader.confinement() == ("bubblewrap", LANDLOCK, "seccomp", "limits")


@LINUX
async def test_without_bubblewrap_nothing_can_be_reached_either(
    reader_without_bubblewrap: Reader[Document],
) -> None:
    assert await text_of(reader_without_bubblewrap, "attempt") == ""
    assert reader_without_bubblewrap.confinement() == (LANDLOCK, "seccomp", "limits")
    assert not Path("/tmp/written-by-a-parser").exists()
    assert not (HERE / "hostile_parser.new").exists()


async def test_no_variable_of_the_server_is_seen(
    reader_without_bubblewrap: Reader[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_SECRET", "s")
    seen = await text_of(reader_without_bubblewrap, "environment")
    assert set(seen.split()) <= {"LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}


@LINUX
@pytest.mark.parametrize("bubblewrap", [True, False])
async def test_a_child_has_its_channel_and_nothing_else_of_the_server(
    reader: Reader[Document], reader_without_bubblewrap: Reader[Document], tmp_path: Path, bubblewrap: bool
) -> None:
    """No descriptor but the standard ones, which are /dev/null, and the channel; no file of anybody."""
    asked = reader if bubblewrap else reader_without_bubblewrap
    other = asyncio.create_task(text_of(asked, "wait"))
    database = tmp_path / "antiphon.db"
    database.write_text("a secret")
    with database.open() as held, socket.create_server(("127.0.0.1", 0)):
        assert held.fileno() > 3
        assert await text_of(asked, "descriptors") == "0 1 2 3"
    for path in (database, tmp_path, Path("/proc/self/environ"), Path("/proc/1/root"), Path("/etc/shadow")):
        assert await text_of(asked, f"read {path}") == "refused"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_time_and_memory_are_bounded(reader: Reader[Document]) -> None:
    computing = error_of(reader, "compute", ReadingLimits(cpu_s=1))
    waiting = error_of(reader, "wait", ReadingLimits(wall_s=1.0))
    neighbour = text_of(reader, "a neighbour")
    computed, waited, read = await asyncio.gather(computing, waiting, neighbour)
    assert computed == ("too_large", "Reading this file takes more than 1 seconds of a processor.")
    assert waited == ("too_large", "Reading this file takes longer than 1 seconds.")
    assert read == "a neighbour"
    code, message = await error_of(reader, "memory")
    assert (code, message) == ("too_large", "Reading this file takes more than 1024 MiB of memory.")


@pytest.mark.parametrize("told", ["crash", "abort", "garbage"])
async def test_the_death_of_a_child_is_the_error_of_one_document(reader: Reader[Document], told: str) -> None:
    died, read = await asyncio.gather(error_of(reader, told), text_of(reader, "a neighbour"))
    assert died[0] == "invalid_file"
    assert read == "a neighbour"


def _document(pages: bytes, title: str | None = None, count: object = 1) -> bytes:
    told = {"kind": "text", "title": title, "pages": count, "confined": []}
    return _frame(json.dumps(told).encode()) + pages


def _frame(data: bytes) -> bytes:
    return FRAME.pack(len(data)) + data


ANSWERS = {
    "a page without a number": _document(_frame(b"x")),
    "a page with an odd number": _document(_frame(b"\xff\xff\xff\xffx")),
    "a NUL": _document(_frame(b"\0\0\0\0a\0b")),
    "a NUL in a title": _document(_frame(b"\0\0\0\0x"), "a\0b"),
    "half a character": _document(_frame(b"\0\0\0\0x"), "\ud800"),
    "half a character in an error": _frame(
        json.dumps({"code": "invalid_file", "message": "\udfff"}).encode()
    ),
    "half a page": _document(_frame(b"\0\0\0\0x"), count=0.5),
    "nested without an end": _frame(b"[" * 60_000),
    "no object": _frame(b"7"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_no_parser_gives_is_the_error_of_one_document(
    reader: Reader[Document], name: str
) -> None:
    code, message = await error_of(reader, f"say {ANSWERS[name].hex()}")
    assert (code, message) == ("invalid_file", "This file cannot be read.")


CUTS = {
    "behind the text": CUT.pack(9, 13),
    "too long": CUT.pack(0, 9),
    "backwards": CUT.pack(2, 1),
    "without text": CUT.pack(1, 1),
    "half of one": CUT.pack(0, 3)[:-1],
    "more than may be": CUT.pack(0, 3) * 3,
}


@pytest.mark.parametrize("name", CUTS)
async def test_a_cut_that_is_none_is_the_error_of_one_document(reader: Reader[Document], name: str) -> None:
    limits = ReadingLimits(chunk_tokens=2, max_chunks=2)
    page = _document(_frame(b"\0\0\0\0" + b"a" * 12))
    read = await reader.read(f"say {(page + _frame(CUT.pack(0, 3) * 2)).hex()}".encode(), "a", limits=limits)
    assert read.cuts == ((0, 3), (0, 3))
    told = await error_of(reader, f"say {(page + _frame(CUTS[name])).hex()}", limits)
    assert told == ("invalid_file", "This file cannot be read.")


async def test_who_gives_up_ends_the_child(reader: Reader[Document]) -> None:
    """More of them than can be read at a time, so that the last document would wait for their ends."""
    waiting = [asyncio.create_task(text_of(reader, "wait")) for _ in range(8)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError)
        for each in await asyncio.gather(*waiting, return_exceptions=True)
    )
    assert await asyncio.wait_for(text_of(reader, "the last"), 30) == "the last"


async def test_nobody_waits_for_a_turn_for_ever(
    reader: Reader[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    going = [asyncio.create_task(text_of(reader, "wait")) for _ in range(1 + PLACES // 2)]
    await asyncio.sleep(0)
    monkeypatch.setattr("tools.documents.reader.WAIT_S", 0.1)
    with pytest.raises(ReadersBusy):
        await reader.read(b"late", "a.txt")
    assert reader._turns.num_waiting == 0
    monkeypatch.undo()
    for each in going:
        each.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    assert await asyncio.wait_for(text_of(reader, "the next"), 30) == "the next"


@LINUX
@pytest.mark.parametrize("namespaces", [True, False])
def test_reading_leaves_the_processor_to_the_server(namespaces: bool) -> None:
    if namespaces and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel has no groups of sessions")
    nursery = Nursery()
    nursery.namespaces = namespaces
    nursery.start()
    try:
        assert nursery.pid is not None
        processes = below(nursery.pid)
        groups = [Path(f"/proc/{each}/autogroup").read_text().split() for each in processes]
    finally:
        nursery.close()
    assert len(groups) == (3 if namespaces else 1)
    assert all(group[1:] == ["nice", str(NICENESS)] for group in groups), groups


async def test_a_lost_nursery_is_started_anew(reader_without_bubblewrap: Reader[Document]) -> None:
    reader = reader_without_bubblewrap
    assert await text_of(reader, "before") == "before"
    pid = reader._nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await text_of(reader, "after") == "after"
    assert reader._nursery.pid != pid


KILLED = """
import sys, time
from tools.documents.child_process import FRAME
from tools.documents.reader import Nursery
nursery = Nursery("tests.tools.documents.hostile_parser", (sys.argv[1],))
child = nursery.fork("text")
print(nursery.pid, flush=True)
time.sleep(600)
"""


@LINUX
def test_processes_end_with_the_server_even_when_it_is_killed() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(HERE)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        nursery = int(server.stdout.readline())
        server.kill()
    deadline = time.monotonic() + 30
    while _runs(nursery):
        assert time.monotonic() < deadline, "the nursery outlives the server"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
