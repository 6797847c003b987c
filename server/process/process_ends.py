"""What a server's process and an engine's have in common: how each begins, and why one ends."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator

from server.process.sockets import raise_descriptor_limit

log = logging.getLogger("antiphon")

ENGINE_DIED = 70  # EX_SOFTWARE


def tune_process() -> None:
    """Have this process take many connections, and its threads make way for its event loop."""
    raise_descriptor_limit()
    # A thread that computes hands over to the event loop sooner: [measured] 64 streams slow an engine step to
    # 2.4 ms at the default of 5 ms, and to 1.0 ms at this.
    sys.setswitchinterval(1e-4)
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
