"""What administrators ask over HTTP is read to the last field, or refused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from storage import AuditFilter
from tests.support.running import Running, http_client, running_app
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
        (f"{ROOT}/runs/resp_1/cancel", {"reason": "x"}, "The fields are owner"),
        ("/admin/keys", {"scope": ["responses"]}, "scopes"),
        ("/admin/keys/KEY", {"limit": {}}, "limits"),
        ("/admin/keys/KEY/rotate", {"grace": 1}, "grace_s"),
        ("/admin/tiers/KEY", {"service_tier": ["flex"]}, "service_tiers"),
        ("/admin/webhooks", {"url": "https://a.example", "events": ["x"]}, "event_types"),
        ("/admin/purge", {"owner": "local", "key": True}, "keys"),
        ("/admin/sealing_keys", {"name": "x"}, "No field"),
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


@pytest.mark.parametrize(("owner", "why"), [("local", "without a key"), ("admin", "of administrators")])
async def test_owners_that_the_server_needs_are_not_archived(
    server_app: Running, client: httpx.AsyncClient, owner: str, why: str
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}
    made = await client.post(f"{ROOT}/admin_api_keys", json={"name": "ops"}, headers=headers)
    assert made.status_code == 200
    reply = await client.post(f"{ROOT}/projects/{owner}/archive", headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_value", "project_id")
    assert why in error["message"]
    project = (await client.get(f"{ROOT}/projects/{owner}", headers=headers)).json()
    assert project["status"] == "active"


@pytest.mark.parametrize("path", [f"{PROJECT}/api_keys/KEY", "/admin/keys/KEY"])
@pytest.mark.parametrize(
    ("field", "value"), [("name", None), ("scopes", None), ("scopes", []), ("limits", None)]
)
async def test_what_a_change_might_mean_is_not_guessed(
    server_app: Running, client: httpx.AsyncClient, path: str, field: str, value: object
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}
    body = {"name": "x", "scopes": ["responses"], "limits": {"requests_per_minute": 1}}
    made = (await client.post(f"{PROJECT}/api_keys", json=body, headers=headers)).json()
    path = path.replace("KEY", made["id"])
    reply = await client.post(path, json={field: value}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    after = (await client.get(f"{PROJECT}/api_keys/{made['id']}", headers=headers)).json()
    assert {name: after[name] for name in body} == body
    if value == []:  # who makes a key with no scopes does not mean one with all
        new = await client.post(f"{PROJECT}/api_keys", json={"scopes": []}, headers=headers)
        assert (new.status_code, new.json()["error"]["param"]) == (400, "scopes")


@pytest.mark.parametrize("models", [None, {"antiphon-scripted": None}, {"antiphon-scripted": 3}])
async def test_limits_of_models_that_are_no_objects_are_explained(
    server_app: Running, client: httpx.AsyncClient, models: object
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}
    reply = await client.post(f"{PROJECT}/limits", json={"limits": {"models": models}}, headers=headers)
    assert reply.status_code == 400 and "null ends a single limit" in reply.json()["error"]["message"]


async def test_limits_in_force_are_told_with_those_of_every_owner(tmp_path: Path) -> None:
    every = ("requests_per_minute=9", "tokens_per_day=100")
    async with running_app(tmp_path, owner_limit=every) as running, http_client(running) as client:
        headers = {"authorization": f"Bearer {running.life.admin_token}"}
        changes = {"limits": {"tokens_per_day": 5, "stored_bytes": 7}}
        changed = (await client.post(f"{PROJECT}/limits", json=changes, headers=headers)).json()
        assert changed["limits"] == {"tokens_per_day": 5, "stored_bytes": 7}
        assert changed["in_force"] == {"requests_per_minute": 9, "tokens_per_day": 5, "stored_bytes": 7}
        assert (await client.get(f"{PROJECT}/limits", headers=headers)).json() == changed
        rates = (await client.get(f"{PROJECT}/rate_limits", headers=headers)).json()["data"]
        assert [(rate["max_requests_per_1_minute"], rate["max_tokens_per_1_day"]) for rate in rates] == [
            (9, 5)
        ]


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


async def test_limits_of_a_model_that_is_not_served_are_refused(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}

    async def ask(path: str, models: Json) -> httpx.Response:
        return await client.post(path, json={"limits": {"models": models}}, headers=headers)

    for path in (f"{PROJECT}/limits", f"{PROJECT}/api_keys", "/admin/keys"):
        reply = await ask(path, {"antiphon-scriptd": {"requests_per_minute": 3}})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "limits")
        assert "does not serve 'antiphon-scriptd'; did you mean 'antiphon-scripted'?" in error["message"]
        wrong = await ask(path, {"antiphon-scripted": {"stored_bytes": 5}})
        assert "is one of everything, not of a single model" in wrong.json()["error"]["message"]
        assert (await ask(path, {"antiphon-scripted": {"requests_per_minute": 3}})).status_code == 200
        assert (await ask(path, {"gone": {"requests_per_minute": None}})).status_code == 200


async def test_the_end_of_the_last_key_beside_expired_ones_is_told_to_lock_the_server(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}
    keys = f"{PROJECT}/api_keys"
    first = (await client.post(keys, json={"name": "x"}, headers=headers)).json()["id"]
    asked = {"grace_seconds": 0}
    second = (await client.post(f"{keys}/{first}/rotate", json=asked, headers=headers)).json()["id"]

    async def told(method: str, id: str) -> tuple[bool, bool]:
        reply = (await client.request(method, f"{keys}/{id}", headers=headers)).json()
        return reply["opens_server"], reply["locks_server"]

    assert await told("GET", first) == (False, False)
    assert await told("GET", second) == await told("DELETE", second) == (False, True)
    assert (await client.get("/v1/models")).status_code == 401
    assert await told("GET", first) == await told("DELETE", first) == (True, False)
    assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "opens"), [({}, True), ({"api_key": ("a key of the configuration",)}, False)]
)
async def test_it_is_told_which_key_is_the_last_that_keeps_others_out(
    tmp_path: Path, settings: Json, opens: bool
) -> None:
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        headers = {"authorization": f"Bearer {running.life.admin_token}"}
        body = {"name": "x"}
        own, admin = f"{PROJECT}/api_keys", f"{ROOT}/admin_api_keys"
        paths = [
            f"{path}/{(await client.post(path, json=body, headers=headers)).json()['id']}"
            for path in (own, admin)
        ]

        async def told(method: str, path: str) -> bool:
            return bool((await client.request(method, path, headers=headers)).json()["opens_server"])

        assert [await told("GET", path) for path in paths] == [False, False]
        assert await told("DELETE", paths[0]) is False
        assert await told("GET", paths[1]) is opens
        assert (await client.get("/v1/models")).status_code == 401
        assert await told("DELETE", paths[1]) is opens
        assert (await client.get("/v1/models")).status_code == (200 if opens else 401)


async def test_the_reply_to_an_archiving_says_what_the_end_of_the_keys_means(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    headers = {"authorization": f"Bearer {server_app.life.admin_token}"}

    async def archived(*keys: str) -> tuple[bool, bool]:
        project = (await client.post(f"{ROOT}/projects", json={"name": "x"}, headers=headers)).json()["id"]
        for name in keys:
            path = f"{ROOT}/projects/{project}/api_keys"
            assert (await client.post(path, json={"name": name}, headers=headers)).status_code == 200
        reply = (await client.post(f"{ROOT}/projects/{project}/archive", headers=headers)).json()
        assert reply["status"] == "archived"
        return reply["opens_server"], reply["locks_server"]

    assert await archived() == (False, False)
    assert await archived("a", "b") == (True, False)
    kept = (await client.post(f"{PROJECT}/api_keys", json={"name": "x"}, headers=headers)).json()["id"]
    assert await archived("a") == (False, False)
    asked = {"grace_seconds": 0}
    made = (await client.post(f"{PROJECT}/api_keys/{kept}/rotate", json=asked, headers=headers)).json()["id"]
    await client.delete(f"{PROJECT}/api_keys/{made}", headers=headers)
    assert await archived("a") == (False, True)


async def test_null_gives_a_successor_no_end(server_app: Running, client: httpx.AsyncClient) -> None:
    headers, path = {"authorization": f"Bearer {server_app.life.admin_token}"}, f"{PROJECT}/api_keys"
    body: Json = {"name": "x", "expires_in_seconds": 600}
    key = (await client.post(path, json=body, headers=headers)).json()["id"]
    for asked, lives in (({}, 600), ({"expires_in_seconds": 60}, 60), ({"expires_in_seconds": None}, None)):
        made = (await client.post(f"{path}/{key}/rotate", json=asked, headers=headers)).json()
        assert (made["expires_at"] and made["expires_at"] - made["created_at"]) == lives
