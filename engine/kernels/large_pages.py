"""Allocates memory of the host in large pages, and reads how much memory is free."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes of such a page on most machines
# where cgroups of version 2 and 1 say what a container may use, uses, and uses for what
CONTAINER = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
SHARE = 8  # of the free memory at most the eighth part is taken ahead of use
MADV_POPULATE_WRITE = 23  # since Linux 5.14; an older one refuses it

_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
)


def large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of this shape that cost memory only where they are written, and as large pages if they are worth
    one: a first use is then thirty times as quick, and a stream of reads is not broken at every 4 KiB.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.zeros(shape, dtype=dtype)
    # asked for in private memory, which others do not get; a page begins where its address is even
    memory = mmap.mmap(-1, size + LARGE, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE
    return whole[first : first + size].view(dtype).view(shape)


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has free, or what is left of its container's
    limit if that is less; where neither can be read, a small machine's 8 GiB.
    """
    free = 8 << 30
    with suppress(OSError, KeyError, ValueError, IndexError):  # not Linux
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) << 10
    for folder, limit, used in CONTAINER:
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))
            free = min(free, max(0, left + files))  # what is only read again is given up
    return free


class Reserve:
    """Memory that is used from its beginning on, and whose pages are there before they are needed.

    The first use of a page waits for the system to clear it: for a cache of many layers some ten pages at
    once, as long as a short prompt takes. So another thread takes as much again as is used: memory far beyond
    what is used is never taken, and clearing it does not delay a step.
    """

    def __init__(self, stretches: Callable[[slice], list[Tensor]], size: int, first: int) -> None:
        """`stretches`: the memory of a slice of `size` units; `first` of them are taken now."""
        self._stretches = stretches
        self._size = size
        self._taken = 0
        self._take(first)

    def uses(self, count: int) -> None:
        """The first `count` units are in use."""
        if 4 * count > 3 * self._taken:
            self._take(2 * count)

    def _take(self, upto: int) -> None:
        upto = min(upto, self._size)
        if upto > self._taken:
            touch(self._stretches(slice(self._taken, upto)))
            self._taken = upto


def touch(tensors: Sequence[Tensor]) -> None:
    """Have the system back these stretches of memory by pages now, on another thread, instead of at their
    first use, which would wait for each page to be cleared. What is written there stays.
    """
    if sys.platform != "linux":
        return
    threading.Thread(target=_touch, args=(tensors,), name="touch", daemon=True).start()


def _touch(tensors: Sequence[Tensor]) -> None:
    if sum(tensor.nbytes for tensor in tensors) > free_memory() // SHARE:
        return  # then only what is really used
    with suppress(OSError):  # steps go first: where they are quicker they take the page themselves
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    advise = ctypes.CDLL(None).madvise  # leaves Python's lock to others
    for tensor in tensors:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        if advise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_POPULATE_WRITE):
            return
