"""Stored chat completions: whose they are, in which order, by which metadata, and when they go."""

from __future__ import annotations

import pytest

from storage import ChatCompletionKnown, NewChatCompletion, NotFound, Storage

OWNER, OTHER = "ann", "bob"


def new(number: int, owner: str = OWNER, model: str = "m", **metadata: str) -> NewChatCompletion:
    return NewChatCompletion(
        id=f"chatcmpl-{number}",
        owner=owner,
        created_at=number,
        model=model,
        metadata=metadata,
        body=b'{"id":"chatcmpl-%d"}' % number,
        messages=b"[]",
    )


async def ids(storage: Storage, owner: str = OWNER, **wanted: object) -> list[str]:
    page = await storage.chat_completions.list(owner, **{"limit": 100, **wanted})  # type: ignore[arg-type]
    return [stored.id.removeprefix("chatcmpl-") for stored in page.data]


async def test_it_is_its_owners(storage: Storage) -> None:
    stored = await storage.chat_completions.create(new(1, a="b"))
    assert (stored.id, stored.metadata, stored.body) == ("chatcmpl-1", b'{"a":"b"}', b'{"id":"chatcmpl-1"}')
    assert await storage.chat_completions.get(OWNER, "chatcmpl-1") == stored
    assert await storage.chat_completions.messages(OWNER, "chatcmpl-1") == b"[]"
    assert await storage.chat_completions.is_known(OWNER, "chatcmpl-1")
    with pytest.raises(ChatCompletionKnown):
        await storage.chat_completions.create(new(1))
    assert not await storage.chat_completions.is_known(OTHER, "chatcmpl-1")
    for verb in ("get", "messages", "delete"):
        with pytest.raises(NotFound):
            await getattr(storage.chat_completions, verb)(OTHER, "chatcmpl-1")
    with pytest.raises(NotFound):
        await storage.chat_completions.change(OTHER, "chatcmpl-1", {})
    await storage.chat_completions.create(new(1, OTHER))  # an id is one owner's
    await storage.chat_completions.delete(OWNER, "chatcmpl-1")
    with pytest.raises(NotFound):
        await storage.chat_completions.get(OWNER, "chatcmpl-1")
    assert await ids(storage, OTHER) == ["1"]


async def test_pages_and_filters(storage: Storage) -> None:
    for number in range(1, 7):
        tags = {"even": "yes"} if number % 2 == 0 else {}
        model = "small" if number > 4 else "m"
        await storage.chat_completions.create(new(number, model=model, at=str(number), **tags))
    await storage.chat_completions.create(new(9, OTHER, even="yes"))
    assert await ids(storage) == list("123456")
    assert await ids(storage, order="desc") == list("654321")
    assert await ids(storage, after="chatcmpl-2", limit=2) == list("34")
    assert await ids(storage, after="chatcmpl-3", order="desc") == list("21")
    assert await ids(storage, model="small") == list("56")
    assert await ids(storage, metadata={"even": "yes"}) == list("246")
    assert await ids(storage, metadata={"even": "yes", "at": "4"}) == ["4"]
    assert await ids(storage, metadata={"even": "no"}) == []
    page = await storage.chat_completions.list(OWNER, limit=5, metadata={"even": "yes"})
    assert not page.has_more
    assert (await storage.chat_completions.list(OWNER, limit=5)).has_more
    with pytest.raises(NotFound):
        await ids(storage, after="chatcmpl-9")


async def test_changed_metadata_is_what_filters_ask(storage: Storage) -> None:
    await storage.chat_completions.create(new(1, a="b", nul="\0", long="x" * 512))
    assert await ids(storage, metadata={"nul": "\0", "long": "x" * 512}) == ["1"]
    before = (await storage.usage(OWNER)).held
    changed = await storage.chat_completions.change(OWNER, "chatcmpl-1", {"a": "c"})
    assert changed.metadata == b'{"a":"c"}'
    assert await ids(storage, metadata={"a": "b"}) == [] and await ids(storage, metadata={"a": "c"}) == ["1"]
    assert (await storage.usage(OWNER)).held < before


async def test_what_it_takes_counts_until_it_goes(storage: Storage) -> None:
    assert (await storage.usage(OWNER)).held == 0
    await storage.chat_completions.create(new(1))
    assert (await storage.usage(OWNER)).held == len(b"{}") + len(b'{"id":"chatcmpl-1"}') + len(b"[]")
    await storage.chat_completions.delete(OWNER, "chatcmpl-1")
    assert (await storage.usage(OWNER)).held == 0


async def test_the_old_and_the_many_go(storage: Storage) -> None:
    for number in range(1, 41):
        await storage.chat_completions.create(new(number, a="b"))
    await storage.chat_completions.create(new(1, OTHER))
    await storage.chat_completions.create(new(50, OTHER))
    assert sum([n async for n in storage.chat_completions.sweep(before=None, most=None)]) == 0
    assert sum([n async for n in storage.chat_completions.sweep(before=3, most=None)]) == 4
    assert (await ids(storage))[0] == "4" and await ids(storage, OTHER) == ["50"]
    assert sum([n async for n in storage.chat_completions.sweep(before=None, most=2)]) == 35
    assert await ids(storage) == ["39", "40"] and await ids(storage, OTHER) == ["50"]


async def test_a_purge_takes_what_was_there(storage: Storage) -> None:
    for number in (1, 2, 30):
        await storage.chat_completions.create(new(number, a="b"))
    await storage.chat_completions.create(new(1, OTHER))
    went = [step async for step in storage.purge(OWNER, 5, entry=None)]
    assert sum(step.chat_completions for step in went) == 2
    assert await ids(storage) == ["30"] and await ids(storage, OTHER) == ["1"]
