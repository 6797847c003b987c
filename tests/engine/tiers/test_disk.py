"""Blocks between pool and disk: what is saved comes back, and what goes wrong there goes no further."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tiers import disk
from engine.tiers import files as file_format
from engine.tiers import shelf as shelves
from engine.tiers.disk import Block, DiskTier, Load, Save
from engine.tiers.files import Key, Name
from engine.tiers.folders import Folder, ForeignFolder, database_of
from engine.tiers.rates import Rates
from engine.tiers.shelf import SavedKV
from tests.support.saved_blocks import BLOCK_SIZE, IDENTITY, Pool, chain

WAIT = 30.0


class Tier:
    """A tier over a pool, and what tests ask of it."""

    def __init__(
        self,
        root: Path,
        *,
        limit: int = 1 << 30,
        identity: bytes = IDENTITY,
        database: str | None = None,
    ) -> None:
        self.pool = Pool()
        self.folder = Folder(root, identity, database)
        self.rates = Rates(token_s=1e-3, growth=1e-4, bytes_per_s=1e9)
        self.disk = DiskTier(self.folder, self.pool, self.rates, limit=limit, block_size=BLOCK_SIZE)
        assert self.disk.opened.wait(WAIT)

    def try_again(self) -> None:
        """What upkeep does a while after a disk was left alone."""
        self.disk._until = time.monotonic()
        self.disk.call(self.disk._upkeep)
        self.flush()

    def flush(self) -> None:
        done = threading.Event()
        self.disk.call(done.set)
        assert done.wait(WAIT)

    def names(self) -> frozenset[str]:
        found: list[frozenset[str]] = []
        self.disk.call(lambda: found.append(self.disk.names()))
        self.flush()
        return found[0]

    def begin(self, name: str, text: str, owner: str = "a", until: float | None = None) -> threading.Event:
        """Save what is not on disk of a sequence with a block for each letter."""
        keys, copied = chain(text), threading.Event()
        self.pool.fill(keys, 0)
        blocks = [
            Block(key, depth, ((0, depth), (1, depth)))
            for depth, key in enumerate(keys)
            if not self.disk.groups_of(key.digest) and not self.disk.is_pending(key.digest)
        ]
        save = Save(Name(name, keys[-1].digest, until), owner, blocks, None, copied.set)
        self.last, self.taken = save, self.disk.save(save)
        return copied

    def save(self, name: str, text: str, owner: str = "a", until: float | None = None) -> None:
        self.begin(name, text, owner, until)
        self.flush()

    def load(self, text: str, owner: str = "a", *, at: int = 32) -> Load:
        """Read a sequence from disk to a place in the pool."""
        done = threading.Event()
        blocks = [Block(key, i, ((0, at + i), (1, at + i))) for i, key in enumerate(chain(text))]
        for group in self.pool.groups:
            group[at:] = 0
        load = Load(owner, blocks, None, lambda _: done.set())
        self.disk.load(load)
        assert done.wait(WAIT)
        assert self.pool.holds(chain(text)[: load.num_read], at), "what is said to be read is there"
        return load

    def has(self, text: str) -> list[bool]:
        return [bool(self.disk.groups_of(key.digest)) for key in chain(text)]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.root.rglob("*.kv"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Tier]]:
    made: list[Tier] = []

    def one(root: Path = tmp_path / "kv", **fields: Any) -> Tier:
        made.append(Tier(root, **fields))
        return made[-1]

    yield one
    for each in made:
        each.pool.gate.set()
        each.disk.close(WAIT)


def test_what_is_saved_comes_back_after_a_restart_too(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.save("two", "abcdefg")  # the first four are there
    assert [len(path.read_bytes()) for path in tier.files] and len(tier.files) == 2
    for each in (tier, make()):
        assert each.has("abcdefgh") == [True] * 7 + [False]
        assert each.load("abcdefg").num_read == 7 and each.names() == {"one", "two"}
    stats = tier.disk.stats()
    assert (stats.state, stats.blocks, stats.files, stats.names, stats.saving) == ("on", 7, 2, 2, 0)
    assert stats.disk_bytes == sum(path.stat().st_size for path in tier.files)
    assert stats.saved_blocks_total == 7 and stats.restored_bytes_total == 7 * 5100


def test_more_than_one_piece_is_written_and_read(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE", 12_000)
    tier, text = make(), "abcdefghijklmnopqrstuvw"
    tier.save("one", text)
    assert tier.load(text).num_read == len(text)


def test_groups_that_are_not_there_are_not_read(make: Callable[..., Tier]) -> None:
    """The first blocks have left the second group's window."""
    tier, keys, copied = make(), chain("abcd"), threading.Event()
    tier.pool.fill(keys, 0)
    blocks = [Block(key, i, ((0, i), (1, i))[: 1 if i < 2 else 2]) for i, key in enumerate(keys)]
    assert tier.disk.save(Save(Name("n", keys[3].digest, None), "a", blocks, None, copied.set))
    tier.flush()
    assert [tier.disk.groups_of(key.digest) for key in keys] == [1, 1, 3, 3]
    done = threading.Event()
    wanted = [Block(key, i, ((0, 40 + i), (1, 40 + i))[: 1 if i < 3 else 2]) for i, key in enumerate(keys)]
    load = Load("a", wanted, None, lambda _: done.set())
    tier.disk.load(load)
    assert done.wait(WAIT) and load.num_read == 4 and tier.pool.holds(keys[3:], 43)
    for i in range(3):
        assert (tier.pool.groups[0][40 + i] == tier.pool.groups[0][i]).all()
        assert not tier.pool.groups[1][40 + i].any()


