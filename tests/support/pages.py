"""Pages of documentation, run as a reader would: every block of sh and Python, in order, against a server.

A page is Markdown. Its blocks of `sh` share one shell, and its blocks of `python` share one interpreter, so
that a later block may use what an earlier one has set. A block of `text` behind one of them is what it
prints: its lines must come in that order, `...` stands for anything within a line. HTML comments that begin
a line say what a reader need not see:

    <!-- server: scripted -->       the page's server has no model; `none`: there is no server
    <!-- not run: needs a GPU -->   the next block is not run here, and why
    <!-- file: antiphon.toml -->    the next block is written to this file of the page's folder
    <!-- first: sleep 1 -->         run this in the shell before the next block
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.forking import READY, command
from tests.support.processes import free_port
from tests.support.schema import lay_schema

ROOT = Path(__file__).parents[2]
RUN = ("sh", "python")
SHOWN = ("text", "toml", "json", "yaml", "ini", "nginx", "js")
"""Languages of blocks that are only read, unless a marker says to write them to a file."""
PORTS = (8000, 8001, 8002, 9000)
"""Ports that pages name; each stands for a free one. The first is the page's server's."""
LIMIT_S = 60.0

_MARKER = re.compile(r"<!--\s*(server|not run|file|first):\s*(.+?)\s*-->")

_INTERPRETER = """
import sys, traceback
from contextlib import redirect_stderr, redirect_stdout
names = {"__name__": "__main__"}
for line in sys.stdin:
    source, out = line.rstrip("\\n").split("\\t")
    failed = 0
    with open(out, "w", buffering=1) as shown, redirect_stdout(shown), redirect_stderr(shown):
        try:
            with open(source) as file:
                exec(compile(file.read(), source, "exec"), names)
        except BaseException:
            traceback.print_exc()
            failed = 1
    print(failed, flush=True)
"""

_SHELL = """
set -eo pipefail
while IFS=$'\\t' read -r source out; do
    source "$source" > "$out" 2>&1 < /dev/null
    echo 0
done
"""


class PageError(AssertionError):
    """A page does not hold; the message names the page, the line, and what came instead."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page. line: of its first line of content, from 1. printed: the lines that the
    page says it prints."""

    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None
    first: str | None = None
    printed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is run. server: `shipped`, `scripted` or `none`."""

    path: Path
    server: str
    blocks: tuple[Block, ...]


def read_page(path: Path) -> Page:
    """The blocks of a Markdown file with their markers. Raises PageError for a block whose language nobody
    knows, and for a marker that belongs to no block."""
    server = "shipped"
    marks: dict[str, str] = {}
    blocks: list[Block] = []
    lines = iter(enumerate(path.read_text("utf-8").splitlines(), 1))
    for number, line in lines:
        if marker := _MARKER.match(line):
            if marker[1] == "server":
                server = marker[2]
            else:
                marks[marker[1]] = marker[2]
        elif line.lstrip().startswith("```"):
            indent = line[: len(line) - len(line.lstrip())]
            language = line.strip().removeprefix("```")
            content = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                content.append(inner.removeprefix(indent))
            if language not in (*RUN, *SHOWN):
                raise PageError(f"{path.name}:{number}: a block of {language or 'no language'}")
            if language == "text" and not marks and blocks and blocks[-1].language in RUN:
                last = blocks.pop()
                printed = tuple(each for each in content if each.strip())
                block = replace(last, printed=printed)
            else:
                block = Block(
                    number + 1,
                    language,
                    "\n".join(content) + "\n",
                    marks.pop("not run", None),
                    marks.pop("file", None),
                    marks.pop("first", None),
                )
            blocks.append(block)
        elif line.strip() and marks:
            raise PageError(f"{path.name}:{number}: text between a marker and its block")
    if marks:
        raise PageError(f"{path.name}: a marker without a block")
    if server not in ("shipped", "scripted", "none"):
        raise PageError(f"{path.name}: the server '{server}' is none of shipped, scripted and none")
    return Page(path, server, tuple(blocks))


def run_page(page: Page, folder: Path) -> int:
    """Run a page's blocks in an empty folder; returns how many were run. Raises PageError at the first that
    fails, or prints something else than the page says."""
    ports = {number: free_port() for number in PORTS}
    data, work, programs = folder / "data", folder / "work", folder / "programs"
    for made in (data, work, programs):
        made.mkdir(mode=0o700)
    for name in ("examples", "engine", "tests", "benchmarks"):
        (work / name).symlink_to(ROOT / name)
    args = ["--port", str(ports[8000]), *(("--engine", "scripted") if page.server == "scripted" else ())]
    env = {
        **os.environ,
        "ANTIPHON_DATA": str(data),
        "ANTIPHON_URL": f"http://127.0.0.1:{ports[8000]}",
        "PATH": os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT),
    }
    with ExitStack() as stack:
        stack.enter_context(command(programs))
        if page.server != "none":
            asyncio.run(lay_schema(data))
            stack.enter_context(_server(args, env))
        workers = {
            "sh": stack.enter_context(_worker(["bash", "-c", _SHELL], work, env)),
            "python": stack.enter_context(_worker([READY, "-c", _INTERPRETER], work, env)),
        }
        done = 0
        for block in page.blocks:
            text, *printed = (_with_ports(each, ports) for each in (block.text, *block.printed))
            block = replace(block, text=text, printed=tuple(printed))
            if block.first is not None:
                before = replace(block, text=f"{block.first}\n", printed=())
                _run(page, before, workers["sh"], folder)
            if block.file is not None:
                (work / block.file).write_text(block.text)
            elif block.language in RUN and block.not_run is None:
                _run(page, block, workers[block.language], folder)
                done += 1
    return done


def _with_ports(text: str, ports: dict[int, int]) -> str:
    return re.sub(r"\b\d{4}\b", lambda found: str(ports.get(int(found[0]), found[0])), text)


def _run(page: Page, block: Block, worker: subprocess.Popen[str], folder: Path) -> None:
    where = f"{page.path.name}:{block.line}"
    source, out = folder / f"{page.path.stem}-{block.line}.txt", folder / "printed.txt"
    source.write_text(block.text)
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{source}\t{out}\n")
    worker.stdin.flush()
    if not select.select([worker.stdout], [], [], LIMIT_S)[0]:
        raise PageError(f"{where} ran for more than {LIMIT_S:g} s, and printed:\n{out.read_text()}")
    answer = worker.stdout.readline().strip()
    printed = out.read_text() if out.exists() else ""
    if answer != "0":
        raise PageError(f"{where} failed, and printed:\n{printed}")
    missing = first_missing(block.printed, printed)
    if missing is not None:
        raise PageError(f"{where}: {missing!r} is not in its place in what was printed:\n{printed}")


def first_missing(wanted: tuple[str, ...], printed: str) -> str | None:
    """The first of `wanted` that no line matches behind those of its forerunners; None if all are there."""
    lines = iter(printed.splitlines())
    for each in wanted:
        pattern = ".*".join(map(re.escape, each.strip().split("...")))
        if not any(re.fullmatch(pattern, line.strip()) for line in lines):
            return each
    return None


@contextmanager
def _server(args: list[str], env: dict[str, str]) -> Iterator[None]:
    """The page's server, from the moment at which it takes requests."""
    serve = [READY, "-m", "server.cli", "serve", *args]
    with subprocess.Popen(serve, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not any("listens on" in line for line in process.stdout):
                raise PageError("the page's server ended before it listened")
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def _worker(program: list[str], work: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A shell or an interpreter that runs what it is told; whatever it has started ends with it."""
    with subprocess.Popen(
        program,
        cwd=work,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
