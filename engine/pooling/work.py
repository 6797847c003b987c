"""What crosses to the thread of a pooling engine and back, and what computes there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.pooling.texts import TextInput
from engine.types import EngineError

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Item:
    """One text to be computed; `handle` names it. owner, weight: for fair shares, as in `GenerateRequest`."""

    handle: int
    text: TextInput
    owner: str
    weight: float


class Outcome(NamedTuple):
    """What became of one text. cached: its tokens that were in the prefix cache."""

    handle: int
    vector: Vector | None = None
    error: EngineError | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute these texts."""

    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget these texts: nobody waits for them."""

    handles: Sequence[int]


class Close(NamedTuple):
    """End the thread."""


Inbox = SimpleQueue[Submit | Drop | Close]
Begin = Callable[[Sequence[int]], None]
"""Told the handles of texts that are about to be computed and were not before, if there are any."""


class Worker(Protocol):
    """A loaded model; all of it runs on one thread."""

    architecture: str
    hidden: int  # numbers of a hidden state, or of what the head gives
    max_len: int  # tokens of the longest text
    vocab_size: int
    fingerprint: bytes

    @property
    def num_waiting(self) -> int:
        """Texts that have not been begun with."""
        ...

    def add(self, item: Item) -> None:
        """Queue a text, whose length and token ids were checked."""
        ...

    def drop(self, handle: int) -> None:
        """Forget a text, if it is still there."""
        ...

    def step(self, begin: Begin) -> list[Outcome] | None:
        """Compute one batch; None where nothing is to be done. Raises what keeps the device from
        computing."""
        ...
