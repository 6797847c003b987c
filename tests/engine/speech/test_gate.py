"""So many sounds at once, and nobody's first one behind the many of another."""

from __future__ import annotations

import asyncio

from engine.speech.gate import Gate


async def test_owners_take_turns_and_one_more_of_another_gets_in() -> None:
    gate, inside, ends = Gate(2), list[str](), dict[str, asyncio.Event]()

    async def visit(name: str) -> None:
        ends[name] = asyncio.Event()
        async with gate.enter(name[0]):
            inside.append(name)
            await ends[name].wait()
            inside.remove(name)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    visits = {name: asyncio.create_task(visit(name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2")}
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
