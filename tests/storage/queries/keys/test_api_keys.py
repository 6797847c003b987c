"""API keys and owners: made, found, changed, rotated, listed; each change with its entry in the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from storage import AuditFilter, KeyEnded, NotFound, OwnerArchived, Storage, open_storage
from storage.drivers import writer
from tests.support.making import OTHER, OWNER, entry, key

FAR = 10**18


async def actions(storage: Storage) -> list[str]:
    page = await storage.list_audit(AuditFilter(), limit=100)
    return [one.entry.action for one in reversed(page.data)]


async def test_a_key_is_found_by_its_hash_also_when_it_is_revoked(storage: Storage) -> None:
    made = await storage.create_key(key("k1", hash=b"hash-1"), entry=entry())
    await storage.create_key(key("k2", OTHER, hash=b"hash-2"), entry=entry(), owner_name="The others")
    found = await storage.find_key(b"hash-1")
    assert found is not None and found.key == made and made.owner == found.owner.id == OWNER
    found = await storage.find_key(b"hash-2")
    assert found is not None and found.owner.name == "The others"
    assert await storage.find_key(b"hash-3") is None
    assert (await storage.revoke_key("k1", FAR, entry=entry("api_key.deleted"))).revoked_at == FAR
    revoked = await storage.find_key(b"hash-1")
    assert revoked is not None and revoked.key.revoked_at == FAR
    assert [(one.id, one.revoked_at) for one in await storage.list_keys()] == [("k1", FAR), ("k2", None)]
    with pytest.raises(Exception, match=r"(?i)unique"):
        await storage.create_key(key("k3", hash=b"hash-2"), entry=entry())
    for id in ("k1", "nope"):
        with pytest.raises(NotFound):
            await storage.revoke_key(id, FAR, entry=entry("api_key.deleted"))
    assert await actions(storage) == ["api_key.created", "api_key.created", "api_key.deleted"]


async def test_what_a_key_may_do_can_be_changed_while_it_lives(storage: Storage) -> None:
    made = await storage.create_key(key("k1", expires_at=FAR), entry=entry())
    assert made.live(FAR - 1) and not made.live(FAR)
    changes: dict[str, Any] = {"scopes": ("files.read", "model:a"), "expires_at": FAR - 5}
    told = entry("api_key.updated")
    changed = await storage.change_key("k1", 5, changes, entry=told, limits=lambda _: b"{}")
    assert (changed.scopes, changed.expires_at, changed.limits) == (("files.read", "model:a"), FAR - 5, b"{}")
    assert changed == await storage.get_key("k1")
    with pytest.raises(KeyEnded):
        await storage.change_key("k1", FAR, {"name": "new"}, entry=entry("api_key.updated"))
    assert await actions(storage) == ["api_key.created", "api_key.updated"]


async def test_a_successor_takes_over_and_the_old_key_lives_until_it_is_told(storage: Storage) -> None:
    first = await storage.create_key(key("k1", scopes=("chat",), limits=b'{"a":1}'), entry=entry())
    successor = key("k2", "nobody", scopes=(), expires_at=FAR)
    made = await storage.rotate_key("k1", successor, first.created_at + 10**9, entry=entry("api_key.rotated"))
    assert (made.owner, made.scopes, made.limits, made.replaces) == (OWNER, ("chat",), b'{"a":1}', "k1")
    assert made.expires_at == FAR
    old = await storage.get_key("k1")
    assert old.expires_at == first.created_at + 10**9 and old.live(first.created_at + 10**9 - 1)
    await storage.rotate_key("k2", key("k3"), 2 * FAR, entry=entry("api_key.rotated"))
    assert (await storage.get_key("k2")).expires_at == FAR  # never later than it was
    await storage.revoke_key("k3", FAR, entry=entry("api_key.deleted"))
    with pytest.raises(KeyEnded):
        await storage.rotate_key("k3", key("k4"), FAR, entry=entry("api_key.rotated"))


async def test_limits_that_two_processes_change_at_once_are_all_kept(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 60.0)  # they wait for each other, however slow the machine is

    def adding(name: bytes) -> Callable[[bytes | None], bytes]:
        return lambda limits: (limits or b"") + name

    async with AsyncExitStack() as stack:
        both = []
        for runner in ("a", "b"):
            both.append(await open_storage(database_url, runner=runner, lock=False))
            stack.push_async_callback(both[-1].close)
        await both[0].create_key(key("k1"), entry=entry())
        await asyncio.gather(
            *(
                change
                for one, name in zip(both * 8, b"abcdefghijklmnop", strict=True)
                for change in (
                    one.limit_owner(OWNER, adding(bytes([name])), entry=entry()),
                    one.change_key("k1", 5, {}, entry=entry(), limits=adding(bytes([name]))),
                )
            )
        )
        for changed in (await both[0].get_owner(OWNER), await both[1].get_key("k1")):
            assert changed.limits is not None and sorted(changed.limits) == [*b"abcdefghijklmnop"]


async def test_pages_of_keys(storage: Storage) -> None:
    for number in range(5):
        scopes = ("admin", "chat.read") if number % 2 else ("all",)
        await storage.create_key(key(f"k{number}", scopes=scopes), entry=entry())
    await storage.create_key(key("theirs", OTHER, scopes=("administration",)), entry=entry())
    await storage.revoke_key("k2", FAR, entry=entry())
    page = await storage.page_of_keys(owner=OWNER, limit=2)
    assert [one.id for one in page.data] == ["k0", "k1"] and page.has_more
    page = await storage.page_of_keys(owner=OWNER, limit=2, after="k1")
    assert [one.id for one in page.data] == ["k3", "k4"] and not page.has_more
    page = await storage.page_of_keys(owner=OWNER, limit=2, order="desc", after="k3")
    assert [one.id for one in page.data] == ["k1", "k0"] and not page.has_more
    page = await storage.page_of_keys(scope="admin", limit=9)
    assert [one.id for one in page.data] == ["k1", "k3"]
    with pytest.raises(NotFound):
        await storage.page_of_keys(limit=2, after="nope")


async def test_the_last_use_only_moves_on(storage: Storage) -> None:
    await storage.create_key(key("k1"), entry=entry())
    await storage.touch_keys({"k1": 50, "nobody": 1})
    await storage.touch_keys({"k1": 40})
    assert (await storage.get_key("k1")).last_used_at == 50


async def test_owners_come_with_their_keys_and_end_with_them(storage: Storage) -> None:
    await storage.create_owner("o1", "Sales", 1, entry=entry("project.created"))
    await storage.ensure_owners(["o1", "o2"], 2)
    await storage.create_key(key("k1", "o1"), entry=entry())
    await storage.create_key(key("k3", "o3", created_at=3), entry=entry())
    page = await storage.list_owners(limit=2)
    assert [(one.id, one.name) for one in page.data] == [("o1", "Sales"), ("o2", "o2")] and page.has_more
    assert [one.id for one in (await storage.list_owners(limit=2, after="o2")).data] == ["o3"]
    assert (await storage.rename_owner("o1", "Buying", entry=entry("project.updated"))).name == "Buying"
    limited = await storage.limit_owner("o1", lambda _: b'{"rpm":1}', entry=entry("rate_limit.updated"))
    assert limited.limits == b'{"rpm":1}'
    found = await storage.find_key(b"k1")
    assert found is not None and found.owner == limited

    await storage.archive_owner("o1", 9, entry=entry("project.archived"))
    ended = await storage.find_key(b"k1")
    assert ended is not None and ended.key.revoked_at == 9
    assert [one.id for one in (await storage.list_owners(limit=9)).data] == ["o2", "o3"]
    assert [one.id for one in (await storage.list_owners(limit=9, archived=True)).data] == ["o1", "o2", "o3"]
    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: storage.create_key(key("k2", "o1"), entry=entry()),
        lambda: storage.rename_owner("o1", "x", entry=entry()),
        lambda: storage.archive_owner("o1", 10, entry=entry()),
    ]
    for verb in refused:
        with pytest.raises(OwnerArchived):
            await verb()
    with pytest.raises(NotFound):
        await storage.rename_owner("o9", "x", entry=entry())
