"""Constraints as the server uses them: each is tried in a child process first, and stepped in one.

This module schedules the trials, remembers their results, and keeps the tokens that each generation has
taken. So a child holds nothing that cannot be restored: when one dies, it finds out which grammar was to
blame, and reopens the other matchers elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.dialects import Dialect
from engine.structured.isolation.child_process import (
    HEADER,
    MASKED,
    NOBODY,
    SHARED,
    TAKEN,
    TOKEN_S,
    Keep,
    Load,
    Opened,
    Row,
    Step,
    Trial,
)
from engine.structured.isolation.nursery import Cause, Died, Nursery, Worker, shared_nursery
from engine.tokenizer import Tokenizer
from engine.types import Constraint, ConstraintError, ReaderParams, RequestFailed

T = TypeVar("T")
Mask = NDArray[np.int32]

# Seconds of a processor. Almost all that can be compiled is in the first; what is not is tried once more, one
# at a time, so that a flood of what never ends holds up nobody else.
SHORT_S = 0.1
LONG_S = 2.0
# A mask takes microseconds; the limits of `grammar` end nearly all that is hostile after some 15 ms.
MASK_S = 0.1
SLOW_MASK_S = 1.0  # where nobody else waits for it but rows that are slow as well
STUCK_S = 6.0  # by the clock: for what waits without working; a step of the engine may take ten
TRIAL_MEMORY = 512 << 20
KEPT_MEMORY = 2 << 30
KEPT_COUNT = 256
KEPT_SIZE = 8 << 20  # characters of all grammars kept
REFUSED_COUNT = 256
ATTEMPTS = 3

_REASONS: dict[Cause, str] = {
    "time": "takes too long",
    "memory": "takes too much memory",
    "crash": "is more than the grammar library can take",
}

_numbers = count(1)


@dataclass(eq=False)
class Grammar:
    """A constraint that was tried, as text. failure: why it is not to be stepped any more."""

    source: str  # JSON
    marked: bool
    starts_in: str
    size: int  # characters
    digest: bytes
    home: Constraints = field(repr=False)
    number: int = field(default_factory=lambda: next(_numbers))
    failure: str | None = None

    def matcher(self, max_tokens: int) -> Matcher:
        """A matcher at the grammar's start. max_tokens: of the whole generation, half of which a thought may
        take."""
        return Matcher(self, max_tokens)


class Matcher:
    """Where one generation stands in a grammar: the tokens that it has taken. Not thread-safe."""

    __slots__ = ("__weakref__", "grammar", "max_tokens", "number", "ready", "stopped", "tokens")

    def __init__(self, grammar: Grammar, max_tokens: int) -> None:
        self.grammar = grammar
        self.max_tokens = max_tokens
        self.number = next(_numbers)
        self.tokens: list[int] = []
        self.stopped = False  # the shape is whole and nothing may follow
        self.ready: Move | None = None  # asks for the mask after these tokens, and may have it by now
        grammar.home.met(self)

    def take(self, token_ids: Sequence[int], *, freely: bool = False) -> int:
        """Take tokens until the shape is whole, and say how many. Raises ConstraintError for one that does
        not fit; `freely`: stops in front of it instead."""
        move = Move(self, list(token_ids), freely=freely)
        self.grammar.home.fast.run([move])
        if move.error is not None:
            raise move.error
        return move.taken

    def allowed(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the tokens that may come next, in their order."""
        move = Move(self, [], asked=list(token_ids))
        self.grammar.home.fast.run([move])
        if move.error is not None:
            raise move.error
        assert move.masks is not None
        bits = np.unpackbits(move.masks[-1].view(np.uint8), bitorder="little")[: len(token_ids)]
        return [token_id for token_id, bit in zip(token_ids, bits.tolist(), strict=True) if bit]


