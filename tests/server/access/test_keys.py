"""Keys at the door: their end, their successors, their last use, and how long a change takes to count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from server.access import FRESH_S, LOCAL_OWNER, OPERATOR, USE_NOTED_S, Keys, hash_key
from server.admin import keys
from server.clock import now_us
from server.config import Config
from server.errors import ApiError
from storage import FoundKey, NewKey, Storage, open_storage
from tests.support.making import OWNER, RUNNER, entry
from tests.support.making import key as new
from tests.support.running import Running


@asynccontextmanager
async def door(folder: Path) -> AsyncIterator[tuple[Keys, Storage]]:
    config = Config(data=folder, engine="scripted")
    storage = await open_storage(config.db, runner=RUNNER)
    accepted = Keys(config)
    accepted.attach(storage)
    try:
        yield accepted, storage
    finally:
        await accepted.close()
        await storage.close()


def stored(secret: str, id: str = "k1", **fields: object) -> NewKey:
    return new(id, hash=hash_key(secret), **fields)


async def test_a_principal_is_all_that_is_known_of_a_key(tmp_path: Path) -> None:
    async with door(tmp_path) as (accepted, storage):
        local = await accepted.principal("anything")
        assert (local.owner, local.key_id, local.scopes.names) == (LOCAL_OWNER, None, ("all",))
        await storage.create_key(
            stored("sk-1", scopes=("files",), limits=b'{"tokens_per_day":1}'), entry=entry()
        )
        await storage.limit_owner(OWNER, lambda _: b'{"stored_bytes":2}', entry=entry())
        accepted.forget()
        principal = await accepted.principal("sk-1")
        assert (principal.owner, principal.key_id, principal.scopes.names) == (OWNER, "k1", ("files",))
        assert principal.key_limits.given() == {"tokens_per_day": 1}
        assert principal.owner_limits.given() == {"stored_bytes": 2}


async def test_a_key_ends_by_the_wall_clock_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with door(tmp_path) as (accepted, storage):
        await storage.create_key(stored("sk-1", expires_at=now_us() + 3_600_000_000), entry=entry())
        assert (await accepted.principal("sk-1")).key_id == "k1"
        later = SimpleNamespace(
            time_ns=lambda: time.time_ns() + 3_600_000_000_000, clock_gettime_ns=time.clock_gettime_ns
        )
        monkeypatch.setattr("server.clock.time", later)
        with pytest.raises(ApiError, match="has expired"):
            await accepted.principal("sk-1")


async def test_a_key_ends_at_its_time_however_fresh_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(tmp_path) as (accepted, storage):
        now = 4 * 10**15  # later than the wall clock
        monkeypatch.setattr("server.clock.now_us", lambda: now)
        await storage.create_key(stored("sk-1", expires_at=now + 1), entry=entry())
        assert (await accepted.principal("sk-1")).key_id == "k1"
        now += 1
        with pytest.raises(ApiError, match="has expired") as refused:
            await accepted.principal("sk-1")
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        accepted.forget()
        # A key that has ended does not open the server to all.
        with pytest.raises(ApiError, match=r"Authorization: Bearer YOUR_KEY.*x-api-key"):
            await accepted.principal(None)


async def test_many_requests_ask_the_database_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with door(tmp_path) as (accepted, storage):
        await storage.create_key(stored("sk-1"), entry=entry())
        asked = 0
        find = storage.find_key

        async def counted(hash: bytes) -> FoundKey | None:
            nonlocal asked
            asked += 1
            return await find(hash)

        monkeypatch.setattr(storage, "find_key", counted)
        found = await asyncio.gather(*(accepted.principal("sk-1") for _ in range(50)))
        assert asked == 1 and {each.key_id for each in found} == {"k1"}
        await accepted.principal("sk-1")
        assert asked == 1
        loop = asyncio.get_running_loop()
        later = loop.time() + FRESH_S
        monkeypatch.setattr(loop, "time", lambda: later)
        await accepted.principal("sk-1")
        assert asked == 2


async def test_what_is_forgotten_while_it_is_looked_up_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(tmp_path) as (accepted, storage):
        await storage.create_key(stored("sk-1"), entry=entry())
        await storage.create_key(stored("sk-2", "k2"), entry=entry())
        find, go = storage.find_key, asyncio.Event()
        begun = asyncio.Event()

        async def slow(hash: bytes) -> FoundKey | None:
            found = await find(hash)
            begun.set()
            await go.wait()
            return found

        monkeypatch.setattr(storage, "find_key", slow)
        asking = asyncio.create_task(accepted.principal("sk-1"))
        await begun.wait()
        await storage.revoke_key("k1", 1, entry=entry())
        accepted.forget()
        go.set()
        await asking  # it came before
        with pytest.raises(ApiError):
            await accepted.principal("sk-1")


async def test_the_last_use_is_written_once_in_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(tmp_path) as (accepted, storage):
        now = 10**15
        monkeypatch.setattr("server.access.keys.now_us", lambda: now)
        await storage.create_key(stored("sk-1"), entry=entry())
        jobs = storage.commit_stats().jobs
        for _ in range(20):
            await accepted.principal("sk-1")
            accepted.forget()
            await accepted.close()
        assert (await storage.get_key("k1")).last_used_at == 10**15
        assert storage.commit_stats().jobs == jobs + 1
        now += int(USE_NOTED_S * 1e6) + 1
        await accepted.principal("sk-1")
        await accepted.close()
        assert (await storage.get_key("k1")).last_used_at == now


async def test_a_rotated_key_and_its_successor_are_both_accepted(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    storage = server_app.context.storage
    old = await keys.make(storage, OPERATOR, name="laptop", owner="ann", scopes=("models", "chat"))
    successor = await keys.rotate(storage, OPERATOR, old.stored.id, grace_s=3600)
    server_app.life.keys.forget()
    for each in (old, successor):
        headers = {"authorization": f"Bearer {each.key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert (successor.stored.owner, successor.stored.scopes) == ("ann", ("models", "chat"))
    assert successor.stored.replaces == old.stored.id and successor.stored.name == "laptop"
    await keys.rotate(storage, OPERATOR, successor.stored.id, grace_s=0)
    server_app.life.keys.forget()
    headers = {"authorization": f"Bearer {successor.key}"}
    refused = await client.get("/v1/models", headers=headers)
    assert refused.status_code == 401 and "has expired" in refused.json()["error"]["message"]


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_whose_key_has_ended_is_logged_and_what_ended_it_is_told(
    server_app: Running, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    storage = server_app.context.storage
    await keys.make(storage, OPERATOR, name="another")  # without any, no key would be needed
    made = await keys.make(storage, OPERATOR, name="laptop", owner="ann")
    if end == "revoked":
        await keys.end(storage, OPERATOR, made.stored.id)
    else:
        await keys.rotate(storage, OPERATOR, made.stored.id, grace_s=0)
    server_app.life.keys.forget()
    with caplog.at_level(logging.INFO, "antiphon.access"):
        for key in (made.key, made.key[:-1] + "-"):
            refused = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (end in error["message"]) == (key == made.key), "only where the secret itself was right"
    told = [(line.__dict__["owner"], line.__dict__["key_id"]) for line in caplog.records]
    assert told == [("ann", made.stored.id), (None, None)]


async def test_metrics_need_their_scope_where_others_can_reach_them(tmp_path: Path) -> None:
    from tests.support.running import http_client, running_app

    async with running_app(tmp_path, host="0.0.0.0") as running, http_client(running) as client:
        statuses = []
        for scopes in (("responses",), ("metrics",)):
            made = await keys.make(running.context.storage, OPERATOR, name="", scopes=scopes)
            running.life.keys.forget()
            headers = {"authorization": f"Bearer {made.key}"}
            statuses.append((await client.get("/metrics", headers=headers)).status_code)
        assert statuses == [403, 200]


async def test_no_reply_that_shows_a_key_is_kept(server_app: Running, client: httpx.AsyncClient) -> None:
    admin = await keys.make(server_app.context.storage, OPERATOR, name="ops", scopes=("admin",))
    server_app.life.keys.forget()
    headers = {"authorization": f"Bearer {admin.key}", "idempotency-key": "once"}
    path, body = "/v1/organization/admin_api_keys", {"name": "second"}
    assert (await client.post(path, json=body, headers=headers)).status_code == 200
    again = await client.post(path, json=body, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_reply_not_kept")


async def test_the_admin_token_is_good_for_the_organization_too(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    """So the commands ask a running server at the official paths; without keys, nobody else gets there."""
    path = "/v1/organization/projects"
    token = {"authorization": f"Bearer {server_app.life.admin_token}"}
    listed = await client.get(path, headers=token)
    assert [project["id"] for project in listed.json()["data"]] == ["local"]
    assert (await client.get(path)).status_code == 403
    assert (await client.get("/v1/models", headers=token)).status_code == 200  # no key is needed there
    await keys.make(server_app.context.storage, OPERATOR, name="")
    server_app.life.keys.forget()
    assert (await client.get("/v1/models", headers=token)).status_code == 401
