"""The processes in which foreign grammars are compiled and stepped.

A nursery process reads a model's vocabulary once, and forks children that have it then. A child tries a
constraint once, or keeps matchers and writes their masks. Children limit their own time and memory, so that
they end even when their parent is gone.

A grammar can make llguidance crash (an integer at the edge of 64 bits), never return (a text that is forced
for ever) or take all memory, so none of it is run in the server's process. Requests are pickles, which come
from the server; replies are JSON and plain numbers, so that a compromised child cannot reach the server
through them.
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
    from engine.dialects import Dialect
    from engine.structured.grammar import Grammar, Grammars, Matcher

LENGTH = struct.Struct("<I")
ORDER = struct.Struct("<cq")  # to the nursery: fork, or tell the end of a process
ANSWER = struct.Struct("<q")  # the process id, or how it ended, as `os.waitpid` says it
TAKEN = struct.Struct("<?I")
"""Of one row: whether its shape is whole, how many tokens it took."""
MASKED = struct.Struct("<dH")
"""Of one row: seconds for its first mask, how many of its masks are right."""
FORK, REAP = b"f", b"r"

HEADER = 64  # bytes of shared memory in front of the masks: `AT_WORK`
AT_WORK = 2  # numbers of 64 bits: the matcher in work, and the grammar that is compiled meanwhile
SHARED = 32 << 20  # bytes of shared memory for masks; a step has half, so that two can be under way
NOBODY = -1
TOKEN_S = 0.0005  # more time, for each token that a row has to catch up with, or takes
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


Row = tuple[int, tuple[int, int] | None, list[int], list[int], bool, list[int] | None, list[int] | None]
"""What is asked of one matcher (a plain tuple: there are thousands a second).

