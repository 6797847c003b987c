"""So many sounds at once, and nobody's first one behind the many of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.speech.gate import Gate
from tests.support.blocking import until


def visited(
    gate: Gate, names: Sequence[str]
) -> tuple[list[str], dict[str, asyncio.Event], dict[str, asyncio.Task[None]]]:
    """Visits, each of the owner that its name begins with: which are inside, what ends them, their tasks."""
    inside, ends = list[str](), {name: asyncio.Event() for name in names}

    async def visit(name: str) -> None:
        async with gate.enter(name[0]):
            inside.append(name)
            await ends[name].wait()
            inside.remove(name)

    return inside, ends, {name: asyncio.create_task(visit(name)) for name in names}


async def test_two_owners_leave_a_place_for_a_third() -> None:
    names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1", "d1")
    inside, ends, visits = visited(Gate(4), names)
    await until(lambda: len(inside) == 5)
    assert inside == ["a1", "a2", "a3", "b1", "c1"]
    ends["a1"].set()
    await until(lambda: "d1" in inside)
    assert sorted(inside) == ["a2", "a3", "b1", "c1", "d1"], "a first one is before the others' next ones"
    for end in ends.values():
        end.set()
    await asyncio.gather(*visits.values())


async def test_owners_take_turns_and_one_more_of_another_gets_in() -> None:
    gate = Gate(2)
    inside, ends, visits = visited(gate, ("a1", "a2", "a3", "a4", "b1", "b2"))

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    await settle()
    assert sorted(inside) == ["a1", "a2", "b1"]  # b1 is the one more
    ends["a1"].set()
    await settle()
    assert sorted(inside) == ["a2", "b1"]
    visits["a3"].cancel()
    ends["a2"].set()
    await settle()
    assert sorted(inside) == ["b1", "b2"] or sorted(inside) == ["a4", "b1"]
    for end in ends.values():
        end.set()
    await asyncio.gather(*visits.values(), return_exceptions=True)
    assert inside == []
    async with asyncio.timeout(5), gate.enter("c"):  # every place was given back
        pass
