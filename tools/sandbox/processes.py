"""The processes of a session: which they are, how much memory they take together, and how they are stopped.

What it costs to look is paid every few tenths of a second of a cell, so the cheap look comes first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MAX_MAPS = 1 << 20
"""Bytes of the list of a process's mappings, which says the path of each, and is as long as code likes."""


def below(process: int) -> list[int]:
    """A process and all that descend from it. In a namespace of processes none can get away from that."""
    found, at = [process], 0
    while at < len(found):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{found[at]}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{found[at]}/task/{thread}/children").read_text()
                    found += [int(child) for child in children.split() if int(child) not in found]
        at += 1
    return found


def of_session(leader: int) -> list[int]:
    """A process that leads a session, and all in that, whoever their parents are, the oldest first."""
    others = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != leader)
    found = [(int(told[19]), each) for each in others if (told := _status(each)) and int(told[3]) == leader]
    return [leader, *(each for _, each in sorted(found))]


def seen_as(process: int) -> int:
    """The number by which `/proc` tells what a process holds: that of another of its threads where the first
    one has ended, for which nothing is told any more."""
    told = _status(process)
    return process if told and told[0] not in "ZX" else _living_thread(process) or process


def descriptors_of(processes: Iterable[int]) -> int:
    """How many descriptors processes hold open together."""
    count = 0
    for process in processes:
        with suppress(OSError):
            count += len(os.listdir(f"/proc/{process}/fd"))
    return count


def written_by(processes: Iterable[int]) -> int:
    """Bytes that processes have written to disks together, or will have."""
    return sum(_sum(f"/proc/{process}/io", ("write_bytes",), unit=1) for process in processes)


def memory_of(processes: Iterable[int], most: int) -> int:
    """Bytes of memory that processes take together, apart from files; above `most` with what they share
    counted once, which takes longer to find out."""
    listed = [*processes]
    resident = sum(_resident(process) for process in listed)
    return resident if resident <= most else sum(_proportional(process) for process in listed)


def inodes_mapped_by(process: int) -> frozenset[int] | None:
    """The inodes of files that a process can write to as if they were memory; None where it has so many
    mappings that they are not read."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/maps", "rb") as maps:
        if len(text := maps.read(MAX_MAPS + 1)) > MAX_MAPS:
            return None
        told = (line.split(maxsplit=5) for line in text.decode(errors="replace").splitlines())
        return frozenset(int(inode) for _, access, _, _, inode, *_ in told if access[1::2] == "ws")
    return frozenset()


def go_on(processes: Iterable[int]) -> None:
    """Let processes go on that were stopped."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def stop(processes: Iterable[int]) -> bool:
    """Let no process go on; whether none that could is left to be seen."""
    settled = True
    for process in processes:
        told = _status(seen_as(process))
        if told and told[0] not in "TtZX":
            settled = False
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
    return settled


def kill(processes: Iterable[int]) -> int:
    """End processes; how many had not ended before."""
    count = 0
    for process in processes:
        if lives(process):
            count += 1
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
    return count


def lives(process: int) -> bool:
    """Whether a process has not ended, with all of its threads."""
    told = _status(process)
    return bool(told) and (told[0] not in "ZX" or _living_thread(process) is not None)


def _living_thread(process: int) -> int | None:
    """A thread of a process that has not ended."""
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            told = _status(thread)
            if told and told[0] not in "ZX":
                return thread
    return None


def _status(process: int) -> list[str]:
    """State, parent, group, session and so on of a process or a thread; nothing where it has gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _resident(process: int) -> int:
    return _sum(f"/proc/{process}/status", ("RssAnon", "RssShmem", "VmSwap"))


def _proportional(process: int) -> int:
    return _sum(f"/proc/{process}/smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss"))


def _sum(path: str, wanted: tuple[str, ...], unit: int = 1024) -> int:
    """Of lines such as `RssAnon:   12 kB`, in bytes. unit: of a line's number."""
    total = 0
    with suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name in wanted:
                total += int(rest.split()[0]) * unit
    return total
