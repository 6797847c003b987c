"""How an operator's commands ask a running server: directly, and what they say where another one answers."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.admin import AdminError, answer_of, asking, leave_address
from server.admin.database_access import carry_out
from server.admin.exports.exporting import COUNTED
from server.cli.commands import main
from server.config import Config
from storage import Storage, open_storage
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


@pytest.mark.parametrize("method, path", [("DELETE", "/admin/purge"), ("POST", "/admin/what-comes-later")])
async def test_a_server_that_does_not_know_the_command_is_of_another_version(
    tmp_path: Path, method: str, path: str
) -> None:
    async with live_app(tmp_path, ScriptedEngine()) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)

        def asked() -> dict[str, Any]:
            with asking(server.life.config) as http:
                return answer_of(http.request(method, path))

        with pytest.raises(AdminError, match=r"of another version than this command.*Use the `antiphon`"):
            await asyncio.to_thread(asked)


async def test_a_command_beside_a_server_that_starts_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds the database from before it migrates, and says where it listens when it is ready."""
    config = Config(data=tmp_path)
    storage = await open_storage(config.db, runner="starting")
    try:
        for argv in (["keys", "list"], ["purge", "--owner", "local"]):
            assert await asyncio.to_thread(main, [*argv, "--data", str(tmp_path)]) == 2
            assert "it is starting, and may be bringing the database" in capsys.readouterr().err
        argv = ["doctor", "--engine", "scripted", "--data", str(tmp_path)]
        async with await asyncio.start_server(_not_ready, "127.0.0.1", 0) as port:
            argv += ["--port", str(port.sockets[0].getsockname()[1])]
            assert await asyncio.to_thread(main, argv) == 0
        lines = {line[6:14].rstrip(): line for line in capsys.readouterr().out.splitlines()}
    finally:
        await storage.close()
    assert lines["database"].startswith("note") and "it is starting" in lines["database"]
    assert lines["port"].startswith("note") and "a server that is starting listens" in lines["port"]


async def _not_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    body = b'{"error": {"code": "not_ready", "message": "The server is starting."}}'
    writer.write(b"HTTP/1.1 503 X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    writer.close()


async def test_what_cannot_be_said_to_a_server_is_refused(tmp_path: Path) -> None:
    async def here(_storage: Storage) -> dict[str, Any]:
        raise AssertionError("a server holds the database")

    async with live_app(tmp_path, ScriptedEngine()) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        said = (server.life.config, here, "POST", "/admin/tiers/local", {"weight": float("nan")})
        with pytest.raises(AdminError, match="not JSON compliant"):
            await asyncio.to_thread(carry_out, *said)


FIRST_RELEASE = Path(__file__).parents[2] / "storage" / "first_release.sql"


@pytest.mark.parametrize("revision, told", [("0001", "run `antiphon migrate"), ("9999", "a newer version")])
@pytest.mark.parametrize(
    "argv",
    [
        ["keys", "list"],
        ["keys", "create"],
        ["usage"],
        ["audit", "verify"],
        ["runs"],
        ["tiers", "local", "--weight", "2"],
        ["export", "--owner", "local"],
        ["import"],
        ["purge", "--owner", "local"],
        ["purge", "--owner", "local", "--yes"],
    ],
    ids=" ".join,
)
def test_a_command_changes_no_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], revision: str, told: str
) -> None:
    """Older servers may be at work on the same database."""
    with closing(sqlite3.connect(tmp_path / "antiphon.db")) as first:
        first.executescript(FIRST_RELEASE.read_text())
        first.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        first.commit()
        before = list(first.iterdump())
        if argv == ["import"]:
            argv = ["import", str(tmp_path / "empty.jsonl")]
            counts = ", ".join(f'"{kind}": 0' for kind in COUNTED)
            (tmp_path / "empty.jsonl").write_text(f'{{"type": "end", "owner": "local", {counts}}}')
        assert main([*argv, "--data", str(tmp_path)]) == 2
        refused = capsys.readouterr()
        assert not refused.out and told in refused.err
        assert list(first.iterdump()) == before
