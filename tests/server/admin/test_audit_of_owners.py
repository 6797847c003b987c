"""The audit log by owner: limits of a model are found by whom they limit, and removals can be told."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from server.admin.database_access import leave_address
from server.cli.commands import main
from tests.support.running import http_client, live_app


async def test_an_owner_is_found_by_its_id_and_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ran(*argv: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(main, [*argv, "--data", str(tmp_path)]) == 0
        return capsys.readouterr().out

    async with live_app(tmp_path) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        async with http_client(server, **admin) as http:
            base = "/v1/organization"
            team = (await http.post(f"{base}/projects", json={"name": "Sales"})).json()["id"]
            rate = f"{base}/projects/{team}/rate_limits/rl-antiphon-scripted"
            assert (await http.post(rate, json={"max_requests_per_1_minute": 3})).status_code == 200
            found = (await http.get(f"{base}/audit_logs?resource_ids[]={team}")).json()["data"]
            assert [log["type"] for log in found] == ["rate_limit.updated", "project.created"]
            key = (await http.post(f"{base}/projects/{team}/api_keys", json={})).json()["id"]
            rotate = f"{base}/projects/{team}/api_keys/{key}/rotate"
            rotated = (await http.post(rotate, json={"grace_seconds": 60})).json()
            assert abs(rotated["replaced_accepted_until"] - time.time() - 60) < 30

        told = await ran("audit", "list", "--target", "Sales", "--type", "rate_limit.updated")
        assert f"rl-antiphon-scripted of {team}  " in told
        told = await ran("audit", "list", "--owner", "Sales", "--type", "api_key.created")
        assert f"api_key.created  {key} of {team}" in told and len(told.splitlines()) == 1

        await ran("owners", "limits", team, "--limit", "requests_per_day=5,tokens_per_day=7")
        await ran("owners", "limits", team, "--limit", "tokens_per_day=none")
        (log,) = json.loads(await ran("audit", "list", "--target", team, "--limit", "1", "--json"))
        assert log["rate_limit.updated"]["changes_requested"] == {"limits": {"tokens_per_day": None}}
