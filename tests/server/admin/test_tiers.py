"""`antiphon tiers`: beside a running server and without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.access import OPERATOR
from server.admin import keys
from server.admin.database_access import leave_address
from server.cli.commands import main
from storage import AuditFilter, Storage
from tests.support.making import entry
from tests.support.running import Running, http_client, live_app


async def run(running: Running, *argv: str) -> int:
    """A command beside the running server, whose database it does not open."""
    leave_address(running.life.config, running.base_url, running.life.admin_token)
    return await asyncio.to_thread(main, ["tiers", *argv, "--data", str(running.life.config.data)])


async def made(storage: Storage) -> keys.MadeKey:
    """A key whose owner has a limit of another kind."""
    key = await keys.make(storage, OPERATOR, name="x", owner="team")
    await storage.limit_owner("team", lambda _: b'{"tokens_per_minute":100000}', entry=entry())
    return key


async def test_what_a_command_sets_counts_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with live_app(tmp_path) as running:
        storage = running.context.storage
        key = await made(storage)
        async with http_client(running, authorization=f"Bearer {key.key}") as client:
            assert (await client.post("/v1/responses", json={"input": "hi"})).json()[
                "service_tier"
            ] == "default"
            assert await run(running, key.stored.id) == 0
            assert await run(running, key.stored.id, "--service-tiers", "flex", "--max-priority", "5") == 0
            assert await run(running, "team", "--weight", "2.5") == 0
            reply = await client.post("/v1/responses", json={"input": "hi"})
            assert reply.json()["service_tier"] == "flex"
            assert await run(running, key.stored.id, "--service-tiers", "none", "--max-priority", "none") == 0
            refused = await client.post("/v1/responses", json={"input": "hi", "service_tier": "flex"})
            assert refused.status_code == 200
        out = capsys.readouterr().out.splitlines()
        assert out == [
            f"{key.stored.id}: nothing is set",
            f"{key.stored.id}: service_tiers=flex max_priority=5",
            "team: weight=2.5",
            f"{key.stored.id}: nothing is set",
        ]
        assert (await storage.get_owner("team")).limits == b'{"tokens_per_minute":100000,"weight":2.5}'
        assert (await storage.get_key(key.stored.id)).limits is None
        told = await storage.list_audit(AuditFilter(), limit=100)
        assert any(b"2.5" in (each.entry.details or b"") for each in told.data)


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--weight", "0"), "weight: input should be greater"),
        (("--weight", "many"), "--weight: 'many' is no number"),
        (("--weight", "nan"), "--weight: 'nan' is no number"),
        (("--weight", "inf"), "--weight: 'inf' is no number"),
        (("--service-tiers", "gold"), "service_tiers: input should be 'default', 'flex' or 'priority'"),
        (("--max-priority", "-2000"), "max_priority: input should be greater"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    async with live_app(tmp_path) as running:
        await made(running.context.storage)
        assert await run(running, "team", *flags) == 2
        assert told in capsys.readouterr().err.lower()


async def test_a_key_has_no_weight_and_what_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running:
        key = await made(running.context.storage)
        assert await run(running, key.stored.id, "--weight", "2") == 2
        assert "weight: it is an owner's" in capsys.readouterr().err
        assert await run(running, "own_nobody") == 1
        assert "own_nobody" in capsys.readouterr().err
