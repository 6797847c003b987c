"""Files and their index, as several processes change one folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tiers.files import FileWriter, Name
from engine.tiers.folders import Folder
from engine.tiers.shelf import YOUNG_S, Shelf
from tests.support.saved_blocks import GROUP_BYTES, IDENTITY, chain, content


def save(shelf: Shelf, name: str, text: str) -> bytes:
    """Save a sequence with a block for each letter; returns its owner."""
    keys, owner = [(key, 0b11, depth) for depth, key in enumerate(chain(text))], shelf.folder.owner("a")

    def fill(writer: FileWriter) -> None:
        writer.add(keys, [content(key) for key, _, _ in keys])

    shelf.write(owner, keys, fill)
    shelf.give(Name(name, keys[-1][0].digest, None), owner)
    return owner


def test_a_name_that_is_found_before_its_blocks_stands_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = (Shelf(Folder(tmp_path, IDENTITY), GROUP_BYTES) for _ in range(2))

    def written_meanwhile(_folder: Folder, _owner: bytes) -> Iterator[Any]:
        """The files are listed, and then another process writes one, and its name."""
        save(others, "one", "ab")
        return iter(())

    save(others, "two", "xy")  # so that there is something to refresh
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "files", written_meanwhile)
        ours.refresh()
    assert set(ours.index.names) == {"one", "two"} and not ours.index.files
    ours.refresh()
    assert len(ours.index.files) == 2 and not ours.index.orphans(), "a name holds all of them"
    ours.forget(["one"])
    assert not any(ours.index.groups_of(key.digest) for key in chain("ab")) and len(ours.index.files) == 1


def test_a_name_whose_blocks_never_come_is_forgotten(tmp_path: Path) -> None:
    shelf = Shelf(Folder(tmp_path, IDENTITY), GROUP_BYTES)
    owner = shelf.folder.owner("a")
    shelf.folder.write_name(owner, Name("lost", chain("a")[0].digest, None))
    shelf.sweep()
    assert set(shelf.index.names) == {"lost"}, "they may be about to come"
    os.utime(shelf.folder.path_of(owner, "lost"), (0, time.time() - 2 * YOUNG_S))
    shelf.sweep()
    assert not shelf.index.names and not shelf.folder.names(owner)
