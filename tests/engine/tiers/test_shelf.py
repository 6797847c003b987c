"""Files and their index, as several processes change one folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.tiers import shelf as shelves
from engine.tiers.files import Name
from engine.tiers.folders import Folder
from engine.tiers.shelf import YOUNG_S, SavedKV, Shelf
from tests.support.saved_blocks import GROUP_BYTES, IDENTITY, chain, save


def has(shelf: Shelf, text: str) -> list[bool]:
    """Which blocks of a sequence are there."""
    return [bool(shelf.index.groups_of(key.digest)) for key in chain(text)]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Shelf, Shelf]:
    """Those of two processes on one folder."""
    ours, others = (Shelf(Folder(tmp_path, IDENTITY), GROUP_BYTES) for _ in range(2))
    return ours, others


def between_listings(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen behind the first of what a refresh lists, and before the second."""
    listed: list[object] = []

    def patched(what: str) -> None:
        listing = getattr(Folder, what)

        def found(folder: Folder, owner: bytes) -> object:
            if len(listed) == 1:
                listed.append(happens())
            result = listing(folder, owner)
            result = result if isinstance(result, dict) else iter(list(result))
            listed.append(result)
            return result

        monkeypatch.setattr(Folder, what, found)

    patched("files")
    patched("names")


def test_a_name_that_is_found_before_its_blocks_stands_for_them(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = two
    save(others, "one", "ab")
    save(others, "two", "xy")
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "files", lambda _folder, _owner: iter(()))
        ours.refresh()
    assert set(ours.index.names) == {"one", "two"} and not ours.index.files
    ours.refresh()
    assert len(ours.index.files) == 2 and not ours.index.orphans(), "a name holds all of them"
    ours.forget(["one"])
    assert not any(ours.index.groups_of(key.digest) for key in chain("ab")) and len(ours.index.files) == 1


def test_a_chain_that_gets_another_name_stays(two: tuple[Shelf, Shelf]) -> None:
    ours, others = two
    owner = save(others, "one", "abcd")
    save(others, "other", "xy")
    ours.refresh()
    others.give(Name("two", chain("abcd")[-1].digest, None), owner)
    others.forget(["one"])
    ours.refresh()
    ours.forget(["other"])  # with it go files' blocks that are dead
    others.refresh()
    assert set(ours.index.names) == {"two"} and all(has(ours, "abcd")) and all(has(others, "abcd"))


def test_a_chain_that_gets_another_name_while_names_are_listed_stays(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = two
    owner = save(others, "one", "abcd")
    ours.refresh()
    listing, seen = Folder.names, list[dict[Path, int]]()

    def without_either(folder: Folder, of: bytes) -> dict[Path, int]:
        """The new name is behind what was listed, and the old one goes before it is."""
        found = listing(folder, of)
        if not seen:
            found = {}
        seen.append(found)
        return found

    others.give(Name("two", chain("abcd")[-1].digest, None), owner)
    others.forget(["one"])
    monkeypatch.setattr(Folder, "names", without_either)
    ours.refresh()
    assert set(ours.index.names) == {"two"} and all(has(ours, "abcd"))


def test_a_name_that_moves_on_while_a_folder_is_listed_loses_nothing(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation's next turn is written by another process."""
    ours, others = two
    save(others, "conv", "abcd")
    ours.refresh()
    save(others, "other", "xy")  # so that there is something to refresh
    with monkeypatch.context() as patched:
        between_listings(patched, lambda: save(others, "conv", "abcdef", first=4))
        ours.refresh()
    ours.refresh()
    ours.forget(["other"])
    others.refresh()
    assert all(has(ours, "abcdef")) and all(has(others, "abcdef"))


def test_blocks_that_move_to_a_file_which_is_found_later_keep_their_name(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = two
    save(others, "one", "abcd")
    ours.refresh()
    with monkeypatch.context() as patched:  # a list of files that has neither the old one nor its copy
        patched.setattr(Folder, "files", lambda _folder, _owner: iter(()))
        save(others, "two", "abxy")
        ours.refresh()
    monkeypatch.setattr(shelves, "YOUNG_S", -1.0)
    ours.sweep()
    assert set(ours.index.names) == {"one", "two"} and all(has(ours, "abcd")) and all(has(ours, "abxy"))


def test_what_a_killed_process_had_begun_to_remove_is_removed(
    two: tuple[Shelf, Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = two
    owner = save(others, "one", "abcd")
    (file,) = ours.folder.files(owner)
    others.give(Name("half", chain("ab")[-1].digest, None), owner)
    ours.refresh()
    others.folder.path_of(owner, "one").unlink()  # and then it is killed
    ours.sweep()
    assert Path(file.path).exists(), "whoever removed the name may be about to write the file anew"
    monkeypatch.setattr(shelves, "YOUNG_S", -1.0)
    ours.sweep()
    (left,) = ours.folder.files(owner)
    assert left.name != file.name and left.stat().st_size < 4 * 8192
    assert has(ours, "abcd") == [True, True, False, False] and set(ours.index.names) == {"half"}


def test_what_models_have_saved_that_are_not_loaded(tmp_path: Path) -> None:
    saved = SavedKV(tmp_path / "kv")
    assert saved.names() == frozenset() and not (tmp_path / "kv").exists()
    one, other = (Shelf(Folder(tmp_path / "kv", each), GROUP_BYTES) for each in (IDENTITY, b"j" * 16))
    save(one, "one", "abcd")
    save(one, "kept", "abxy")
    owner = save(other, "one", "abcd")
    other.folder.write_name(owner, Name("over", chain("ab")[-1].digest, time.time() - 1))
    assert saved.names() == {"one", "kept"}
    saved.forget(["one"])
    for shelf in (one, other):
        shelf.refresh()
    assert saved.names() == {"kept"} == set(one.index.names) and not other.index.files
    assert has(one, "abcd") == [True, True, False, False] and all(has(one, "abxy"))


def test_a_name_whose_blocks_never_come_is_forgotten(tmp_path: Path) -> None:
    shelf = Shelf(Folder(tmp_path, IDENTITY), GROUP_BYTES)
    owner = shelf.folder.owner("a")
    shelf.folder.write_name(owner, Name("lost", chain("a")[0].digest, None))
    shelf.sweep()
    assert set(shelf.index.names) == {"lost"}, "they may be about to come"
    os.utime(shelf.folder.path_of(owner, "lost"), (0, time.time() - 2 * YOUNG_S))
    shelf.sweep()
    assert not shelf.index.names and not shelf.folder.names(owner)
