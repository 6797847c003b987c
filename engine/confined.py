"""The processes in which foreign grammars are compiled and stepped.

Owns: the nursery, a process that has read a model's vocabulary and forks others that have it then, and what
those do: try a constraint once, or keep matchers and write their masks; and the limits that they set
themselves, so that nothing foreign outlives them even where nobody is left to kill it. Refuses to know:
torch, who asks (`confinement`, `constraints`), what becomes of a death.

What a grammar makes llguidance do may end a process (an integer at the edge of 64 bits), never return (a text
that is forced for ever) or take all memory. So none of it is done in the server's process. Requests are
pickles, which come from the server; replies are JSON and plain numbers, since whoever gets a grammar to write
where it should not must not get further than this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.types import Constraint, ConstraintError, ReaderParams

if TYPE_CHECKING:
    from engine.grammar import Grammar, Grammars, Matcher
    from engine.marks import Dialect

LENGTH = struct.Struct("<I")
ORDER = struct.Struct("<cq")  # to the nursery: fork, or tell the end of a process
ANSWER = struct.Struct("<q")  # the process id, or how it ended, as `os.waitpid` says it
STEPPED = struct.Struct("<d?HH")
"""Of one row: seconds for its first mask, whether it has stopped, tokens taken, masks that are right."""
FORK, REAP = b"f", b"r"

HEADER = 64  # bytes of shared memory in front of the masks: the matcher in work as a number of 64 bits
SHARED = 16 << 20  # bytes of shared memory for the masks of one request
NOBODY = -1
TOKEN_S = 0.0005  # more time for a row, for each token that it has to catch up with
LOOK_AHEAD = 4  # tokens of a text that fits, whose masks are part of a trial


class Load(NamedTuple):
    """What the nursery reads first: tokenizer.json as text, the ids that end a turn, the dialect."""

    tokenizer: str
    eos_token_ids: tuple[int, ...]
    dialect: Dialect


class Trial(NamedTuple):
    """A constraint that is compiled for the first time, within `seconds` of a processor and `memory` bytes.

    long: it may take its time, so everybody else goes first."""

    constraint: Constraint
    reader: ReaderParams
    seconds: float
    memory: int
    long: bool


class Keep(NamedTuple):
    """From here on: keep matchers, `seconds` of a processor for each row, `memory` bytes for all."""

    seconds: float
    memory: int


class Opened(NamedTuple):
    """A grammar that was tried before, as its trial wrote it."""

    grammar: int
    source: str  # JSON
    marked: bool
    starts_in: str


class Row(NamedTuple):
    """What is asked of one matcher.

    opening: its grammar and the tokens of the generation, where the process has not met the matcher. known:
    tokens that it took elsewhere. taken: tokens to take now; `freely` says that one which does not fit is no
    error, but left. drafts: masks are written for the place behind `taken` and behind each draft; None: no
    mask. asked: of these tokens, those that may come next are written as bits of one more mask.
    """

    matcher: int
    opening: tuple[int, int] | None
    known: list[int]
    taken: list[int]
    freely: bool = False
    drafts: list[int] | None = None
    asked: list[int] | None = None


class Step(NamedTuple):
    """Rows in the order of their masks, and whatever nobody wants any more. width: words of a mask."""

    rows: list[Row]
    width: int
    matchers_gone: list[int]
    grammars_gone: list[int]


def send(channel: socket.socket, data: bytes) -> None:
    """One message."""
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> bytes:
    """One message; EOFError where the other side is gone, TimeoutError after the socket's own time."""
    return exactly(channel, LENGTH.unpack(exactly(channel, LENGTH.size))[0])


