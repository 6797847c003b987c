"""The file of SQLite's write-ahead log: its length, and putting it on the disk."""

from __future__ import annotations

import os
import struct
from pathlib import Path


class Wal:
    """The write-ahead log as a file: its valid length, and a sync of it.

    SQLite reuses the file after a checkpoint, so its size says little. Valid frames carry the salt of the
    header and form a prefix: a binary search finds its end
    (https://sqlite.org/fileformat2.html#the_write_ahead_log).
    """

    HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint number, salt 1, salt 2, checksums
    FRAME_HEADER = 24

    def __init__(self, database: Path) -> None:
        self._path = f"{database}-wal"
        self._fd = -1
        self.num_bytes = 0

    def _open(self) -> int:
        # Late, since the file exists from the first write on. Closing a descriptor drops no lock of SQLite's:
        # it takes none on this file.
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def sync(self) -> None:
        """Puts every commit so far on the disk. After an OSError nobody knows what the disk holds."""
        os.fdatasync(self._open())

    def measure(self) -> int:
        """Bytes of the WAL that are in use."""
        fd = self._open()
        header = os.pread(fd, self.HEADER.size, 0)
        if len(header) < self.HEADER.size:
            self.num_bytes = 0
            return 0
        fields = self.HEADER.unpack(header)
        frame, salts = self.FRAME_HEADER + fields[2], header[16:24]
        low, high = 0, (os.fstat(fd).st_size - self.HEADER.size) // frame
        while low < high:
            middle = (low + high) // 2
            if os.pread(fd, 8, self.HEADER.size + middle * frame + 8) == salts:
                low = middle + 1
            else:
                high = middle
        self.num_bytes = self.HEADER.size + low * frame if low else 0
        return self.num_bytes

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
