"""What the audit log is told of the server's own settings: what has changed since it was told last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from engine import ScriptedEngine
from server.mcp_servers import read_mcp_settings
from storage import AuditFilter
from tests.support.making import query
from tests.support.running import Running, http_client, running_app

TYPES = (
    *("models.updated", "mcp_servers.updated", "given_keys.updated", "given_sealing_keys.updated"),
    "rate_limit.updated",
)
TOKEN = "a-secret-token"


async def told(running: Running) -> list[tuple[str, Any]]:
    """Types of entries, newest first, and what they say."""
    page = await running.context.storage.list_audit(AuditFilter(actions=TYPES), limit=99)
    found = []
    for one in page.data:
        assert one.entry.actor == "server" and one.entry.request_id is None
        [said] = orjson.loads(one.entry.details).values()
        found.append((one.entry.action, said))
    assert (await running.context.storage.examine_audit()).broken is None
    return found


def other_model() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine._info = replace(engine.info, fingerprint="other")
    return engine


async def test_models_are_told_when_they_change(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running:
        [(action, models)] = await told(running)
        assert action == "models.updated"
        assert models == {"antiphon-scripted": running.context.models.get(None).info.fingerprint}
    async with running_app(tmp_path) as running:  # nothing has changed
        assert await told(running) == [(action, models)]
    async with running_app(tmp_path, other_model()) as running:
        [newest, before] = await told(running)
        assert newest == (action, {"antiphon-scripted": "other"}) and before == (action, models)
    async with running_app(tmp_path, other_model(), served_model_name=("a", "b")) as running:
        assert (await told(running))[0] == (action, {"a": "other", "b": "other"})


async def test_servers_keys_and_limits_of_the_settings_are_told_without_secrets(tmp_path: Path) -> None:
    def mcp(*command: str, **more: Any) -> Any:
        search = {"url": "https://mcp.example.com/mcp?key=hidden-in-the-url", "token": TOKEN}
        files = {"command": list(command), "env": {"API_KEY": TOKEN}}
        return read_mcp_settings({"servers": {"search": {**search, **more}, "files": files}}, {})

    settings: dict[str, Any] = {
        "mcp": mcp("mcp-files", "/srv"),
        "api_key": ("sk-given-1",),
        "sealing_key": ("5e" * 64, "6f" * 64),
        "owner_limit": ("requests_per_minute=60",),
    }
    async with running_app(tmp_path, **settings) as running:
        limits, seals, keys, servers, _ = await told(running)
        assert seals[0] == "given_sealing_keys.updated" and [*seals[1].values()] == ["seals", "opens"]
        assert limits == ("rate_limit.updated", {"requests_per_minute": 60})
        assert keys == ("given_keys.updated", running.life.keys.given) and len(keys[1]) == 1
        assert {name: server["reaches"] for name, server in servers[1].items()} == {
            "search": "https://mcp.example.com/mcp?key=***",
            "files": "mcp-files",
        }
        running.life.keys.give(("sk-given-1", "sk-given-2"))  # what SIGHUP does
        running.life.settings_changed()
        assert running.life._noting is not None
        await running.life._noting
        newest, *_ = await told(running)
        assert newest[0] == "given_keys.updated" and len(newest[1]) == 2
        database = str(running.life.config.db)
    settings["mcp"] = mcp("mcp-files", "/home", trust=True)
    async with running_app(tmp_path, **settings) as running:
        keys, servers_now = (await told(running))[:2]
        assert keys[0] == "given_keys.updated" and len(keys[1]) == 1
        assert servers_now[1]["search"]["trust"] and not servers[1]["search"]["trust"]
        assert servers_now[1]["files"]["digest"] != servers[1]["files"]["digest"]
    async with running_app(tmp_path) as running:
        assert [(action, said) for action, said in await told(running) if not said] == [
            ("rate_limit.updated", {}),
            ("given_sealing_keys.updated", {}),
            ("given_keys.updated", {}),
            ("mcp_servers.updated", {}),
        ]
    everything = str(query(database, "SELECT details FROM audit"))
    assert TOKEN not in everything and "hidden" not in everything and "sk-given" not in everything
    assert "5e5e" not in everything


async def test_owners_of_keys_that_the_settings_add_can_be_limited_at_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first:sk-given-1\n")
    keys.chmod(0o600)
    async with (
        running_app(tmp_path / "data", api_key_file=keys) as running,
        http_client(running, authorization=f"Bearer {running.life.admin_token}") as operator,
    ):
        path = "/v1/organization/projects/acme/limits"
        assert (await operator.get(path)).status_code == 404
        keys.write_text("first:sk-given-1\nacme:sk-given-2\n")
        assert running.life.keys.reload()  # what SIGHUP does
        running.life.settings_changed()
        assert running.life._noting is not None
        await running.life._noting
        assert (await operator.get(path)).status_code == 200
