"""Chooses which sequences run in the next step, and with how many tokens.

It owns the running batch, admission into it, chunked prefill under one token budget, preemption, and the slot
and blocks of every sequence. Owners get fair shares: of the places in the batch, and of the step's tokens.

A prompt that arrives while others decode gets as much of a step as `prefill_budget` allows. Sequences that
began to decode after it had arrived are not spared: of a crowd that arrives at once, all prompts are computed
first.

Prompts are computed in the order of their arrival, but a long one leaves half of each step to the shorter
prompts behind it, and spares those of them that decode. So a prompt that takes half a minute does not hold
up requests that take a moment.

One that is not long has a step to itself where it fills one. Several in one step would all have their first
token at its end, and of a crowd whose turns end together, the next turns would begin together again.
"""

from __future__ import annotations

import heapq
import sys
import time
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.core.batch_state import PROMPT_LOGPROBS_CHUNK, Rows, noise_key
from engine.core.kv_cache import BlockHasher, BlockKey, Hit, KVCache
from engine.core.messages import Forget, Keep, Save, Submit
from engine.core.prefill_budget import Pace
from engine.core.sequences import Sequence, WaitingQueue
from engine.core.tiering import Owned, Room, Tiering
from engine.failures import without
from engine.step import Ints, token_array
from engine.types import CACHED_TOKEN, GenerateRequest

MAX_ASIDE = 8
"""Sequences that wait for what others compute and are looked past in one step, such as a prompt's choices."""

MAX_LONG_ASIDE = 32
"""And those altogether, where long prompts among them wait for the end of another long one."""

LONG = 2
"""A prompt is long while more tokens of it are left than so many full steps compute."""


@dataclass(slots=True)
class Counters:
    """Totals since the start, and what the latest step was; see `EngineStats`."""

    prefix_queries: int = 0
    pool_hits: int = 0
    disk_hits: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: int = 0
    drafts_accepted: int = 0
    prefilling: int = 0  # of the latest step, as is the next one
    decoding: int = 0

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that were found, wherever."""
        return self.pool_hits + self.disk_hits


@dataclass(frozen=True, slots=True)
class Batch:
    """What the next step computes: `counts[i]` tokens of `sequences[i]`.

    num_beside: how many of them are prompt tokens, where other sequences decode; None: nothing decodes.
    num_prefills: how many of the sequences have prompts computed.
    """

    sequences: list[Sequence]
    slots: Ints
    counts: Ints
    num_beside: int | None
    num_prefills: int = 0

    def halves(self) -> tuple[Batch, Batch]:
        """The same work as two steps, which do not count for the prefill budget."""
        middle = len(self.sequences) // 2
        first, last = slice(middle), slice(middle, None)
        return (
            Batch(self.sequences[first], self.slots[first], self.counts[first], None),
            Batch(self.sequences[last], self.slots[last], self.counts[last], None),
        )


@dataclass(slots=True)
class Filling:
    """A step while it is filled: who is in it with how many tokens, and what still fits."""

    left: int
    beside: int  # tokens that late prompts may have, which came after others had begun to decode
    whole: int = 0  # tokens that the first prompt may have if they are its last, whatever is `left`
    enough: int = sys.maxsize  # tokens of prompts that are not long, behind which no other begins
    newest: int | None = None  # prompts with handles above this one are late; None: nothing decodes
    long: frozenset[int] = frozenset()  # handles of long prompts,
    last: int = -1  # which are late as well where one that came later, up to this one, decodes
    halved: frozenset[int] = frozenset()  # those of `long` that leave half of their room to shorter ones
    scored: int = PROMPT_LOGPROBS_CHUNK  # tokens left for prompts whose log probabilities are wanted
    chosen: dict[int, tuple[Sequence, int]] = field(default_factory=dict)

    def take_prompts(self, most: int, enough: int) -> None:
        """From now on it is filled with prompts: with `most` tokens, or more of the first one if that ends
        it, and with none behind those that have `enough`."""
        self.whole = min(self.left, LONG * most)
        self.left = min(self.left, most)
        self.enough = enough

    def room(self, sequence: Sequence, wanted: int = 0) -> int:
        """Tokens that it may have, if it wants so many."""
        left = max(self.left, wanted) if wanted <= self.whole else self.left
        return min(left, self.beside) if self._is_late(sequence) else left

    def put(self, sequence: Sequence, count: int) -> None:
        """Add a sequence, or more tokens of it."""
        self.whole = 0
        if sequence.handle not in self.long:
            self.enough -= count
        self.chosen[sequence.handle] = (sequence, self.chosen.get(sequence.handle, (None, 0))[1] + count)
        self.left -= count
        if sequence.wants_prompt_logprobs and count > 1:
            self.scored -= count
        if self._is_late(sequence):
            self.beside -= count

    def decoding(self, sequence: Sequence, newest: int) -> None:
        """Note a sequence that decodes; `newest`: the newest request's handle when it began to."""
        if sequence.began is None:
            sequence.began = newest
        self.newest = sequence.began if self.newest is None else min(self.newest, sequence.began)
        self.last = max(self.last, sequence.handle)

    def batch(self) -> Batch:
        """The step."""
        sequences = [sequence for sequence, _ in self.chosen.values()]
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        counts = np.fromiter((count for _, count in self.chosen.values()), np.int64, len(sequences))
        beside = [count for sequence, count in self.chosen.values() if sequence.began is None]
        return Batch(sequences, slots, counts, None if self.newest is None else sum(beside), len(beside))

    def _is_late(self, sequence: Sequence) -> bool:
        if sequence.began is not None or self.newest is None:
            return False
        return sequence.handle > self.newest or (sequence.handle in self.long and sequence.handle < self.last)


