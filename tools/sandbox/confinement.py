"""Starts a program of Python where it can do no harm: under bubblewrap, by Landlock, or by an operator's own
command.

Under bubblewrap it has a network of its own without any connection, sees nothing of the system but what it
needs to run, which it cannot write, and no process but its own. The folders that it can write to are file
systems of its own in memory, whose sizes nothing that it does can exceed; the server has descriptors of them,
because a size bounds no files and links without content, which take memory of the kernel.

By Landlock it shares the machine's processes, users and network, which the kernel refuses it the use of; it
can open no more files than under bubblewrap. In both, its user is another one where the server's is root, so
that the number of its processes can be limited. It ends with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tools.landlock import landlock_version
from tools.sandbox.cells import DATA, CellLimits, SandboxError, Tier
from tools.sandbox.folder import Folder, give
from tools.sandbox.python import Python
from tools.sandbox.system_calls import code_filter

_LANDLOCK_MODULE = (files("tools") / "landlock.py").read_text()
_PRIORITY_MODULE = (files("tools") / "priority.py").read_text()

USERS = 32
FIRST_USER = 60_000 + USERS * secrets.randbelow(128)
"""The first of the users that code runs as where the server's own is root. Other servers on the machine have
others, because the processes of a user are counted together."""

_SYSTEM = ("/bin", "/lib", "/lib64", "/sbin")
_SEEN = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
)
_DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_SLACK_BYTES = 8192
"""What a file takes besides its bytes, at the most: the rest of its last page, and its folder."""
_LANDLOCK = 6
"""The version that also keeps signals and abstract sockets in."""
_UNKNOWN = f"the system calls of this machine ({platform.machine()}) are not known here"
SCRATCH = ("/tmp", "/dev/shm")
"""What code can write to under bubblewrap, besides the folder of its files."""
SCRATCH_NAME = "tmp"
"""Of the folder beside that of the files which takes the place of /tmp by Landlock."""
_DESCRIPTORS = 256
"""Of one process."""
_SIGNALS = 128
"""Signals that wait, and timers, of a user; the kernel keeps them in memory of its own."""
_CPU_FACTOR = 20
"""Seconds of the processor that a process may use in its life, for each second that a cell may take."""


@dataclass(frozen=True, slots=True)
class Started:
    """A program that runs. orders: what it reads as its standard input. output: a descriptor that what it
    writes to standard error comes out of, which does not wait. channel: over which it shows the folders that
    it can write to, that of its files first; None where the server made that."""

    process: asyncio.subprocess.Process
    orders: asyncio.StreamWriter
    output: int
    channel: socket.socket | None


@dataclass(frozen=True, slots=True)
class Confinement:
    """How programs are started. python: which runs them. command: what runs in the place of bubblewrap, of
    that tier, in which `{data}` stands for the folder of the files."""

    python: Python
    tier: Tier = "bubblewrap"
    command: str | None = None

    @property
    def in_memory(self) -> bool:
        """Whether each program makes the folder of its files itself, in memory, which ends with it."""
        return self.tier == "bubblewrap"

    @property
    def alone(self) -> bool:
        """Whether all other processes that a program can reach are its own."""
        return self.tier == "bubblewrap"

    @property
    def num_own(self) -> int:
        """How many processes of a session run no code but the server's: the worker, which is the last of
        them, and those above it, which only wait for its end."""
        return {"bubblewrap": 3, "landlock": 2}.get(self.tier, 1)

    @property
    def told(self) -> str:
        """How code is confined, for whoever uses it."""
        version = f" {landlock_version()}" if self.tier == "landlock" else ""
        return f"{self.tier}{version}, Python {self.python.version}"

    def require_hidden(self, paths: Iterable[Path]) -> None:
        """Raises SandboxError where code could read one of these paths, because it lies in a folder that code
        has to see. What an operator's own command shows it is not known here."""
        if self.tier == "command":
            return
        for path in paths:
            for folder in ("/usr", *_SYSTEM, *_SEEN, *self.python.folders):
                if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                    raise SandboxError(f"code could read {path}, which lies in {folder}: move one of them")

    async def start(
        self, program: str, data: Path | None, limits: CellLimits, slot: int, memory: int
    ) -> Started:
        """Start a program, given as its text, with a JSON object as its argument.

        data: the folder that it may write to, where it does not make it itself. slot: tells those that run at
        once apart, from 0. memory: bytes of address space. Its standard output is a pipe. Raises
        SandboxError.
        """
        uid = self.user(slot)
        scratch = data.parent / SCRATCH_NAME if self.tier == "landlock" and data is not None else None
        told = {**_limits(limits, memory), "uid": uid, "alone": self.alone, "data": str(data or DATA)}
        output, write = os.pipe()
        os.set_blocking(output, False)
        channel, theirs = socket.socketpair() if self.in_memory else (None, None)
        # Code has the other end of this pair, and may write into it. An event loop that had made the pair
        # would take that for the end of the program.
        ours, read = socket.socketpair()
        _, orders = await asyncio.open_unix_connection(sock=ours)
        filter_ = None
        try:
            argv = list[str]()
            if self.tier == "bubblewrap":
                filter_ = _filter()
                argv = [*self._bubblewrap(limits, uid=uid), "--seccomp", str(filter_), "--"]
            elif self.command is not None:
                argv = [part.replace("{data}", str(data)) for part in shlex.split(self.command)]
            else:
                told |= {"shared": True, "restrictions": self._restrictions([str(data), str(scratch)])}
            if theirs is not None:
                told |= {"channel": theirs.fileno(), "shown": [DATA, *SCRATCH]}
            argv += [str(self.python.path), "-I", "-c", program, json.dumps(told)]
            handed = [filter_, None if theirs is None else theirs.fileno()]
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=read.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=write,
                pass_fds=[each for each in handed if each is not None],
                env=_environment(self.python, "/tmp" if scratch is None else str(scratch)),
                limit=64 * 1024,
                start_new_session=True,
            )
        except BaseException as fault:
            os.close(output)
            orders.close()
            if channel is not None:
                channel.close()
            if isinstance(fault, OSError):
                raise SandboxError(f"the sandbox cannot be started: {fault}") from None
            raise
        finally:
            os.close(write)
            read.close()
            if theirs is not None:
                theirs.close()
            if filter_ is not None:
                os.close(filter_)
        return Started(process, orders, output, channel)

    def user(self, slot: int) -> int:
        """The user that a program runs as; 0 where it is the server's own."""
        return FIRST_USER + slot if os.geteuid() == 0 and self.tier != "command" else 0

    def give(self, data: Folder, slot: int) -> None:
        """Make a folder and all in it the user's that a program of this slot runs as."""
        if uid := self.user(slot):
            give(data, uid)

    def _restrictions(self, folders: list[str]) -> Mapping[str, Any]:
        """What the program takes from itself before it runs any code, by Landlock and seccomp."""
        instructions = code_filter(alone=False)
        if (version := landlock_version()) < _LANDLOCK:
            has = f"Landlock {version}" if version else "no Landlock"
            raise SandboxError(f"the kernel has {has}, and version {_LANDLOCK} (Linux 6.12) is needed")
        if instructions is None:
            raise SandboxError(_UNKNOWN)
        return {
            "module": _LANDLOCK_MODULE,
            "readable": ["/usr", *_SYSTEM, *_SEEN, *self.python.folders],
            "writable": [*folders, *_DEVICES],
            "filter": instructions.hex(),
        }

    def _bubblewrap(self, limits: CellLimits, *, uid: int) -> list[str]:
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxError("bubblewrap (bwrap) is not installed")
        argv = [found, "--die-with-parent", "--new-session"]
        argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if uid:  # as root it needs no namespace of users, and the program gives up being root itself
            argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            argv += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        argv += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
        for folder in _SYSTEM:
            if os.path.islink(folder):
                argv += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                argv += ["--ro-bind", folder, folder]
        for path in _SEEN:
            argv += [*_above(path), "--ro-bind-try", path, path]
        scratch = str(limits.scratch_bytes)
        # What can be written there is other processes' memory, and what holds code back behind the server.
        argv += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        argv += ["--perms", "1777", "--size", scratch, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        argv += ["--perms", "1777", "--size", scratch, "--tmpfs", "/tmp"]
        for folder in self.python.folders:  # which may lie in the /tmp outside
            argv += [*_above(folder), "--ro-bind", folder, folder]
        size = str(limits.data_bytes + limits.files * _SLACK_BYTES)
        argv += [*_above(DATA), "--perms", "0700" if not uid else "1777", "--size", size, "--tmpfs", DATA]
        return [*argv, "--remount-ro", "/", "--chdir", "/"]


def _above(folder: str) -> list[str]:
    """What makes the folders above one such that every user can pass through them."""
    parents = [str(parent) for parent in reversed(Path(folder).parents)][1:]
    return [part for parent in parents for part in ("--perms", "0755", "--dir", parent)]


def _limits(limits: CellLimits, memory: int) -> Mapping[str, Any]:
    processor = int(limits.cell_s * _CPU_FACTOR) + 1
    return {
        "rlimits": {
            "RLIMIT_AS": memory,
            "RLIMIT_FSIZE": limits.data_bytes,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_SIGPENDING": _SIGNALS,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_NICE": 0,
            "RLIMIT_RTPRIO": 0,
            "RLIMIT_NOFILE": _DESCRIPTORS,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": processor,
        },
        "images": limits.images,
        "priority": _PRIORITY_MODULE,
    }


def _environment(python: Python, scratch: str) -> dict[str, str]:
    """Nothing of the server's own, which may hold secrets."""
    return {
        "HOME": scratch,
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "2",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": f"{scratch}/.matplotlib",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "PATH": f"{python.path.parent}:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": f"{scratch}/.cache",
    }


def _filter() -> int:
    """A descriptor that the filter of system calls can be read from. Raises SandboxError."""
    program = code_filter(alone=True)
    if program is None:
        raise SandboxError(_UNKNOWN)
    held, write = os.pipe()  # a few kilobytes: they fit
    os.write(write, program)
    os.close(write)
    return held
