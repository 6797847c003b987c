"""Python processes that begin with everything imported.

Tests start hundreds of servers and commands, and each would spend two seconds of a processor on imports. A
command whose program is `READY`, and not `sys.executable`, is forked from a process that has imported the
server already. `subprocess` and asyncio start it, wait for it and send signals to it as they do with any
other child, and it is one. It differs in what it has from the start: modules, and the seed of hashes. Tests
of what is imported, or of an order that has to be the same in two processes, say `sys.executable`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "server.cli.commands",
    "server.process.serve",
    "server.process.child",
    "engine.backends.local",
    "engine.core.loop",
    "alembic.command",
    "alembic.context",
    "numpy.random",
    "sqlalchemy.ext.asyncio",
    "transformers",
    "openai",
)
PREPARED: list[str] = []
"""Modules that change what forked processes do, and are imported behind those."""
PR_SET_CHILD_SUBREAPER = 36
ORDER_BYTES = 1 << 17
"""Of a command with its environment; Linux gives a socket twice as much."""


class _Program(str):
    """The path of the interpreter, marked."""


READY: str = _Program(sys.executable)
"""The program of a command that is to be forked."""


class Forks:
    """A process that has imported the server, and forks when it is told to."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.forking", str(theirs.fileno()), *PREPARED]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with theirs:
            self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], cwd=ROOT)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._turn = threading.Lock()
        atexit.register(self._end)

    def fork(self, argv: list[str], cwd: str, env: dict[str, str], fds: list[int], session: bool) -> int:
        """The pid of a new child of this process. argv: behind the program. fds: what it has as 0, 1 and 2,
        then what it has under the same numbers as here. session: whether it begins one."""
        order = {"argv": argv, "cwd": cwd, "env": env, "numbers": fds[3:], "session": session}
        with self._turn:
            # The forking process lets go of its child, which then falls to its next ancestor that asks for
            # orphans: to this one, and for no longer than that takes.
            self._prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._line, [json.dumps(order).encode()], fds)
                answer = self._line.recv(32)
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise OSError("the process that forks has ended")
        return int(answer)

    def _end(self) -> None:
        self._line.close()
        self._process.wait(30)


_forks: Forks | None = None
_starting = threading.Lock()


def _of_this_process() -> Forks:
    global _forks
    with _starting:
        _forks = _forks or Forks()
    return _forks


def _forked(command: list[str], how: dict[str, Any]) -> int | None:
    """The pid of a child that was forked; None where it has to be started as others are."""
    if not isinstance(command[0], _Program) or how["preexec_fn"] is not None:
        return None
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in (how["env"] or os.environ).items()}
    if _read_at_start(env) != _read_at_start({**os.environ, "PYTHONPATH": str(ROOT)}):
        return None
    given = (how["p2cread"], how["c2pwrite"], how["errwrite"])
    fds = [number if fd == -1 else fd for number, fd in enumerate(given)]
    argv = [os.fsdecode(each) for each in command[1:]]
    cwd = os.path.abspath(os.fsdecode(how["cwd"] or "."))
    return _of_this_process().fork(argv, cwd, env, [*fds, *how["pass_fds"]], bool(how["start_new_session"]))


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    """What the interpreter and its libraries read before the first line of a program."""
    told = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "TORCH", "TRITON", "HF_")
    return {"PYTHONPATH": str(ROOT)} | {name: env[name] for name in env if name.startswith(told)}


def install() -> None:
    """From now on `subprocess` forks what is to be forked."""
    plain = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    shape = inspect.signature(plain)

    def execute_child(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        how = shape.bind(self, args, *rest, **named).arguments
        command = [args] if isinstance(args, str | bytes | Path) else list(args)
        pid = None if how["shell"] else _forked(command, how)
        if pid is None:
            plain(self, args, *rest, **named)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(
            *(how[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------
# For shells

_LAUNCHER = """#!{python} -S
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
order = dict(argv=["-m", "server.cli", *sys.argv[1:]], cwd=os.getcwd(), env=dict(os.environ))
socket.send_fds(line, [json.dumps(order).encode()], [0, 1, 2])
pid = int(line.recv(32))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(line.recv(32))
sys.exit(code if code >= 0 else 128 - code)
"""


_numbers = itertools.count()


@contextmanager
def command(folder: Path) -> Iterator[None]:
    """A program `antiphon` in a folder, whose processes are forked. It passes signals on, and whatever it has
    started ends with it."""
    address = f"\0antiphon-{os.getpid()}-{next(_numbers)}"  # a folder's path may be longer than one can be
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        program = folder / "antiphon"
        program.write_text(_LAUNCHER.format(python=sys.executable, address=address))
        program.chmod(0o755)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:  # it was shut down
            return
        threading.Thread(target=_carry_out, args=(line,), daemon=True).start()


def _carry_out(line: socket.socket) -> None:
    """Has one command run, and tells how it ended."""
    with line:
        told, fds, _, _ = socket.recv_fds(line, ORDER_BYTES, 3)
        order = json.loads(told)
        pid = _of_this_process().fork(order["argv"], order["cwd"], order["env"], fds, session=False)
        for fd in fds:
            os.close(fd)
        line.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        try:
            if ended not in select.select([line.fileno(), ended], [], [])[0]:
                os.kill(pid, signal.SIGKILL)  # the launcher was killed
        finally:
            os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            line.send(str(code).encode())


# ------------------------------------------------------------------------------------------------------------
# The process that forks


def _next_child(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks as it is told, and returns in the children; None at the end, when nobody tells it any more."""
    while True:
        told, fds, _, _ = socket.recv_fds(line, ORDER_BYTES, 64)
        if not told:
            return None
        answer, answers = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            order = json.loads(told)
            if order["session"]:
                os.setsid()  # before anybody knows the child, who may send signals to its group
            os.write(answers, str(os.getpid()).encode())
            line.close()
            os.close(answer)
            os.close(answers)
            return order, fds
        os.waitpid(between, 0)  # the child has another parent from here on
        line.send(os.read(answer, 32))
        for fd in (answer, answers, *fds):
            os.close(fd)


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Runs what the command says, as the interpreter would."""
    # Out of the way first: a number may be wanted that another of them has now.
    away = [os.dup2(fd, 500 + place) for place, fd in enumerate(fds)]
    for number, fd in zip((0, 1, 2, *order["numbers"]), away, strict=True):
        os.dup2(fd, number)
    kept = {0, 1, 2, *order["numbers"]}
    for fd in {*fds, *away} - kept:
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    _run(order["argv"])


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).absolute().parent)
        runpy.run_path(argv[0], run_name="__main__")


_status: int | None = None  # of a child that has ended as most do


def _leave() -> None:
    """Ends a child behind all its other exit functions: what it was born with is not taken apart, which would
    be most of the work of a short command."""
    if _status is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the interpreter has words and a status for it
    os._exit(_status & 0xFF)


def main() -> None:
    """Imports all, and forks until its line is closed."""
    global _status
    atexit.register(_leave)  # the first, so the last to be called
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    gc.freeze()  # a collection would write to every page, and so copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = _next_child(socket.socket(fileno=int(sys.argv[1])))
    if child is None:
        return
    try:
        _become(*child)
        _status = 0
    except SystemExit as left:
        _status = 0 if left.code is None else left.code if isinstance(left.code, int) else None
        raise


if __name__ == "__main__":
    main()