def exactly(channel: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = channel.recv(count)
    if len(data) == count:
        return data
    parts = [data]
    while data and (count := count - len(data)):
        data = channel.recv(count)
        parts.append(data)
    if count:
        raise EOFError
    return b"".join(parts)


# -- the nursery ---------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Read a vocabulary, then fork whoever is asked for, until the server is gone, which ends them all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=descriptor)
    try:
        grammars = _load(pickle.loads(receive(control)))
    except ConstraintError as error:
        send(control, str(error).encode())
        return
    send(control, b"")
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    try:
        while True:
            data, handed, _, _ = socket.recv_fds(control, ORDER.size, 3)
            if not data:
                return
            order, number = ORDER.unpack(data)
            if order == FORK:
                number = os.fork()
                if number == 0:
                    _child(control, grammars, handed)
                for each in handed:
                    os.close(each)
                children.add(number)
            else:
                children.discard(number)
                number = os.waitpid(number, 0)[1]
            control.sendall(ANSWER.pack(number))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def _load(load: Load) -> Grammars:
    """Everything that is read but once, so that whoever is forked has it."""
    from tokenizers import Tokenizer as Backend

    from engine.grammar import Grammars
    from engine.text import Tokenizer

    tokenizer = Tokenizer(Backend.from_str(load.tokenizer), eos_token_ids=load.eos_token_ids)
    grammars = Grammars(tokenizer, load.dialect)
    grammars.read()
    return grammars


def _child(control: socket.socket, grammars: Grammars, handed: list[int]) -> None:
    """A forked process; never returns."""
    status = 1
    try:
        control.close()
        with contextlib.suppress(OSError):  # Linux: should memory run out, this one goes, not the server
            Path("/proc/self/oom_score_adj").write_text("900")
        channel = socket.socket(fileno=handed[0])
        order = pickle.loads(receive(channel))
        _hold(order.memory)
        if isinstance(order, Trial):
            send(channel, json.dumps(_try(grammars, order)).encode())
        else:
            _Keeper(grammars, channel, handed[1:], order.seconds).run()
        status = 0
    except (EOFError, OSError):
        status = 0  # the server is gone, or has what it wanted
    finally:
        os._exit(status)


def _hold(memory: int) -> None:
    """Set the limit of memory, as what may come in addition to what was read before."""
    with contextlib.suppress(OSError, ValueError):  # only Linux counts what is mapped
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _allow(seconds: float) -> None:
    """End this process after so many more seconds of a processor, whatever it is doing then; 0: do not."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# -- a trial -------------------------------------------------------------------------------------------------


def _try(grammars: Grammars, trial: Trial) -> dict[str, Any]:
    """Compile a constraint, and walk a little: what it was written as, or why it cannot be honoured."""
    if trial.long:
        os.nice(10)
    _allow(trial.seconds)
    try:
        grammar = grammars.compile(trial.constraint, trial.reader)
    except ConstraintError as error:
        return {"error": str(error), "tool": error.tool}
    except MemoryError:
        return {"error": "compiling it takes too much memory", "tool": None}
    except RecursionError:
        return {"error": "it is nested too deeply", "tool": None}
    except BaseException as error:  # Rust's panics are no Exceptions; none of them is the server's business
        return {"error": f"it cannot be compiled ({type(error).__name__})", "tool": None}
    with contextlib.suppress(BaseException):  # what does not end this process is found again where it counts
        _walk(grammars, grammar)
    _allow(0)
    return {"source": grammar.source.written(), "marked": grammar.marked, "size": grammar.size}


def _walk(grammars: Grammars, grammar: Grammar) -> None:
    """The masks along the first tokens of one text."""
    import numpy as np

    from engine.grammar import allowed_ids

    matcher, mask = grammar.matcher(1000), np.zeros(-(-grammars.size // 32), np.int32)
    for step in range(LOOK_AHEAD):
        matcher.fill(mask)
        allowed = allowed_ids(mask)
        matcher.advance(int(allowed[len(allowed) * step // LOOK_AHEAD]))
        if matcher.stopped:
            return


# -- matchers ------------------------------------------------------------------------------------------------


class _Keeper:
    """Keeps the matchers of running rows, and writes their masks where both processes see them."""

    def __init__(self, grammars: Grammars, channel: socket.socket, handed: list[int], seconds: float) -> None:
        import numpy as np

        self._grammars = grammars
        self._channel = channel
        self._opening = socket.socket(fileno=handed[0])
        self._shared = mmap.mmap(handed[1], HEADER + SHARED)
        self._at_work = np.frombuffer(self._shared, np.int64, 1)
        self._masks = np.frombuffer(self._shared, np.int32, offset=HEADER)
        self._seconds = seconds
        self._opened: dict[int, Grammar] = {}
        self._matchers: dict[int, Matcher] = {}

    def run(self) -> None:
        """Until the server is gone."""
        # llguidance lets go of the interpreter, so grammars are compiled while masks are made.
        threading.Thread(target=self._open, daemon=True).start()
        while True:
            step: Step = pickle.loads(receive(self._channel))
            for matcher in step.matchers_gone:
                self._matchers.pop(matcher, None)
            for grammar in step.grammars_gone:
                self._opened.pop(grammar, None)
            at, stepped, errors = 0, [], {}
            for index, row in enumerate(step.rows):
                self._at_work[0] = row.matcher
                _allow(self._seconds + TOKEN_S * len(row.known))
                count = (0 if row.drafts is None else 1 + len(row.drafts)) + (row.asked is not None)
                masks = self._masks[at : at + count * step.width].reshape(count, step.width)
                at += count * step.width
                try:
                    stepped.append(STEPPED.pack(*self._step(row, masks)))
                except BaseException as error:  # one row's failure is its own; panics are no Exceptions
                    self._matchers.pop(row.matcher, None)
                    stepped.append(STEPPED.pack(0.0, False, 0, 0))
                    errors[index] = str(error)[:500] or type(error).__name__
            _allow(0)
            self._at_work[0] = NOBODY
            told = json.dumps(errors).encode() if errors else b""
            send(self._channel, b"".join(stepped) + told)

    def _open(self) -> None:
        """Compile what was tried already."""
        while True:
            try:
                opened: Opened = pickle.loads(receive(self._opening))
            except (EOFError, OSError):
                os._exit(0)
            error = ""
            try:
                made = self._grammars.again(opened.source, opened.marked, opened.starts_in)
                self._opened[opened.grammar] = made
            except BaseException as failure:
                error = str(failure)[:500] or type(failure).__name__
            with contextlib.suppress(OSError):
                send(self._opening, error.encode())

    def _step(self, row: Row, masks: Any) -> tuple[float, bool, int, int]:
        if row.opening is not None:
            grammar, max_tokens = row.opening
            self._matchers[row.matcher] = self._opened[grammar].matcher(max_tokens)
        matcher = self._matchers[row.matcher]
        for token_id in row.known:
            matcher.advance(token_id)
        taken = 0
        for token_id in row.taken:
            if row.freely and not matcher.allows(token_id):
                break
            matcher.advance(token_id)
            taken += 1
            if matcher.stopped:
                break
        took, right = 0.0, len(masks)
        if row.drafts is not None:
            began = time.thread_time()
            matcher.fill(masks[0])
            took = time.thread_time() - began
            masks[1:] = -1
            ahead = matcher.fork() if row.drafts else matcher
            for place, draft in enumerate(row.drafts, 1):
                if not _follow(ahead, draft):
                    break  # nothing that is drawn behind it counts
                try:
                    ahead.fill(masks[place])
                except ConstraintError:  # so it will be told when the draft has come true
                    masks[place], right = -1, place
                    break
        if row.asked is not None:
            import numpy as np

            bits = np.zeros(masks.shape[1] * 32, np.uint8)
            bits[: len(row.asked)] = [matcher.allows(token_id) for token_id in row.asked]
            masks[-1] = np.packbits(bits, bitorder="little").view(np.int32)
        return took, matcher.stopped, taken, right


def _follow(matcher: Matcher, draft: int) -> bool:
    """Take a draft; False where it cannot come, or ends the shape."""
    try:
        matcher.advance(draft)
    except ConstraintError:  # should this token be drawn, the row's own matcher says the same
        return False
    return not matcher.stopped


def command(descriptor: int) -> list[str]:
    """The command line of a nursery that is handed this descriptor; it finds the modules that we found."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from engine.confined import main; main({descriptor})"
    return [sys.executable, "-c", code]
