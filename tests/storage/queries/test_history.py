"""History: its shapes, its pins, and that no deletion changes what lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import ClosedItem, HistoryItem, NotFound, RunAppend, Storage, open_storage
from tests.support.making import OTHER, OWNER, RUNNER, check, finish, message, new, now, turn, url


def shape(history: Sequence[HistoryItem]) -> list[str]:
    return [h.item.id for h in history]


async def test_nothing_comes_from_nothing(storage: Storage) -> None:
    assert await storage.history(OWNER) == ()
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    assert await storage.history(OWNER, conversation_id="c1") == ()
    for ref in ({"previous_response_id": "nope"}, {"conversation_id": "nope"}):
        with pytest.raises(NotFound):
            await storage.history(OWNER, **ref)  # type: ignore[arg-type]


async def test_a_chain(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"), message("m2"), outputs=[message("o1"), message("o2")])
    await turn(storage, "r2", message("m3"), previous="r1", status="failed")
    await turn(storage, "fork", message("m4"), previous="r1")
    history = await storage.history(OWNER, previous_response_id="r2")
    assert [(h.item.id, h.response_id, h.response_status, h.direction) for h in history] == [
        ("m1", "r1", "completed", "in"),
        ("m2", "r1", "completed", "in"),
        ("o1", "r1", "completed", "out"),
        ("o2", "r1", "completed", "out"),
        ("m3", "r2", "failed", "in"),
        ("r2.out", "r2", "failed", "out"),
    ]
    with pytest.raises(NotFound):
        await storage.history(OTHER, previous_response_id="r2")


async def test_more_than_ten_items_keep_their_order(storage: Storage) -> None:
    names = [f"m{number}" for number in range(30)]
    await turn(storage, "r1", *map(message, names), outputs=[message(f"o{n}") for n in range(12)])
    assert shape(await storage.history(OWNER, previous_response_id="r1")) == [
        *names,
        *(f"o{n}" for n in range(12)),
    ]


async def test_a_long_chain(storage: Storage) -> None:
    previous = None
    for number in range(60):
        await turn(storage, f"r{number}", message(f"m{number}"), previous=previous)
        previous = f"r{number}"
    expected = [id for number in range(60) for id in (f"m{number}", f"r{number}.out")]
    assert shape(await storage.history(OWNER, previous_response_id=previous)) == expected


async def test_conversation_and_chain_together(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("seed")])
    await turn(storage, "r1", message("m1"), conversation="c1")
    await turn(storage, "r2", message("m2"), conversation="c1")
    assert shape(await storage.history(OWNER, conversation_id="c1")) == [
        "seed",
        "m1",
        "r1.out",
        "m2",
        "r2.out",
    ]
    assert shape(await storage.history(OWNER, conversation_id="c1", conversation_head=3)) == [
        "seed",
        "m1",
        "r1.out",
    ]
    # A response of a conversation stands on what the conversation held when it began.
    assert shape(await storage.history(OWNER, previous_response_id="r1")) == ["seed", "m1", "r1.out"]
    await turn(storage, "r3", message("m3"), previous="r1")
    assert shape(await storage.history(OWNER, previous_response_id="r3")) == [
        "seed",
        "m1",
        "r1.out",
        "m3",
        "r3.out",
    ]
    entries = await storage.history(OWNER, conversation_id="c1")
    assert [(h.response_id, h.response_status, h.direction) for h in entries[:3]] == [
        (None, None, "in"),
        ("r1", "completed", "in"),
        ("r1", "completed", "out"),
    ]
    # The conversation may go: what stands on it stays.
    await storage.delete_conversation(OWNER, "c1", now())
    assert shape(await storage.history(OWNER, previous_response_id="r3")) == [
        "seed",
        "m1",
        "r1.out",
        "m3",
        "r3.out",
    ]
    with pytest.raises(NotFound):
        await storage.history(OWNER, conversation_id="c1")


async def test_a_pinned_run_sees_what_was_deleted_under_it(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m0"), message("m1")])
    await turn(storage, "old", message("x"))
    run = new("r1", message("m2"), conversation="c1")
    claim = await storage.start_response(run)
    chained = new("r2", message("y"), previous="old")
    await storage.start_response(chained)
    await storage.delete_conversation_item(OWNER, "c1", "m0", now())
    await storage.add_conversation_items(OWNER, "c1", [message("late")])
    await storage.delete_response(OWNER, "old", now())

    pinned = await storage.history(OWNER, conversation_id="c1", conversation_head=2, as_of=run.created_at)
    assert shape(pinned) == ["m0", "m1"]
    assert shape(await storage.history(OWNER, conversation_id="c1")) == ["m1", "late"]
    own = await storage.history(OWNER, previous_response_id="r1", as_of=run.created_at)
    assert shape(own) == ["m0", "m1", "m2"]
    assert shape(await storage.history(OWNER, previous_response_id="old", as_of=chained.created_at)) == [
        "x",
        "old.out",
    ]
    with pytest.raises(NotFound):
        await storage.history(OWNER, previous_response_id="old")

    await storage.delete_conversation(OWNER, "c1", now())
    pinned = await storage.history(OWNER, conversation_id="c1", conversation_head=2, as_of=run.created_at)
    assert shape(pinned) == ["m0", "m1"]
    # The turn ends in a conversation that is gone: nothing is appended, nothing is left hanging.
    out = (ClosedItem(0, message("o1")),)
    assert not await storage.append([RunAppend("r1", claim.fence, closed=out, finish=finish(append=True))])
    assert shape(await storage.history(OWNER, previous_response_id="r1")) == ["m1", "m2", "o1"]


async def test_a_deleted_item_goes_when_no_run_can_see_it(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m0"), message("m1")])
    await storage.delete_conversation_item(OWNER, "c1", "m0", now())
    assert await stored_items(storage) == {"m1"}
    claim = await storage.start_response(new("r1", conversation="c1"))
    await storage.delete_conversation_item(OWNER, "c1", "m1", now())
    assert await stored_items(storage) == {"m1"}
    assert not await storage.append([RunAppend("r1", claim.fence, finish=finish(append=True))])
    assert await stored_items(storage) == set()


async def stored_items(storage: Storage) -> set[str]:
    from sqlalchemy import text

    return await storage._read(lambda conn: set(conn.execute(text("SELECT id FROM items")).scalars()))


# A history that was true when a response ended stays true, whatever is deleted around it.
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["chain", "turn", "chain", "turn", "add", "drop_response", "drop_item", "drop_conversation"]
        ),
        st.integers(0, 30),
        st.integers(0, 2),
    ),
    max_size=25,
)


@pytest.mark.long
@given(operations=OPERATIONS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_deletions_never_change_what_lives(
    operations: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("model")
    storage = await open_storage(url(folder), runner=RUNNER)
    alive: dict[str, list[str]] = {}  # response -> its history, by our own bookkeeping
    held: dict[str, list[str]] = {}  # conversation -> its items
    # An item that the client took out of a conversation is gone from histories that stood on it.
    bases: dict[str, set[str]] = {}
    for number, (operation, choice, which) in enumerate(operations):
        conversation = f"c{which}"
        if operation in ("turn", "add", "drop_item") and conversation not in held:
            if operation == "drop_item":
                continue
            conversation = f"c{which}.{number}"
            await storage.create_conversation(OWNER, conversation, now(), b"{}")
            held[conversation] = []
        known = sorted(alive)
        id, item = f"r{number}", f"m{number % 7}"
        new_items = [message(item), message(f"{id}.in")]
        match operation:
            case "chain":
                previous = known[choice % len(known)] if known else None
                await turn(storage, id, *new_items, previous=previous)
                base = alive.get(previous, []) if previous else []
                alive[id] = [*base, item, f"{id}.in", f"{id}.out"]
                bases[id] = set(bases.get(previous, set())) if previous else set()
            case "turn":
                await turn(storage, id, *new_items, conversation=conversation)
                base = held[conversation]
                alive[id] = [*base, item, f"{id}.in", f"{id}.out"]
                bases[id] = {conversation}
                held[conversation] = [*base, *(i for i in alive[id][len(base) :] if i not in base)]
            case "add":
                await storage.add_conversation_items(OWNER, conversation, [message(item)])
                if item not in held[conversation]:
                    held[conversation] = [*held[conversation], item]
            case "drop_response" if known:
                await storage.delete_response(OWNER, known[choice % len(known)], now())
                del alive[known[choice % len(known)]]
            case "drop_item" if held[conversation]:
                dropped = held[conversation][choice % len(held[conversation])]
                await storage.delete_conversation_item(OWNER, conversation, dropped, now())
                held[conversation] = [i for i in held[conversation] if i != dropped]
                for response in [r for r in alive if conversation in bases[r]]:
                    # Which copies were the conversation's is the code's to know: look elsewhere.
                    alive.pop(response)
            case "drop_conversation" if conversation in held:
                await storage.delete_conversation(OWNER, conversation, now())
                del held[conversation]
        for response, expected in alive.items():
            assert shape(await storage.history(OWNER, previous_response_id=response)) == expected
        for name, expected in held.items():
            assert shape(await storage.history(OWNER, conversation_id=name)) == expected
    await storage.close()
    check(storage.url)
