"""Where saved blocks lie, for one process and for several."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.tiers.files import Name
from engine.tiers.folders import ABANDONED_S, Folder
from tests.support.saved_blocks import IDENTITY, chain, write

NAME = Name("resp_1", b"t" * 16, None)


def test_all_is_private_and_tells_nothing_of_owners_and_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kv", IDENTITY)
    owner = folder.owner("Alice")
    write(folder.of(owner), chain("ab"))
    folder.write_name(owner, NAME)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert "Alice" not in str(path) and "resp_1" not in str(path)
    assert folder.owners() == [owner]
    assert [entry.name.endswith(".kv") for entry in folder.files(owner)] == [True]
    (path,) = folder.names(owner)
    assert folder.read_name(owner, path) == NAME


def test_the_secret_is_the_roots_and_stays(tmp_path: Path) -> None:
    first, second = Folder(tmp_path, IDENTITY), Folder(tmp_path, b"j" * 16)
    assert first.secret == second.secret and len(first.secret) == 32
    assert first.owner("a") == second.owner("a") != first.owner("b")
    assert Folder(tmp_path / "other", IDENTITY).secret != first.secret
    assert not list(tmp_path.glob("*.tmp"))


def test_processes_that_begin_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: Folder(tmp_path, IDENTITY).secret, range(32)))
    assert len(set(made)) == 1


def test_a_root_that_was_removed_is_made_again_with_its_secret(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kv", IDENTITY)
    shutil.rmtree(tmp_path / "kv")
    folder.touch()
    assert folder.path.is_dir()
    assert Folder(tmp_path / "kv", IDENTITY).secret == folder.secret


def test_what_is_written_first_after_a_removal_makes_the_root_again_with_its_secret(tmp_path: Path) -> None:
    """An owner's folder made it, open to others, and the next process gave it a secret of its own."""
    folder = Folder(tmp_path / "kv", IDENTITY)
    owner = folder.owner("Alice")
    shutil.rmtree(tmp_path / "kv")
    folder.write_name(owner, NAME)
    made = [tmp_path / "kv", *(path for path in (tmp_path / "kv").rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert Folder(tmp_path / "kv", IDENTITY).secret == folder.secret
    assert Folder(tmp_path / "kv", IDENTITY).owners() == [owner]


def test_a_root_that_lost_its_secret_alone_gets_it_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kv", IDENTITY)
    (tmp_path / "kv" / "secret").unlink()
    folder.touch()
    assert Folder(tmp_path / "kv", IDENTITY).secret == folder.secret


def test_a_secret_that_was_cut_is_made_anew(tmp_path: Path) -> None:
    before = Folder(tmp_path, IDENTITY).secret
    (tmp_path / "secret").write_bytes(before[:10])
    after = Folder(tmp_path, IDENTITY).secret
    assert len(after) == 32 and after != before and Folder(tmp_path, IDENTITY).secret == after


def test_an_owner_is_removed_with_all_that_is_theirs(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    for name in ("a", "b"):
        write(folder.of(folder.owner(name)), chain("ab"))
        folder.write_name(folder.owner(name), NAME)
    folder.remove_owner(folder.owner("a"))
    folder.remove_owner(folder.owner("nobody"))
    assert folder.owners() == [folder.owner("b")] and not list(folder.files(folder.owner("a")))


def test_a_disk_that_lets_go_of_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, IDENTITY)
    owner = folder.owner("a")
    folder.write_name(owner, NAME)
    tried = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: tried.append(path))
    folder.remove_owner(owner)
    assert set(tried) == {folder.of(owner)}


def test_what_was_abandoned_is_removed_and_what_is_foreign_is_left(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    owner = folder.owner("a")
    path = folder.of(owner)
    for name in ("old.tmp", "new.tmp", "notes.txt", "xyz.kv"):
        (path / name).write_text("x")
    os.utime(path / "old.tmp", (0, os.stat(path).st_mtime - ABANDONED_S - 1))
    (path / "names" / "stray").write_text("x")
    (tmp_path / "lost+found").mkdir()
    (stray,) = folder.names(owner)
    assert not list(folder.files(owner)) and not folder.others() and folder.read_name(owner, stray) is None
    left = {each.name for each in path.iterdir()}
    assert left == {"new.tmp", "notes.txt", "xyz.kv", "names"}
    assert not list((path / "names").iterdir()), "a name that cannot be read is of no use"


def test_a_name_that_lies_where_another_belongs_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    owner = folder.owner("a")
    folder.write_name(owner, NAME)
    folder.path_of(owner, "resp_1").rename(folder.path_of(owner, "resp_2"))
    assert folder.read_name(owner, folder.path_of(owner, "resp_2")) is None
    assert not folder.names(owner)


def test_what_other_models_left_is_found(tmp_path: Path) -> None:
    mine, other = Folder(tmp_path, IDENTITY), Folder(tmp_path, b"j" * 16)
    path = write(other.of(other.owner("a")), chain("ab"))
    os.utime(path, (0, 4e9))
    (found,) = mine.others()
    assert found.identity == other.identity and found.num_bytes() == path.stat().st_size
    assert found.touched_at() == 4e9
    found.remove()
    assert not mine.others()


def test_what_others_remove_meanwhile_is_no_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path, IDENTITY)
    owner = folder.owner("a")
    assert folder.read_name(owner, folder.path_of(owner, "resp_1")) is None
    assert not folder.names(owner) and not list(folder.files(owner))
