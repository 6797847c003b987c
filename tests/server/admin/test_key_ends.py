"""The ends of keys: given as a duration or a day, taken away again, and told of once a key is revoked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from server.admin.database_access import leave_address
from server.cli.commands import main
from tests.support.running import http_client, live_app


@asynccontextmanager
async def reached(data: Path, at_a_server: bool) -> AsyncIterator[None]:
    """The folder by itself, or held by a server that commands find."""
    if not at_a_server:
        yield
        return
    async with live_app(data) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        yield


@pytest.mark.parametrize("at_a_server", [False, True])
async def test_an_end_is_given_and_taken_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_a_server: bool
) -> None:
    async def ran(*argv: str, rc: int = 0) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["keys", *argv, "--data", str(tmp_path)]) == rc
        printed = capsys.readouterr()
        return printed.err if rc else printed.out

    async def key() -> dict[str, object]:
        (found,) = json.loads(await ran("list", "--json"))
        return dict(found)

    async def story() -> None:
        day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=40)
        await ran("create", "--name", "x", "--expires", day.strftime("%Y-%m-%d"))
        made = await key()
        id = str(made["id"])
        assert abs(int(str(made["expires_at"])) - int(day.timestamp())) <= 2
        for word in ("never", "none"):
            await ran("update", id, "--expires", "1d")
            assert (await key())["expires_at"] is not None
            assert f"{id} never expires" in await ran("update", id, "--expires", word)
            assert (await key())["expires_at"] is None
        await ran("update", id, "--expires", "1d")
        await ran("update", id, "--name", "y")
        assert (await key())["expires_at"] is not None
        assert "hundred years" in await ran("update", id, "--expires", "2020-01-01", rc=2)
        assert f"{id} is revoked" in await ran("revoke", id)
        assert f"{id} was revoked already, on 20" in await ran("revoke", id)

    async with reached(tmp_path, at_a_server):
        await story()


@pytest.mark.parametrize("at_a_server", [False, True])
async def test_a_revocation_that_leaves_only_expired_keys_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_a_server: bool
) -> None:
    """They do not open the server, so that every request is refused."""

    async def ran(*argv: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["keys", *argv, "--data", str(tmp_path)]) == 0
        return capsys.readouterr().out

    async def story() -> None:
        await ran("create")
        [first] = json.loads(await ran("list", "--json"))
        await ran("rotate", first["id"], "--grace", "0s")
        [second] = [key for key in json.loads(await ran("list", "--json")) if key["id"] != first["id"]]
        told = await ran("revoke", second["id"])
        assert "No stored key is accepted any more" in told and f"not revoked: {first['id']}." in told
        assert "No stored key is live any more" in await ran("revoke", first["id"])

    async with reached(tmp_path, at_a_server):
        await story()


async def test_null_takes_an_end_away_over_http(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server:
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        async with http_client(server, **admin) as http:
            team = (await http.post("/v1/organization/projects", json={"name": "Sales"})).json()["id"]
            keys = f"/v1/organization/projects/{team}/api_keys"
            made = (await http.post(keys, json={"expires_in_seconds": 60})).json()
            kept = (await http.post(f"{keys}/{made['id']}", json={"name": "x"})).json()
            assert kept["expires_at"] == made["expires_at"]
            freed = (await http.post(f"{keys}/{made['id']}", json={"expires_in_seconds": None})).json()
            assert (freed["name"], freed["expires_at"]) == ("x", None)


@pytest.mark.parametrize("at_a_server", [False, True])
async def test_a_successor_lives_as_long_as_its_key_was_made_to_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_a_server: bool
) -> None:
    async def lifetimes(*argv: str) -> list[int | None]:
        assert await asyncio.to_thread(main, ["keys", *argv, "--data", str(tmp_path)]) == 0
        capsys.readouterr()
        return [key["expires_at"] and key["expires_at"] - key["created_at"] for key in await keys()]

    async def keys() -> list[dict[str, Any]]:
        assert await asyncio.to_thread(main, ["keys", "list", "--json", "--data", str(tmp_path)]) == 0
        return list(json.loads(capsys.readouterr().out))

    async def story() -> None:
        day, hour = 86_400, 3600
        assert await lifetimes("create", "--expires", "90d") == [90 * day]
        [first] = [key["id"] for key in await keys()]
        assert (await lifetimes("rotate", first, "--grace", "1h"))[1:] == [90 * day]
        assert (await lifetimes("rotate", first, "--grace", "1h"))[2:] == [90 * day], (
            "not as long as its grace"
        )
        assert (await lifetimes("rotate", first, "--expires", "1h"))[3:] == [hour]
        assert (await lifetimes("rotate", first, "--expires", "never"))[4:] == [None]
        assert (await lifetimes("rotate", first))[5:] == [None]

    async with reached(tmp_path, at_a_server):
        await story()


@pytest.mark.parametrize(
    "ends", [("owners", "archive", "ann"), ("purge", "--owner", "ann", "--yes", "--keys")]
)
@pytest.mark.parametrize("at_a_server", [False, True])
async def test_the_end_of_an_owner_says_what_the_end_of_its_keys_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_a_server: bool, ends: tuple[str, ...]
) -> None:
    async def ran(*argv: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(main, [*argv, "--data", str(tmp_path)]) == 0
        return capsys.readouterr().out

    async def story() -> None:
        for owner in ("ann", "bob"):
            await ran("keys", "create", "--owner", owner)
        told = await ran("owners", "archive", "bob")
        assert "archived" in told and "No stored key" not in told
        assert "No stored key is live any more" in await ran(*ends)
        await ran("owners", "create", "nobody")
        assert "No stored key" not in await ran("owners", "archive", "nobody")

    async with reached(tmp_path, at_a_server):
        await story()
