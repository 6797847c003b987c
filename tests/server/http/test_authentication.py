"""Keys and owners: who gets in, and that nobody sees another's rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from server.access import (
    FRESH_S,
    KEY_PREFIX,
    LOCAL,
    LOCAL_OWNER,
    OPERATOR,
    KeyFileError,
    hash_key,
    new_key,
    owner_of_flag_key,
    read_key_file,
)
from tests.support.running import Running, http_client, running_app

ANN, BOB = "sk-ann-0123456789abcdef", "sk-bob-0123456789abcdef"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_keys_anything_passes_on_loopback(client: httpx.AsyncClient) -> None:
    for headers in ({}, bearer("whatever"), {"authorization": "Basic eA=="}, {"x-api-key": "k"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_requests_that_come_together_look_for_stored_keys_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(tmp_path) as running:
        storage, keys = running.context.storage, running.life.keys
        any_key, looks = storage.any_key, 0

        async def counted() -> bool:
            nonlocal looks
            looks += 1
            return await any_key()

        monkeypatch.setattr(storage, "any_key", counted)
        keys.forget()
        assert await asyncio.gather(*(keys.principal(None) for _ in range(16))) == [LOCAL] * 16
        assert looks == 1


async def test_a_key_is_needed_once_one_is_configured(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=(ANN,)) as running, http_client(running) as client:
        for good in (bearer(ANN), {"authorization": f"bearer  {ANN}"}, {"x-api-key": ANN}):
            assert (await client.get("/v1/models", headers=good)).status_code == 200
        for bad in ({}, bearer(""), bearer(BOB), {"authorization": ANN}, {"x-api-key": ANN + "x"}):
            reply = await client.get("/v1/models", headers=bad)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.json()["error"]["type"] == "invalid_request_error"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
            assert BOB not in reply.text
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/v1/nothing")).status_code == 401  # what exists is nobody's business


async def test_metrics_need_a_key_where_others_can_reach_them(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, host="0.0.0.0", api_key=(ANN,)) as running,
        http_client(running) as client,
    ):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(ANN))).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_the_owner_of_a_flag_key_is_derived_from_it() -> None:
    assert owner_of_flag_key(ANN) == owner_of_flag_key(ANN) != owner_of_flag_key(BOB)
    assert ANN not in owner_of_flag_key(ANN)
    assert hash_key(ANN).hex()[:24] not in owner_of_flag_key(ANN)


ROUTES = [
    ("GET", "/v1/responses/{response}"),
    ("GET", "/v1/responses/{response}?stream=true"),
    ("GET", "/v1/responses/{response}/input_items"),
    ("POST", "/v1/responses/{response}/cancel"),
    ("DELETE", "/v1/responses/{response}"),
    ("GET", "/v1/conversations/{conversation}"),
    ("POST", "/v1/conversations/{conversation}"),
    ("GET", "/v1/conversations/{conversation}/items"),
    ("POST", "/v1/conversations/{conversation}/items"),
    ("GET", "/v1/conversations/{conversation}/items/{item}"),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}"),
    ("DELETE", "/v1/conversations/{conversation}"),
]
BODIES = {
    "/v1/conversations/{conversation}": {"metadata": {}},
    "/v1/conversations/{conversation}/items": {"items": []},
}


async def test_a_foreign_id_is_an_unknown_id(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=(ANN, BOB)) as running, http_client(running) as client:
        made = await client.post("/v1/responses", json={"input": "say hello"}, headers=bearer(ANN))
        talk = await client.post(
            "/v1/conversations", json={"items": [{"role": "user", "content": "hi"}]}, headers=bearer(ANN)
        )
        page = await client.get(f"/v1/conversations/{talk.json()['id']}/items", headers=bearer(ANN))
        ids = {
            "response": made.json()["id"],
            "conversation": talk.json()["id"],
            "item": page.json()["data"][0]["id"],
        }
        unknown = {
            "response": "resp_" + "0" * 48,
            "conversation": "conv_" + "0" * 48,
            "item": "msg_" + "0" * 48,
        }

        async def ask(method: str, path: str, names: dict[str, str]) -> tuple[int, str]:
            reply = await client.request(
                method, path.format(**names), json=BODIES.get(path), headers=bearer(BOB)
            )
            text = reply.text
            for name, value in names.items():
                text = text.replace(value, name)
            return reply.status_code, text

        for method, path in ROUTES:
            foreign = await ask(method, path, ids)
            assert foreign == await ask(method, path, unknown), (method, path)
            assert foreign[0] == 404, (method, path)
        for field, value in (
            ("previous_response_id", ids["response"]),
            ("conversation", ids["conversation"]),
            ("input", [{"type": "item_reference", "id": ids["item"]}]),
        ):
            body = {"input": "say x", field: value}
            reply = await client.post("/v1/responses", json=body, headers=bearer(BOB))
            assert reply.status_code in (400, 404), field
            assert (await client.post("/v1/responses", json=body, headers=bearer(ANN))).status_code == 200, (
                field
            )


# ------------------------------------------------------------------------------------------------------------
# Stored keys


async def make_key(client: httpx.AsyncClient, running: Running, **body: str) -> dict[str, str]:
    reply = await client.post("/admin/keys", json=body, headers=bearer(running.life.admin_token))
    assert reply.status_code == 200
    made: dict[str, str] = reply.json()
    return made


async def test_what_is_wrong_with_a_new_key_is_named(server_app: Running, client: httpx.AsyncClient) -> None:
    admin = bearer(server_app.life.admin_token)
    for param, value in (("owner", "own_nobody"), ("name", "a\0b"), ("scopes", ["nothing"])):
        refused = await client.post("/admin/keys", json={param: value}, headers=admin)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_stored_keys_come_and_go(server_app: Running, client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).status_code == 200
    first = await make_key(client, server_app, name="ann", owner="ann")
    assert (await client.get("/v1/models")).status_code == 401  # from the first key on, one is needed
    assert (await client.get("/v1/models", headers=bearer(first["key"]))).status_code == 200
    admin = bearer(server_app.life.admin_token)
    listed = (await client.get("/admin/keys", headers=admin)).json()["data"]
    assert [(key["id"], key["owner"], key["name"]) for key in listed] == [(first["id"], "ann", "ann")]
    assert first["key"] not in str(listed)
    assert listed[0]["hint"] == "..." + first["key"][-4:]
    second = await make_key(client, server_app)
    assert (first["first"], second["first"]) == (True, False)
    ended = await client.delete(f"/admin/keys/{first['id']}", headers=admin)
    assert (ended.status_code, ended.json()["last"]) == (200, False)
    assert (await client.get("/v1/models", headers=bearer(first["key"]))).status_code == 401
    again = await client.delete(f"/admin/keys/{first['id']}", headers=admin)
    assert (again.status_code, again.json()["revoked_before"] is not None) == (200, True)
    assert (await client.get("/v1/models")).status_code == 401  # one is still live
    ended = await client.delete(f"/admin/keys/{second['id']}", headers=admin)
    assert (ended.status_code, ended.json()["last"]) == (200, True)
    assert (await client.get("/v1/models")).status_code == 200  # with none, none is needed


async def test_without_a_live_key_another_address_stays_closed(tmp_path: Path) -> None:
    async with running_app(tmp_path, host="0.0.0.0") as running, http_client(running) as client:
        made = await make_key(client, running)
        admin = bearer(running.life.admin_token)
        assert (await client.get("/v1/models", headers=bearer(made["key"]))).status_code == 200
        await client.delete(f"/admin/keys/{made['id']}", headers=admin)
        for headers in ({}, bearer(made["key"])):
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        assert not await running.life.keys.usable()


async def test_what_was_made_without_a_key_has_an_owner(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    made = (await client.post("/v1/responses", json={"input": "say hello"})).json()
    own = await make_key(client, server_app, owner=LOCAL_OWNER)
    other = await make_key(client, server_app)
    path = f"/v1/responses/{made['id']}"
    assert (await client.get(path, headers=bearer(own["key"]))).status_code == 200
    assert (await client.get(path, headers=bearer(other["key"]))).status_code == 404


async def test_keys_of_a_file_and_that_it_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\n{ANN}\n  bob : {BOB}\n")
    file.chmod(0o600)
    async with running_app(tmp_path, api_key_file=file) as running, http_client(running) as client:
        keys = running.life.keys
        assert (await keys.principal(ANN)).owner == owner_of_flag_key(ANN)  # as if it were a flag
        assert (await keys.principal(BOB)).owner == "bob"
        assert (await client.get("/v1/models")).status_code == 401
        file.write_text("bob:sk-new\n")
        keys.reload()
        assert (await keys.principal("sk-new")).owner == "bob"
        assert (await client.get("/v1/models", headers=bearer(BOB))).status_code == 401
        file.write_text("")
        with pytest.raises(KeyFileError, match="holds no key"):
            keys.reload()
        assert (await keys.principal("sk-new")).owner == "bob"  # nothing changed


@pytest.mark.parametrize("text", ["", "# none\n", "a b\n", ":sk-1\n", "ann:\n", "a:b:sk-1\n"])
def test_a_file_of_keys_with_a_fault(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError) as caught:
        read_key_file(file)
    assert str(file) in str(caught.value) and "sk-1" not in str(caught.value)


def test_a_key_of_two_owners_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann:{ANN}\n# bob\nbob:{ANN}\n")
    with pytest.raises(KeyFileError) as caught:
        read_key_file(file)
    assert str(caught.value) == f"{file}, lines 1 and 3, give one key to two owners"
    file.write_text(f"ann:{ANN}\nann:{ANN}\n")
    assert read_key_file(file).keys == [(hash_key(ANN), "ann")]


async def test_short_keys_are_warned_of_by_their_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\nann:{ANN}\nbob:k\neve:fifteen-letters\n")
    file.chmod(0o600)
    async with running_app(tmp_path, api_key_file=file, api_key=("x",)) as running:
        assert (await running.life.keys.principal("k")).owner == "bob"
    told = [record.getMessage() for record in caplog.records if "can be guessed" in record.getMessage()]
    assert told == [
        "api_key has a key of fewer than 16 characters, which can be guessed",
        f"{file}, lines 3, 4: a key of fewer than 16 characters can be guessed",
    ]
    assert "fifteen" not in caplog.text


async def test_a_key_of_the_configuration_with_a_colon_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sales:a-key-that-nobody-guesses"
    async with running_app(tmp_path, api_key=[key]) as running, http_client(running) as client:
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert "OWNER:KEY is for api_key_file" in caplog.text and "nobody-guesses" not in caplog.text


def test_a_file_of_keys_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "keys")


async def test_a_key_revoked_elsewhere_stops_working_within_seconds(
    server_app: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FRESH_S <= 1
    monkeypatch.setattr("server.access.keys.FRESH_S", 0.0)
    made = await make_key(client, server_app)
    await make_key(client, server_app)  # with no live key none would be needed
    assert (await client.get("/v1/models", headers=bearer(made["key"]))).status_code == 200
    ended = OPERATOR.did("api_key.deleted", made["id"])
    await server_app.context.storage.revoke_key(made["id"], 1, entry=ended)
    assert (await client.get("/v1/models", headers=bearer(made["key"]))).status_code == 401


async def test_admin_routes_need_the_admin_token(server_app: Running, client: httpx.AsyncClient) -> None:
    made = await make_key(client, server_app)
    for headers in ({}, bearer("x"), bearer(made["key"]), {b"authorization": b"Bearer caf\xc3\xa9"}):
        for method, path in (
            ("GET", "/admin/keys"),
            ("POST", "/admin/keys"),
            ("DELETE", "/admin/keys/key_1"),
        ):
            reply = await client.request(method, path, headers=headers)
            assert reply.status_code == 401


def test_keys_are_long_and_never_twice_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 43 + len(KEY_PREFIX) for key in keys)
