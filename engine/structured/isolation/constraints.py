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
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.dialects import Dialect
from engine.structured.isolation.child_process import (
    AT_WORK,
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
    count_masks,
)
from engine.structured.isolation.nursery import Cause, Died, Nursery, Worker, shared_nursery
from engine.tokenizer import Tokenizer
from engine.types import Constraint, ConstraintError, EngineError, ReaderParams, RequestFailed

T = TypeVar("T")
Mask = NDArray[np.int32]

# Seconds of a processor. Almost all that can be compiled is in the first; what is not is tried once more, one
# at a time, so that a flood of what never ends holds up nobody else.
SHORT_S = 0.1
LONG_S = 1.5
# A mask takes microseconds; the limits of `grammar` end nearly all that is hostile after some 15 ms. Other
# rows under grammars wait so long for one that does not end, and then for another process.
MASK_S = 0.02
SLOW_MASK_S = 1.0  # where nobody else waits for it but rows that are slow as well
STUCK_S = 6.0  # by the clock: for what waits without working
CAUGHT_UP = 4096  # tokens of a step that is sent without waiting: they fit what a socket holds
TRIAL_MEMORY = 512 << 20
KEPT_MEMORY = 2 << 30
KEPT_COUNT = 256
KEPT_SIZE = 8 << 20  # characters of all grammars kept
REFUSED_COUNT = 256
LARGE = 64 << 10  # characters of a constraint; more are told from others in a thread
ATTEMPTS = 3

_REASONS: dict[Cause, str] = {
    "time": "takes too long",
    "memory": "takes too much memory",
    "crash": "is more than the grammar library can take",
}

_numbers = count(1)


@dataclass(eq=False)
class Grammar:
    """A constraint that was tried, as text. slow: it took all the time that it may take beside others, so it
    is stepped apart from them. failure: why it is not to be stepped any more."""

    source: str  # JSON
    marked: bool
    starts_in: str
    size: int  # characters
    digest: bytes
    home: Constraints = field(repr=False)
    number: int = field(default_factory=lambda: next(_numbers))
    slow: bool = False
    failure: str | None = None

    def matcher(self, max_tokens: int) -> Matcher:
        """A matcher at the grammar's start. max_tokens: of the whole generation, half of which a thought may
        take."""
        return Matcher(self, max_tokens)


