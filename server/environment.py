"""`antiphon collect-env`: what a bug report should say of the machine and the installation.

Owns: what is told, and that no secret is. Refuses to change anything: it opens no database and loads no
model.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from server import __version__
from server.config import Config, Loaded, settings, shown

_THREADS = re.compile(r"OMP_|MKL_|KMP_|OPENBLAS_|GOMP_|TORCH|PYTORCH|CUDA_|TRITON_|LD_PRELOAD|MALLOC_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_LIMITS = {"memory": "memory.max", "processors": "cpu.max"}  # of a container, under /sys/fs/cgroup


def describe(loaded: Loaded) -> Iterator[str]:
    """The report, line by line. Takes some seconds, most of them torch's import."""
    yield from _part("Antiphon", _installation())
    yield from _part("Machine", _machine())
    yield from _part("Variables", _variables())
    yield from _part("Database", _database(loaded.config))
    yield from _part("Settings that are not the defaults", _settings(loaded))
    yield from _part("Torch", _torch())


def _part(title: str, rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"## {title}"
    lines = ["  ".join((row[0].ljust(24), *row[1:])).rstrip() for row in rows]
    yield from lines or ["none"]
    yield ""


def _installation() -> Iterator[Sequence[str]]:
    yield "antiphon", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    try:
        wanted = requires("antiphon") or []
    except PackageNotFoundError:  # run from a folder that was never installed
        wanted = []
    for requirement in wanted:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "missing"


def _machine() -> Iterator[Sequence[str]]:
    yield "platform", platform.platform()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processors", f"{os.cpu_count()}, {usable} of them usable, load {os.getloadavg()[0]:.1f}"
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    for name, file in _LIMITS.items():
        limit = Path("/sys/fs/cgroup") / file
        if limit.is_file():
            yield f"container's {name}", limit.read_text().strip()


def _variables() -> Iterator[Sequence[str]]:
    for name, value in sorted(os.environ.items()):
        if _THREADS.match(name) and not _SECRET.search(name):
            yield name, value


def _database(config: Config) -> Iterator[Sequence[str]]:
    yield "url", without_secrets(config.db)
    if (file := config.db_file) is not None:
        yield "sqlite", sqlite3.sqlite_version
        yield "file", f"{file.stat().st_size:,} bytes" if os.path.isfile(file) else "not there yet"


def _settings(loaded: Loaded) -> Iterator[Sequence[str]]:
    for row in settings():
        source = loaded.sources[row.name]
        if source != "default":
            yield row.name, f"{without_secrets(getattr(loaded.config, row.name))} ({source})"
    for name in loaded.strangers:
        yield name, "in the environment, but no setting"


def _torch() -> Iterator[Sequence[str]]:
    try:
        from engine import describe_machine

        report = describe_machine()
    except ImportError as error:
        report = f"cannot be imported: {error}"
    for line in report.splitlines():
        yield (line,)


def without_secrets(value: Any) -> str:
    """A setting as it may be shown around: a URL says neither who asks, nor what follows its question
    mark."""
    named = re.sub(r"://\S*@", "://***@", shown(value))
    return re.sub(r"\?[^\s,]*", "?***", named)
