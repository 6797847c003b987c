"""GET / and /console/...: the console over HTTP, and without it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from server.console import CONTENT_SECURITY_POLICY, assets
from tests.support.running import Running, http_client, running_app


async def test_the_page_and_its_files(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for path, asset in assets().items():
        reply = await client.get(f"/console/{path}")
        assert (reply.status_code, reply.content) == (200, asset.body), path
        assert reply.headers["content-type"] == asset.media_type
        assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cross-origin-opener-policy"] == "same-origin"
        assert reply.headers["cache-control"] == "no-cache"
    script = await client.get("/console/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["content-encoding"] == "gzip"


async def test_what_a_browser_has_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/console/console.css")
    again = await client.get("/console/console.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    head = await client.head("/console/console.css", headers={"accept-encoding": "identity"})
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(assets()["console.css"].body)


@pytest.mark.parametrize(
    "path",
    [
        *("/console/", "/console", "/console/nothing.js", "/console/assets.py", "/console/../assets.py"),
        *("/console/%2e%2e/assets.py", "/console/..%2fassets.py", "/console//etc/passwd", "/console/pages"),
    ],
)
async def test_nothing_else_is_there(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.get(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


async def test_the_page_needs_no_key_and_the_api_does(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=("secret",)) as running, http_client(running) as client:
        for path in ("/", "/console/main.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/tools", "/v1/responses", "/v1/conversations"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/v1/tools", headers={"authorization": "Bearer secret"})).status_code == 200


async def test_the_door_is_the_same_for_it(client: httpx.AsyncClient) -> None:
    foreign = await client.get("/", headers={"host": "evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (421, "host_not_allowed")
    page = await client.get("/console/main.js", headers={"origin": "http://evil.example"})
    assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")


async def test_it_can_be_left_out(tmp_path: Path) -> None:
    async with running_app(tmp_path, console=False) as running, http_client(running) as client:
        for path in ("/", "/console/main.js"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
        told = "the endpoints are under /v1, and the page /docs lists them."
        assert (await client.get("/")).json()["error"]["message"] == f"Invalid URL (GET /): {told}"
        assert (await client.get("/v1/tools")).status_code == 200


async def test_it_is_there_before_the_server_is_ready(server_app: Running, client: httpx.AsyncClient) -> None:
    server_app.life.phase = "starting"
    try:
        assert (await client.get("/")).status_code == 200
    finally:
        server_app.life.phase = "ready"
