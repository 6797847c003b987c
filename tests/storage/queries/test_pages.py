"""Pages of lists end by their bytes as well: one request cannot have the server read all that it stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest

from storage import NewChatCompletion, NewFork, NewItem, Page, PromptChange, Storage, StoredPrompt
from tests.support.making import OWNER, message, now, turn

SMALL, LARGE = b"x" * 400, b"x" * 2000
"""Of what is stored here, three small ones are a page, and so is a large one alone."""

SIZES = (SMALL, SMALL, SMALL, LARGE, SMALL, SMALL, LARGE)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.records.PAGE_BYTES", 1000)


def items(prefix: str) -> list[NewItem]:
    return [message(f"{prefix}{number}", body) for number, body in enumerate(SIZES)]


async def pages(
    read: Callable[..., Awaitable[Page[Any]]],
    name: Callable[[Any], Any] = lambda row: row.id,
    limit: int = 100,
    **wanted: Any,
) -> list[str]:
    """The names of what a client is given that reads on as long as there is more, page by page."""
    found: list[str] = []
    after = None
    while True:
        page = await read(limit=limit, after=after, **wanted)
        names = [name(row) for row in page.data]
        found.append(" ".join(str(one).rpartition(".")[2] for one in names))
        if not page.has_more:
            return found
        after = names[-1]


async def test_items_of_conversations(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", items(""))
    item_id = attrgetter("item.id")
    read = partial(storage.list_conversation_places, OWNER, "c1")
    assert await pages(read, item_id, order="asc") == ["0 1 2", "3", "4 5 6"]
    assert await pages(read, item_id, order="desc") == ["6", "5 4 3", "2 1 0"]
    assert await pages(read, item_id, order="asc", limit=2) == ["0 1", "2 3", "4 5", "6"]
    # A fork crosses from what it shares to what it has of its own.
    await storage.fork_conversation(OWNER, "c1", NewFork("c2", now(), "1"))
    await storage.add_conversation_items(OWNER, "c2", items("b"), now())
    read = partial(storage.list_conversation_places, OWNER, "c2")
    assert await pages(read, item_id, order="asc") == ["0 1 b0", "b1 b2 b3", "b4 b5 b6"]
    assert await pages(read, item_id, order="desc") == ["b6", "b5 b4 b3", "b2 b1 b0", "1 0"]


async def test_input_of_responses(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", items("c"))
    await turn(storage, "r1", *items("a"), conversation="c1")
    await turn(storage, "r2", *items("b"), message("c0", SMALL), previous="r1")
    read = partial(storage.input_items, OWNER, "r2")
    assert await pages(read, order="asc") == ["b0 b1 b2", "b3", "b4 b5 b6", "c0"]
    assert await pages(read, order="desc") == ["c0 b6", "b5 b4 b3", "b2 b1 b0"]
    # With all that led to it: what stands there twice has its first place.
    read = partial(storage.all_input_items, OWNER, "r2")
    before = ["c0 c1 c2", "c3", "c4 c5 c6", "a0 a1 a2", "a3", "a4 a5 a6"]
    assert await pages(read, order="asc") == [*before, "out b0 b1 b2", "b3", "b4 b5 b6"]
    assert (
        await pages(read, order="desc", limit=1)
        == " ".join([*before, "out b0 b1 b2 b3 b4 b5 b6"]).split()[::-1]
    )


async def test_responses_with_their_output(storage: Storage) -> None:
    for number, body in enumerate(SIZES):
        await turn(storage, f"r{number}", outputs=[message(f"o{number}", body)])
    read = partial(storage.list_responses, OWNER)
    assert await pages(read, order="asc") == ["r0 r1 r2", "r3", "r4 r5 r6"]
    assert await pages(read, order="desc") == ["r6", "r5 r4 r3", "r2 r1 r0"]
    assert [[item.body for item in one.output] for one in (await read(limit=100)).data] == [[LARGE]]


async def test_chat_completions(storage: Storage) -> None:
    for number, body in enumerate(SIZES):
        new = NewChatCompletion(f"chatcmpl.{number}", OWNER, number, "m", {}, body, b"[]")
        await storage.chat_completions.create(new)
    read = partial(storage.chat_completions.list, OWNER)
    assert await pages(read, order="asc") == ["0 1 2", "3", "4 5 6"]


async def test_versions_of_prompts(storage: Storage) -> None:
    await storage.prompts.create(StoredPrompt("p1", OWNER, 1, None, b"{}"), SIZES[0])
    for body in SIZES[1:]:
        await storage.prompts.change(OWNER, "p1", PromptChange(body=body), 2)
    read = partial(storage.prompts.versions, OWNER, "p1")
    assert await pages(read, lambda row: row.version, order="asc") == ["1 2 3", "4", "5 6 7"]


async def test_exports_are_whole(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", items(""))
    found = [*await storage.export_conversation_items(OWNER, "c1", after=-1, limit=100)]
    while more := await storage.export_conversation_items(OWNER, "c1", after=found[-1].position, limit=100):
        found += more
    assert [each.item.body for each in found] == [*SIZES]
    await turn(storage, "r1", message("m"), conversation="c1")
    await storage.delete_conversation(OWNER, "c1", now())
    [exported] = await storage.export_responses(OWNER, after=None, limit=9, carried=frozenset())
    assert exported.deleted_conversation is not None
    assert [each.item.body for each in exported.deleted_conversation.items] == [*SIZES]
