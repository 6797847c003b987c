"""What administrators ask over HTTP is read to the last field, or refused."""

from __future__ import annotations

import httpx
import pytest

from storage import AuditFilter
from tests.support.running import Running
from tests.support.wire import Json

ROOT = "/v1/organization"
PROJECT = f"{ROOT}/projects/local"


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        (f"{PROJECT}/api_keys", {"name": "x", "scope": ["responses"]}, "scopes"),
        (f"{PROJECT}/api_keys", {"name": "x", "limit": {}}, "limits"),
        (f"{PROJECT}/api_keys", {"expires_in": 3600}, "expires_in_seconds"),
        (f"{PROJECT}/api_keys", {"scopez": None}, "scopes"),
        (f"{PROJECT}/service_accounts/local/api_keys", {"scope": ["responses"]}, "scopes"),
        (f"{PROJECT}/api_keys/KEY", {"scope": ["responses"]}, "scopes"),
        (f"{PROJECT}/api_keys/KEY/rotate", {"grace_second": 1}, "grace_seconds"),
        (f"{PROJECT}/limits", {"limit": {"stored_bytes": 1}}, "limits"),
        (
            f"{PROJECT}/rate_limits/rl-antiphon-scripted",
            {"max_requests_per_minute": 1},
            "max_requests_per_1_",
        ),
        (f"{PROJECT}", {"nam": "x"}, "name"),
        (f"{PROJECT}/archive", {"project": "x"}, "No field"),
        (f"{ROOT}/projects", {"name": "x", "nmae": "y"}, "name"),
        (f"{ROOT}/admin_api_keys", {"name": "x", "expires_in": 1}, "expires_in_seconds"),
    ],
)
async def test_an_unknown_field_is_refused_and_changes_nothing(
    server_app: Running, client: httpx.AsyncClient, path: str, body: Json, meant: str
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}
    made = (await client.post(f"{PROJECT}/api_keys", json={}, headers=headers)).json()
    storage = server_app.context.storage

    async def written() -> tuple[int, int]:
        page = await storage.list_audit(AuditFilter(), limit=100)
        return len(page.data), len(await storage.list_keys())

    before = await written()
    reply = await client.post(path.replace("KEY", made["id"]), json=body, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "unknown_parameter", [*body][-1])
    assert meant in error["message"]
    assert await written() == before


@pytest.mark.parametrize(
    "under",
    [f"{ROOT}/{name}" for name in ("users", "invites", "groups", "roles", "certificates")]
    + [f"{PROJECT}/users"],
)
async def test_what_is_not_built_of_the_official_api_is_told(client: httpx.AsyncClient, under: str) -> None:
    for path in (under, f"{under}/some_id"):
        reply = await client.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
        assert f"does not have the endpoints under {under}." in reply.json()["error"]["message"]
