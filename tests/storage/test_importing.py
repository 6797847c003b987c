"""Imports: what an export holds comes back as it was, and what was deleted and is needed, as deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from storage import (
    DeletedConversation,
    DeletedResponse,
    ExportedResponse,
    ImportedConversation,
    ImportedResponse,
    NewFork,
    NewItem,
    NewResponseFork,
    NotFound,
    OwnedByAnother,
    Place,
    Storage,
    StoredItem,
)
from tests.support.making import OTHER, OWNER, call, message, new, now, rows, turn


async def exported(storage: Storage, *, limit: int = 2) -> list[ExportedResponse]:
    """All that an export reads of responses, page by page."""
    found: list[ExportedResponse] = []
    carried: set[str] = set()
    after = None
    while page := await storage.export_responses(OWNER, after=after, limit=limit, carried=carried):
        found += page
        carried.update(one.id for each in page for one in each.deleted)
        carried.update(
            each.deleted_conversation.conversation.id
            for each in page
            if each.deleted_conversation is not None
        )
        after = (page[-1].response.created_at, page[-1].response.id)
    return found


def carries(found: Sequence[ExportedResponse]) -> dict[str, list[str]]:
    """What was deleted that is exported beside each response, of those that have any."""
    return {each.response.id: [one.id for one in each.deleted] for each in found if each.deleted}


def _new(items: Sequence[StoredItem]) -> list[NewItem]:
    return [NewItem(item.id, item.kind, item.body, item.call_id, item.name, item.private) for item in items]


def _deleted(one: DeletedResponse, at: int) -> ImportedResponse:
    same = {field.name: getattr(one, field.name) for field in fields(one)}
    same |= {"input": _new(one.input), "output": _new(one.output), "deleted_at": at}
    return ImportedResponse(head=b"", echo=b"", plan=b"", **same)


def _deleted_conversation(one: DeletedConversation, at: int) -> ImportedConversation:
    shown = one.conversation
    places = [
        Place(place.position, _new([place.item])[0], place.created_at, place.direction, place.status)
        for place in one.items
    ]
    return ImportedConversation(
        *(shown.id, shown.created_at, shown.metadata, shown.title, shown.used_at, shown.archived_at),
        *(shown.head, places),
        deleted_at=at,
    )


def imported(found: ExportedResponse, *, whole: bool = True) -> ImportedResponse:
    """A response as an import stores it. whole: with what of its history was deleted, as older exports are
    not."""
    stored, at = found.response, now()
    conversation = found.deleted_conversation if whole else None
    return ImportedResponse(
        id=stored.id,
        created_at=stored.created_at,
        completed_at=stored.completed_at,
        status=stored.status,
        model=stored.model,
        background=stored.background,
        head=stored.head,
        echo=stored.echo,
        plan=stored.plan,
        previous_response_id=stored.previous_response_id,
        conversation_id=stored.conversation_id,
        conversation_head=stored.conversation_head,
        input=_new(found.input),
        output=_new(stored.output),
        deleted=[_deleted(one, at) for one in found.deleted] if whole else (),
        deleted_conversation=None if conversation is None else _deleted_conversation(conversation, at),
    )


async def told(storage: Storage, id: str) -> list[tuple[str, str | None]]:
    """What a run is told that continues a response: items, and how their turns ended."""
    history = await storage.history(OWNER, previous_response_id=id)
    return [(entry.item.id, entry.response_status) for entry in history]


async def delete(storage: Storage, *ids: str) -> None:
    for id in ids:
        await storage.delete_response(OWNER, id, now())


async def start_afresh(storage: Storage) -> None:
    """An empty database."""
    async for _ in storage.purge(OWNER, now(), entry=None):
        pass
    assert await rows(storage) == {}


async def test_a_chain_whose_beginning_was_deleted_comes_back_whole(storage: Storage) -> None:
    await turn(storage, "r1", message("a"), outputs=[call("a1", "k"), message("a2")], status="incomplete")
    await turn(storage, "r2", message("b"), previous="r1")
    await turn(storage, "r3", message("c"), previous="r2")
    await delete(storage, "r1", "r2")
    before, held = await told(storage, "r3"), (await storage.usage(OWNER)).held
    assert [id for id, _ in before] == ["a", "a1", "a2", "b", "r2.out", "c", "r3.out"]
    [found] = await exported(storage)
    assert carries([found]) == {"r3": ["r2", "r1"]}
    await start_afresh(storage)

    assert await storage.imports.response(OWNER, imported(found))
    assert await told(storage, "r3") == before
    assert (await storage.usage(OWNER)).held == held
    assert await storage.get_items(OWNER, ["a", "b"]) == {}
    for id in ("r1", "r2"):
        with pytest.raises(NotFound):
            await storage.get_response(OWNER, id)
        with pytest.raises(NotFound):
            await storage.start_response(new("no", previous=id))
    assert [one.id for one in (await storage.list_responses(OWNER, limit=9)).data] == ["r3"]
    assert carries(await exported(storage)) == {"r3": ["r2", "r1"]}
    # Begun again, it changes nothing; and what was deleted goes with the last that needs it.
    there = await rows(storage)
    assert not await storage.imports.response(OWNER, imported(found))
    assert await rows(storage) == there
    await turn(storage, "r4", message("d"), previous="r3")
    assert await told(storage, "r4") == [*before, ("d", "completed"), ("r4.out", "completed")]
    await delete(storage, "r4", "r3")
    assert await rows(storage) == {}


async def test_what_several_need_is_exported_once_and_what_none_needs_is_not(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    await turn(storage, "r2", message("b"), previous="r1")
    for id in ("x", "y"):
        await turn(storage, id, message(f"{id}1"), previous="r2")
    await turn(storage, "x2", message("x2.in"), previous="x")
    await turn(storage, "z", message("z1"), previous="x2")
    # Two that nobody goes on from but what is not exported, or has all that it needs of it: a fork.
    await turn(storage, "p", message("p1"))
    await storage.start_response(new("flies", message("f"), previous="p"))
    await turn(storage, "q", message("q1"), outputs=[message("q2"), message("q3")])
    await storage.fork_response(OWNER, "q", NewResponseFork("fork", now(), b"{}", b"", b"", "q2"))
    await delete(storage, "r1", "r2", "x2", "p", "q")
    found = await exported(storage)
    assert carries(found) == {"x": ["r2", "r1"], "z": ["x2"]}
    assert carries(await exported(storage, limit=9)) == carries(found)
    assert [one.response.id for one in found] == ["x", "y", "z", "flies", "fork"]
    before = {id: await told(storage, id) for id in ("x", "y", "z", "fork")}
    await start_afresh(storage)

    for one in found:
        if one.response.id != "flies":
            await storage.imports.response(OWNER, imported(one))
    assert {id: await told(storage, id) for id in before} == before
    await delete(storage, "x", "z")
    assert await told(storage, "y") == before["y"]
    await delete(storage, "y", "fork")
    assert await rows(storage) == {}


async def test_what_ran_in_a_deleted_conversation_keeps_what_it_stood_on(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b'{"k":"v"}', [message("s1"), message("s2")])
    await turn(storage, "t1", message("a"), conversation="c1", status="incomplete")
    await turn(storage, "t2", message("b"), conversation="c1")
    await turn(storage, "t3", message("c"), conversation="c1")
    await turn(storage, "on", message("d"), previous="t2")
    await turn(storage, "t4", message("e"), conversation="c1")
    await storage.delete_conversation_item(OWNER, "c1", "s2", now())
    await storage.delete_conversation(OWNER, "c1", now())
    await delete(storage, "t1", "t2", "t4")
    before = {id: await told(storage, id) for id in ("t3", "on")}
    assert before["on"] == [
        *(("s1", None), ("a", "incomplete"), ("t1.out", "incomplete"), ("b", "completed")),
        *(("t2.out", "completed"), ("d", "completed"), ("on.out", "completed")),
    ]
    found = await exported(storage)
    assert carries(found) == {"on": ["t2"]}
    [carried] = [one.deleted_conversation for one in found if one.deleted_conversation is not None]
    # Below the beginning of t3's turn, and without what was deleted of it before.
    assert [place.item.id for place in carried.items] == ["s1", "a", "t1.out", "b", "t2.out"]
    await delete(storage, "t3")
    [lesser] = [one.deleted_conversation for one in await exported(storage) if one.deleted_conversation]
    assert [place.item.id for place in lesser.items] == ["s1", "a", "t1.out"]  # where t2 began
    await start_afresh(storage)

    for one in found:
        await storage.imports.response(OWNER, imported(one))
    assert {id: await told(storage, id) for id in before} == before
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "c1")
    assert await storage.export_conversations(OWNER, after=None, limit=9) == ()
    assert await storage.get_items(OWNER, ["s1", "s2"]) == {}
    await delete(storage, "t3", "on")
    assert await rows(storage) == {}


async def test_the_items_of_a_deleted_fork_of_a_conversation_come_with_it(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("a"), message("b")])
    await storage.fork_conversation(OWNER, "c1", NewFork("c2", now(), "a"))
    await turn(storage, "t1", message("x"), conversation="c2")
    await turn(storage, "t2", message("y"), conversation="c2")
    for id in ("c1", "c2"):
        await storage.delete_conversation(OWNER, id, now())
    before, found = await told(storage, "t2"), await exported(storage)
    await start_afresh(storage)
    for one in found:
        await storage.imports.response(OWNER, imported(one))
    assert await told(storage, "t2") == before
    assert [id for id, _ in before] == ["a", "x", "t1.out", "y", "t2.out"]


async def test_what_an_older_import_has_left_out_is_added(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    await turn(storage, "r2", message("b"), previous="r1")
    await delete(storage, "r1")
    before, [found] = await told(storage, "r2"), await exported(storage)
    await start_afresh(storage)
    assert await storage.imports.response(OWNER, imported(found, whole=False))
    assert [id for id, _ in await told(storage, "r2")] == ["b", "r2.out"]
    assert not await storage.imports.response(OWNER, imported(found))
    assert await told(storage, "r2") == before


async def test_what_is_there_stays_as_it_is(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    await turn(storage, "r2", message("b"), previous="r1")
    [first, second] = await exported(storage)
    await delete(storage, "r1")
    [found] = await exported(storage)
    await delete(storage, "r2")
    assert await rows(storage) == {}
    # One that is seen here is not deleted by an import, and one that is deleted is not seen again by one.
    await storage.imports.response(OWNER, imported(first))
    await storage.imports.response(OWNER, imported(found))
    assert (await storage.get_response(OWNER, "r1")).id == "r1"
    await delete(storage, "r1")
    assert not await storage.imports.response(OWNER, imported(first))
    assert not await storage.imports.response(OWNER, imported(second))
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")
    await start_afresh(storage)
    await turn(storage, "r1", message("a"), owner=OTHER)
    with pytest.raises(OwnedByAnother, match="response r1 is in this database"):
        await storage.imports.response(OWNER, imported(found))
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r2")


async def test_a_deleted_response_that_has_not_ended_is_none(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    await turn(storage, "r2", message("b"), previous="r1")
    await delete(storage, "r1")
    [found] = await exported(storage)
    wrong = imported(found)
    object.__setattr__(wrong.deleted[0], "status", "in_progress")
    with pytest.raises(ValueError, match="r1 has not ended"):
        await storage.imports.response(OWNER, wrong)
