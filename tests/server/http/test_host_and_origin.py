"""Who may ask at all: names of the server, pages of other origins, TLS, proxies; WebSockets alike."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from starlette.websockets import WebSocket

from server.config import Config, ConfigError, load
from server.errors import ApiError
from server.http.host_and_origin import OwnNames, name_of
from tests.support.running import Running, http_client, running_app
from tests.support.wire import validate_error

KEY = {"authorization": "Bearer sk-ann-0123456789abcdef"}
EVIL = "https://evil.example"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def refusal(reply: httpx.Response, status: int, code: str) -> None:
    """It is that error, in the official shape and with the headers of every reply."""
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    validate_error(reply.json())
    assert reply.headers["x-request-id"] and reply.headers["openai-version"] == "2020-10-01"
    assert "access-control-allow-origin" not in reply.headers


async def stored(client: httpx.AsyncClient) -> str:
    """The id of a stored response."""
    made: str = (await client.post("/v1/responses", json={"input": "say hello"})).json()["id"]
    return made


# ------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:80", "a.localhost", "127.0.0.1", "127.8.8.8:1", "[::1]:8000",
     "[::ffff:127.0.0.1]"],
)  # fmt: skip
async def test_names_of_this_machine_are_known(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example",
     "192.168.1.5", "8.8.8.8:8000", "[2001:db8::1]", "0x7f.1", "localhost:80:80", "localhost@evil.example",
     "", "."],
)  # fmt: skip
async def test_a_foreign_name_reads_writes_and_deletes_nothing(client: httpx.AsyncClient, host: str) -> None:
    path = f"/v1/responses/{await stored(client)}"
    for method, url, body in (
        ("GET", "/v1/models", None),
        ("GET", path, None),
        ("DELETE", path, None),
        ("POST", "/v1/responses", {"input": "say hello"}),
        ("POST", "/admin/keys", {}),
    ):
        refusal(await client.request(method, url, json=body, headers={"host": host}), 421, "host_not_allowed")
    assert (await client.get(path)).status_code == 200


async def test_a_message_repeats_little_of_a_name(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/models", headers={"host": "e" * 5000})
    assert len(reply.json()["error"]["message"]) < 300


async def test_probes_may_know_the_server_by_its_address_only(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready"):
        for host in ("10.1.2.3:8000", "[fd00::7]:8000", ""):
            assert (await client.get(path, headers={"host": host})).status_code == 200
        refusal(await client.get(path, headers={"host": "evil.example"}), 421, "host_not_allowed")
    refusal(await client.get("/version", headers={"host": "10.1.2.3"}), 421, "host_not_allowed")


@pytest.mark.parametrize(
    ("settings", "known", "foreign"),
    [
        ({"allowed_host": "chat.example"}, ["chat.example:443", "localhost"], ["a.chat.example", "10.0.0.1"]),
        ({"allowed_host": "*.Example.com"}, ["a.b.example.com"], ["example.com", "anexample.com"]),
        ({"allowed_host": "*"}, ["anything", "10.0.0.1", ""], []),
        ({"host": "127.0.0.2"}, ["127.0.0.1"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["anything", "10.0.0.1"], []),  # keys are needed, which no foreign page has
        (
            {"host": "0.0.0.0", "allowed_host": "chat.example"},
            ["chat.example", "0.0.0.0:80", "10.0.0.1", "[fd00::1]", "localhost"],
            ["evil.example", ""],
        ),
        ({"host": "gpu-box", "allowed_host": "x.example"}, ["GPU-box:8000"], ["evil.example"]),
    ],
)
def test_which_names_are_the_servers_own(
    settings: dict[str, str], known: list[str], foreign: list[str]
) -> None:
    names = OwnNames(Config(**settings))
    assert [host for host in known if name_of(host) not in names] == []
    assert [host for host in foreign if name_of(host) in names] == []


@pytest.mark.parametrize(
    "flags",
    [
        {"allowed_host": ["chat.example:8000"]},
        {"allowed_host": ["https://chat.example"]},
        {"allowed_host": ["a.*.example"]},
        {"cors_origin": ["https://chat.example/"]},
        {"cors_origin": ["chat.example"]},
        {"cors_origin": ["null"]},
        {"trusted_proxy": ["proxy.example"]},
        {"trusted_proxy": ["10.0.0.1/8"]},
        {"ssl_keyfile": "key.pem"},
        {"ssl_ca_certs": "ca.pem"},
        {"root_path": "antiphon"},
        {"root_path": "/a b"},
        {"default_openai_organization": "a\r\nb: c"},
        {"default_openai_version": "caf\u00e9"},
    ],
)
def test_a_value_that_would_never_match_is_refused(tmp_path: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        load(flags, {"ANTIPHON_DATA": str(tmp_path)})


# ------------------------------------------------------------------------------------------------------------
# Origins

FOREIGN: list[dict[str, str]] = [
    {"origin": EVIL},
    {"origin": EVIL, "sec-fetch-site": "cross-site"},
    {"origin": "null"},
    {"origin": "null", "sec-fetch-site": "same-origin"},
    {"origin": "https://antiphon.localhost"},  # another scheme
    {"origin": "http://antiphon.localhost:81"},
    {"origin": "http://antiphon.localhost", "sec-fetch-site": "same-site"},
    {"origin": "http://antiphon.localhost, https://evil.example"},
    {"origin": "chrome-extension://abc", "sec-fetch-site": "none"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},  # a page of another port of this machine
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
]
OWN: list[dict[str, str]] = [
    {},
    {"origin": "http://antiphon.localhost"},
    {"origin": "HTTP://Antiphon.localhost:80"},
    {"origin": "http://antiphon.localhost", "sec-fetch-site": "same-origin"},
    {"origin": "https://antiphon.localhost", "sec-fetch-site": "same-origin"},  # behind a proxy with TLS
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("marks", FOREIGN)
async def test_a_foreign_page_reads_writes_and_deletes_nothing(
    client: httpx.AsyncClient, server_app: Running, marks: dict[str, str]
) -> None:
    path = f"/v1/responses/{await stored(client)}"
    simple = {**marks, "content-type": "text/plain"}  # what a browser sends without asking first
    requests = (
        ("POST", "/v1/responses", b'{"input": "say hello"}', simple),
        ("POST", "/v1/responses", b'{"input": "say hello", "background": true}', marks),
        ("GET", path, b"", marks),
        ("DELETE", path, b"", marks),
        ("GET", "/v1/models", b"", marks),
        ("OPTIONS", "/v1/models", b"", {**marks, "access-control-request-method": "GET"}),
        ("GET", "/version", b"", marks),
    )
    for method, url, content, headers in requests:
        reply = await client.request(method, url, content=content, headers=headers)
        refusal(reply, 403, "origin_not_allowed")
    assert (await client.get(path)).status_code == 200
    assert (await client.head("/health", headers=marks)).status_code == 403


@pytest.mark.parametrize("marks", OWN)
async def test_the_servers_own_pages_and_other_clients_may(
    client: httpx.AsyncClient, marks: dict[str, str]
) -> None:
    made = await client.post("/v1/responses", json={"input": "say hello"}, headers=marks)
    assert made.status_code == 200
    assert (await client.delete(f"/v1/responses/{made.json()['id']}", headers=marks)).status_code == 200


async def test_pages_of_listed_origins_may(tmp_path: Path) -> None:
    listed = ("https://app.example:443", "chrome-extension://abc")
    async with running_app(tmp_path, cors_origin=listed) as running, http_client(running) as client:
        for origin in ("https://app.example", "chrome-extension://abc"):
            marks = {"origin": origin, "sec-fetch-site": "cross-site"}
            reply = await client.post("/v1/responses", json={"input": "say hi"}, headers=marks)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
            assert reply.headers["access-control-expose-headers"] == "*"
        for marks in FOREIGN:
            reply = await client.post("/v1/responses", json={"input": "say hi"}, headers=marks)
            if marks["origin" if "origin" in marks else "sec-fetch-site"] not in listed:
                refusal(reply, 403, "origin_not_allowed")


async def test_with_a_star_every_page_may(tmp_path: Path) -> None:
    async with running_app(tmp_path, cors_origin="*") as running, http_client(running) as client:
        for marks in FOREIGN:
            assert (await client.get("/v1/models", headers=marks)).status_code == 200


async def test_keys_change_nothing_about_origins(tmp_path: Path) -> None:
    key = KEY["authorization"].split()[1]
    async with running_app(tmp_path, api_key=(key,)) as running, http_client(running, **KEY) as client:
        refusal(await client.get("/v1/models", headers={"origin": EVIL}), 403, "origin_not_allowed")
        assert (await client.get("/v1/models")).status_code == 200


async def test_which_methods_and_headers_listed_pages_may_use(tmp_path: Path) -> None:
    settings = {"cors_origin": EVIL, "cors_method": ("get", "POST"), "cors_header": ("X-Own",)}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:

        async def preflight(method: str, header: str) -> int:
            asked = {"origin": EVIL, "access-control-request-method": method}
            asked["access-control-request-headers"] = header
            return (await client.options("/v1/responses", headers=asked)).status_code

        assert await preflight("POST", "x-own,content-type") == 200
        assert await preflight("DELETE", "x-own") == 403
        assert await preflight("POST", "authorization") == 403


# ------------------------------------------------------------------------------------------------------------
# TLS and proxies


async def test_plain_http_is_refused_where_tls_is_required(tmp_path: Path) -> None:
    key = KEY["authorization"].split()[1]
    settings: dict[str, Any] = {"host": "0.0.0.0", "api_key": (key,), "require_tls": True}
    async with (
        running_app(tmp_path, trusted_proxy="127.0.0.0/8", **settings) as running,
        http_client(running, **KEY) as client,
    ):
        refusal(await client.get("/v1/models"), 403, "tls_required")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/admin/keys")).status_code == 401  # an operator's commands, by their token
        operator = {"authorization": f"Bearer {running.life.admin_token}"}
        projects = "/v1/organization/projects"  # some of these commands ask here
        assert (await client.get(projects, headers=operator)).status_code == 200
        refusal(await client.get(projects), 403, "tls_required")
        behind = {"x-forwarded-proto": "https"}
        assert (await client.get("/v1/models", headers=behind)).status_code == 200
    async with running_app(tmp_path, **settings) as running, http_client(running, **KEY) as client:
        refusal(await client.get("/v1/models", headers=behind), 403, "tls_required")  # nobody is believed


async def test_on_loopback_tls_is_not_required(tmp_path: Path) -> None:
    async with running_app(tmp_path, require_tls=True) as running, http_client(running) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_who_is_no_trusted_proxy_is_where_the_connection_comes_from(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trusted_proxy": "10.0.0.0/8", "api_key": (KEY["authorization"].split()[1],)}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_a_client_that_a_proxy_names_is_where_the_proxy_says(tmp_path: Path) -> None:
    """What is freer on loopback is so for clients on this machine."""
    key = KEY["authorization"].split()[1]
    elsewhere = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "http"}
    settings: dict[str, Any] = {"trusted_proxy": "127.0.0.0/8", "api_key": (key,)}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        for unsaid in ({}, {"x-forwarded-for": " "}):  # the proxy does not say for whom it asks
            assert (await client.get("/metrics", headers=unsaid)).status_code == 401
        assert (await client.get("/metrics", headers=elsewhere)).status_code == 401
        assert (await client.get("/metrics", headers={**elsewhere, **KEY})).status_code == 200
        assert (await client.get("/metrics", headers={"x-forwarded-for": "unknown"})).status_code == 401
        assert (
            await client.get("/metrics", headers={"x-forwarded-for": "::ffff:127.0.0.1"})
        ).status_code == 200
    settings["require_tls"] = True
    async with running_app(tmp_path, **settings) as running, http_client(running, **KEY) as client:
        refusal(await client.get("/v1/models", headers=elsewhere), 403, "tls_required")
        assert (await client.get("/health", headers=elsewhere)).status_code == 200
        refusal(await client.get("/v1/models"), 403, "tls_required")
        assert (await client.get("/v1/models", headers={"x-forwarded-for": "127.0.0.1"})).status_code == 200
        by_tls = {**elsewhere, "x-forwarded-proto": "https"}
        assert (await client.get("/v1/models", headers=by_tls)).status_code == 200


@pytest.mark.parametrize(
    ("trusted", "peer", "logged", "own"),
    [
        (("127.0.0.1",), "127.0.0.1", "203.0.113.9", True),
        (("10.0.0.0/8", "127.0.0.0/8"), "127.0.0.1", "203.0.113.9", True),
        (("127.0.0.0/8",), "::ffff:127.0.0.1", "203.0.113.9", True),  # as a socket for both families says it
        (("10.0.0.0/8",), "127.0.0.1", "127.0.0.1", False),
        ((), "127.0.0.1", "127.0.0.1", False),
    ],
)
async def test_only_trusted_proxies_are_believed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trusted: tuple[str, ...],
    peer: str,
    logged: str,
    own: bool,
) -> None:
    async with running_app(tmp_path, trusted_proxy=trusted) as running:
        transport = httpx.ASGITransport(running.app, client=(peer, 123))
        async with httpx.AsyncClient(transport=transport, base_url=running.base_url) as client:
            marks = {"x-forwarded-for": "1.1.1.1, 203.0.113.9", "x-forwarded-proto": "https"}
            marks["origin"] = "https://antiphon.localhost"
            with caplog.at_level(logging.INFO, "antiphon.access"):
                reply = await client.get("/v1/models", headers=marks)
    assert reply.status_code == (200 if own else 403)
    assert caplog.messages[-1].split()[6] == logged


async def test_a_log_line_repeats_no_address_that_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_app(tmp_path, trusted_proxy="127.0.0.1") as running, http_client(running) as client:
        with caplog.at_level(logging.INFO, "antiphon.access"):
            await client.get("/v1/models", headers={"x-forwarded-for": "me 200 0 ms req_forged"})
    assert caplog.messages[-1].endswith(" -") and "forged" not in caplog.text


async def test_a_root_path_may_be_there_or_not(tmp_path: Path) -> None:
    async with running_app(tmp_path, root_path="/llm/") as running, http_client(running) as client:
        for path in ("/llm/v1/models", "/v1/models", "/llm/health", "/health", "/llm/metrics"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/llmv1/models", "/llm/llm/v1/models", "/v1/llm/models"):
            assert (await client.get(path)).status_code == 404, path
        key = {"idempotency-key": "one"}
        first = await client.post("/llm/v1/responses", json={"input": "say hi"}, headers=key)
        again = await client.post("/v1/responses", json={"input": "say hi"}, headers=key)
        assert first.json()["id"] == again.json()["id"]
        assert (await client.get("/llm/admin/keys")).status_code == 401
        bare = await client.get("/llm")
        assert (bare.status_code, bare.headers["location"]) == (307, "/llm/")
        assert (await client.get("/llm/console/main.js")).status_code == 200
        assert (await client.post("/llm")).status_code == 405


async def test_the_reference_is_under_the_root_path(tmp_path: Path) -> None:
    async with running_app(tmp_path, root_path="/llm") as running, http_client(running) as client:
        for below in ("", "/llm"):  # with the proxy's path taken off, and without
            page = (await client.get(f"{below}/docs")).text
            (link,) = re.findall("<a href=([^ >]+)>/openapi.json</a>", page)
            assert urljoin("https://chat.example/llm/docs", link) == "https://chat.example/llm/openapi.json"
            assert (await client.get(f"{below}/openapi.json")).json()["servers"] == [{"url": "/llm"}]
    async with running_app(tmp_path / "bare") as running, http_client(running) as client:
        assert "servers" not in (await client.get("/openapi.json")).json()


# ------------------------------------------------------------------------------------------------------------
# Headers of requests and replies


async def test_a_clients_request_id_comes_back_and_stands_in_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "antiphon.access"):
        for path in ("/v1/models", "/v1/nothing"):
            reply = await client.get(path, headers={"x-request-id": "trace-7/a"})
            assert reply.headers.get_list("x-request-id") == ["trace-7/a"]
            assert " trace-7/a " in caplog.messages[-1]
        for bad in (b"", b"two words", b"x" * 129, b"caf\xc3\xa9", b"a\tb"):
            reply = await client.get("/v1/models", headers={b"x-request-id": bad})
            assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("POST", "/v1/responses", {"input": "say hi"}, 200),
        ("POST", "/v1/responses", {"input": "say hi", "stream": True}, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("POST", "/v1/responses/resp_x/cancel", {}, 404),
        ("POST", "/v1/responses/resp_x/tool_outputs", {"tool_outputs": []}, 400),
        ("POST", "/v1/responses", {"input": 7}, 400),
    ],
)  # fmt: skip
async def test_every_reply_has_the_same_headers(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    own = {"x-request-id": "r1", "x-client-request-id": "c1", "x-request-trace": "t1"}
    own |= {"openai-organization": "org-mine", "openai-version": "2026-01-01"}
    settings = {"default_openai_organization": "org-house", "default_openai_version": "2025-05-05"}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        reply = await client.request(method, path, json=body, headers=own)
        assert reply.status_code == status
        assert {name: reply.headers.get_list(name) for name in own} == {k: [v] for k, v in own.items()}
        assert reply.headers["openai-processing-ms"].isdigit() and reply.headers["x-antiphon-version"]
        reply = await client.request(method, path, json=body)
        assert reply.headers["openai-organization"] == "org-house"
        assert reply.headers["openai-version"] == "2025-05-05"
        assert reply.headers["x-request-id"].startswith("req_") and "x-request-trace" not in reply.headers


async def test_there_is_no_organization_by_default(client: httpx.AsyncClient) -> None:
    assert "openai-organization" not in (await client.get("/v1/models")).headers


# ------------------------------------------------------------------------------------------------------------
# WebSockets

Handler = Callable[[WebSocket], Awaitable[None]]


class Socket:
    """A WebSocket's client, over ASGI. sent: the messages that it got."""

    def __init__(self, running: Running, path: str, *, deniable: bool = True, **headers: str) -> None:
        self.sent: list[dict[str, Any]] = []
        self._running = running
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "websocket.connect"})
        headers = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
        self._scope = {
            "type": "websocket",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}} if deniable else {},
        }

    async def run(self) -> Socket:
        async def send(message: Any) -> None:
            self.sent.append(dict(message))

        async with asyncio.timeout(10):
            await self._running.app(self._scope, self._inbox.get, send)
        return self

    def say(self, text: str) -> Socket:
        self._inbox.put_nowait({"type": "websocket.receive", "text": text})
        return self

    @property
    def kinds(self) -> list[str]:
        return [message["type"].removeprefix("websocket.") for message in self.sent]

    def denied(self, status: int, code: str) -> None:
        """It was denied with that error, before it was accepted, with the headers of every reply."""
        assert self.kinds == ["http.response.start", "http.response.body"], self.sent
        assert self.sent[0]["status"] == status
        headers = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        assert headers["x-request-id"] and headers["content-type"] == "application/json"
        error = httpx.Response(status, content=self.sent[1]["body"]).json()
        assert validate_error(error)["code"] == code


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(f"{socket.state.principal.owner}: {await socket.receive_text()}")
    await socket.close()


