"""Files of saved blocks: what is written is read, and nothing else ever is."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.tiers.files import (
    ALIGN,
    Bytes,
    Damaged,
    Name,
    new_file,
    open_private,
    read_blocks,
    read_name,
    read_table,
    write_name,
)
from tests.support.saved_blocks import BLOCK_SIZE, GROUP_BYTES, IDENTITY, OWNER, chain, content, table, write

KEYS = chain("abcde")


def read(path: Path) -> list[Bytes]:
    rows = table(path)
    with open_private(path, os.O_RDONLY) as descriptor:
        into = np.zeros(path.stat().st_size, np.uint8)
        return [block.copy() for block in read_blocks(descriptor, rows, into)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS, first=7)
    rows = table(path)
    assert [row.key for row in rows] == KEYS and [row.depth for row in rows] == [7, 8, 9, 10, 11]
    assert all(row.offset % ALIGN == 0 for row in rows)
    for key, block in zip(KEYS, read(path), strict=True):
        assert np.array_equal(block, content(key))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_block_may_have_some_groups_only(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS[:2], groups=0b10)
    assert [row.length for row in table(path)] == [GROUP_BYTES[1]] * 2
    assert np.array_equal(read(path)[1], content(KEYS[1], 0b10))


def test_blocks_in_the_middle_are_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS)
    into = np.zeros(3 * ALIGN * 2, np.uint8)
    with open_private(path, os.O_RDONLY) as descriptor:
        found = read_blocks(descriptor, table(path)[1:3], into)
        assert [np.array_equal(block, content(key)) for block, key in zip(found, KEYS[1:3], strict=True)]


def test_any_flipped_bit_is_seen_or_means_nothing(tmp_path: Path) -> None:
    """Every byte of header and table, and a thousand of the blocks: never other blocks than those written."""
    path = write(tmp_path, KEYS)
    whole = path.read_bytes()
    rng = random.Random(0)
    places = [*range(1000), *(rng.randrange(len(whole)) for _ in range(1000))]
    seen = 0
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            rows = table(path)
            assert [row.key for row in rows] == KEYS
            assert all(
                np.array_equal(block, content(key)) for block, key in zip(read(path), KEYS, strict=True)
            )
        except Damaged:
            seen += 1
    assert seen > 500  # the others were padding


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS)
    whole = path.read_bytes()
    for size in [*range(0, 1000, 7), *range(1000, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(Damaged):
            table(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(Damaged):
        table(path)


def test_a_file_that_is_cut_after_its_table_was_read_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS)
    rows = table(path)
    os.truncate(path, rows[-1].offset + 10)
    with open_private(path, os.O_RDONLY) as descriptor, pytest.raises(Damaged):
        read_blocks(descriptor, rows, np.zeros(1 << 20, np.uint8))


@pytest.mark.parametrize(
    "foreign",
    [{"identity": b"x" * 16}, {"owner": b"x" * 16}, {"group_bytes": (100, 4999)}, {"group_bytes": (5100,)}],
)
def test_a_foreign_file_is_damaged(tmp_path: Path, foreign: dict[str, bytes]) -> None:
    path = write(tmp_path, KEYS)
    mine = {"identity": IDENTITY, "owner": OWNER, "group_bytes": GROUP_BYTES}
    with open_private(path, os.O_RDONLY) as descriptor:
        assert len(read_table(descriptor, **mine)) == 5  # type: ignore[arg-type]
        with pytest.raises(Damaged):
            read_table(descriptor, **{**mine, **foreign})  # type: ignore[arg-type]


def test_a_huge_count_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS)
    data = bytearray(path.read_bytes())
    data[16:20] = (2**31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(Damaged, match="impossible"):
        table(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError), open_private(tmp_path / "link", os.O_RDONLY):
        pass


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, KEYS)
    assert not list(tmp_path.iterdir())


def test_a_write_may_be_taken_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(descriptor: int, pieces: list[memoryview], at: int) -> int:
        return os.pwrite(descriptor, pieces[0][:777], at)

    monkeypatch.setattr(os, "pwritev", some)
    path = write(tmp_path, KEYS)
    monkeypatch.undo()
    assert all(np.array_equal(block, content(key)) for block, key in zip(read(path), KEYS, strict=True))


def test_an_empty_half_is_written_too(tmp_path: Path) -> None:
    with new_file(tmp_path, identity=IDENTITY, owner=OWNER, block_size=BLOCK_SIZE, capacity=1) as (
        path,
        each,
    ):
        each.add([], [])
        each.add([(KEYS[0], 0b11, 0)], [content(KEYS[0])])
    assert [row.key for row in table(path)] == KEYS[:1]


# -- names ---------------------------------------------------------------------------------------------------


@pytest.fixture
def name_path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "name"
    assert [each.name for each in tmp_path.iterdir()] == ["name"]


@pytest.mark.parametrize("until", [None, 1.5e9])
def test_a_name_is_read_as_it_was_written(name_path: Path, until: float | None) -> None:
    for text in ("resp_1", "resp_2 ü\n"):
        write_name(name_path, Name(text, KEYS[2].digest, until))
        assert read_name(name_path) == Name(text, KEYS[2].digest, until)


def test_a_changed_name_is_damaged(name_path: Path) -> None:
    write_name(name_path, Name("resp_1", KEYS[2].digest, None))
    whole = name_path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 4
        name_path.write_bytes(data)
        with pytest.raises(Damaged):
            read_name(name_path)
    name_path.write_bytes(whole * 100)
    with pytest.raises(Damaged):
        read_name(name_path)
