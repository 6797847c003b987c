"""What a server has counted, and what its replies say that they used."""

from __future__ import annotations

from server.clock import now_us
from storage import Counts, UsageFilter
from tests.support.running import Running
from tests.support.wire import Json


async def used(running: Running, kind: str = "completions") -> Counts:
    """All that was counted of a kind of use, whoever used it."""
    await running.context.meter.flush()
    wanted = UsageFilter(kind, 0, now_us() + 60_000_000)
    sums = await running.context.storage.usage_sums(wanted, (), 86_400_000_000)
    total = Counts()
    for one in sums:
        total += one.counts
    return total


def told(*responses: Json) -> Counts:
    """What these responses say that they used."""
    total = Counts()
    for response in responses:
        usage = response["usage"]
        total += Counts(
            1,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        )
    return total