class Matcher:
    """Where one generation stands in a grammar: the tokens that it has taken. Not thread-safe."""

    __slots__ = ("__weakref__", "grammar", "max_tokens", "number", "stopped", "tokens")

    def __init__(self, grammar: Grammar, max_tokens: int) -> None:
        self.grammar = grammar
        self.max_tokens = max_tokens
        self.number = next(_numbers)
        self.tokens: list[int] = []
        self.stopped = False  # the shape is whole and nothing may follow
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
    """What is asked of one matcher (see `child_process.Row`), and what came of it.

    masks: one for each place. right: how many of them count: after a draft there may be none. seconds: of a
    processor, for the first. error: why there is no more; the matcher is of no use then. late: others do not
    wait for it; then `wake` is called as soon as its tokens are booked, and when it is done, from a thread of
    the stepper.
    """

    matcher: Matcher
    token_ids: list[int] = field(default_factory=list)
    freely: bool = False
    drafts: list[int] | None = None
    asked: list[int] | None = None
    wake: Callable[[], None] | None = None
    masks: Mask | None = None
    booked: bool = False  # `taken` is right
    done: bool = False
    late: bool = False
    taken: int = 0
    right: int = 0
    seconds: float = 0.0
    error: EngineError | None = None

    @property
    def num_masks(self) -> int:
        """How many are written."""
        return (0 if self.drafts is None else 1 + len(self.drafts)) + (self.asked is not None)

    def fail(self, error: EngineError) -> None:
        """There is no more."""
        self.error, self.done = error, True


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
        self.slow = Stepper(self, SLOW_MASK_S)
        self.fast = Stepper(self, MASK_S, slow=self.slow)
        places = max(1, (os.cpu_count() or 1) // 2)
        self._short, self._long = Turns(places), Turns(1)
        # Threads that wait for processes: one a place, and more for what is known and only opened.
        self._pool = ThreadPoolExecutor(places + 9, thread_name_prefix="engine-grammars")
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, ConstraintError] = OrderedDict()
        self._size = 0
        self._tried: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()

    def start(self) -> None:
        """Start the processes that the first constraint would have to wait for. It is told what fails."""
        with suppress(EngineError, Died):
            self.fast.start()

    # -- trials ----------------------------------------------------------------------------------------------

    async def compile(self, constraint: Constraint, reader: ReaderParams, owner: str = "") -> Grammar:
        """The grammar of a constraint behind a prompt whose answer is read like this.

        Owners take turns. Raises ConstraintError that names the tool and the keyword which cannot be
        honoured.
        """
        offered = reader.tools if self._dialect.typed and constraint.tools else ()
        told = (constraint, reader.starts_in, reader.dialect, offered)
        large = _num_chars(constraint) > LARGE
        digest = await self._beside(lambda: _digest(told)) if large else _digest(told)
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
            raise ConstraintError(said["error"], tool=said["tool"], place=said["place"])
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
            return error.of_tool(tools[0].name)
        while len(tools) > 1:
            half = tools[: len(tools) // 2]
            tools = half if await fails(Constraint(half, 1)) else tools[len(half) :]
        alone = tools and await fails(Constraint(tools, 1))
        return error.of_tool(tools[0].name) if alone else error

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
                raise error.of_tool(error.tool)
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
            self._drop(digest)
            while len(self._refused) > REFUSED_COUNT:
                self._refused.popitem(last=False)

    def _drop(self, digest: bytes) -> None:
        if (grammar := self._kept.pop(digest, None)) is not None:
            self._size -= grammar.size

    def condemn(self, grammar: Grammar, cause: Cause) -> None:
        """A grammar ended a process while it was stepped: nobody steps it again. The same constraint is tried
        anew after "memory", which others may have taken, and else refused."""
        grammar.failure = f"following the grammar {_REASONS[cause]}"
        if cause == "memory":
            with self._lock:
                self._drop(grammar.digest)
        else:
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


def _num_chars(constraint: Constraint) -> int:
    answer = 0 if constraint.answer is None else len(constraint.answer.source)
    return answer + sum(
        len(tool.parameters) + (0 if tool.input is None else len(tool.input.source))
        for tool in constraint.tools
    )


def _digest(told: tuple[Any, ...]) -> bytes:
    return blake2b(repr(told).encode(errors="surrogatepass"), digest_size=16).digest()


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

    `run` and `open` may be called by any thread. `begin`, `settle` and `later` are one thread's, the
    engine's: what they ask is done while that thread does something else, and what takes long becomes late,
    which is to say that a thread of the stepper waits for it instead. Until that one is through, everything
    that is begun is late as well: there is one process.
    """

    def __init__(self, home: Constraints, seconds: float, *, slow: Stepper | None = None) -> None:
        """seconds: of a processor, for the tokens or a mask of one row. slow: who steps a grammar that took
        all of them, which is otherwise not stepped any more."""
        self._home = home
        self._seconds = seconds
        self._slow = slow
        self._running, self._opening, self._starting = (threading.Lock() for _ in range(3))
        self._worker: _Kept | None = None
        self._under_way: deque[_Asked] = deque()  # what the process was asked and has not answered
        self._half = 0
        self._late: deque[list[Move]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-masks")
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
                    error = worker.process.open(order, STUCK_S).decode()
                except Died:
                    self._lost(worker)
                    continue  # another one's doing, most likely: this one was tried
                if error:
                    raise ConstraintError(error)
                worker.opened.add(grammar.number)
                weakref.finalize(grammar, worker.grammars_gone.append, grammar.number).atexit = False
                return
        raise RequestFailed("the grammars' process died again and again")

    # -- now, or while the caller does something else --------------------------------------------------------

    def run(self, moves: Sequence[Move], *, strict: bool = False) -> None:
        """Do what is asked, each within its time; what became of it stands in the moves then. strict: raise
        the first error."""
        too_slow = self._finish(moves)
        if too_slow and self._slow is not None:
            self._slow.run(too_slow)
        if strict and (error := next((move.error for move in moves if move.error is not None), None)):
            raise error

    def begin(self, moves: Sequence[Move]) -> None:
        """Have it done from now on: `settle` says when, or it is late."""
        if not moves:
            return
        if not self._late:
            with self._running, suppress(Died):  # whoever goes on from here finds it dead
                worker = self._worker
                if worker is not None and len(self._under_way) < 2 and self._fits(worker, moves):
                    self._send(worker, moves)
                    return
        self.later(moves)

    def settle(self, seconds: float, *, masks: bool) -> None:
        """Wait so long for what has begun: for its masks, or only for what tokens were taken. Then it is
        done, or late."""
        if self._late or not self._under_way:
            return
        with self._running:
            until = time.monotonic() + seconds
            try:
                for asked in self._under_way:
                    while not asked.answered if masks else not asked.booked:
                        left = max(0.0001, until - time.monotonic())
                        asked.book(asked.worker.process.hear(left), self._home.width)
                while self._under_way and self._under_way[0].answered:
                    self._under_way.popleft()
                return
            except (TimeoutError, EOFError, OSError):  # where it died, the one that goes on sees of what
                pass
        self.later([])

    def later(self, moves: Sequence[Move]) -> None:
        """Have it done beside, with all that has begun: nobody waits for it."""
        begun: list[Move] = []
        if not self._late:  # else those are late already
            begun = [move for asked in self._under_way for move in asked.moves if not move.done]
        waiting = [*begun, *moves]
        for move in waiting:
            move.late = True
        self._late.append(waiting)
        self._thread.submit(self._go_on, waiting, moves)

    def _go_on(self, waiting: list[Move], moves: Sequence[Move]) -> None:
        too_slow: list[Move] = []
        failure: EngineError = RequestFailed("the grammar could not be followed")
        try:
            too_slow = self._finish(moves)
        except EngineError as error:
            failure = error
        finally:
            self._late.popleft()
            for move in waiting:
                if move not in too_slow:
                    if not move.done:
                        move.error, move.done = failure, True
                    move.late = False
                    if move.wake is not None:
                        move.wake()
            if too_slow and self._slow is not None:
                self._slow.later(too_slow)

    # -- to the end ------------------------------------------------------------------------------------------

    def _finish(self, moves: Sequence[Move]) -> list[Move]:
        """Do what has begun, and these; returns those that are too slow for this stepper."""
        too_slow: list[Move] = []
        with self._running:
            begun, self._under_way = self._under_way, deque()
            pending = [*self._answered(begun), *moves]
            for _ in range(len(pending) + ATTEMPTS):
                if self._slow is not None:
                    too_slow += [move for move in pending if move.matcher.grammar.slow]
                    pending = [move for move in pending if not move.matcher.grammar.slow]
                if not pending:
                    break
                pending = self._try(pending)
        for move in pending:
            move.fail(ConstraintError("following the grammar failed again and again"))
        return too_slow

    def _try(self, moves: list[Move]) -> list[Move]:
        """Returns those that are left because a grammar ended the process."""
        ready: list[Move] = []
        worker = self._started()
        for move in moves:
            grammar = move.matcher.grammar
            if grammar.failure is not None:
                move.fail(ConstraintError(grammar.failure))
                continue
            try:
                if grammar.number not in worker.opened:
                    self.open(grammar)
            except (ConstraintError, RequestFailed) as error:
                move.fail(error)
                continue
            ready.append(move)
        at, most = 0, self._most_masks()
        while at < len(ready):
            end, num_masks = at, 0
            while end < len(ready) and (end == at or num_masks + ready[end].num_masks <= most):
                num_masks += ready[end].num_masks
                end += 1
            try:
                self._send(worker, ready[at:end])
            except Died as death:
                self._died(worker, death, ready)
                return [move for move in ready[at:] if not move.done]
            if left := self._answered(deque([self._under_way.pop()])):
                return [*left, *(move for move in ready[end:] if not move.done)]
            at = end
        return []

    def _answered(self, begun: deque[_Asked]) -> list[Move]:
        """Wait for all answers; returns the moves that are left because the process died of one of them, or
        was lost before."""
        for asked in begun:
            try:
                while not asked.answered:
                    asked.book(asked.worker.process.ask(None, asked.seconds), self._home.width)
            except Died as death:
                moves = [move for each in begun for move in each.moves if not move.done]
                self._died(asked.worker, death, moves)
                return [move for move in moves if not move.done]
        return []

    def _died(self, worker: _Kept, death: Died, moves: list[Move]) -> None:
        """Find out which grammar a process died of."""
        culprit, opened = worker.at_work.tolist()
        if death.cause == "memory" and opened != NOBODY:
            culprit = NOBODY  # it may have been what was compiled beside the rows: these are tried once more
        self._lost(worker)
        for move in moves:
            if move.matcher.number == culprit and not move.done:
                grammar = move.matcher.grammar
                if death.cause == "time" and self._slow is not None:
                    grammar.slow = True
                else:
                    self._home.condemn(grammar, death.cause)
                    move.fail(ConstraintError(grammar.failure or ""))

    def _most_masks(self) -> int:
        return max(1, SHARED // (8 * self._home.width))

    def _fits(self, worker: _Kept, moves: Sequence[Move]) -> bool:
        """Whether it can be asked at once."""
        opened, known = worker.opened, worker.known
        caught_up = num_masks = 0
        for move in moves:
            matcher = move.matcher
            grammar = matcher.grammar
            if grammar.number not in opened or grammar.slow or grammar.failure is not None:
                return False
            caught_up += len(matcher.tokens) - known.get(matcher.number, 0)
            num_masks += move.num_masks
        return caught_up <= CAUGHT_UP and num_masks <= self._most_masks()

    def _send(self, worker: _Kept, moves: Sequence[Move]) -> None:
        """Ask a process that has all their grammars; raises Died."""
        rows: list[Row] = []
        caught_up = 0
        for move in moves:
            matcher = move.matcher
            known = worker.known.get(matcher.number)
            opening = (matcher.grammar.number, matcher.max_tokens) if known is None else None
            behind = matcher.tokens[known or 0 :]
            token_ids = [] if move.booked else move.token_ids
            caught_up += len(behind) + len(token_ids)
            rows.append((matcher.number, opening, behind, token_ids, move.freely, move.drafts, move.asked))
        at, self._half = self._half * (SHARED // 8), 1 - self._half
        worker.process.tell(Step(rows, self._home.width, at, worker.gone(), _drained(worker.grammars_gone)))
        seconds = STUCK_S + self._seconds * len(rows) + TOKEN_S * caught_up
        self._under_way.append(_Asked(worker, moves, at, sum(map(count_masks, rows)), seconds))

    def start(self) -> None:
        """Start the process now. Raises what `open` raises."""
        self._started()

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
        self._thread.shutdown(wait=False)


class _Asked:
    """A step that a process was told to take, and what it has answered."""

    def __init__(self, worker: _Kept, moves: Sequence[Move], at: int, num_masks: int, seconds: float) -> None:
        """at: where its masks are. seconds: by the clock, after which it will not answer any more."""
        self.worker = worker
        self.moves = moves
        self.seconds = seconds
        self.booked = self.answered = False
        self._at = at
        self._num_masks = num_masks

    def book(self, answer: bytes, width: int) -> None:
        """Its next answer: what the rows took, then their masks."""
        size = len(self.moves) * (MASKED if self.booked else TAKEN).size
        if len(answer) > size:
            for index, error in json.loads(answer[size:]).items():
                move = self.moves[int(index)]
                move.fail(ConstraintError(error))
                self.worker.known.pop(move.matcher.number, None)
        if self.booked:
            self._book_masks(memoryview(answer)[:size], width)
        else:
            self._book_tokens(memoryview(answer)[:size])

    def _book_tokens(self, answer: memoryview) -> None:
        known, masks_follow = self.worker.known, self._num_masks > 0
        for move, (stopped, taken) in zip(self.moves, TAKEN.iter_unpack(answer), strict=True):
            if move.done:
                continue
            matcher = move.matcher
            if not move.booked:
                move.taken = taken
                matcher.tokens += move.token_ids[:taken]
            matcher.stopped = stopped
            known[matcher.number] = len(matcher.tokens)
            move.booked, move.done = True, not masks_follow
            if move.late and move.wake is not None:
                move.wake()
        self.booked, self.answered = True, not masks_follow

    def _book_masks(self, answer: memoryview, width: int) -> None:
        at, size = self._at, self._num_masks * width
        masks = self.worker.masks[at : at + size].reshape(self._num_masks, width).copy()
        first = 0
        for move, (seconds, right) in zip(self.moves, MASKED.iter_unpack(answer), strict=True):
            last = first + move.num_masks
            if not move.done:
                move.masks, move.seconds, move.right = masks[first:last], seconds, right
                move.done = True
            first = last
        self.answered = True


class _Kept:
    """What one process knows."""

    def __init__(self, process: Worker) -> None:
        assert process.shared is not None
        self.process = process
        self._memory = mmap.mmap(process.shared, HEADER + SHARED)
        os.close(process.shared)
        process.shared = None
        self.at_work = np.frombuffer(self._memory, np.int64, AT_WORK)
        self.at_work[:] = NOBODY
        self.masks = np.frombuffer(self._memory, np.int32, offset=HEADER)
        self.known: dict[int, int] = {}  # matchers, and how many of their tokens
        self.opened: set[int] = set()  # grammars
        self.matchers_gone: deque[int] = deque()
        self.grammars_gone: deque[int] = deque()

    def gone(self) -> list[int]:
        """Matchers to let go of, once."""
        gone = [each for each in _drained(self.matchers_gone) if self.known.pop(each, None) is not None]
        return gone


def _drained(queue: deque[int]) -> list[int]:
    found = []
    while queue:
        found.append(queue.popleft())
    return found


def _forget(steppers: tuple[Stepper, ...], matcher: int) -> None:
    for stepper in steppers:
        stepper.forget(matcher)
