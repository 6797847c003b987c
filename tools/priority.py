"""How a process that others could wait for less stands back behind the server.

Imports nothing of ours: its text is also handed to processes that have nothing of ours.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

NICENESS = 12
"""Of a processor that both want, such a process gets a fifteenth of what the server gets."""

OOM_SCORE = 900
"""Of 1000, which is added to how much of the machine's memory such a process has (proc(5), oom_score_adj)."""


def stand_back() -> None:
    """Be as nice as that, with the session of this process and all that it will start."""
    os.nice(NICENESS)
    let_session_stand_back("self")


def end_first(process: int | str = "self") -> None:
    """Have a process, and what it will start, end before others where the machine's memory runs out."""
    with suppress(OSError), open(f"/proc/{process}/oom_score_adj", "w") as adjust:
        adjust.write(str(OOM_SCORE))


def let_session_stand_back(process: int | str) -> None:
    """Make the session of a process as nice as that, where Linux shares a processor out among sessions first:
    the niceness of a process then counts only inside of its session (sched(7), autogroup)."""
    for _ in range(3):
        try:
            with open(f"/proc/{process}/autogroup", "w") as group:
                group.write(str(NICENESS))
            return
        except BlockingIOError:  # the kernel has set that of another session less than 0.1 s ago
            time.sleep(0.05)
        except OSError:  # it has no such groups
            return


def let_stand_back(process: int) -> None:
    """Make another process, of our own session, as nice as that, with all threads that it has."""
    threads = [process]
    with suppress(OSError):  # this system tells no threads: there it holds for all of a process
        threads = [int(thread) for thread in os.listdir(f"/proc/{process}/task")]
    for thread in threads:
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
