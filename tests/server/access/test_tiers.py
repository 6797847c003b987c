"""Tiers, priorities and weights: what limits leave of them, and what a request hears that wants more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from pydantic import ValidationError

from engine import ScriptedEngine
from server.access import OPERATOR, Service
from server.admin import keys
from server.errors import ApiError
from server.limits import ServiceShape, load_limits
from tests.support.making import entry
from tests.support.running import http_client, live_app, running_app

RESPONSES, CHAT, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/completions"
SAID: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "say hi"},
    CHAT: {"messages": [{"role": "user", "content": "say hi"}]},
    COMPLETIONS: {"prompt": "say hi", "max_tokens": 4},
}


def served(key_limits: dict[str, Any], owner_limits: dict[str, Any]) -> Service:
    """What such limits of a key and its owner leave, as they are stored."""
    return Service.of(*(load_limits(orjson.dumps(limits)) for limits in (key_limits, owner_limits)))


def test_where_limits_say_nothing_everything_is_as_asked() -> None:
    service = served({}, {"tokens_per_minute": 5})
    assert service == Service()
    asked = [(None, None), ("auto", None), ("scale", None), ("flex", None), ("fast", None), (None, 7)]
    assert [service.resolved(*each) for each in asked] == [
        ("default", 0),
        ("default", 0),
        ("default", 0),
        ("flex", 1),
        ("priority", -1),
        ("flex", 7),
    ]


def test_a_key_gets_no_more_than_its_owner() -> None:
    service = served(
        {"service_tiers": ["flex", "priority"], "max_priority": -5, "weight": 9},
        {"service_tiers": ["default", "flex"], "max_priority": 0, "weight": 3, "models": {}},
    )
    assert service == Service(3.0, ("flex",), 0)
    assert served({}, {"service_tiers": ["flex", "default"]}).tiers == ("flex", "default")
    assert served({"service_tiers": ["priority"]}, {"max_priority": 0}).tiers == ("flex",)


def test_a_tier_is_served_at_the_most_urgent_number_that_is_allowed() -> None:
    service = served({"max_priority": 5}, {})
    assert service.tiers == ("flex",) and service.resolved(None, None) == ("flex", 5)
    assert served({"max_priority": -9}, {}).resolved("priority", None) == ("priority", -1)


@pytest.mark.parametrize(
    "limits, asked, param, told",
    [
        ({"service_tiers": ["flex"]}, ("priority", None), "service_tier", "'priority'. It may use 'flex'."),
        ({"service_tiers": ["default", "flex"]}, ("fast", None), "service_tier", "'default' and 'flex'"),
        ({"service_tiers": ["flex"]}, (None, 0), "priority", "'default', which is that of priority 0"),
        ({"max_priority": -2}, (None, -3), "priority", "priority -3. The most urgent it may use is -2"),
        ({}, (None, -2), "priority", "priority -2. The most urgent it may use is -1"),
    ],
)
def test_what_a_key_may_not_use_is_named(
    limits: dict[str, Any], asked: tuple[str | None, int | None], param: str, told: str
) -> None:
    with pytest.raises(ApiError) as refused:
        served(limits, {}).resolved(*asked)
    error = refused.value
    assert (error.status, error.code, error.param) == (403, "insufficient_permissions", param)
    assert told in error.message


async def test_without_keys_no_key_is_spoken_of(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        refused = await client.post(RESPONSES, json=SAID[RESPONSES] | {"priority": -10})
    told = refused.json()["error"]["message"]
    assert refused.status_code == 403
    assert told.startswith("A request without a key may not use priority -10. The most urgent it may use is")


@pytest.mark.parametrize(
    "limits",
    [
        {"weight": 0},
        {"weight": "3"},
        {"service_tiers": []},
        {"service_tiers": ["auto"]},
        {"max_priority": 0.5},
    ],
)
def test_what_is_no_shape_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServiceShape.model_validate(limits)


@asynccontextmanager
async def keyed(
    folder: Path, key_limits: dict[str, Any], owner_limits: dict[str, Any]
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedEngine]]:
    """A server and a client whose key and owner have such limits."""
    engine = ScriptedEngine()
    async with live_app(folder, engine) as server:
        storage = server.context.storage
        made = await keys.make(storage, OPERATOR, name="x", owner="tenant")
        await keys.change(storage, OPERATOR, made.stored.id, limits=key_limits)
        await storage.limit_owner("tenant", lambda _: orjson.dumps(owner_limits), entry=entry())
        async with http_client(server, authorization=f"Bearer {made.key}") as client:
            yield client, engine


@pytest.mark.parametrize("path", SAID)
async def test_every_endpoint_serves_at_what_the_key_may_have(tmp_path: Path, path: str) -> None:
    limits = {"service_tiers": ["flex", "default"], "max_priority": 0}
    async with keyed(tmp_path, limits, {"weight": 2.5}) as (client, engine):
        plain = (await client.post(path, json=SAID[path])).raise_for_status().json()
        assert plain.get("service_tier", "flex") == "flex"
        asked: list[dict[str, Any]] = [{"service_tier": "default"}, {"priority": 3}]
        for more, tier in zip(asked, ("default", "flex"), strict=True):
            reply = (await client.post(path, json=SAID[path] | more)).raise_for_status()
            assert reply.json()["service_tier"] == tier
            assert "x-antiphon-ignored" not in reply.headers
        assert [(one.priority, one.weight) for one in engine.requests] == [(1, 2.5), (0, 2.5), (3, 2.5)]
        bad: list[tuple[int, str, dict[str, Any]]] = [
            (403, "service_tier", {"service_tier": "priority"}),
            (403, "priority", {"priority": -1}),
            (400, "priority", {"priority": 1.5}),
            (400, "priority", {"priority": 1001}),
            (400, "priority", {"priority": 1, "service_tier": "default"}),
        ]
        for status, param, more in bad:
            refused = await client.post(path, json=SAID[path] | more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("settings", "limits", "allowed"),
    [
        ({}, None, False),
        ({}, {"service_tiers": ["default", "priority"]}, True),
        ({}, {"max_priority": -5}, True),
        ({}, {"max_priority": 5}, False),
        ({"owner_service_tier": ("default", "priority")}, None, True),
        ({"owner_service_tier": ("default",)}, {"service_tiers": ["priority"]}, True),
    ],
)
async def test_a_team_goes_before_others_only_where_somebody_said_so(
    tmp_path: Path, settings: dict[str, Any], limits: dict[str, Any] | None, allowed: bool
) -> None:
    async with running_app(tmp_path, **settings) as server, http_client(server) as client:
        asked = {"input": "say hi", "service_tier": "priority"}
        open_to_all = await client.post("/v1/responses", json=asked)
        # Without keys nobody can be overtaken by another owner.
        assert open_to_all.status_code == (403 if settings.get("owner_service_tier") == ("default",) else 200)
        made = await keys.make(server.context.storage, OPERATOR, name="", owner="ann", limits=limits)
        server.life.keys.forget()
        headers = {"authorization": f"Bearer {made.key}"}
        reply = await client.post("/v1/responses", json=asked, headers=headers)
        assert reply.status_code == (200 if allowed else 403), reply.text
        if not allowed:
            assert reply.json()["error"]["param"] == "service_tier"