@dataclass(eq=False, slots=True)
class Move:
    """What is asked of one matcher (see `confined.Row`), and what came of it.

    masks: where they are written, one for each place. right: how many of them count: after a draft there may
    be none. seconds: of a processor, for the first. error: why there is no more; the matcher is of no use
    then.
    """

    matcher: Matcher
    token_ids: list[int] = field(default_factory=list)
    freely: bool = False
    drafts: list[int] | None = None
    asked: list[int] | None = None
    masks: Mask | None = None
    booked: bool = False  # `taken` is right
    taken: int = 0
    right: int = 0
    seconds: float = 0.0
    error: ConstraintError | None = None

    @property
    def num_masks(self) -> int:
        """How many are written."""
        return (0 if self.drafts is None else 1 + len(self.drafts)) + (self.asked is not None)


class Constraints:
    """Tries constraints for one model, and keeps what was found. `compile` and `replay` belong to asyncio,
    the rest to any thread."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, *, lasting: bool = False) -> None:
        """lasting: the vocabulary is shared with all that have the same, and stays when this is closed."""
        load = Load(tokenizer.serialized, tuple(tokenizer.eos_token_ids), dialect)
        self._dialect = dialect
        self._lasting = lasting
        self.nursery = shared_nursery(load) if lasting else Nursery(load)
        self.width = -(-tokenizer.vocab_size // 32)
        self.fast = Stepper(self, MASK_S)
        self.slow = Stepper(self, SLOW_MASK_S)
        places = max(1, (os.cpu_count() or 1) // 2)
        self._short, self._long = Turns(places), Turns(1)
        # Threads that wait for processes: one a place, and more for what is known and only opened.
        self._pool = ThreadPoolExecutor(places + 9, thread_name_prefix="engine-grammars")
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, ConstraintError] = OrderedDict()
        self._size = 0
        self._tried: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()

    # -- trials ----------------------------------------------------------------------------------------------

    async def compile(self, constraint: Constraint, reader: ReaderParams, owner: str = "") -> Grammar:
        """The grammar of a constraint behind a prompt whose answer is read like this.

        Owners take turns. Raises ConstraintError that names the tool and the keyword which cannot be
        honoured.
        """
        offered = reader.tools if self._dialect.typed and constraint.tools else ()
        told = repr((constraint, reader.starts_in, reader.dialect, offered))
        digest = blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()
        if (found := self._known(digest)) is not None:
            return found
        lock = self._tried.get(digest)
        if lock is None:
            lock = self._tried[digest] = asyncio.Lock()
        async with lock:  # the same from many at once is tried once
            if (found := self._known(digest)) is not None:
                return found
            try:
                grammar = await self._try(constraint, reader, digest, owner)
                # Where it will be stepped, it is compiled beside the masks that are made there meanwhile.
                await self._beside(lambda: self.fast.open(grammar))
            except ConstraintError as error:
                self._refuse(digest, error)
                raise
            self._keep(grammar)
            return grammar

    async def _try(self, constraint: Constraint, reader: ReaderParams, digest: bytes, owner: str) -> Grammar:
        try:
            said = await self._told(constraint, reader, owner)
        except Died as death:
            raise await self._blame(constraint, reader, owner, death.cause) from None
        if "error" in said:
            raise ConstraintError(said["error"], tool=said["tool"])
        return Grammar(said["source"], said["marked"], reader.starts_in, said["size"], digest, self)

    async def _blame(
        self, constraint: Constraint, reader: ReaderParams, owner: str, cause: Cause
    ) -> ConstraintError:
        """The error for what ended its process, with the tool that does so by itself, where one does. Half of
        the tools are tried, and half of these, all in the short time: whoever asked waits for it."""
        error = ConstraintError(f"compiling it {_REASONS[cause]}")

        async def fails(part: Constraint) -> bool:
            try:
                trial = Trial(part, reader, SHORT_S, TRIAL_MEMORY, False)
                return "error" in await self._trial(self._short, trial, owner)
            except Died as death:
                return death.cause == cause

        tools, answer = constraint.tools, constraint.answer
        if tools and answer is not None and answer.kind != "text" and await fails(Constraint(answer=answer)):
            return error
        if len(tools) == 1:
            return ConstraintError(str(error), tool=tools[0].name)
        while len(tools) > 1:
            half = tools[: len(tools) // 2]
            tools = half if await fails(Constraint(half, 1)) else tools[len(half) :]
        alone = tools and await fails(Constraint(tools, 1))
        return ConstraintError(str(error), tool=tools[0].name) if alone else error

    async def _told(self, constraint: Constraint, reader: ReaderParams, owner: str) -> dict[str, Any]:
        """What a trial says. Raises Died."""
        try:
            return await self._trial(
                self._short, Trial(constraint, reader, SHORT_S, TRIAL_MEMORY, False), owner
            )
        except Died as death:
            if death.cause != "time":
                raise
        return await self._trial(self._long, Trial(constraint, reader, LONG_S, TRIAL_MEMORY, True), owner)

    async def _trial(self, turns: Turns, trial: Trial, owner: str) -> dict[str, Any]:
        async with turns.turn(owner):
            run = _Run(self.nursery, trial)
            try:
                return await self._beside(run)
            except asyncio.CancelledError:  # whoever asked has left: its place is somebody else's
                run.stop()
                raise

    # -- what was found --------------------------------------------------------------------------------------

    def _known(self, digest: bytes) -> Grammar | None:
        with self._lock:
            if (error := self._refused.get(digest)) is not None:
                self._refused.move_to_end(digest)
                raise ConstraintError(str(error), tool=error.tool)
            if (found := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return found

    def _keep(self, grammar: Grammar) -> None:
        with self._lock:
            self._kept[grammar.digest] = grammar
            self._size += grammar.size
            while len(self._kept) > KEPT_COUNT or (self._size > KEPT_SIZE and len(self._kept) > 1):
                self._size -= self._kept.popitem(last=False)[1].size

    def _refuse(self, digest: bytes, error: ConstraintError) -> None:
        """Remember why not."""
        with self._lock:
            self._refused[digest] = error
            if (grammar := self._kept.pop(digest, None)) is not None:
                self._size -= grammar.size
            while len(self._refused) > REFUSED_COUNT:
                self._refused.popitem(last=False)

    def condemn(self, grammar: Grammar, cause: Cause) -> None:
        """A grammar that ended a process while it was stepped: nobody steps it again."""
        grammar.failure = f"following the grammar {_REASONS[cause]}"
        if cause != "memory":  # that may have been others', too
            self._refuse(grammar.digest, ConstraintError(grammar.failure))

    # -- matchers --------------------------------------------------------------------------------------------

    def met(self, matcher: Matcher) -> None:
        """See to it that nobody keeps what this matcher leaves."""
        weakref.finalize(matcher, _forget, (self.fast, self.slow), matcher.number).atexit = False

    async def replay(self, matcher: Matcher, token_ids: Sequence[int]) -> bool:
        """Have a matcher take the tokens of a generation that goes on; whether its shape is whole then."""
        await self._beside(lambda: self.slow.run([Move(matcher, list(token_ids))], strict=True))
        return matcher.stopped

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the processes; whoever waits for one is told that it failed."""
        self.fast.close()
        self.slow.close()
        if not self._lasting:
            self.nursery.close()
        self._pool.shutdown(wait=False)


