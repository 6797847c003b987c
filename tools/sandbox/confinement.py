"""Starts a program of Python where it can do no harm: under bubblewrap, or by an operator's own command.

Under bubblewrap it has a network of its own without any connection, sees nothing of the system but what it
needs to run, which it cannot write, and no process but its own; its user, where the server's is root, is
another one, so that the number of its processes can be limited. It ends with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.sandbox.cells import DATA, CellLimits, SandboxError
from tools.sandbox.folder import give
from tools.sandbox.python import Python
from tools.sandbox.seccomp import system_call_filter

FIRST_USER = 60_000
"""The first of the users that code runs as where the server's own is root."""

_SYSTEM = ("/bin", "/lib", "/lib64", "/sbin")
_SEEN = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
)
_CPU_FACTOR = 20
"""Seconds of the processor that a process may use in its life, for each second that a cell may take."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """How programs are started. python: which runs them. command: what runs in the place of bubblewrap, in
    which `{data}` stands for the folder of the files; None for bubblewrap."""

    python: Python
    command: str | None = None

    async def start(
        self, program: str, told: Mapping[str, Any], data: Path, limits: CellLimits, slot: int, memory: int
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Start a program, given as its text, with a JSON object as its argument.

        told: what it is told besides its limits. data: the folder that it may write to. slot: tells those
        that run at once apart, from 0. memory: bytes of address space. Its standard input and output are
        pipes; what it writes to standard error comes out of the descriptor that is returned, which does not
        wait. Raises SandboxError.
        """
        uid = self.user(slot)
        argument = json.dumps({**told, **_limits(limits, memory), "uid": uid})
        inner = [str(self.python.path), "-I", "-c", program, argument]
        output, write = os.pipe()
        os.set_blocking(output, False)
        filter_ = None
        try:
            if self.command is None:
                argv = self._bubblewrap(data, limits, uid=uid)
                if (filter_ := _filter()) is not None:
                    argv += ["--seccomp", str(filter_)]
                argv += ["--", *inner]
            else:
                argv = [part.replace("{data}", str(data)) for part in shlex.split(self.command)]
                argv += inner
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=write,
                pass_fds=() if filter_ is None else (filter_,),
                env=_environment(self.python),
                limit=64 * 1024,
                start_new_session=True,
            )
        except OSError as fault:
            os.close(output)
            raise SandboxError(f"the sandbox cannot be started: {fault}") from None
        finally:
            os.close(write)
            if filter_ is not None:
                os.close(filter_)
        return process, output

    def user(self, slot: int) -> int:
        """The user that a program runs as; 0 where it is the server's own."""
        return FIRST_USER + slot if os.geteuid() == 0 and self.command is None else 0

    def give(self, data: Path, slot: int) -> None:
        """Make a folder and all in it the user's that a program of this slot runs as."""
        if uid := self.user(slot):
            give(data, uid)

    def seen(self, data: Path) -> str:
        """The folder of the files as programs see it."""
        return DATA if self.command is None else str(data)

    def _bubblewrap(self, data: Path, limits: CellLimits, *, uid: int) -> list[str]:
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
        for folder in self.python.folders:
            argv += [*_above(folder), "--ro-bind", folder, folder]
        scratch = str(limits.scratch_bytes)
        argv += ["--proc", "/proc", "--dev", "/dev"]
        argv += ["--perms", "1777", "--size", scratch, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        argv += ["--perms", "1777", "--size", scratch, "--tmpfs", "/tmp"]
        return [*argv, *_above(DATA), "--bind", str(data), DATA, "--remount-ro", "/", "--chdir", "/"]


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
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": processor,
        },
        "images": limits.images,
    }


def _environment(python: Python) -> dict[str, str]:
    """Nothing of the server's own, which may hold secrets."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "2",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": "/tmp/matplotlib",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "PATH": f"{python.path.parent}:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": "/tmp",
    }


def _filter() -> int | None:
    """A descriptor that the filter of system calls can be read from."""
    program = system_call_filter()
    if program is None:
        return None
    held, write = os.pipe()  # a few hundred bytes: they fit
    os.write(write, program)
    os.close(write)
    return held