class Scheduler:
    """The queues and the batch. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        kv: KVCache,
        rows: Rows,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_undelivered: int,
        eos_token_ids: tuple[int, ...],
        adapters: Mapping[str, int] | None = None,
        prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        tiering: Tiering | None = None,
    ) -> None:
        """adapters: their numbers, by name. prefix_caching: whether requests find what others computed.
        tiering: where what has left the pool is found; with it, `hasher` has a secret that stays."""
        self.kv = kv
        self.rows = rows
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by priority, then in the order of admission
        self._parked: dict[int, Sequence] = {}  # preempted, and waiting for their consumers
        self._live: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._hasher = hasher or BlockHasher(kv.block_size)
        self._tiering = tiering
        if tiering is not None:
            tiering.go_on = self.go_on
        self._prefix_caching = prefix_caching
        self.pace = Pace(max_num_batched_tokens)
        self._newest = -1  # the highest handle so far
        self._begun: list[int] = []  # handles
        self._aside: list[Sequence] = []  # of this step: see `_set_aside`
        self._budget = self._most = max_num_batched_tokens  # tokens of the next step, and of any
        self._max_model_len = max_model_len
        self._max_undelivered = max_undelivered
        self._eos = eos_token_ids
        self._adapters = adapters or {}
        self._held_back: tuple[int, int] | None = (
            None  # (handle, releases): it did not fit, and nothing changed
        )
        self.considered: Sequence | None = (
            None  # the sequence that `schedule` looks at: the culprit where it raises
        )

    def limit_step(self, num_tokens: int) -> None:
        """From now on a step computes at most so many tokens, and never more than at the start."""
        self._budget = min(num_tokens, self._most)

    # -- requests come and go --------------------------------------------------------------------------------

    def add(self, submit: Submit) -> None:
        """Queue a request; its checks are done, it fits the context."""
        request, sampling = submit.request, submit.request.sampling
        tokens = token_array(request.prompt_ids)
        if request.prefix:
            tokens = np.concatenate((tokens, token_array(request.flat_prefix)))
        stops = set(sampling.stop_token_ids)
        # a grammar allows the end of turn only where the shape may end: it always ends the sequence then
        if not sampling.ignore_eos or submit.matcher is not None:
            stops |= set(self._eos)
        # Under a salt of its own a sequence that was preempted still finds its blocks, and nobody else does.
        salt = request.cache_salt if self._prefix_caching else f"request {submit.handle}"
        sequence = Sequence(
            handle=submit.handle,
            request=request,
            matcher=submit.matcher,
            tokens=tokens,
            root=self._hasher.root(request.owner, salt, request.adapter),
            stop_ids=frozenset(stops),
            limit=min(len(request.prompt_ids) + sampling.max_tokens, self._max_model_len),
            credit=self._max_undelivered,
            banned=submit.banned,
            submitted=submit.at,
            saved_as=request.saved_as,
        )
        was_contested = self.waiting.is_contested
        self.waiting.push(sequence)
        if self.waiting.is_contested and not was_contested:
            for other in self.running:  # what they got while they were alone does not count
                other.num_charged = int(self.rows.num_computed[other.slot])
        self._live[submit.handle] = sequence
        self._newest = submit.handle
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, submit.handle))

    def credit(self, handle: int, num_tokens: int) -> None:
        """The consumer took tokens; a sequence that was held back for it goes on."""
        sequence = self._live.get(handle)
        if sequence is None:
            return
        sequence.credit += num_tokens
        if sequence.credit > 0 and self._parked.pop(handle, None) is not None:
            self.waiting.push(sequence, front=True)

    def find(self, handle: int) -> Sequence | None:
        """A sequence that has not ended."""
        return self._live.get(handle)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed; each is named once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, handle = heapq.heappop(self._deadlines)
            if handle in self._live:
                late.append(self._live[handle])
        return late

    @property
    def next_deadline(self) -> float | None:
        """time.monotonic seconds of the earliest deadline, perhaps of a sequence that is gone."""
        due = [self._deadlines[0][0]] if self._deadlines else []
        if self._tiering is not None and (deadline := self._tiering.next_deadline) is not None:
            due.append(deadline)
        return min(due, default=None)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> list[list[int]]:
        """Drop a sequence wherever it is; returns its blocks by group if their content is bad (`forget`)."""
        del self._live[sequence.handle]
        blocks: list[list[int]] = []
        if sequence.slot >= 0:
            self.running.remove(sequence)
            num_saved = 0 if forget else sequence.num_published
            blocks = self._vacate(sequence, forget=forget)
            if self._tiering is not None and sequence.saved_as is not None and num_saved:
                request = sequence.request
                owned = Owned(sequence.saved_as, request.owner, request.saved_until)
                with without("saving KV on disk"):
                    self._tiering.save(owned, sequence.chain[:num_saved])
        elif self._parked.pop(sequence.handle, None) is None and not self._is_loading(sequence):
            self.waiting.remove(sequence)
        if self._tiering is not None:
            self._tiering.leave(sequence)
        if not self._live:
            self.waiting.forget()
        return blocks if forget else []

    def keep(self, keep: Keep) -> None:
        """Evict the KV of a request that has ended after what nobody waits for."""
        if self._prefix_caching:  # nobody could find it otherwise
            self.kv.keep(keep.name, self._chain_of(keep.request, keep.output), keep.until)

    def save(self, save: Save) -> None:
        """Write the KV of a request that has ended to disk, as far as it is still in the pool."""
        if self._tiering is not None:
            owned = Owned(save.name, save.request.owner, save.until)
            self._tiering.save(owned, self._chain_of(save.request, save.output))

    def _chain_of(self, request: GenerateRequest, output: tuple[int, ...]) -> list[BlockKey]:
        """The keys of the blocks that a request has left."""
        root = self._hasher.root(request.owner, request.cache_salt, request.adapter)
        tokens = np.concatenate((token_array(request.prompt_ids), token_array(output)))
        chain: list[BlockKey] = []
        self._hasher.extend(chain, root, tokens, _media(request))
        return chain

    def forget(self, forget: Forget) -> None:
        """Remove what was saved from disk, and let no sequence save under these names."""
        for sequence in self._live.values():
            if sequence.saved_as in forget.names or sequence.request.owner == forget.owner:
                sequence.saved_as = None
        if self._tiering is not None:
            self._tiering.forget(forget)

    def give_up_late_loads(self, now: float) -> None:
        """Sequences whose prompts the disk has not brought in time compute them."""
        if self._tiering is not None:
            self._tiering.give_up_late(now)

    def go_on(self, sequence: Sequence) -> None:
        """What a sequence waited for has been read, or will not be."""
        if sequence.credit > 0:
            self.waiting.push(sequence, front=True)
        else:
            self._parked[sequence.handle] = sequence

    def _is_loading(self, sequence: Sequence) -> bool:
        return self._tiering is not None and self._tiering.is_loading(sequence)

    @property
    def num_waiting(self) -> int:
        num_loading = 0 if self._tiering is None else self._tiering.num_loading
        return len(self.waiting) + len(self._parked) + num_loading

    @property
    def num_paused(self) -> int:
        """Of those that wait: preempted, and held back by their readers."""
        return len(self._parked)

    # -- a step ----------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Choose the next step's tokens: first those that decode, then begun prefills, then new sequences,
        which go before begun prefills that matter less, or whose owners were served more.

        Where it raises, `considered` is the sequence that it raised for. Once that one is finished, it can be
        called again: what was done for others is no more than they need.
        """
        self.considered = None
        try:
            return self._filled()
        finally:
            while self._aside:
                self.waiting.push(self._aside.pop(), front=True)

    def _filled(self) -> Batch | None:
        """The next step, or None where nobody can go on; what it passes over lies in `_aside` afterwards."""
        slots = np.fromiter((sequence.slot for sequence in self.running), np.int64, len(self.running))
        remaining = (self.rows.num_tokens[slots] - self.rows.num_computed[slots]).tolist()
        begun = list(zip(self.running, remaining, strict=True))
        decodes = [(sequence, 1) for sequence, wanted in begun if wanted == 1]
        if len(decodes) > self._budget:  # they take turns
            decodes.sort(key=lambda row: self.waiting.rank(row[0]))
        prefills = [(sequence, wanted) for sequence, wanted in begun if wanted != 1]
        prefills.sort(key=lambda row: self.waiting.rank(row[0]))
        long = {sequence.handle for sequence, wanted in prefills if self._is_long(sequence, wanted)}
        while prefills and (head := self.waiting.peek()) is not None and not head.late:
            self.considered = head
            if self._is_long_in_queue(head) and self._is_behind(head, prefills, long):
                if not self._set_aside(head, MAX_LONG_ASIDE):
                    break
            elif not (self._waits_for_another(head, *self._hit(head)) and self._set_aside(head)):
                break
        newcomer = self.waiting.peek() if prefills else None
        before = None if newcomer is None else self.waiting.rank(newcomer)
        later = [row for row in prefills if before is not None and self.waiting.rank(row[0]) > before]
        # the ranks at which shorter prompts stand behind long ones
        short = {self.waiting.rank(sequence) for sequence, _ in prefills if sequence.handle not in long}
        if newcomer is not None and not self._is_long_in_queue(newcomer):
            short.add(self.waiting.rank(newcomer))
        halved = {sequence.handle for sequence, _ in prefills if self.waiting.rank(sequence) in short} & long
        num_prompts = len(prefills) + min(len(self.waiting), self.rows.num_free)
        beside = self.pace.allowance(num_prompts, len(decodes))
        filling = Filling(self._budget, beside, long=frozenset(long), halved=frozenset(halved))
        self._go_on(filling, decodes)
        for sequence, _ in filling.chosen.values():
            filling.decoding(sequence, self._newest)
        if self.rows.num_drafts[slots].any():
            # half of what is left is for those that have yet to begin, however many drafts there are
            self._add_drafts(filling, filling.left // 2 if prefills or self.waiting else filling.left)
        if filling.chosen and not beside:
            filling.left = 0  # early prompts would hide the time of the decodes as well
        # Prompts that were here before anybody decoded have all that is left, but not all in one long step.
        filling.take_prompts(self.pace.most, self.pace.enough)
        self._go_on(filling, prefills[: len(prefills) - len(later)])
        self._admit(filling, self.waiting.rank(later[0][0]) if later else None)
        if later:
            self._go_on(filling, later)
            self._admit(filling)
        self._top_up(filling, [row for row in prefills if row[0].handle in halved])
        self.considered = None
        return filling.batch() if filling.chosen else None

    def decode(self, sequences: list[Sequence]) -> Batch:
        """The step in which these decode a token each, and which runs already."""
        filling = Filling(len(sequences), 0)
        for sequence in sequences:
            filling.put(sequence, 1)
            filling.decoding(sequence, self._newest)
        return filling.batch()

    def _is_long(self, sequence: Sequence, wanted: int) -> bool:
        """Whether a prompt with so many tokens left may not have whole steps while shorter ones wait; one
        whose log probabilities are wanted has small chunks anyway."""
        step = min(self._budget, self.pace.most)  # where a full step would take too long, it is no full step
        return wanted > LONG * step and not sequence.wants_prompt_logprobs

    def _is_long_in_queue(self, sequence: Sequence) -> bool:
        """The same of a sequence that waits: what the pool has of it is not computed."""
        num_tokens = len(sequence.tokens)
        if not self._is_long(sequence, num_tokens):
            return False
        hit, _ = self._hit(sequence)
        return self._is_long(sequence, num_tokens - hit.num_blocks * self.kv.block_size)

    def _is_behind(self, head: Sequence, prefills: list[tuple[Sequence, int]], long: set[int]) -> bool:
        """Whether a long prompt has its turn before this one, which is long as well."""
        rank = self.waiting.rank(head)
        return any(
            each.handle in long and each.credit > 0 and not each.late and self.waiting.rank(each) <= rank
            for each, _ in prefills
        )

    def _go_on(self, filling: Filling, begun: list[tuple[Sequence, int]]) -> None:
        for sequence, wanted in begun:
            self.considered = sequence
            if filling.enough <= 0:
                break
            # a slot below 0: preempted for one that came before, and perhaps admitted anew
            if (
                sequence.slot < 0
                or sequence.credit <= 0
                or sequence.late
                or sequence.handle in filling.chosen
            ):
                continue
            room = filling.room(sequence, wanted)
            count = self._chunk(
                filling, sequence, wanted, -(-room // 2) if sequence.handle in filling.halved else room
            )
            if count and self._grow(sequence, count, filling):
                filling.put(sequence, count)

    def _top_up(self, filling: Filling, begun: list[tuple[Sequence, int]]) -> None:
        """Give long prompts what nobody else took; they take no blocks from other sequences for it."""
        for sequence, wanted in begun:
            self.considered = sequence
            if sequence.handle not in filling.chosen:
                continue
            has = filling.chosen[sequence.handle][1]
            more = min(wanted - has, filling.room(sequence))
            if more > 0 and self.kv.grow(
                sequence.slot, int(self.rows.num_computed[sequence.slot]) + has + more
            ):
                filling.put(sequence, more)

    def _add_drafts(self, filling: Filling, left: int) -> None:
        """Have drafts checked as far as `left` goes; they take no blocks from other sequences."""
        rows = self.rows
        for sequence, _ in list(filling.chosen.values()):
            self.considered = sequence
            drafts = min(int(rows.num_drafts[sequence.slot]), left)
            if drafts and self.kv.grow(sequence.slot, int(rows.num_tokens[sequence.slot]) + drafts):
                filling.put(sequence, drafts)
                left -= drafts

    def _chunk(self, filling: Filling, sequence: Sequence, wanted: int, room: int) -> int:
        """Of a prompt; all whose scores are wanted share what a step may score."""
        is_scored = sequence.wants_prompt_logprobs and wanted > 1
        return min(wanted, room, filling.scored if is_scored else room)

    def _grow(self, sequence: Sequence, count: int, filling: Filling) -> bool:
        """Find blocks for `count` more tokens, at the cost of the last in `running`; False: it was itself the
        last.
        """
        needed = int(self.rows.num_computed[sequence.slot]) + count
        while not self.kv.grow(sequence.slot, needed):
            if self._tiering is not None:
                way = self._tiering.make_room()
                if way == "wait":
                    return False
                if way == "again":
                    continue
            victim = self._victim()
            filling.chosen.pop(victim.handle, None)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        """One that waits for its consumer, else the last admitted of those that matter least."""
        return next((s for s in reversed(self.running) if s.credit <= 0), self.running[-1])

    def preempt(self, sequence: Sequence, *, forget: bool = False) -> list[list[int]]:
        """Take a sequence's blocks; it will be computed again (mostly from the prefix cache).

        Returns them by group if their content is bad (`forget`).
        """
        self.counters.preemptions += 1
        sequence.tokens = self.rows.tokens[sequence.slot, : self.rows.num_tokens[sequence.slot]].copy()
        self.running.remove(sequence)
        blocks = self._vacate(sequence, forget=forget)
        if sequence.credit > 0:
            self.waiting.push(sequence, front=True)
        else:
            self._parked[sequence.handle] = sequence
        return blocks if forget else []

    def _vacate(self, sequence: Sequence, *, forget: bool = False) -> list[list[int]]:
        blocks = self.kv.release(sequence.slot, forget=forget)
        self.waiting.share(sequence).end(sequence.request.owner)
        self.rows.give_back(sequence.slot)
        sequence.slot = -1
        sequence.num_published = 0
        sequence.began = None
        sequence.prompt_logprobs.clear()
        self._held_back = None
        return blocks

    def lender(self) -> Sequence | None:
        """The running sequence that makes room for the one that is next, if any.

        That is one that waits for its consumer; one with a priority above 0, which may be interrupted, for
        one with a lower number; or the last of an owner that has more than its share.
        """
        paused = next((other for other in reversed(self.running) if other.credit <= 0), None)
        newcomer = self.waiting.peek()
        if paused is not None or newcomer is None or newcomer.late or not self.running:
            return paused
        request = newcomer.request
        if self.running[-1].request.priority > max(0, request.priority):
            return self.running[-1]
        owner = self.waiting.share(newcomer).lender(request.owner, request.weight)
        if owner is None:
            return None
        its = (request.priority, owner)
        return next(
            (
                other
                for other in reversed(self.running)
                if (other.request.priority, other.request.owner) == its and not other.late
            ),
            None,
        )

    def _admit(self, filling: Filling, before: tuple[int, float] | None = None) -> None:
        """Start sequences that wait, as far as there is room; before: only those with a lower rank."""
        while (sequence := self.waiting.peek()) is not None and not sequence.late:
            self.considered = sequence
            if min(filling.room(sequence), filling.enough) <= 0:
                break
            if before is not None and self.waiting.rank(sequence) >= before:
                break
            if filling.halved and self._is_long_in_queue(sequence):
                break  # what long prompts leave is for shorter ones
            yields = self.lender()
            held_back = self._held_back == (sequence.handle, self.kv.num_releases)
            if yields is None and (held_back or not self.rows.num_free):
                break
            hit, limit = self._hit(sequence)
            cannot_score = sequence.wants_prompt_logprobs and filling.scored <= 0
            if cannot_score or self._waits_for_another(sequence, hit, limit):
                if self._set_aside(sequence):
                    continue
                break
            wanted = min(len(sequence.tokens) + 1, self._max_model_len)
            if not self.rows.num_free or not self.kv.fits(hit, wanted, self._most):
                if yields is None:
                    way = self._make_room_for(sequence)
                    if way == "again":
                        continue
                    if way == "none":
                        self._held_back = (sequence.handle, self.kv.num_releases)
                    break
                filling.chosen.pop(yields.handle, None)
                self.preempt(yields)
                continue
            if self._restores(sequence, hit, limit):
                self.waiting.pop()
                continue
            self._start(sequence, hit)
            num_hit = hit.num_blocks * self.kv.block_size
            left = len(sequence.tokens) - num_hit
            count = self._chunk(filling, sequence, left, filling.room(sequence, left))
            if self._grow(sequence, count, filling):
                filling.put(sequence, count)
                self.waiting.charge(sequence, num_hit + count)

    def _hit(self, sequence: Sequence) -> tuple[Hit, int]:
        """What a waiting sequence finds in the pool, and how many blocks it could find at most."""
        self._hasher.extend(sequence.chain, sequence.root, sequence.tokens, _media(sequence.request))
        # the last token is always computed: its logits are wanted
        limit = 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // self.kv.block_size
        return self.kv.match(sequence.chain, limit), limit

    def _waits_for_another(self, sequence: Sequence, hit: Hit, limit: int) -> bool:
        """Whether another sequence computes right now the first block that this one does not find."""
        return hit.num_blocks < limit and self._is_being_computed(
            sequence.chain[hit.num_blocks], hit.num_blocks
        )

    def _set_aside(self, sequence: Sequence, most: int = MAX_ASIDE) -> bool:
        """Look past the next in the queue for this step, so that it does not keep those behind it; False
        where as many have been looked past as may be."""
        if len(self._aside) >= most:
            return False
        self.waiting.pop()
        self._aside.append(sequence)
        return True

    def _restores(self, sequence: Sequence, hit: Hit, limit: int) -> bool:
        """Whether a sequence waits for the disk from now on."""
        if self._tiering is not None:
            with without("reading KV from disk"):
                return self._tiering.restore(sequence, hit, limit)
        return False

    def _make_room_for(self, sequence: Sequence) -> Room:
        """What is pinned for others, or being saved, gives way to the one whose turn it is."""
        if self._tiering is None:
            return "none"
        if self._tiering.unpin_other(sequence):
            return "again"
        return "none" if self.running else self._tiering.make_room()

    def _is_being_computed(self, key: BlockKey, index: int) -> bool:
        rows = self.rows
        return any(
            len(other.chain) > index
            and other.chain[index].digest == key.digest
            and rows.num_computed[other.slot] <= index * self.kv.block_size
            for other in self.running
            if other.credit > 0
        )

    def _start(self, sequence: Sequence, hit: Hit) -> None:
        request = sequence.request
        num_prompt, num_hit = len(request.prompt_ids), hit.num_blocks * self.kv.block_size
        slot = self.rows.take(
            request,
            sequence.tokens,
            noise_key(request.sampling.seed, request.choice, request.generation),
            np.array(sorted(sequence.stop_ids), np.int64),
            sequence.matcher is not None,
            0 if request.adapter is None else self._adapters[request.adapter],
        )
        self.waiting.pop()
        self.waiting.share(sequence).begin(request.owner, request.weight)
        sequence.slot = slot
        insort(self.running, sequence, key=lambda other: other.request.priority)
        self.kv.attach(slot, hit)
        if self._tiering is not None:
            self._tiering.unpin(sequence)
        sequence.num_published = hit.num_blocks
        self.rows.num_computed[slot] = num_hit
        self.waiting.charge(sequence, num_hit, CACHED_TOKEN)
        if sequence.cached_tokens is None:
            self._begun.append(sequence.handle)
            sequence.started = time.perf_counter()
            sequence.cached_tokens = min(num_hit, num_prompt)
            self.counters.prefix_queries += num_prompt
            of_disk = min(sequence.num_restored, sequence.cached_tokens)
            self.counters.disk_hits += of_disk
            self.counters.pool_hits += sequence.cached_tokens - of_disk
            self.counters.prompt_tokens += num_prompt

    def take_begun(self) -> list[int]:
        """The handles of those that have come into a step for the first time since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def took(self, batch: Batch, seconds: float) -> None:
        """A step took so long: its pace is learnt from that."""
        if batch.num_beside is None:
            self.pace.took_alone(int(batch.counts.sum()), seconds)
        else:
            self.pace.took(batch.num_beside, seconds)

    def computed(self, batch: Batch, num_rejected: Ints | int = 0) -> list[tuple[Sequence, Exception]]:
        """Book a step's tokens as computed: publish full blocks, release those that left a window.

        num_rejected: how many at the end of each sequence's were drafts that did not come true; their places
        are computed again. Returns the sequences whose blocks could not be booked, and why.
        """
        failed = []
        self.rows.num_computed[batch.slots] += batch.counts - num_rejected
        self.counters.steps += 1
        computed = self.rows.num_computed[batch.slots]
        if self.waiting.is_contested:
            for sequence, num_computed in zip(batch.sequences, computed.tolist(), strict=True):
                self.waiting.charge(sequence, num_computed)
        full = (computed // self.kv.block_size).tolist()
        for sequence, num_full, num_computed in zip(batch.sequences, full, computed.tolist(), strict=True):
            if num_full > sequence.num_published:
                try:
                    self._publish(sequence, num_full, num_computed)
                except Exception as error:  # that sequence's alone
                    failed.append((sequence, error))
        return failed

    def _publish(self, sequence: Sequence, num_full: int, num_computed: int) -> None:
        tokens = self.rows.tokens[sequence.slot, :num_computed]
        self._hasher.extend(sequence.chain, sequence.root, tokens, _media(sequence.request))
        self.kv.publish(sequence.slot, sequence.chain, sequence.num_published, num_full)
        sequence.num_published = num_full
        if self.kv.has_windows:
            self.kv.trim(sequence.slot, num_computed)

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, slots and queues do not add up."""
        self.kv.check_integrity(sequence.slot for sequence in self.running)
        assert len(self._live) == len(self.running) + self.num_waiting, "a sequence is nowhere, or twice"
        assert self.rows.num_free + len(self.running) == len(self.rows.num_tokens), "a slot is lost"


def _media(request: GenerateRequest) -> list[tuple[int, int, bytes]]:
    return [(span.offset, span.length, span.content_hash) for span in request.media]
