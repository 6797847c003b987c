"""What a server's process and an engine's have in common: how each begins, and why one ends."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator

from server.process.sockets import raise_descriptor_limit

log = logging.getLogger("antiphon")

ENGINE_DIED = 70  # EX_SOFTWARE

SWITCH_S = 5e-4
"""How long a thread that computes keeps the interpreter's lock from others. Python's 5 ms hold up the loop.
[measured] When a step of the engine asked for the lock 11 times, 64 stored streams got 6 % more tokens a
second at this than at 0.1 ms, where the loop is made to hand over too often (BENCHMARKS.md)."""


def tune_process() -> None:
    """Have this process take many connections, and its threads make way for its event loop."""
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    # Young objects here are mostly events that wait for their readers, and no garbage: [measured] a look
    # through them every 700 takes 9 to 13 us of the loop per event with 64 streams, and 5 to 6 at this.
    gc.set_threshold(5_000)


def reasons(failure: BaseException, *foreseen: type[BaseException]) -> Iterator[str]:
    """One line per cause; an error that is none of those foreseen, and no ValueError, keeps its traceback."""
    if isinstance(failure, BaseExceptionGroup):
        for each in failure.exceptions:
            yield from reasons(each, *foreseen)
    elif isinstance(failure, (*foreseen, ValueError)):
        yield str(failure)
    else:
        log.error("the server could not start", exc_info=failure)
        yield f"could not start: {failure!r}"
