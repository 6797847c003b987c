"""How an operator's commands ask a running server: directly, and what they say where another one answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.admin import AdminError, answer_of, asking, leave_address
from server.cli.commands import main
from server.config import Config
from tests.support.running import live_app


def owners(config: Config) -> dict[str, Any]:
    with asking(config) as http:
        return answer_of(http.get("/admin/owners"))


async def test_keys_and_the_token_are_not_shown_to_proxies_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with (
        live_app(tmp_path, ScriptedEngine()) as server,
        await asyncio.start_server(proxy, "127.0.0.1", 0) as other,
    ):
        for name in ("http_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        found = await asyncio.to_thread(owners, server.life.config)
        assert [owner["id"] for owner in found["data"]] == ["local"]
        assert await asyncio.to_thread(main, ["prompts", "list", "--url", server.base_url]) == 0
        assert not seen


@pytest.mark.parametrize("body", [b"<html>", b'{"detail": "gone"}', b"[]"])
async def test_a_reply_of_another_server_is_told_as_that(tmp_path: Path, body: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    config = Config(data=tmp_path)
    async with await asyncio.start_server(other, "127.0.0.1", 0) as found:
        leave_address(config, f"http://127.0.0.1:{found.sockets[0].getsockname()[1]}", "token")
        with pytest.raises(AdminError, match="does not speak this API: status 502"):
            await asyncio.to_thread(owners, config)