Its number. Its grammar and the tokens of the generation, where the process has not met it. Tokens that it
took elsewhere. Tokens to take now, and whether one that does not fit is left instead of being an error.
Drafts: masks are written for the place after the tokens and after each draft; None: no mask. Tokens of
which those that may come next are written as the bits of one more mask; None: none.
"""


class Step(NamedTuple):
    """Rows in the order of their masks, and whatever nobody wants any more. width: words of a mask. at: the
    word of shared memory where the masks begin.

    It is answered twice: with what the rows took, and, if any wants masks, when those are written. Either
    answer has a `TAKEN`, or `MASKED`, for each row, and after them what failed, as JSON: messages by index.
    """

    rows: list[Row]
    width: int
    at: int
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

    from engine.structured.grammar import Grammars
    from engine.tokenizer import Tokenizer

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
        return {"error": error.reason, "tool": error.tool, "place": error.place}
    except MemoryError:
        return {"error": "compiling it takes too much memory", "tool": None, "place": None}
    except RecursionError:
        return {"error": "it is nested too deeply", "tool": None, "place": None}
    except BaseException as error:  # Rust's panics are not Exceptions; none of them is the server's business
        return {"error": f"it cannot be compiled ({type(error).__name__})", "tool": None, "place": None}
    with contextlib.suppress(BaseException):  # what does not end this process is found again where it counts
        _walk(grammars, grammar)
    _allow(0)
    return {"source": grammar.source.written(), "marked": grammar.marked, "size": grammar.size}


def _walk(grammars: Grammars, grammar: Grammar) -> None:
    """The masks along the first tokens of one text."""
    import numpy as np

    from engine.structured.grammar import allowed_ids

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
        self._at_work = np.frombuffer(self._shared, np.int64, AT_WORK)
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
            self._step(step)

    def _step(self, step: Step) -> None:
        """Both answers; the number of the row in work stands where the server finds it should this process
        end. Each row has its own time."""
        rows, at_work = step.rows, self._at_work
        told: list[bytes] = []
        errors: dict[int, str] = {}
        matchers: list[Matcher | None] = []
        for index, (number, opening, known, token_ids, freely, _, _) in enumerate(rows):
            at_work[0] = number
            _allow(self._seconds + TOKEN_S * (len(known) + len(token_ids)))
            matcher = None
            try:
                if opening is not None:
                    self._matchers[number] = self._opened[opening[0]].matcher(opening[1])
                matcher = self._matchers[number]
                for token_id in known:
                    matcher.advance(token_id)
                told.append(TAKEN.pack(*_take(matcher, token_ids, freely)))
            except BaseException as error:  # one row's failure is its own; panics are not Exceptions
                self._failed(number, index, error, errors)
                matcher = None
                told.append(TAKEN.pack(False, 0))
            matchers.append(matcher)
        at_work[0] = NOBODY
        _allow(0)
        self._tell(told, errors)
        num_masks = sum(map(count_masks, rows))
        if not num_masks:
            return
        masks = self._masks[step.at : step.at + num_masks * step.width].reshape(num_masks, step.width)
        told, errors, at = [], {}, 0
        for index, (row, matcher) in enumerate(zip(rows, matchers, strict=True)):
            own, at = masks[at : at + count_masks(row)], at + count_masks(row)
            at_work[0] = row[0]
            took, right = 0.0, 0
            if matcher is not None and len(own) and not (row[3] and matcher.stopped):
                _allow(self._seconds)
                try:
                    took, right = _mask(matcher, row, own)
                except BaseException as error:  # as above
                    self._failed(row[0], index, error, errors)
            told.append(MASKED.pack(took, right))
        at_work[0] = NOBODY
        _allow(0)
        self._tell(told, errors)

    def _failed(self, number: int, index: int, error: BaseException, errors: dict[int, str]) -> None:
        self._matchers.pop(number, None)
        errors[index] = str(error)[:500] or type(error).__name__

    def _tell(self, told: list[bytes], errors: dict[int, str]) -> None:
        send(self._channel, b"".join(told) + (json.dumps(errors).encode() if errors else b""))

    def _open(self) -> None:
        """Compile what was tried already."""
        while True:
            try:
                opened: Opened = pickle.loads(receive(self._opening))
            except (EOFError, OSError):
                os._exit(0)
            error = ""
            self._at_work[1] = opened.grammar
            try:
                made = self._grammars.again(opened.source, opened.marked, opened.starts_in)
                self._opened[opened.grammar] = made
            except BaseException as failure:
                error = str(failure)[:500] or type(failure).__name__
            self._at_work[1] = NOBODY
            with contextlib.suppress(OSError):
                send(self._opening, error.encode())


def count_masks(row: Row) -> int:
    """How many masks are written for a row."""
    return (0 if row[5] is None else 1 + len(row[5])) + (row[6] is not None)


def _take(matcher: Matcher, token_ids: list[int], freely: bool) -> tuple[bool, int]:
    """Whether the shape is whole, and how many tokens it took."""
    for taken, token_id in enumerate(token_ids):
        if freely and not matcher.allows(token_id):
            return False, taken
        matcher.advance(token_id)
        if matcher.stopped:
            return True, taken + 1
    return matcher.stopped, len(token_ids)


def _mask(matcher: Matcher, row: Row, masks: Any) -> tuple[float, int]:
    """Write a row's masks; seconds for the first, and how many are right."""
    took, drafts, asked = 0.0, row[5], row[6]
    if asked is not None:
        import numpy as np

        bits = np.zeros(masks.shape[1] * 32, np.uint8)
        bits[: len(asked)] = [matcher.allows(token_id) for token_id in asked]
        masks[-1] = np.packbits(bits, bitorder="little").view(np.int32)
    if drafts is not None:
        began = time.thread_time()
        matcher.fill(masks[0])
        took = time.thread_time() - began
    if drafts:
        masks[1 : len(drafts) + 1] = -1
        ahead = matcher.fork()
        for place, draft in enumerate(drafts, 1):
            if not _follow(ahead, draft):
                break  # nothing that is drawn after it counts
            try:
                ahead.fill(masks[place])
            except ConstraintError:  # so it will be told when the draft has come true
                masks[place] = -1
                return took, place
    return took, len(masks)


def _follow(matcher: Matcher, draft: int) -> bool:
    """Take a draft; False where it cannot come, or ends the shape."""
    try:
        matcher.advance(draft)
    except ConstraintError:  # should this token be drawn, the row's own matcher says the same
        return False
    return not matcher.stopped


def command(descriptor: int) -> list[str]:
    """The command line of a nursery that is handed this descriptor; it finds the modules that we found."""
    start = "from engine.structured.isolation.child_process import main"
    code = f"import sys; sys.path[:] = {sys.path!r}; {start}; main({descriptor})"
    return [sys.executable, "-c", code]