@asynccontextmanager
async def sockets(folder: Path, handler: Handler = echo, **settings: Any) -> AsyncIterator[Running]:
    """A server with a route for WebSockets at /ws, which has only the tests for users."""
    async with running_app(folder, **settings) as running:
        running.app.add_api_websocket_route("/ws", handler)
        yield running


async def test_a_websocket_passes_every_middleware(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sockets(tmp_path, cors_origin="https://app.example") as running:
        for origin in ({}, {"origin": "http://localhost"}, {"origin": "https://app.example"}):
            with caplog.at_level(logging.INFO, "antiphon.access"):
                socket = await Socket(running, "/ws", x_request_id="ws-1", **origin).say("hi").run()
            assert socket.kinds == ["accept", "send", "close"]
            assert socket.sent[1]["text"] == "local: hi"
            assert (b"x-request-id", b"ws-1") in socket.sent[0]["headers"]
            assert caplog.messages[-1].startswith("WEBSOCKET /ws 101 ")


async def test_a_websocket_of_a_foreign_page_or_name_is_denied(tmp_path: Path) -> None:
    async with sockets(tmp_path) as running:
        (await Socket(running, "/ws", origin=EVIL).run()).denied(403, "origin_not_allowed")
        (await Socket(running, "/ws", origin="null").run()).denied(403, "origin_not_allowed")
        (await Socket(running, "/ws", origin="https://localhost").run()).denied(403, "origin_not_allowed")
        (await Socket(running, "/ws", host="evil.example").run()).denied(421, "host_not_allowed")
        bare = await Socket(running, "/ws", deniable=False, origin=EVIL).run()
        assert bare.kinds == ["close"]  # which a server of HTTP says as a bare 403


async def test_a_websocket_needs_a_key_where_one_is_needed(tmp_path: Path) -> None:
    key = KEY["authorization"].split()[1]
    async with sockets(tmp_path, api_key=(key,)) as running:
        (await Socket(running, "/ws").run()).denied(401, "invalid_api_key")
        (await Socket(running, "/ws", authorization="Bearer x").run()).denied(401, "invalid_api_key")
        assert (await Socket(running, "/ws", **KEY).say("hi").run()).kinds == ["accept", "send", "close"]
        for path in ("/health", "/metrics", "/nothing"):  # open for HTTP only
            (await Socket(running, path).run()).denied(401, "invalid_api_key")
        (await Socket(running, "/admin/ws", **KEY).run()).denied(401, "invalid_api_key")


async def test_a_websocket_over_plain_http_is_denied_where_tls_is_required(tmp_path: Path) -> None:
    async with sockets(tmp_path, host="0.0.0.0", require_tls=True) as running:
        (await Socket(running, "/ws").run()).denied(403, "tls_required")


async def test_a_websocket_that_leads_nowhere_is_denied(tmp_path: Path) -> None:
    async with sockets(tmp_path) as running:
        (await Socket(running, "/nothing").run()).denied(404, "unknown_url")


async def test_a_draining_server_takes_no_websocket(tmp_path: Path) -> None:
    async with sockets(tmp_path) as running:
        running.life.phase = "draining"
        (await Socket(running, "/ws").run()).denied(503, "draining")


@pytest.mark.parametrize(
    ("error", "status", "code", "close"),
    [
        (ApiError(400, "No.", code="invalid_value"), 400, "invalid_value", 1008),
        (ApiError(429, "Later.", code="queue_full"), 429, "queue_full", 1013),
        (LookupError("a secret"), 500, "server_error", 1011),
    ],
)
async def test_errors_of_a_websocket_are_told(
    tmp_path: Path, error: Exception, status: int, code: str, close: int
) -> None:
    async def early(socket: WebSocket) -> None:
        raise error

    async def late(socket: WebSocket) -> None:
        await socket.accept()
        raise error

    async with sockets(tmp_path / "early", early) as running:
        denied = await Socket(running, "/ws").run()
        denied.denied(status, code)
        assert b"secret" not in denied.sent[1]["body"]
    async with sockets(tmp_path / "late", late) as running:
        socket = await Socket(running, "/ws").run()
        assert socket.kinds == ["accept", "close"]
        assert (socket.sent[1]["code"], socket.sent[1]["reason"]) == (close, code)


async def test_a_websocket_whose_client_leaves_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sockets(tmp_path) as running:
        socket = Socket(running, "/ws")
        socket._inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        assert (await socket.run()).kinds == ["accept"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_lifespan_passes(server_app: Running) -> None:
    inbox = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]
    sent: list[str] = []

    async def receive() -> Any:
        return inbox.pop()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await server_app.app({"type": "lifespan", "app": server_app.app}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
