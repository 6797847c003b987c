"""Budgets for life: who is refused once they are spent, what counts, and who shares one."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest

from server.access import OPERATOR
from server.admin import keys
from server.clock import now_us
from server.limits import Budgets, used_by
from storage import Account, Counts, Spent, Storage
from tests.support import wire
from tests.support.running import http_client, running_app
from tests.support.usage import used
from tests.support.wire import Json

CHAT: Json = {"messages": [{"role": "user", "content": "say hi"}]}
APIS: dict[str, tuple[str, Json]] = {
    "responses": ("/v1/responses", {"input": "say hi"}),
    "unstored": ("/v1/responses", {"input": "say hi", "store": False}),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("/v1/completions", {"prompt": "say hi"}),
}


async def spend(client: httpx.AsyncClient, path: str, body: Json) -> tuple[int, httpx.Response]:
    """Ask until somebody refuses: how often it was answered, and the refusal."""
    async with asyncio.timeout(20):
        for answered in range(10_000):
            if (reply := await client.post(path, json=body)).status_code != 200:
                return answered, reply
    raise AssertionError


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", APIS)
async def test_a_budget_that_is_spent_is_a_403_for_good_until_it_is_raised(tmp_path: Path, api: str) -> None:
    path, body = APIS[api]
    async with (
        running_app(tmp_path, owner_limit=("total_tokens=5",)) as server,
        http_client(server) as client,
        http_client(server, authorization=f"Bearer {server.life.admin_token}") as admin,
    ):
        answered, reply = await spend(client, path, body)
        assert answered >= 1 and reply.status_code == 403
        error = wire.validate_error(reply.json())
        assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert "5" in error["message"] and reply.headers["x-should-retry"] == "false"
        assert (await client.get("/v1/responses")).status_code == 200, "reading goes on"
        assert 'over_limit_total{limit="total_tokens"} 1.0' in (await client.get("/metrics")).text
        project = "/v1/organization/projects/local/limits"
        counted = await used(server)
        spent = counted.input_tokens - counted.cached_tokens + counted.output_tokens
        assert (await admin.get(project)).json() == {
            "object": "project.limits",
            "limits": {},
            "in_force": {"total_tokens": 5},
            "used": {"total_tokens": spent, "total_cost": 0, "stored_bytes": ANY},
        }
        raised = {"limits": {"total_tokens": 10**6}}
        assert (await admin.post(project, json=raised)).json()["used"]["total_tokens"] == spent
        assert (await client.post(path, json=body)).status_code == 200
        lowered = {"limits": {"total_tokens": 5}}
        assert (await admin.post(project, json=lowered)).status_code == 200
    # What was used is in the database: a restart forgets none of it.
    async with (
        running_app(tmp_path, owner_limit=("total_tokens=5",)) as server,
        http_client(server) as client,
    ):
        assert (await client.post(path, json=body)).status_code == 403


async def test_a_budget_of_money_goes_by_the_prices(tmp_path: Path) -> None:
    settings = {"price": ("*=1000000/0/1000000",), "owner_limit": ("total_cost=4.5",)}
    async with running_app(tmp_path, **settings) as server, http_client(server) as client:
        _, reply = await spend(client, *APIS["responses"])
        assert (
            reply.status_code == 403
            and "USD of 4.5, the limit total_cost." in reply.json()["error"]["message"]
        )
    async with (
        running_app(tmp_path, owner_limit=("total_cost=4.5",)) as server,
        http_client(server) as client,
    ):
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200


async def test_the_keys_of_a_rotation_share_a_budget_and_other_keys_do_not(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server:
        storage = server.context.storage
        limits = {"total_tokens": 5}
        old = await keys.make(storage, OPERATOR, name="old", owner="team", limits=limits)
        other = await keys.make(storage, OPERATOR, name="other", owner="team", limits=limits)
        new = await keys.rotate(storage, OPERATOR, old.stored.id, grace_s=3600, expires_in_s=None)
        server.life.keys.forget()
        async with http_client(server, authorization=f"Bearer {new.key}") as client:
            _, reply = await spend(client, *APIS["responses"])
            assert "Your key" in reply.json()["error"]["message"]
        async with http_client(server, authorization=f"Bearer {old.key}") as client:
            assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 403
        async with http_client(server, authorization=f"Bearer {other.key}") as client:
            assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        async with http_client(server, **admin) as client:
            path = f"/v1/organization/projects/team/api_keys/{new.stored.id}"
            found = (await client.get(path)).json()
            assert found["limits"] == limits and found["used"]["total_tokens"] >= 5


async def test_what_was_used_long_ago_and_just_now_counts_once(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server:
        storage: Storage = server.context.storage
        ann, bob = Account("ann", "k", "m", "default"), Account("bob", None, "m", "default")
        hour = 3600 * 1_000_000
        now = now_us()
        for at in (now, now - hour // 2, now - 2 * hour, now - 5 * hour, 1):
            await storage.add_usage([Spent(at, ann, Counts(1, 10, 4, 2)), Spent(at, bob, Counts(1, 99))])
        budgets = Budgets(storage, lambda model, counts: Decimal(counts.requests), "usd")
        for _ in range(2):
            assert await budgets.require("ann", None, 41, 5.01, "your project") is None
            name, error = await budgets.require("ann", None, 40, None, "your project") or ("", None)
            assert name == "total_tokens" and error is not None and error.status == 403
            assert (await budgets.require("ann", "k", None, 5.0, "your key") or [""])[0] == "total_cost"
            assert await budgets.require("ann", "another", 1, None, "your key") is None
            await storage.fold_usage(now - hour)
        assert (await used_by(storage, lambda *_: Decimal(0), "ann")).tokens == 40
