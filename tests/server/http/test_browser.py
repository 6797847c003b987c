"""What pages can do to a server through a real browser.

Each page says itself what became of its attempts; the server's access log says what arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import HTMLResponse

from tests.support.chromium import CHROMIUM, MARKS
from tests.support.running import Running, http_client, live_app

pytestmark = MARKS

PAGE = """<!doctype html><title>page</title><script type=module>
const api = "{api}", stored = "{stored}", done = {{}};
const json = {{"content-type": "application/json"}};
async function attempt(name, what) {{
  try {{ done[name] = await what(); }} catch (error) {{ done[name] = error.name; }}
}}
const status = async (url, options) => {{
  const reply = await fetch(url, options);
  await reply.arrayBuffer();
  return reply.type === "opaque" ? "opaque" : reply.status;
}};
{script}
await fetch("{report}/report", {{method: "POST", mode: "no-cors", body: JSON.stringify(done)}});
</script>"""

FOREIGN = """
const body = JSON.stringify({input: "say hello"});
const simple = {method: "POST", mode: "no-cors", headers: {"content-type": "text/plain"}, body};
await attempt("simple post", () => status(api + "/v1/responses", simple));
await attempt("readable simple post", () => status(api + "/v1/responses", {...simple, mode: "cors"}));
await attempt("json post", () => status(api + "/v1/responses", {method: "POST", headers: json, body}));
await attempt("read", () => status(api + "/v1/models"));
await attempt("opaque read", () => status(api + "/v1/models", {mode: "no-cors"}));
await attempt("delete", () => status(`${api}/v1/responses/${stored}`, {method: "DELETE"}));
await attempt("beacon", () => navigator.sendBeacon(api + "/v1/conversations", "{}"));
const loaded = (element) => new Promise((resolve) => {
  element.onload = () => resolve("loaded");
  element.onerror = () => resolve("failed");
});
await attempt("image", () => {
  const image = new Image();
  image.src = api + "/v1/models?image";
  return loaded(image);
});
await attempt("form", async () => {
  const frame = document.createElement("iframe");
  frame.name = "target";
  document.documentElement.append(frame);
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", enctype: "text/plain", action: api + "/v1/responses?form"});
  form.target = "target";
  const field = document.createElement("input");
  Object.assign(field, {name: '{"input": "say hello", "metadata": {"a": "', value: '"}}'});
  form.append(field);
  document.documentElement.append(form);
  form.submit();
  return loaded(frame);
});
await attempt("sandboxed form", () => {
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-forms allow-scripts";
  frame.srcdoc = `<form method=POST enctype=text/plain action="${api}/v1/responses?sandboxed">
    <input name='{"input": "' value='say hello"}'></form><script>document.forms[0].submit()</` + "script>";
  document.documentElement.append(frame);
  return "sent";
});
"""

REBOUND = """
await fetch("/rebind");
await attempt("read", () => status("/v1/models"));
await attempt("read stored", () => status("/v1/responses/" + stored));
const post = {method: "POST", headers: json, body: '{"input": "say hello"}'};
await attempt("post", () => status("/v1/responses", post));
await attempt("delete", () => status("/v1/responses/" + stored, {method: "DELETE"}));
"""

FRIENDLY = """
const own = {...json, "x-own": "1", "x-request-id": "from-the-page", authorization: "Bearer any"};
const post = (fields) => fetch(api + "/v1/responses",
  {method: "POST", headers: own, body: JSON.stringify({input: "say hello", ...fields})});
await attempt("post", async () => {
  const reply = await post({});
  done.id = (await reply.json()).id;
  done.header = reply.headers.get("x-request-id");
  return reply.status;
});
await attempt("stream", async () => {
  const text = await (await post({stream: true})).text();
  return text.includes("response.completed");
});
await attempt("read", () => status(api + "/v1/responses/" + done.id));
await attempt("delete", () => status(`${api}/v1/responses/${done.id}`, {method: "DELETE"}));
"""


@dataclass
class Site:
    """A web server with one page, and what the page reports. rebound: set once the page has asked for it."""

    url: str = ""
    page: str = ""
    reported: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    rebound: bool = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        body = ""
        if path == "/report":
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            self.reported.set_result(json.loads(await reader.readexactly(length)))
        elif path == "/rebind":
            self.rebound = True
        elif path == "/":
            body = self.page
        fields = f"content-type: text/html\r\ncontent-length: {len(body.encode())}\r\nconnection: close"
        writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{body}".encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """A web server on a port of its own."""
    here = Site()
    server = await asyncio.start_server(here.answer, "127.0.0.1", 0)
    here.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield here


@asynccontextmanager
async def rebinding(page: Site, server: Running) -> AsyncIterator[int]:
    """A port that leads to a site until its page has it lead to a server: what a browser sees of a name whose
    address changes."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(server.base_url if page.rebound else page.url)
        to_reader, to_writer = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(pipe(reader, to_writer), pipe(to_reader, writer))

    listening = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


