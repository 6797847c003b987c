"""What a process that reads documents is kept from: files, the network, other processes, memory, time.

Parsers are written in C in good part, and are fed with the bytes of strangers. Four things confine them, each
where the machine has it: bubblewrap (namespaces of their own), Landlock (which files can be read), seccomp
(which system calls can be made) and limits of resources, which every Unix has.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tools.landlock import filter_system_calls, give_up_privileges, only_these_files

OWN = Path(__file__).resolve().parents[1]
"""The folder of the package `tools`, which is all of ours that such a process can read."""

_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store")
_MOST_OPEN_FILES = 64


def library_folders() -> list[str]:
    """Where installed packages lie. Other folders on Python's path may hold more than code: the folder that
    the server was started in is one."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages", "lib-dynload")]


def readable_folders() -> list[str]:
    """What holds Python, its libraries and ours; what lies within another is left out."""
    python = str(Path(os.path.realpath(sys.executable)).parents[1])
    wanted = [*_SYSTEM, sys.prefix, sys.base_prefix, python, str(OWN), *library_folders()]
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)}, key=len):
        if path != "/" and not any(path.startswith(f"{folder}/") for folder in kept):
            kept.append(path)
    return kept


def namespaced(command: Sequence[str], folders: Iterable[str]) -> list[str] | None:
    """The same command by bubblewrap: only these folders, to be read; no network; processes, users and names
    of its own. None where bubblewrap is not installed.

    It ends with its first process, which ends with its channel; `--die-with-parent` would end it with the
    thread that started it.
    """
    if (program := shutil.which("bwrap")) is None:
        return None
    binds = [part for folder in folders for part in ("--ro-bind-try", folder, folder)]
    own = [program, "--unshare-all", "--new-session", *binds]
    return [*own, "--remount-ro", "/", "--chdir", "/", "--", *command]


# -- in the process itself -----------------------------------------------------------------------------------


def limit(memory: int, cpu_s: int) -> None:
    """Set limits of resources: bytes of address space, seconds of a processor, nothing written to files."""
    limits = {
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_FSIZE": (0, 0),
        "RLIMIT_NOFILE": (_MOST_OPEN_FILES, _MOST_OPEN_FILES),
        "RLIMIT_NPROC": (0, 0),
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),
    }
    for name, values in limits.items():
        with suppress(AttributeError, OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(getattr(resource, name), values)


def confine(folders: Iterable[str]) -> list[str]:
    """Take from this process, for good, what a parser has no use for; says by what means that was done."""
    if sys.platform != "linux" or not give_up_privileges():
        return []
    done = []
    if only_these_files(folders):
        done.append("Landlock")
    if _without_system_calls():
        done.append("seccomp")
    return done


_DENIED = {
    "x86_64": (
        *(41, 42, 49, 53),  # socket, connect, bind, socketpair
        *(56, 57, 58, 435, 59, 322),  # clone, fork, vfork, clone3, execve, execveat
        *(62, 200, 129, 297, 424, 434, 438),  # kill, tkill, rt_(tg)sigqueueinfo, pidfd_*
        *(101, 310, 311, 298, 321, 323),  # ptrace, process_vm_*, perf_event_open, bpf, userfaultfd
        *(160, 302, 319, 425),  # setrlimit, prlimit64, memfd_create, io_uring_setup
        *(165, 166, 272, 308, 248, 249, 250),  # mount, umount2, unshare, setns, keys
    ),
    "aarch64": (
        *(198, 203, 200, 199),
        *(220, 435, 221, 281),
        *(129, 130, 138, 240, 424, 434, 438),
        *(117, 270, 271, 241, 280, 282),
        *(164, 261, 279, 425),
        *(40, 39, 97, 268, 217, 218, 219),
    ),
}
"""Numbers of the system calls that no parser makes."""

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_TGKILL = {"x86_64": 234, "aarch64": 131}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""What a filter returns: carried out; EPERM; the end of the process."""


def _without_system_calls() -> bool:
    """seccomp: no sockets, no processes, no signals but to itself (as `abort` sends one)."""
    machine = platform.machine()
    if machine not in _DENIED or sys.byteorder != "little":
        return False
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in _DENIED[machine]:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    code += [
        (_EQUAL, 0, 3, _TGKILL[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, os.getpid()),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return filter_system_calls(b"".join(struct.pack("<HBBI", *each) for each in code))