def test_another_owner_reads_nothing(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd", owner="a")
    load = tier.load("abcd", owner="b")
    assert load.num_read == 0 and load.failure is not None


def test_a_changed_block_is_a_miss_and_its_file_goes(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    (path,) = tier.files
    data = bytearray(path.read_bytes())
    data[-6000] ^= 1  # in the third block or the padding before it
    data[4096 * 6 + 1] ^= 1
    path.write_bytes(data)
    load = tier.load("abcd")
    assert load.num_read < 4 and "Damaged" in str(load.failure)
    tier.flush()
    assert not tier.files and tier.has("abcd") == [False] * 4 and not tier.names()
    assert tier.disk.stats().evictions == {"damaged": 4}


def test_a_file_that_vanishes_is_a_miss(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.files[0].unlink()
    assert tier.load("abcd").num_read == 0
    tier.flush()
    assert tier.has("abcd") == [False] * 4


def test_blocks_may_leave_the_pool_only_once_they_are_copied(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.pool.gate.clear()
    copied = tier.begin("one", "abcd")
    assert not copied.wait(0.05) and tier.disk.stats().saving == 1
    tier.pool.gate.set()
    assert copied.wait(WAIT)
    for group in tier.pool.groups:
        group[:] = 7  # others have them now
    tier.flush()
    assert tier.load("abcd").num_read == 4


def test_a_name_is_forgotten_with_what_it_alone_stood_for(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.save("two", "abxyz")
    before = sum(path.stat().st_size for path in tier.files)
    tier.disk.forget(["one", "unknown"])
    tier.flush()
    assert tier.has("abcd") == [True, True, False, False] and tier.load("abxyz").num_read == 5
    assert tier.names() == {"two"} and sum(path.stat().st_size for path in tier.files) < before
    tier.disk.forget(["two"])
    tier.flush()
    assert not tier.files and not list(tier.folder.root.rglob("names/*"))
    assert tier.disk.stats().evictions == {"forgotten": 7}


def test_a_name_forgotten_while_it_is_saved_stays_forgotten(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.pool.gate.clear()
    tier.begin("one", "abcd")
    tier.disk.forget(["one"])
    tier.disk.forget_owner("b")
    tier.pool.gate.set()
    tier.flush()
    assert not tier.files and not tier.names() and tier.has("abcd") == [False] * 4


def test_an_owner_is_forgotten_under_every_model(make: Callable[..., Tier]) -> None:
    tier, other = make(), make(identity=b"j" * 16)
    for each in (tier, other):
        each.save("one", "abcd", owner="a")
        each.save("two", "wxyz", owner="b")
    tier.disk.forget_owner("a")
    tier.flush()
    assert tier.names() == {"two"} and other.names() == {"two"} and len(tier.files) == 2


def test_a_name_is_forgotten_under_every_model(make: Callable[..., Tier]) -> None:
    tier, other = make(), make(identity=b"j" * 16)
    other.save("one", "abcd")
    other.save("two", "abxy")
    tier.disk.forget(["one"])
    tier.flush()
    assert other.names() == {"two"} and other.has("abcd") == [True, True, False, False]
    assert other.load("abxy").num_read == 4


def test_what_was_read_while_it_was_forgotten_is_whole_or_a_miss(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.pool.gate.clear()
    reader = threading.Thread(target=lambda: loads.append(tier.load("abcd")))
    loads: list[Load] = []
    reader.start()
    tier.disk.forget(["one"])
    tier.flush()
    tier.pool.gate.set()
    reader.join(WAIT)
    assert loads[0].num_read in (0, 4) and not tier.files


def test_another_process_reads_what_this_one_wrote(make: Callable[..., Tier]) -> None:
    tier, other = make(), make()
    tier.save("one", "abcd")
    assert other.names() == {"one"} and other.load("abcd").num_read == 4
    other.disk.forget(["one"])
    other.flush()
    assert tier.names() == set() and tier.has("abcd") == [False] * 4 and not tier.files


def test_the_same_blocks_saved_twice_are_one(make: Callable[..., Tier]) -> None:
    tier, other = make(), make()
    tier.save("one", "abcd")
    other.save("two", "abcd")  # it has not seen the first
    assert tier.names() == {"one", "two"} and len(tier.files) == 2
    tier.disk.forget(["one"])
    tier.flush()
    assert tier.load("abcd").num_read == 4
    tier.disk.forget(["two"])
    tier.flush()
    assert not tier.files


def test_the_quota_holds_and_the_sequence_that_grows_keeps_its_head(make: Callable[..., Tier]) -> None:
    tier = make(limit=20 * 8192)
    for i in range(12):
        tier.save(f"n{i}", f"{i:02}abcd")
        assert tier.disk.stats().disk_bytes <= 20 * 8192
        tier.save(f"n{i}b", f"{i:02}abcdefgh")
        assert all(tier.has(f"{i:02}abcdefgh"))
    assert tier.disk.stats().evictions["quota"] > 50
    tier.save("large", "abcdefghijklmnopqrstuvw")
    assert not any(tier.has("abcdefghijklmnopqrstuvw"))
    assert tier.disk.stats().saves_refused == {"room": 1} and "large" not in tier.names()


def test_names_end_when_their_time_is_over(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    tier.save("one", "abcd", until=time.time() + 3600)
    tier.disk._upkeep()
    assert tier.names() == {"one"}
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 4000)
    tier.disk.call(tier.disk._upkeep)
    assert not tier.names() and not tier.files and tier.disk.stats().evictions == {"expired": 4}


def test_a_full_disk_turns_saving_off_with_one_line(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    tier.save("one", "abcd")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(file_format.os, "pwritev", full)  # type: ignore[attr-defined]
        tier.save("two", "wxyz")
        assert tier.taken
        for _ in range(3):
            tier.save("three", "mnop")
            assert not tier.taken
    left = "saved KV on disk is left alone: the disk is full"
    assert [record.getMessage() for record in caplog.records] == [left]
    assert tier.disk.state == "full" and tier.disk.stats().saves_refused == {"state": 4}
    assert tier.load("abcd").num_read == 4 and len(tier.files) == 1
    tier.disk.forget(["one"])
    tier.flush()
    assert not tier.files
    tier.try_again()
    assert [record.getMessage() for record in caplog.records] == [left, "saved KV on disk is on again"]
    tier.save("four", "abcd")
    assert tier.disk.stats().state == "on" and tier.load("abcd").num_read == 4


def test_a_disk_with_little_left_is_not_filled(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    free = os.statvfs(tier.folder.root)
    fields = list(free)
    fields[4] = 10 * 8192 // free.f_frsize  # f_bavail

    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    for _ in range(2):
        tier.save("one", "abcdef")
    assert not tier.files and tier.disk.stats().saves_refused == {"room": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "saved KV on disk has no room for 52 KiB: of the 1 GiB that kv_disk_bytes allows, 40 KiB may be used"
    ]


def test_a_save_larger_than_what_is_free_keeps_no_other_from_the_disk(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE", 3 * 8192)
    tier = make()
    free = os.statvfs(tier.folder.root)
    fields = list(free)
    fields[4] = 6 * 8192 // free.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    tier.save("large", "abcdefgh")
    tier.save("small", "wx")
    assert tier.names() == {"small"} and tier.disk.stats().saves_refused == {"room": 1}


def test_what_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tier(tmp_path / "kv").save("one", "abcd")
    with monkeypatch.context() as patched:

        def broken(_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patched.setattr(shelves.Shelf, "sweep", broken)
        tier = Tier(tmp_path / "kv")
        assert tier.disk.state == "failed" and "Input/output error" in tier.disk.stats().why
        tier.save("two", "wxyz")
        assert not tier.taken
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    assert tier.names() == {"one"} and tier.has("abcd") == [True] * 4
    tier.disk.close(WAIT)


def test_a_disk_with_errors_is_left_alone_until_it_has_none(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patched:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        patched.setattr(os, "pwrite", broken)
        patched.setattr(file_format.os, "pwritev", broken)  # type: ignore[attr-defined]
        tier.save("one", "abcd")
        tier.try_again()
        assert tier.disk.state == "failed" and "Input/output error" in tier.disk.stats().why
    tier.try_again()
    assert tier.disk.stats().state == "on" and not tier.disk.stats().why
    assert [record.getMessage() for record in caplog.records] == [
        "saved KV on disk is left alone: the disk fails: [Errno 5] Input/output error",
        "saved KV on disk is on again",
    ]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_costs_nobody_anything(make: Callable[..., Tier], kind: str) -> None:
    make().save("one", "abcd")
    tier = make()
    [file] = tier.files
    strange = file.with_name(f"{'0' * 32}.kv")
    {"folder": strange.mkdir, "pipe": lambda: os.mkfifo(strange), "link": lambda: strange.symlink_to("x")}[
        kind
    ]()
    later = make()
    assert later.disk.state == "on" and later.load("abcd").num_read == 4
    later.disk.forget(["one"])
    later.flush()
    assert not file.exists()


def test_what_cannot_be_removed_is_tried_again(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    tier.save("one", "abcd")
    with monkeypatch.context() as patched:

        def read_only(self: Path, missing_ok: bool = False) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(self))

        patched.setattr(Path, "unlink", read_only)
        tier.disk.forget(["one"])
        tier.flush()
        assert tier.files and not tier.names() and "is tried again" in caplog.text
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    assert not tier.files and not list((tier.folder.path).rglob("names/*"))


def test_names_of_other_settings_are_told(make: Callable[..., Tier]) -> None:
    """So that what was deleted in the database is found there, too."""
    tier, other = make(), make(identity=b"j" * 16)
    other.save("one", "abcd")
    tier.save("two", "wxyz")
    assert tier.names() == {"one", "two"}
    tier.disk.forget(["one"])
    tier.flush()
    assert tier.names() == {"two"} and len(other.files) == 1


def test_a_full_disk_turns_writing_off_and_keeps_what_is_there(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    tier.save("one", "abcd")
    real = os.statvfs(tier.folder.path)
    fields = [*real]
    fields[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    for name, text in (("two", "wxyz"), ("three", "mnop")):
        tier.save(name, text)
    tier.try_again()
    assert tier.disk.state == "full" and caplog.text.count("the disk is full") == 1
    assert tier.names() == {"one"} and tier.load("abcd").num_read == 4


def test_closing_writes_what_waits_and_no_longer_than_it_may(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.begin("one", "abcd")
    tier.disk.close(WAIT)
    assert make().names() == {"one"}
    hung = make()
    hung.pool.gate.clear()
    hung.begin("two", "wxyz")
    began = time.monotonic()
    hung.disk.close(0.05)
    assert time.monotonic() - began < 5
    assert not hung.disk.save(Save(Name("n", b"", None), "a", [], None, lambda: None))


def test_too_many_saves_are_refused(make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_SAVING", 2)
    tier = make()
    tier.pool.gate.clear()
    for text in ("a", "b", "c"):
        tier.begin(text, text)
    assert not tier.taken and tier.disk.stats().saves_refused == {"busy": 1}
    tier.pool.gate.set()


def test_a_save_whose_blocks_are_taken_back_is_counted_once(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.pool.gate.clear()
    tier.begin("one", "ab")
    tier.begin("two", "xy")
    assert tier.last.claim(), "nobody copies it yet"
    tier.disk.refused("busy")
    tier.pool.gate.set()
    assert tier.names() == {"one"} and tier.disk.stats().saves_refused == {"busy": 1}


def test_a_kill_leaves_nothing_of_the_probe(
    make: Callable[..., Tier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    monkeypatch.setattr(os, "fdatasync", lambda _: left.append(list(tmp_path.rglob("*.tmp"))))
    make()
    assert left == [[]]


def test_copies_wait_for_memory(make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "STAGED", 10_000)
    tier = make()
    for i in range(20):
        tier.begin(f"n{i}", f"{i:02}abc")
    tier.flush()
    assert len(tier.names()) == 20 and tier.disk._staged == 0 and not tier.disk._pending


def test_what_a_crash_left_without_a_name_goes_when_it_is_old(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.save("two", "wxyz")
    tier.folder.path_of(tier.folder.owner("a"), "two").unlink()
    tier.disk.close(WAIT)
    young = make()
    assert len(young.files) == 2 and young.names() == {"one"}
    for path in young.files:
        os.utime(path, (0, time.time() - 2 * shelves.YOUNG_S))
    again = make()
    assert len(again.files) == 1 and again.load("abcd").num_read == 4 and not any(again.has("wxyz"))


def test_what_another_model_left_goes_after_a_week(make: Callable[..., Tier]) -> None:
    other = make(identity=b"j" * 16)
    other.save("one", "abcd")
    other.disk.close(WAIT)
    make()
    assert len(other.files) == 1
    long_ago = time.time() - shelves.STALE_S - 10
    for path in [*other.files, other.folder.path]:
        os.utime(path, (long_ago, long_ago))
    make()
    assert not other.folder.path.exists()


def test_what_a_model_that_is_served_has_is_not_taken_for_left(make: Callable[..., Tier]) -> None:
    """However long nothing of it was read or written."""
    tier = make()
    tier.save("one", "abcd")
    long_ago = time.time() - shelves.STALE_S - 10
    for path in [*tier.files, tier.folder.path]:
        os.utime(path, (long_ago, long_ago))
    tier.disk._housekeeping_at = 0.0
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    make(identity=b"j" * 16)
    assert tier.load("abcd").num_read == 4


def test_what_others_have_left_is_looked_through_while_a_model_is_served(make: Callable[..., Tier]) -> None:
    tier, other = make(), make(identity=b"j" * 16)
    other.save("one", "abcd")
    other.disk.close(WAIT)
    long_ago = time.time() - shelves.STALE_S - 10
    for path in [*other.files, other.folder.path]:
        os.utime(path, (long_ago, long_ago))
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    assert other.folder.path.exists(), "this is done now and then"
    tier.disk._housekeeping_at = 0.0
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    assert not other.folder.path.exists()


def test_a_folder_that_is_removed_under_a_model_is_made_anew(make: Callable[..., Tier]) -> None:
    tier = make()
    tier.save("one", "abcd")
    tier.folder.remove()
    tier.disk.call(tier.disk._upkeep)
    tier.flush()
    assert tier.disk.state == "on" and tier.has("abcd") == [False] * 4 and not tier.names()
    tier.save("two", "wxyz")
    assert tier.load("wxyz").num_read == 4 and stat.S_IMODE(tier.folder.path.stat().st_mode) == 0o700


def test_a_folder_that_another_database_has_taken_is_left_alone(
    make: Callable[..., Tier], caplog: pytest.LogCaptureFixture
) -> None:
    """It was removed, and made anew by a server of that one."""
    tier = make(database="a" * 32)
    tier.save("one", "abcd")
    shutil.rmtree(tier.folder.root)
    other = make(database="b" * 32)
    other.save("two", "wxyz")
    tier.disk.call(tier.disk._upkeep)
    tier.disk.forget(["two"])
    tier.disk.forget_owner("a")
    assert tier.names() == set()
    assert tier.disk.state == "foreign" and caplog.text.count("another database") == 1
    assert other.names() == {"two"} and other.load("wxyz").num_read == 4
    with pytest.raises(ForeignFolder):
        SavedKV(tier.folder.root, database="a" * 32).names()
    shutil.rmtree(tier.folder.root)
    tier.try_again()
    assert tier.disk.stats().state == "on" and database_of(tier.folder.root) == "a" * 32


def test_whose_a_folder_is_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Folder(tmp_path / "kv", IDENTITY).root
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "write", full)
        folder = Folder(root, IDENTITY, "a" * 32)
        assert database_of(root) is None and not list(root.glob("*.tmp"))
    folder.make()
    assert database_of(root) == "a" * 32


def test_a_disk_that_was_too_slow_is_measured_again_in_time(make: Callable[..., Tier]) -> None:
    tier = make()

    def measured() -> bool:
        """Whether upkeep finds out that a slow spell is over."""
        tier.rates.read(1 << 20, 1000.0, anew=True)
        tier.disk.call(tier.disk._upkeep)
        tier.flush()
        return tier.rates.bytes_per_s > 1 << 20

    tier.disk._measure_at = 0.0
    assert not measured(), "nobody did without the disk"
    tier.disk.doubt()
    assert measured()
    tier.disk.doubt()
    assert not measured(), "not so soon"
    tier.disk._measure_at = 0.0
    tier.disk.slow("it hangs")
    assert not measured(), "it is left alone"
    tier.disk._until = time.monotonic()
    assert measured() and tier.disk.state == "on"
    assert tier.disk._measure_s == disk.RETRY_S and disk.RETRY_S < disk.MOST_RETRY_S


def test_a_disk_that_stays_slow_is_measured_less_and_less_often(
    make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, pauses = make(), list[float]()
    monkeypatch.setattr(tier.disk, "_measure", lambda: None)
    for _ in range(8):
        tier.disk._measure_again()
        pauses.append(tier.disk._measure_s)
    assert pauses == sorted(pauses) and pauses[0] == 2 * disk.RETRY_S and pauses[-1] == disk.MOST_RETRY_S


def test_reads_teach_the_rate(make: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    assert tier.rates.bytes_per_s != 1e9, "measured at start"
    text = "abcdefghijklmnopqrstuvw"
    tier.save("one", text)
    rates: list[int] = []
    monkeypatch.setattr(tier.rates, "read", lambda num_bytes, seconds: rates.append(num_bytes))
    tier.load(text)
    assert rates == [len(text) * 5100]


def test_a_key_with_other_tokens_is_a_miss(make: Callable[..., Tier]) -> None:
    """A digest that is the same of other tokens, were there such a thing."""
    tier = make()
    tier.save("one", "ab")
    done = threading.Event()
    key = chain("ab")[0]
    load = Load(
        "a", [Block(Key(key.digest, key.parent, bytes(16)), 0, ((0, 1), (1, 1)))], None, lambda _: done.set()
    )
    tier.disk.load(load)
    assert done.wait(WAIT) and load.num_read == 0
