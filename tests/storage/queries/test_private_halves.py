"""The private half of an item: it comes and goes with the item, and counts as stored."""

from __future__ import annotations

from dataclasses import replace

from storage import Storage
from tests.support.making import OTHER, OWNER, message, now, turn

SHOWN = b'{"output":"' + b"x" * 5000 + b'"}'


async def test_it_is_read_wherever_the_item_is(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    searched = replace(message("o1"), private=SHOWN)
    await turn(storage, "r1", message("m1"), conversation="c1", outputs=[searched])
    await turn(storage, "r2", message("m2"), searched, previous="r1")
    kept = {"m1": None, "o1": SHOWN, "m2": None, "r2.out": None}

    stored = await storage.get_response(OWNER, "r1")
    assert [item.private for item in stored.output] == [SHOWN]
    for ref in ({"previous_response_id": "r2"}, {"conversation_id": "c1"}):
        history = await storage.history(OWNER, **ref)  # type: ignore[arg-type]
        assert {one.item.id for one in history} <= kept.keys()
        assert all(one.item.private == kept[one.item.id] for one in history)
    page = await storage.input_items(OWNER, "r2", limit=10, order="asc", after=None)
    assert [item.private for item in page.data] == [None, SHOWN], "an item that is sent back finds its own"
    listed = await storage.list_conversation_places(OWNER, "c1", limit=10, order="asc", after=None)
    assert [place.item.private for place in listed.data] == [None, SHOWN]
    assert (await storage.get_items(OWNER, ["o1"]))["o1"].private == SHOWN
    assert await storage.get_items(OTHER, ["o1"]) == {}


async def test_an_item_that_is_sent_back_does_not_lose_it(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"), outputs=[replace(message("o1"), private=SHOWN)])
    await turn(storage, "r2", message("o1"), previous="r1")  # the same body, and nothing else is known of it
    assert (await storage.get_items(OWNER, ["o1"]))["o1"].private == SHOWN


async def test_it_counts_and_is_erased_with_the_item(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    before = (await storage.usage(OWNER)).held
    searched = replace(message("o1"), private=SHOWN)
    await storage.add_conversation_items(OWNER, "c1", [searched], now=now())
    assert (await storage.usage(OWNER)).held - before == len(searched.body) + len(SHOWN) + 128
    await storage.delete_conversation_item(OWNER, "c1", "o1", now())
    assert (await storage.usage(OWNER)).held == before
    assert await storage.get_items(OWNER, ["o1"]) == {}
    await storage.add_conversation_items(OWNER, "c1", [message("o1")], now=now())
    assert (await storage.get_items(OWNER, ["o1"]))["o1"].private is None
