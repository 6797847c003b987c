"""What is said where this user may not use the files of the database, or where one of them is none."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from storage import open_storage
from tests.support.permissions import NOBODY
from tests.support.processes import ROOT

SERVE = ("serve", "--engine", "scripted", "--port", "0")
DOCTOR = ("doctor", "--engine", "scripted", "--port", "0")
UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


def antiphon(data: Path, *argv: str) -> tuple[int, str]:
    """The exit code of a command without the rights of root, and all that it says."""
    done = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-m", "server.cli", *argv, "--data", str(data)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a database."""

    async def make() -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path / 'antiphon.db'}", runner="test")
        await storage.close()

    asyncio.run(make())
    return tmp_path


@pytest.mark.parametrize("argv", [SERVE, ("keys", "create"), ("keys", "list"), DOCTOR])
def test_a_file_that_cannot_be_written_is_named(data: Path, argv: tuple[str, ...]) -> None:
    file = data / "antiphon.db"
    file.chmod(0o400)
    code, told = antiphon(data, *argv)
    me = getpass.getuser()
    assert code == (1 if argv == DOCTOR else 2)
    assert (
        f"the user {me} cannot write {file}, which belongs to the user {me} and has the mode 0400\n" in told
    )
    assert not [each for each in data.iterdir() if each.name.endswith(("-wal", "-shm"))]


@pytest.mark.parametrize("suffix", ["-wal", ".lock"])
def test_a_file_beside_the_database_is_named_too(data: Path, suffix: str) -> None:
    database, file = data / "antiphon.db", data / f"antiphon.db{suffix}"
    if suffix == "-wal":  # as a server that was killed leaves it
        with closing(sqlite3.connect(database)) as writing:
            writing.execute("CREATE TABLE left_behind (number)")
            for each in (database, file):
                shutil.copy(each, data / f"{each.name}.copy")
        for each in (database, file):
            (data / f"{each.name}.copy").rename(each)
    file.chmod(0o400)
    for argv, expected in ((DOCTOR, 1), (SERVE, 2)):
        code, told = antiphon(data, *argv)
        assert code == expected and f" cannot write {file}, which belongs to the user " in told, told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_named_with_whose_it_is(data: Path) -> None:
    file = data / "antiphon.db"
    os.chown(file, NOBODY, -1)
    for argv in (SERVE, ("keys", "list"), ("backup", str(data / "copy.db"))):
        code, told = antiphon(data, *argv)
        assert code == 2
        assert f"cannot read {file}, which belongs to the user nobody and has the mode 0600\n" in told
        assert "copy.db" not in told and "unable to open" not in told


def test_a_folder_in_the_place_of_the_database_is_told_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "antiphon.db"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for argv, expected in ((DOCTOR, 1), (SERVE, 2), (("keys", "create"), 2)):
        code, told = antiphon(tmp_path, *argv)
        assert code == expected and f": {folder} is a folder, and a file is needed\n" in told, told
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert list(tmp_path.iterdir()) == [folder]
