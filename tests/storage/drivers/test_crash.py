"""Crash: a process that is killed between any two instructions has lost nothing that it acknowledged."""

from __future__ import annotations

import random
import re
import signal
import subprocess

import pytest

from storage import NotFound, open_storage
from tests.support.forking import READY
from tests.support.making import OWNER, check, claim_all

KILLS = 10

# Goes on with what an earlier process left, runs eight more, and says what storage has acknowledged.
CHILD = """if True:
    import asyncio, os, sys
    from storage import ClosedItem, RunAppend, open_storage
    from tests.support.making import claim_all, finish, message, new, record

    def say(line):
        os.write(1, (line + "\\n").encode())

    async def carry_on(storage, claim):
        seq = claim.next_seq
        say(f"claimed {claim.response_id} {seq}")
        for step in range(12):
            size = 1 + (seq + step) % 3
            added = (record(seq, size, tokens=[seq]),)
            assert not await storage.append([RunAppend(claim.response_id, claim.fence, records=added)])
            seq += size
            say(f"appended {claim.response_id} {seq}")
        out = ClosedItem(0, message(claim.response_id + ".out"))
        end = {"records": (record(seq),), "closed": (out,), "finish": finish(append=True)}
        assert not await storage.append([RunAppend(claim.response_id, claim.fence, **end)])
        say(f"finished {claim.response_id} {seq + 1}")

    async def run(storage, id):
        conversation = id + ".conv"
        await storage.create_conversation("tenant-a", conversation, 1, b"{}")
        start = new(id, message(id + ".in"), conversation=conversation, runner="r")
        claim = await storage.start_response(start)
        say(f"started {id} {claim.next_seq}")
        await carry_on(storage, claim)

    async def main():
        storage = await open_storage(sys.argv[1], runner="r")
        left = [carry_on(storage, claim) for claim in await claim_all(storage)]
        await asyncio.gather(*left, *(run(storage, f"{sys.argv[2]}-{number}") for number in range(8)))
        say("done")

    asyncio.run(main())
"""


@pytest.mark.sampled(2)
async def test_a_kill_loses_nothing_acknowledged(database_url: str) -> None:
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    print(f"seed {seed}")
    ends: dict[str, int] = {}  # response -> the first number that was not acknowledged
    finished: set[str] = set()
    for kill in range(KILLS):
        child = subprocess.Popen(
            [READY, "-c", CHILD, database_url, f"k{kill}"], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = []
        for _ in range(draw.randrange(1, 110)):
            lines.append(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        for line in lines:
            if said := re.fullmatch(r"(\w+) (\S+) (\d+)\n", line):
                what, id, seq = said[1], said[2], int(said[3])
                if what == "claimed":
                    assert seq >= ends.get(id, 0) and id not in finished
                ends[id] = max(seq, ends.get(id, 0))
                if what == "finished":
                    finished.add(id)
        check(database_url)
    storage = await open_storage(database_url, runner="r")
    for id, end in ends.items():
        log = await storage.records(id, after=-1, limit_bytes=1 << 30)
        assert log[-1].first_seq + log[-1].num_events >= end
        stored = await storage.get_response(OWNER, id)
        history = await storage.history(OWNER, conversation_id=f"{id}.conv")
        if id in finished:
            assert stored.status == "completed" and [item.id for item in stored.output] == [f"{id}.out"]
        assert [h.item.id for h in history] == (
            [f"{id}.in", f"{id}.out"] if stored.status == "completed" else []
        )
    claims = {claim.response_id: claim for claim in await claim_all(storage)}
    assert claims.keys() >= ends.keys() - finished - await completed(storage, ends.keys() - finished)
    assert len(ends) > KILLS
    await storage.close()


async def completed(storage: object, ids: set[str]) -> set[str]:
    """Ended, though the kill came before the word of it."""
    found = set()
    for id in ids:
        try:
            if (await storage.get_response(OWNER, id)).status == "completed":  # type: ignore[attr-defined]
                found.add(id)
        except NotFound:
            raise AssertionError(f"{id} was acknowledged and is gone") from None
    return found
