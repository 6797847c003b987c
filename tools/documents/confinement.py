"""What a process that reads documents is kept from: files, the network, other processes, memory, time.

Parsers are written in C in good part, and are fed with the bytes of strangers. Four things confine them, each
where the machine has it: bubblewrap (namespaces of their own), Landlock (which files can be read), seccomp
(which system calls can be made) and limits of resources, which every Unix has.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tools.landlock import (
    filter_system_calls,
    give_up_capabilities,
    give_up_privileges,
    only_these_files,
)
from tools.seccomp import CHANNEL, ITSELF, READING, Condition, system_call_filter

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
    own = [program, "--unshare-all", *binds]  # whoever starts it gives it a session without a terminal
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
    give_up_capabilities()
    done = []
    if version := only_these_files(folders):
        done.append(f"Landlock {version}")
    if (instructions := parsing_filter(os.getpid())) is not None and filter_system_calls(instructions):
        done.append("seccomp")
    return done


def parsing_filter(process: int, machine: str = "") -> bytes | None:
    """The system calls that parsers make: no sockets, no processes, no signals but to itself, as `abort`
    sends one. process: the one that it is for. None where they are not known for the machine."""
    allowed = {**READING, **ITSELF, **CHANNEL, "tgkill": (Condition(0, (process,)),)}
    return system_call_filter(allowed, machine)
