"""Prompt templates in the database: numbers of versions, owners, and what they count."""

from __future__ import annotations

import asyncio

import pytest

from storage import DefaultVersion, NotFound, PromptChange, Storage, StoredPrompt
from tests.support.making import OTHER, OWNER


def prompt(id: str = "p1", owner: str = OWNER, at: int = 1) -> StoredPrompt:
    return StoredPrompt(id, owner, at, "a name", b"{}")


async def test_versions_count_up_and_are_given_once(storage: Storage) -> None:
    prompts = storage.prompts
    await prompts.create(prompt(), b'{"a":1}')
    changes = [PromptChange(body=b'{"a":2}'), PromptChange(body=b'{"a":3}', default_version=1)]
    for change in changes:
        await prompts.change(OWNER, "p1", change, 5)
    found, version = await prompts.version(OWNER, "p1")
    assert (found.default_version, found.latest_version, version.body) == (1, 3, b'{"a":1}')
    await prompts.delete_version(OWNER, "p1", 3)
    changed = await prompts.change(OWNER, "p1", PromptChange(body=b"{}"), 6)
    assert (changed.default_version, changed.latest_version) == (4, 4)
    page = await prompts.versions(OWNER, "p1", limit=10)
    assert [row.version for row in page.data] == [4, 2, 1]
    with pytest.raises(DefaultVersion):
        await prompts.delete_version(OWNER, "p1", 4)
    with pytest.raises(NotFound):
        await prompts.change(OWNER, "p1", PromptChange(default_version=3), 7)


async def test_changes_at_once_get_numbers_of_their_own(storage: Storage) -> None:
    await storage.prompts.create(prompt(), b"{}")
    changes = (storage.prompts.change(OWNER, "p1", PromptChange(body=b"{}"), 5) for _ in range(8))
    made = await asyncio.gather(*changes)
    assert sorted(one.latest_version for one in made) == [*range(2, 10)]


async def test_another_owner_finds_nothing(storage: Storage) -> None:
    prompts = storage.prompts
    await prompts.create(prompt(), b"{}")
    for verb in (
        prompts.get(OTHER, "p1"),
        prompts.version(OTHER, "p1", 1),
        prompts.versions(OTHER, "p1", limit=1),
        prompts.change(OTHER, "p1", PromptChange(name="x"), 2),
        prompts.delete_version(OTHER, "p1", 1),
        prompts.delete(OTHER, "p1"),
        prompts.list(OTHER, limit=1, after="p1"),
    ):
        with pytest.raises(NotFound) as unknown:
            await verb
        assert unknown.value.args == ("prompt", "p1")
    assert (await prompts.list(OTHER, limit=9)).data == ()


async def test_they_count_among_what_an_owner_stores_and_go_with_it(storage: Storage) -> None:
    before = (await storage.usage(OWNER)).total
    await storage.prompts.create(prompt(), b"x" * 1000)
    await storage.prompts.create(prompt("p2", OTHER), b"{}")
    assert (await storage.usage(OWNER)).total - before > 1000
    async for _ in storage.purge(OWNER, 10, entry=None):
        pass
    assert (await storage.usage(OWNER)).total == before
    assert (await storage.prompts.get(OTHER, "p2")).id == "p2"
    with pytest.raises(NotFound):
        await storage.prompts.get(OWNER, "p1")
