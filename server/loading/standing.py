"""Where a model stands that is loaded when it is wanted, and what has become of it so far."""

from __future__ import annotations

from dataclasses import dataclass

from server.loading.child import Child
from server.loading.shelf import Held, State


@dataclass(frozen=True, slots=True)
class Standing:
    """A snapshot. pid, memory_bytes: of its process, where it has one; 0 bytes where none is expected back.
    waiting: requests that wait for it. load_s: how long it took to load the last time. failure: why it cannot
    be had."""

    state: State = "unloaded"
    pid: int | None = None
    memory_bytes: int = 0
    waiting: int = 0
    load_s: float = 0.0
    loads: int = 0
    unloads: int = 0
    load_failures: int = 0
    crashes: int = 0
    failure: str | None = None


def standing(held: Held, child: Child) -> Standing:
    """Of a model whose process this process keeps."""
    return Standing(
        state=held.state,
        pid=child.pid,
        memory_bytes=held.model.memory_bytes() if child.is_kept else 0,
        waiting=held.num_waiting,
        load_s=held.load_s,
        loads=held.num_loads,
        unloads=held.num_unloads,
        load_failures=held.num_failures,
        crashes=child.num_crashes,
        failure=held.failure or child.given_up,
    )