async def visit(
    url: str, page: Site, folder: Path, until: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """Open a page in Chromium, for which every name in .example is this machine, and keep it open until it
    has reported and a state is reached; returns the report."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    mapping = "--host-resolver-rules=MAP *.example 127.0.0.1"
    browser = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *flags, mapping, f"--user-data-dir={folder / 'browser'}", url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(60):
            said = await page.reported
            while not until():
                await asyncio.sleep(0.02)
            return said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        await browser.wait()


@asynccontextmanager
async def scene(folder: Path, script: str, **settings: Any) -> AsyncIterator[tuple[Running, Site, str]]:
    """A server, a site whose page runs a script against it, and the id of a response that it has stored."""
    async with live_app(folder, **settings) as server, site() as page, http_client(server) as client:
        stored = (await client.post("/v1/responses", json={"input": "say hello"})).json()["id"]
        page.page = PAGE.format(api=server.base_url, stored=stored, report=page.url, script=script)
        yield server, page, stored
        assert (await client.get(f"/v1/responses/{stored}")).status_code == 200


def arrived(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, int]]:
    """Method, path and status of every request so far."""
    lines = [record for record in caplog.records if record.name == "antiphon.access"]
    return [(record.args[0], record.args[1], record.args[2]) for record in lines]  # type: ignore[index,misc]


def posts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The paths of all POSTs so far."""
    return [path for method, path, _ in arrived(caplog) if method == "POST"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["127.0.0.1", "evil.example"])
@pytest.mark.parametrize("listed", [(), ("https://app.example",)])
async def test_a_foreign_page_can_neither_read_nor_do_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, listed: tuple[str, ...]
) -> None:
    async with scene(tmp_path, FOREIGN, cors_origin=listed) as (_, page, _stored):
        with caplog.at_level(logging.DEBUG, "antiphon.access"):
            caplog.clear()
            url = page.url.replace("127.0.0.1", name)
            said = await visit(url, page, tmp_path, until=lambda: len(posts(caplog)) >= 5)
            seen, posted = arrived(caplog), posts(caplog)
    assert said == {
        "simple post": "opaque",
        "readable simple post": "TypeError",
        "json post": "TypeError",
        "read": "TypeError",
        "opaque read": "opaque",
        "delete": "TypeError",
        "beacon": True,
        "image": "failed",
        "form": "loaded",
        "sandboxed form": "sent",
    }
    assert {status for _, _, status in seen} == {403}, seen
    # Those that no browser asks about first have come in, so they were refused by the server and nobody else.
    assert sorted(posted) == ["/v1/conversations", *["/v1/responses"] * 4], seen


async def test_a_page_whose_name_turns_into_this_machine_can_do_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scene(tmp_path, REBOUND) as (server, page, _stored),
        rebinding(page, server) as port,
    ):
        with caplog.at_level(logging.DEBUG, "antiphon.access"):
            caplog.clear()
            said = await visit(f"http://evil.example:{port}/", page, tmp_path)
            seen = arrived(caplog)
    # The browser takes the replies for the page's own and lets the page read them; there is nothing in them.
    assert said == {"read": 421, "read stored": 421, "post": 421, "delete": 421}
    assert {status for _, _, status in seen} == {421} and len(seen) >= 4, seen


async def test_a_page_of_a_listed_origin_can_do_everything(tmp_path: Path) -> None:
    async with site() as page:
        origin = page.url.replace("127.0.0.1", "app.example")
        async with live_app(tmp_path, cors_origin=origin) as server:
            page.page = PAGE.format(api=server.base_url, stored="", report=page.url, script=FRIENDLY)
            said = await visit(origin, page, tmp_path)
    assert said.pop("id").startswith("resp_")
    assert said == {"post": 200, "stream": True, "read": 200, "delete": 200, "header": "from-the-page"}


async def test_a_page_of_the_server_itself_can_do_everything(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, site() as page:

        async def own_page(request: Request) -> HTMLResponse:
            return HTMLResponse(PAGE.format(api="", stored="", report=page.url, script=FRIENDLY))

        server.app.add_route("/page", own_page)
        said = await visit(f"{server.base_url}/page", page, tmp_path)
    assert said.pop("id").startswith("resp_")
    assert said == {"post": 200, "stream": True, "read": 200, "delete": 200, "header": "from-the-page"}