class Turns:
    """Places, given to owner after owner, within one in order."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a place, and have it."""
        if self._free:
            self._free -= 1
        else:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave()  # it was given to one that is on its way out
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            owner, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[owner] = places
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


class _Run:
    """One trial in a process of its own, which `stop` ends from any thread."""

    def __init__(self, nursery: Nursery, trial: Trial) -> None:
        self._nursery = nursery
        self._trial = trial
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._stopped = False

    def __call__(self) -> dict[str, Any]:
        worker = self._nursery.fork(keeps=False)
        with self._lock:
            self._worker = worker
            if self._stopped:
                worker.kill()
        try:
            said: dict[str, Any] = json.loads(worker.ask(self._trial, STUCK_S + 10 * self._trial.seconds))
            return said
        finally:
            worker.kill()
            worker.bury()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()


class Stepper:
    """One process that steps matchers, started when it is first needed and anew after each death.
    Thread-safe: one `run` at a time, `open` beside it."""

    def __init__(self, home: Constraints, seconds: float) -> None:
        self._home = home
        self._seconds = seconds
        self._running, self._opening, self._starting = (threading.Lock() for _ in range(3))
        self._worker: _Kept | None = None
        self._awaited: tuple[_Kept, list[Move]] | None = None
        self._later = False
        self._closed = False

    def open(self, grammar: Grammar) -> None:
        """Have a grammar compiled that was tried. Raises ConstraintError, RequestFailed."""
        for _ in range(ATTEMPTS):
            with self._opening:
                worker = self._started()
                if grammar.number in worker.opened:
                    return
                order = Opened(grammar.number, grammar.source, grammar.marked, grammar.starts_in)
                try:
                    error = worker.process.ask(order, STUCK_S, opening=True).decode()
                except Died:
                    self._lost(worker)
                    continue  # another one's doing, most likely: this one was tried
                if error:
                    raise ConstraintError(error)
                worker.opened.add(grammar.number)
                weakref.finalize(grammar, worker.grammars_gone.append, grammar.number).atexit = False
                return
        raise RequestFailed("the grammars' process died again and again")

    def run(self, moves: Sequence[Move], *, strict: bool = False, later: bool = False) -> None:
        """Do what is asked, each within its time; what became of it stands in the moves then.

        strict: raise the first error. later: masks are made from now on, and stand in the `ready` of matchers
        once `collect` was called; those that do not are to be asked for again.
        """
        with self._running:
            self._collect()
            self._later = later
            pending = list(moves)
            for _ in range(len(moves) + ATTEMPTS):
                if not pending:
                    break
                pending = self._try(pending)
            for move in pending:
                move.error = ConstraintError("following the grammar failed again and again")
        if strict and (error := next((move.error for move in moves if move.error is not None), None)):
            raise error

    def collect(self) -> None:
        """Wait for what was asked for later."""
        with self._running:
            self._collect()

    def _collect(self) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._masked(*awaited)

    def _try(self, moves: list[Move]) -> list[Move]:
        """Returns those that are left because a grammar ended the process."""
        ready: list[Move] = []
        worker = self._started()
        for move in moves:
            grammar = move.matcher.grammar
            if grammar.failure is not None:
                move.error = ConstraintError(grammar.failure)
                continue
            try:
                if grammar.number not in worker.opened:
                    self.open(grammar)
            except (ConstraintError, RequestFailed) as error:
                move.error = ConstraintError(str(error))
                continue
            ready.append(move)
        width, at = self._home.width, 0
        room = max(1, SHARED // (4 * width))
        while at < len(ready):
            end, num_masks = at, 0
            while end < len(ready) and (end == at or num_masks + ready[end].num_masks <= room):
                num_masks += ready[end].num_masks
                end += 1
            self._collect()
            if not self._ask(worker, ready[at:end], width):
                return [move for move in ready[at:] if move.error is None]
            at = end
        return []

    def _ask(self, worker: _Kept, moves: list[Move], width: int) -> bool:
        """False where the process died of one of them, or was lost before."""
        rows: list[Row] = []
        for move in moves:
            matcher = move.matcher
            known = worker.known.get(matcher.number)
            opening = (matcher.grammar.number, matcher.max_tokens) if known is None else None
            caught_up = matcher.tokens[known or 0 :]
            token_ids = [] if move.booked else move.token_ids
            rows.append((matcher.number, opening, caught_up, token_ids, move.freely, move.drafts, move.asked))
        step = Step(rows, width, worker.gone(), _drained(worker.grammars_gone))
        seconds = STUCK_S + TOKEN_S * sum(len(row[2]) for row in rows)
        told = self._answer(worker, moves, step, seconds)
        if told is None:
            return False
        for move, (stopped, taken) in zip(moves, TAKEN.iter_unpack(told), strict=True):
            matcher = move.matcher
            if move.error is not None:
                continue
            if not move.booked:
                move.taken, move.booked = taken, True
            if taken:
                matcher.tokens += move.token_ids[:taken]
                matcher.ready = None
            matcher.stopped = stopped
            worker.known[matcher.number] = len(matcher.tokens)
            if self._later and move.drafts is not None:
                matcher.ready = move
        if not any(move.num_masks for move in moves):
            return True
        if self._later:
            self._awaited = (worker, moves)
            return True
        return self._masked(worker, moves)

    def _masked(self, worker: _Kept, moves: list[Move]) -> bool:
        """The second answer."""
        told = self._answer(worker, moves, None, STUCK_S)
        if told is None:
            return False
        first, width = 0, self._home.width
        for move, (seconds, right) in zip(moves, MASKED.iter_unpack(told), strict=True):
            if move.num_masks:
                own = worker.masks[first * width : (first + move.num_masks) * width]
                if move.error is None:
                    move.seconds, move.right = seconds, right
                    made = own.reshape(move.num_masks, width)
                    if move.masks is None:
                        move.masks = made.copy()
                    else:
                        place(made, move.masks)
                first += move.num_masks
        return True

    def _answer(
        self, worker: _Kept, moves: list[Move], step: Step | None, seconds: float
    ) -> memoryview | None:
        """What is said of each, the errors taken out; None where the process died, of whatever it was at."""
        try:
            reply = worker.process.ask(step, seconds)
        except Died as death:
            culprit = int(worker.at_work[0])
            self._lost(worker)
            for move in moves:
                if move.matcher.number == culprit:
                    self._home.condemn(move.matcher.grammar, death.cause)
                    move.error = ConstraintError(move.matcher.grammar.failure or "")
            return None
        size = len(moves) * (MASKED if step is None else TAKEN).size
        if len(reply) > size:
            for index, error in json.loads(reply[size:]).items():
                move = moves[int(index)]
                move.error = ConstraintError(error)
                worker.known.pop(move.matcher.number, None)
        return memoryview(reply)[:size]

    def _started(self) -> _Kept:
        with self._starting:
            if self._closed:
                raise RequestFailed("the engine was closed")
            if self._worker is None:
                process = self._home.nursery.fork(keeps=True)
                process.tell(Keep(self._seconds, KEPT_MEMORY))
                self._worker = _Kept(process)
            return self._worker

    def _lost(self, worker: _Kept) -> None:
        with self._starting:
            if self._worker is worker:
                self._worker = None
        worker.process.kill()
        worker.process.bury()

    def forget(self, matcher: int) -> None:
        """A matcher is gone."""
        if (worker := self._worker) is not None:
            worker.matchers_gone.append(matcher)

    def close(self) -> None:
        """End the process."""
        with self._starting:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.process.kill()
            worker.process.bury()


class _Kept:
    """What one process knows."""

    def __init__(self, process: Worker) -> None:
        assert process.shared is not None
        self.process = process
        self._memory = mmap.mmap(process.shared, HEADER + SHARED)
        os.close(process.shared)
        process.shared = None
        self.at_work = np.frombuffer(self._memory, np.int64, 1)
        self.at_work[0] = NOBODY
        self.masks = np.frombuffer(self._memory, np.int32, offset=HEADER)
        self.known: dict[int, int] = {}  # matchers, and how many of their tokens
        self.opened: set[int] = set()  # grammars
        self.matchers_gone: deque[int] = deque()
        self.grammars_gone: deque[int] = deque()

    def gone(self) -> list[int]:
        """Matchers to let go of, once."""
        gone = [each for each in _drained(self.matchers_gone) if self.known.pop(each, None) is not None]
        return gone


def place(masks: Mask, there: Mask) -> None:
    """Copy masks to where they are wanted; ids beyond the tokenizer's are not allowed."""
    shared = min(there.shape[1], masks.shape[1])
    there[:, :shared] = masks[:, :shared]
    there[:, shared:] = 0


def _drained(queue: deque[int]) -> list[int]:
    found = []
    while queue:
        found.append(queue.popleft())
    return found


def _forget(steppers: tuple[Stepper, ...], matcher: int) -> None:
    for stepper in steppers:
        stepper.forget(matcher)


def ahead(matcher: Matcher, width: int, pool: ThreadPoolExecutor) -> Future[tuple[Mask, float]]:
    """A mask that takes long, begun now: the mask, and the seconds that it took."""

    def make() -> tuple[Mask, float]:
        move = Move(matcher, drafts=[], masks=np.zeros((1, width), np.int32))
        matcher.grammar.home.slow.run([move], strict=True)
        assert move.masks is not None
        return move.masks[0], move.seconds

    return pool.submit(make)
