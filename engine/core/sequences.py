"""Keeps requests until they end, and queues those that wait: by priority, and in fair shares among owners."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.core.fair_share import FairShare
from engine.core.kv_cache import BlockKey
from engine.step import RowLogprobs
from engine.types import GenerateRequest

if TYPE_CHECKING:
    from engine.structured.isolation import Matcher, Move
    from engine.tokenizer import BannedTexts


@dataclass(slots=True, eq=False)
class Sequence:
    """One request until it ends. While it runs its tokens are in its slot's row; otherwise in `tokens`."""

    handle: int
    request: GenerateRequest
    matcher: Matcher | None
    tokens: NDArray[np.int32]
    root: bytes
    stop_ids: frozenset[int]  # token ids that end it, end-of-turn ids among them
    limit: int  # tokens of prompt and output together at which it ends
    credit: int  # tokens that may still be drawn before the consumer takes some
    banned: BannedTexts | None = None  # what its output must not say
    slot: int = -1
    chain: list[BlockKey] = field(default_factory=list)
    num_published: int = 0
    num_charged: int = 0  # tokens that its owner's counter has in it
    cached_tokens: int | None = None
    first_sent: bool = False
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    began: int | None = None  # the newest request's handle when this one began to decode
    submitted: float = 0.0  # time.perf_counter seconds, as is the next one
    started: float = 0.0  # when it was first in a step
    slow: bool = False  # making its masks takes long
    move: Move | None = None  # what its grammar was asked last
    saved_as: str | None = None  # the name that its KV is saved under when it ends
    num_restores: int = 3  # how often more of its prompt may be read from disk
    num_restored: int = 0  # tokens of it that were
    unsettled: bool = False  # what that took of the tokens drawn last is not known yet

    @property
    def late(self) -> bool:
        """Whether its next draw cannot be made yet."""
        return self.unsettled or (self.move is not None and self.move.late)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and not self.first_sent


class WaitingQueue:
    """Sequences that wait: the lowest priority number first; within it the owner that was served least, in
    tokens by weight; within an owner in order. Owners that were served alike take turns.
    """

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, deque[Sequence]]] = {}
        self._shares: dict[int, FairShare] = {}
        self._size = 0
        self._next: Sequence | None = None  # what `peek` found, until something changes

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Add a sequence; `front`: it ran before and is its owner's next."""
        owner = sequence.request.owner
        owners = self._classes.setdefault(sequence.request.priority, OrderedDict())
        if owner not in owners:
            self.share(sequence).join(owner, owners.keys())
        queue = owners.setdefault(owner, deque())
        if front:
            queue.appendleft(sequence)
            owners.move_to_end(owner, last=False)
        else:
            queue.append(sequence)
        self._size += 1
        self._next = None

    def peek(self) -> Sequence | None:
        """The one whose turn it is."""
        if self._next is None and self._classes:
            priority = min(self._classes)
            owners = self._classes[priority]
            self._next = owners[self._shares[priority].least(owners)][0]
        return self._next

    def pop(self) -> None:
        """Take out the one that `peek` shows; among those served alike, the next turn is another owner's."""
        sequence = self.peek()
        assert sequence is not None
        self.remove(sequence)
        owners = self._classes.get(sequence.request.priority)
        if owners and sequence.request.owner in owners:
            owners.move_to_end(sequence.request.owner)

    def remove(self, sequence: Sequence) -> None:
        """Take out any sequence."""
        priority, owner = sequence.request.priority, sequence.request.owner
        owners = self._classes[priority]
        owners[owner].remove(sequence)
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._classes[priority]
        self._size -= 1
        self._next = None

    # -- what was served -------------------------------------------------------------------------------------

    def share(self, sequence: Sequence) -> FairShare:
        """The counters of those that it competes with."""
        return self._shares.setdefault(sequence.request.priority, FairShare())

    def rank(self, sequence: Sequence) -> tuple[int, float]:
        """Its place among others, lower first: its priority, and what its owner was served."""
        return sequence.request.priority, self.share(sequence).served(sequence.request.owner)

    @property
    def is_contested(self) -> bool:
        """Whether anybody competes with another: otherwise nothing needs to be counted."""
        return any(share.is_contested for share in self._shares.values())

    def charge(self, sequence: Sequence, num_tokens: int, cost: float = 1.0) -> None:
        """The first `num_tokens` tokens of a sequence are computed; those that were not counted yet count
        `cost` each. What has to be computed again, after the sequence made room for another, costs nothing.
        """
        if num_tokens > sequence.num_charged:
            request, num_new = sequence.request, num_tokens - sequence.num_charged
            self._shares[request.priority].charge(request.owner, cost * num_new, request.weight)
            sequence.num_charged = num_tokens
            self._next = None

    def forget(self) -> None:
        """Nothing waits or runs: who was served what no longer counts."""
        self._shares.clear()
