"""What every reply carries, and the official shape of what the router itself refuses."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from server.config import Config
from server.process.lifecycle import ServerLifecycle
from storage import StorageUnavailable
from tests.support.running import Running, http_client, running_app


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/nothing", 404),
        ("PATCH", "/v1/models", 405),
        ("POST", "/v1/responses", 400),
    ],
)
async def test_standard_headers(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    reply = await client.request(method, path, headers={"x-client-request-id": "abc-1"})
    assert reply.status_code == status
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["x-client-request-id"] == "abc-1"
    assert reply.headers["openai-processing-ms"].isdigit()
    assert reply.headers["x-antiphon-version"]


async def test_request_ids_differ_and_bad_echoes_are_dropped(client: httpx.AsyncClient) -> None:
    first = await client.get("/health", headers={"x-client-request-id": "x" * 513})
    second = await client.get("/health", headers={b"x-client-request-id": b"caf\xc3\xa9"})
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert "x-client-request-id" not in first.headers
    assert "x-client-request-id" not in second.headers


async def test_unknown_urls_and_methods(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert missing.json() == {
        "error": {
            "message": "Invalid URL (GET /v1/nothing)",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
    }
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/responses", "/v1/responses"),
        ("/v1/conversations/", "/v1/conversations"),
        ("/v1/health", "/health"),
        ("/v3/chat/completions", "/v1/chat/completions"),
        ("/v1/respones", "/v1/responses"),
        ("/v1/respones/resp_1/cancle", "/v1/responses/resp_1/cancel"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/audio/transcription", "/v1/audio/transcriptions"),
        ("/v1/model/", "/v1/models"),
        ("/v1//responses", "/v1/responses"),
    ):
        error = (await client.post(path)).json()["error"]
        assert error["message"] == f"Invalid URL (POST {path}): did you mean {meant}?"
    long = f"/v1/respones/{'a' * 200}/cancel"  # to compare it would take long
    assert (await client.post(long)).json()["error"]["message"] == f"Invalid URL (POST {long})"
    told = "the endpoints are under /v1, and the page /docs lists them."
    for method, path in (("GET", "/v1"), ("POST", "/v1")):
        reply = await client.request(method, path)
        assert reply.json()["error"]["message"] == f"Invalid URL ({method} {path}): {told}"
    wrong = await client.put("/v1/responses/resp_1")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET, DELETE"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert (await client.get("/v1/models/")).status_code == 404  # no redirect to another spelling


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/assistants"),
        ("POST", "/v1/images/generations"),
    ],
)
async def test_official_endpoints_that_are_not_built_say_so(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    reply = await client.request(method, path, json={})
    family = "/".join(path.split("/")[:3])
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
    assert f"does not have the endpoints under {family}. Its page /docs" in reply.json()["error"]["message"]
    assert (await client.get("/docs")).status_code == 200


async def test_an_endpoint_beside_others_that_are_built_is_told_to_be_missing_alone(
    client: httpx.AsyncClient,
) -> None:
    speech = (await client.post("/v1/audio/speech", json={})).json()["error"]
    assert "does not make speech" in speech["message"] and "transcriptions" in speech["message"]
    for path in ("/v1/messages/batches", "/v1/messages/batches/msgbatch_1"):
        batches = (await client.get(path)).json()["error"]
        assert batches["type"] == "not_found_error" and "POST /v1/batches" in batches["message"]
    voices = (await client.get("/v1/audio/voices")).json()["error"]
    assert "has other endpoints under /v1/audio, but not this one. Its page" in voices["message"]


async def test_no_documentation_pages_but_ours(client: httpx.AsyncClient) -> None:
    """FastAPI's own load scripts from elsewhere; `tests/server/routes/reference` has tests of ours."""
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert (await client.get(path)).status_code == 404


async def test_an_unforeseen_exception_is_a_500_that_tells_its_request_id(
    server_app: Running, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: object) -> None:
        raise LookupError("a secret")

    server_app.app.add_route("/broken", broken)  # type: ignore[arg-type]
    reply = await client.get("/broken")
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert reply.headers["x-request-id"] in error["message"]
    assert "a secret" not in reply.text
    assert "a secret" in caplog.text  # where the operator looks


async def test_browsers_may_not_call_unless_allowed(client: httpx.AsyncClient, tmp_path: Path) -> None:
    origin = {"origin": "https://app.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    for refused in (
        await client.get("/health", headers=origin),
        await client.options("/v1/responses", headers=preflight),
    ):
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    async with (
        running_app(tmp_path / "other", cors_origin=("https://app.example",)) as running,
        http_client(running) as open_client,
    ):
        allowed = await open_client.options("/v1/responses", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert allowed.headers["x-request-id"]
        refused = await open_client.get("/v1/nothing", headers=origin)
        assert refused.status_code == 404
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


async def test_tokenize(client: httpx.AsyncClient) -> None:
    counted = (await client.post("/tokenize", json={"prompt": "h\u00e9"})).json()
    assert counted == {"count": 3, "max_model_len": 262144, "tokens": [104, 195, 169]}
    back = await client.post("/detokenize", json={"tokens": counted["tokens"]})
    assert back.json() == {"prompt": "h\u00e9"}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert chat["count"] == len(chat["tokens"]) > 2
    for body, param in (({}, "prompt"), ({"prompt": 1}, "prompt"), ({"messages": 1}, "messages")):
        assert (await client.post("/tokenize", json=body)).json()["error"]["param"] == param
    assert (await client.post("/detokenize", json={"tokens": [-1]})).json()["error"]["param"] == "tokens[0]"
    assert (await client.post("/tokenize", json={"model": "x", "prompt": "a"})).status_code == 404


async def test_what_fails_to_close_keeps_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = ServerLifecycle(Config(data=tmp_path, engine="scripted"), engine=ScriptedEngine())
    await life.start()
    assert life.context is not None
    storage, failures = life.context.storage, [RuntimeError("the last"), OSError("the first")]

    async def fail() -> None:
        raise failures.pop()

    monkeypatch.setattr(life.context.library.ingester, "close", fail)
    monkeypatch.setattr(life.keys, "close", fail)
    with pytest.raises(RuntimeError, match="the last"):
        await life.close()
    assert not failures
    with pytest.raises(StorageUnavailable):
        await storage.add_usage([])
    again = ServerLifecycle(Config(data=tmp_path, engine="scripted"), engine=ScriptedEngine())
    await again.start()  # the folder is free
    await again.close()
