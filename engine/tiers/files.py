"""The format of saved blocks: one file for each save, written in one go and never changed.

A file is a header, a table with a row for each block, and the blocks, each at a multiple of `ALIGN` bytes.
The header's checksum covers itself and the table, a row's covers its block. What does not fit, in size or
checksum or identity, raises `Damaged`: a reader then computes what it hoped to read.

A name is a small text file of its own, so that forgetting it is one `unlink`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

Bytes = NDArray[np.uint8]

MAGIC = b"antiphKV"
VERSION = 1
ALIGN = 4096
MAX_BLOCKS = 1 << 16  # in one file
MAX_BLOCK_SIZE = 1 << 12  # tokens
MAX_NAME_BYTES = 1 << 12  # of a file that is a name
SUFFIX, UNFINISHED = ".kv", ".tmp"

_HEADER = struct.Struct("<8sIIII16s16sQ")  # magic, version, block size, blocks, 0, identity, owner, file size
_CHECKED = _HEADER.size + 16  # with its checksum


class Damaged(Exception):
    """A file is not what it should be; says how."""


class Key(NamedTuple):
    """What a block holds: its own digest, that of the block before it, and its tokens as int32 bytes."""

    digest: bytes
    parent: bytes
    tokens: bytes


class Row(NamedTuple):
    """Where a block lies. depth: how many blocks are before it. groups: bits of its layer groups."""

    key: Key
    checksum: bytes
    offset: int
    length: int
    groups: int
    depth: int


def aligned(size: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def _rows(block_size: int) -> np.dtype[np.void]:
    fields = [("digest", "V16"), ("parent", "V16"), ("checksum", "V16"), ("offset", "<u8"), ("length", "<u8")]
    return np.dtype([*fields, ("groups", "<u4"), ("depth", "<u4"), ("tokens", f"V{4 * block_size}")])


@contextmanager
def open_private(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a file that nobody else may read; links are not followed."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class FileWriter:
    """Writes one file under a temporary name; see `new_file`."""

    descriptor: int
    identity: bytes  # 16 bytes, of model and layout
    owner: bytes  # 16 bytes
    block_size: int
    capacity: int  # blocks that it is to have
    rows: list[Row] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        self.size = aligned(_CHECKED + self.capacity * _rows(self.block_size).itemsize)

    def add(self, keys: Sequence[tuple[Key, int, int]], data: Sequence[Bytes]) -> None:
        """Write blocks behind those so far; keys: each with its groups and depth."""
        pieces: list[Bytes] = []
        for (key, groups, depth), block in zip(keys, data, strict=True):
            digest = xxh3_128_digest(block.data)
            self.rows.append(Row(key, digest, self.size, len(block), groups, depth))
            self.size += aligned(len(block))
            pieces += [block, np.zeros(aligned(len(block)) - len(block), np.uint8)]
        at = self.rows[-len(data)].offset if data else self.size
        _write(self.descriptor, pieces, at)

    def finish(self) -> None:
        """Write header and table; before this the file is nothing."""
        assert len(self.rows) == self.capacity
        table = np.zeros(self.capacity, _rows(self.block_size))
        for at, row in enumerate(self.rows):
            table[at] = (
                *(row.key.digest, row.key.parent, row.checksum, row.offset, row.length),
                *(row.groups, row.depth, row.key.tokens),
            )
        head = _HEADER.pack(
            *(MAGIC, VERSION, self.block_size, self.capacity, 0),
            *(self.identity, self.owner, self.size),
        )
        body = table.tobytes()
        whole = head + xxh3_128_digest(head + body) + body
        _write(self.descriptor, [np.frombuffer(whole, np.uint8)], 0)
        os.ftruncate(self.descriptor, self.size)


def _write(descriptor: int, pieces: Sequence[Bytes], at: int) -> None:
    """Write pieces one after the other, from this offset on, however little the system takes at once."""
    left = [piece.data.cast("B") for piece in pieces if len(piece)]
    while left:
        written = os.pwritev(descriptor, left[:512], at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


@contextmanager
def new_file(
    folder: Path, *, identity: bytes, owner: bytes, block_size: int, capacity: int
) -> Iterator[tuple[Path, FileWriter]]:
    """A file to write, and the path that it has once the context ends without an exception.

    Raises OSError, as of a disk that is full; then nothing is left.
    """
    assert 0 < capacity <= MAX_BLOCKS
    path = folder / (secrets.token_hex(16) + SUFFIX)
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with open_private(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            writer = FileWriter(descriptor, identity, owner, block_size, capacity)
            yield path, writer
            writer.finish()
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_table(
    descriptor: int, *, identity: bytes, owner: bytes, group_bytes: Sequence[int] | None
) -> list[Row]:
    """The rows of a file; raises Damaged for one that is torn, changed, or of another model or owner.

    group_bytes: bytes of a block of each layer group; None: not known, as of a model that is not loaded.
    """
    head = os.pread(descriptor, _CHECKED, 0)
    if len(head) < _CHECKED:
        raise Damaged("it ends within its header")
    magic, version, block_size, count, zero, whose, by, size = _HEADER.unpack_from(head)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise Damaged("it is of another format")
    if (whose, by) != (identity, owner):
        raise Damaged("it is of another model or owner")
    if not 0 < block_size <= MAX_BLOCK_SIZE or not 0 < count <= MAX_BLOCKS:
        raise Damaged("its header has impossible sizes")
    kind = _rows(block_size)
    body = os.pread(descriptor, count * kind.itemsize, _CHECKED)
    if len(body) < count * kind.itemsize or os.fstat(descriptor).st_size != size:
        raise Damaged("it was cut")
    if xxh3_128_digest(head[: _HEADER.size] + body) != head[_HEADER.size :]:
        raise Damaged("its table was changed")
    rows = [
        Row(Key(digest, parent, tokens), checksum, offset, length, groups, depth)
        for digest, parent, checksum, offset, length, groups, depth, tokens in np.frombuffer(
            body, kind
        ).tolist()
    ]
    at = aligned(_CHECKED + len(body))
    for row in rows:
        if row.offset != at or not row.length or not _is_block(row, group_bytes):
            raise Damaged("its table says what cannot be")
        at += aligned(row.length)
    if at != size:
        raise Damaged("it has another size than its table says")
    return rows


def _is_block(row: Row, group_bytes: Sequence[int] | None) -> bool:
    """Whether a block is as long as its layer groups are."""
    if group_bytes is None:
        return True
    wanted = sum(num for bit, num in enumerate(group_bytes) if row.groups >> bit & 1)
    return row.length == wanted and not row.groups >> len(group_bytes)


def read_blocks(descriptor: int, rows: Sequence[Row], into: Bytes) -> list[Bytes]:
    """Blocks that lie one behind the other, read in one go into this memory; each is checked.

    Raises Damaged for one that is not what was written.
    """
    begin, size = rows[0].offset, rows[-1].offset + rows[-1].length - rows[0].offset
    view, have = into.data[:size], 0
    while have < size:
        num = os.preadv(descriptor, [view[have:]], begin + have)
        if not num:
            raise Damaged("it was cut")
        have += num
    blocks = [into[row.offset - begin : row.offset - begin + row.length] for row in rows]
    for row, block in zip(rows, blocks, strict=True):
        if xxh3_128_digest(block.data) != row.checksum:
            raise Damaged(f"the block at {row.offset} was changed")
    return blocks


# -- names ---------------------------------------------------------------------------------------------------


class Name(NamedTuple):
    """What is saved under a name: the blocks up to this digest. until: unix seconds; None: no end."""

    name: str
    tail: bytes
    until: float | None


def write_name(path: Path, name: Name) -> None:
    """Write or replace a name; raises OSError."""
    text = json.dumps({"name": name.name, "tail": name.tail.hex(), "until": name.until}).encode()
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open_private(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            _write(descriptor, [np.frombuffer(xxh3_128_hexdigest(text).encode() + text, np.uint8)], 0)
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_name(path: Path) -> Name:
    """A name; raises Damaged, or OSError."""
    with open_private(path, os.O_RDONLY) as descriptor:
        data = os.read(descriptor, MAX_NAME_BYTES + 1)
    checksum, text = data[:32], data[32:]
    if len(data) > MAX_NAME_BYTES or xxh3_128_hexdigest(text).encode() != checksum:
        raise Damaged("the name was changed")
    try:
        fields = json.loads(text)
        name, tail, until = fields["name"], bytes.fromhex(fields["tail"]), fields["until"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged("the name cannot be read") from error
    timeless = until is None or (isinstance(until, int | float) and math.isfinite(until))
    if not isinstance(name, str) or len(tail) != 16 or not timeless:
        raise Damaged("the name says what cannot be")
    return Name(name, tail, until)
