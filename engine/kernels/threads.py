"""How many threads torch computes with. It is one number for all engines of a process, and each sets its own
before it computes."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def own_threads() -> int:
    """What torch takes by itself, or what its user told it before any engine set a number."""
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Have torch compute with so many threads, on this thread and on those that begin to compute later."""
    own_threads()  # which nobody can read any more afterwards
    torch.set_num_threads(count)
