"""Starts, asks and ends the child processes of `child_process`, and finds out why one died."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Literal

from engine.structured.isolation.child_process import (
    ANSWER,
    FORK,
    HEADER,
    LENGTH,
    ORDER,
    REAP,
    SHARED,
    Load,
    command,
    exactly,
    receive,
    send,
)
from engine.types import ConstraintError, RequestFailed

Cause = Literal["time", "memory", "crash"]

START_S = 120.0  # for a large vocabulary, on a machine that is busy
FORK_S = 30.0
TELL_S = 6.0  # for a process that does not read what it is told
# One thread each: a process that forks must have no other, and none of these computes much.
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Died(Exception):
    """A process died of what it was asked, or had to be killed."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class Nursery:
    """One process that has read a model's vocabulary, and forks workers that have it too. Thread-safe; it is
    started by the first `fork`, and anew should it be lost. Who serves asks for one before any request does
    (`Constraints.start`)."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._number = 0
        self._closed = False

    def fork(self, *, keeps: bool) -> Worker:
        """A new worker; `keeps`: one that keeps matchers, so has shared memory and a second channel.

        Raises ConstraintError for a tokenizer that cannot be constrained, RequestFailed where there is no
        process to be had.
        """
        channel, theirs = socket.socketpair()
        ends, shared = [theirs.fileno()], None
        opening = theirs_too = None
        try:
            if keeps:
                opening, theirs_too = socket.socketpair()
                shared = _shared()
                ends += [theirs_too.fileno(), shared]
            with self._lock:
                try:
                    number, pid = self._ask(FORK, 0, ends)
                except (EOFError, OSError):  # it was lost, with all that it knew: once more
                    number, pid = self._ask(FORK, 0, ends)
        except (EOFError, OSError) as error:
            for each in (channel, opening, shared):
                _close(each)
            raise RequestFailed(f"there is no process for grammars: {error}") from error
        except BaseException:
            for each in (channel, opening, shared):
                _close(each)
            raise
        finally:
            theirs.close()
            _close(theirs_too)
        return Worker(self, number, pid, channel, opening, shared)

    def reap(self, number: int, pid: int) -> int | None:
        """How a process that is ending ended, as `os.waitpid` tells; None where nobody knows."""
        with self._lock, suppress(EOFError, OSError):
            if number == self._number and self._control is not None:
                return self._ask(REAP, pid, [])[1]
        return None

    def close(self) -> None:
        """End it, and every worker."""
        self._closed = True
        if self._control is None and (loading := self._process) is not None:
            loading.kill()  # nobody is to wait until it has read everything
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        return None if self._process is None else self._process.pid

    def _ask(self, order: bytes, number: int, descriptors: list[int]) -> tuple[int, int]:
        """Which nursery answered, and what. EOFError, OSError: none did, and it is ended, because an answer
        that comes late would be read as that of the next order."""
        try:
            control = self._control or self._start()
            data = ORDER.pack(order, number)
            if descriptors:
                socket.send_fds(control, [data], descriptors)
            else:
                control.sendall(data)
            answer: int = ANSWER.unpack(exactly(control, ANSWER.size))[0]
            if order == FORK and answer <= 1:  # who kills 0, 1 or -1 kills much
                raise EOFError(f"{answer} is no child")
        except (EOFError, OSError):
            self._end()
            raise
        return self._number, answer

    def _start(self) -> socket.socket:
        if self._closed:
            raise EOFError("the engine was closed")
        control, theirs = socket.socketpair()
        with theirs:
            # A session of its own: what a terminal sends to the server ends the server first.
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                env={**os.environ, **QUIET},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        control.settimeout(START_S)
        try:
            send(control, pickle.dumps(self._load))
            refused = receive(control).decode()
        except (EOFError, OSError):
            control.close()
            self._wait()
            raise
        if refused:
            control.close()
            self._wait()
            raise ConstraintError(refused)
        control.settimeout(FORK_S)
        self._control = control
        self._number += 1
        return control

    def _end(self) -> None:
        _close(self._control)
        self._control = None
        self._wait()

    def _wait(self) -> None:
        """It ends as soon as its channel is closed, since it does nothing foreign itself."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Worker:
    """One process that does foreign work. One thread may wait for each of its channels."""

    def __init__(
        self,
        nursery: Nursery,
        number: int,
        pid: int,
        channel: socket.socket,
        opening: socket.socket | None,
        shared: int | None,
    ) -> None:
        self.pid = pid
        self.channel = channel
        self.opening = opening
        self.shared = shared  # the descriptor of its memory
        self._nursery = nursery
        self._number = number
        self._lock = threading.Lock()
        self._heard = bytearray()  # of answers that have not been read
        self._killed = False
        self._cause: Cause | None = None  # of its end, once it is gone for good

    def tell(self, message: Any) -> None:
        """Send what is answered later, or never. Raises Died."""
        try:
            self.channel.settimeout(TELL_S)
            send(self.channel, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except TimeoutError:
            self.kill()
            raise Died(self.bury()) from None
        except OSError:
            raise Died(self.bury()) from None

    def hear(self, seconds: float) -> bytes:
        """The next answer. TimeoutError: it has not come within so many seconds by the clock, and may still
        come. EOFError, OSError: none will come."""
        heard = self._heard
        while len(heard) < LENGTH.size or len(heard) < LENGTH.size + LENGTH.unpack_from(heard)[0]:
            self.channel.settimeout(seconds)
            data = self.channel.recv(1 << 16)
            if not data:
                raise EOFError
            heard += data
        end = LENGTH.size + LENGTH.unpack_from(heard)[0]
        answer = bytes(heard[LENGTH.size : end])
        del heard[:end]
        return answer

    def ask(self, message: Any, seconds: float) -> bytes:
        """What it answers within so many seconds by the clock; Died, and gone, where it does not. None: what
        else it answers to the last message."""
        if message is not None:
            self.tell(message)
        return self._answered(lambda: self.hear(seconds))

    def open(self, message: Any, seconds: float) -> bytes:
        """The same through the channel of those that keep matchers, beside what is asked meanwhile."""
        opening = self.opening
        assert opening is not None

        def hear() -> bytes:
            opening.settimeout(seconds)
            send(opening, pickle.dumps(message))
            return receive(opening)

        return self._answered(hear)

    def _answered(self, hear: Callable[[], bytes]) -> bytes:
        try:
            return hear()
        except TimeoutError:
            self.kill()
            self.bury()
            raise Died("time") from None
        except (EOFError, OSError):
            raise Died(self.bury()) from None

    def kill(self) -> None:
        """End it at once; whoever waits for it gets Died. `bury` it then."""
        with self._lock:
            if self._cause is None:
                self._killed = True
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> Cause:
        """Let go of what a process held that is dead or about to be, and say what it died of."""
        with self._lock:
            if self._cause is None:
                self._cause = self._reap()
            return self._cause

    def _reap(self) -> Cause:
        _close(self.channel)
        _close(self.opening)
        status = self._nursery.reap(self._number, self.pid)
        ended = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        if ended == signal.SIGPROF or self._killed:
            return "time"
        return "memory" if ended in (signal.SIGABRT, signal.SIGKILL) else "crash"


@cache
def shared_nursery(load: Load) -> Nursery:
    """A nursery that lives as long as this process; the same for the same vocabulary."""
    nursery = Nursery(load)
    atexit.register(nursery.close)
    return nursery


def _shared() -> int:
    """A descriptor of memory that two processes can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("masks")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, HEADER + SHARED)
    return descriptor


def _close(held: socket.socket | int | None) -> None:
    if isinstance(held, int):
        os.close(held)
    elif held is not None:
        held.close()
