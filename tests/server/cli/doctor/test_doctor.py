"""`antiphon doctor`: what it says of each thing that a server needs, and that it changes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from engine import EngineStats, ScriptedEngine, TierStats
from engine.tiers import Folder
from server import __version__
from server.admin import database_access, leave_address
from server.cli.commands import main
from server.cli.doctor import CHECKS
from server.cli.doctor import database as database_check
from server.cli.doctor.access import openings
from server.clock import now_us
from server.config import Config
from storage import (
    Account,
    Counts,
    Finish,
    Notice,
    RunAppend,
    Spent,
    StorageUnavailable,
    StoredFile,
    StoredWebhook,
    open_storage,
)
from storage.migrate import HEAD
from tests.support.making import entry, new, put_bytes
from tests.support.mcp_servers import stdio_command
from tests.support.permissions import barred
from tests.support.postgres import Postgres
from tests.support.processes import server_process
from tests.support.running import http_client, live_app
from tools import BUILTIN, Connections, Listing, McpServer, ToolSpec, operator

FIRST_RELEASE = Path(__file__).parents[3] / "storage" / "first_release.sql"


def database_line(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().out.splitlines() if line[6:14] == "database")


def test_a_backup_says_what_belongs_to_it_and_doctor_misses_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def make() -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="test")
        blob = await put_bytes(storage.blobs, b"x")
        await storage.files.create(StoredFile("f", "local", "a", "user_data", 1, blob.digest, now_us()))
        await storage.close()

    asyncio.run(make())
    copy = tmp_path / "copy" / "antiphon.db"
    copy.parent.mkdir(mode=0o700)
    assert main(["backup", str(copy), "--data", str(tmp_path)]) == 0
    assert f"{copy} and the folder {copy}.blobs hold the whole database" in capsys.readouterr().out
    doctor = ["doctor", "--engine", "scripted", "--data", str(copy.parent), "--port", "0"]
    assert main(doctor) == 0
    shutil.rmtree(f"{copy}.blobs")
    capsys.readouterr()
    assert main(doctor) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert "belong together" in line

    async def lacking() -> str | None:
        storage = await open_storage(f"sqlite+aiosqlite:///{copy}", runner="test")
        try:
            return await storage.lacking_blobs()
        finally:
            await storage.close()

    assert asyncio.run(lacking()) == f"{copy}.blobs", "a server says it as it starts"


def test_doctor_says_where_the_disk_is_nearly_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for free, told in (
        (200_000_000, None),
        (50_000_000, "its disk has only 50.0 MB free"),
        (3_000_000, "its disk has only 3.0 MB free: below 4.2 MB nothing new is stored"),
    ):
        monkeypatch.setattr("storage.drivers.sqlite.free_bytes", lambda _, free=free: free)
        assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "database"]
        assert line.startswith("ok" if told is None else "note")
        assert line.endswith("the first start makes them" if told is None else told)


@pytest.mark.parametrize(
    ("days", "told"), [(-10, "not used for 10 days, or the clock is wrong"), (3, "stored 3.0 days from now")]
)
def test_doctor_says_where_the_clock_may_be_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, days: int, told: str
) -> None:
    async def make(days: int) -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="test")
        at = now_us() + days * 86_400_000_000
        await storage.add_usage([Spent(at, Account("ann", None, "m", "default"), Counts(1))])
        await storage.close()

    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]
    asyncio.run(make(days))
    main(doctor)
    line = database_line(capsys)
    assert line.startswith("note") and told in line
    if days < 0:
        asyncio.run(make(-2))
        main(doctor)
        assert database_line(capsys).startswith("ok")


@pytest.mark.parametrize(
    "flags, line", [(["--data", "/proc/x"], "data"), (["--db", "sqlite:////proc/x/x.db"], "database")]
)
def test_doctor_misses_a_folder_that_cannot_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], line: str
) -> None:
    data = [] if "--data" in flags else ["--data", str(tmp_path)]
    assert main(["doctor", "--engine", "scripted", "--port", "0", *data, *flags]) == 1
    [found] = [told for told in capsys.readouterr().out.splitlines() if told.split()[1] == line]
    assert found.startswith("FAIL") and "/proc/x does not exist, and /proc cannot be written" in found


def test_doctor_reads_the_file_of_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]
    assert main([*doctor, "--api-key-file", str(tmp_path / "keys")]) == 1
    assert f"the file of keys {tmp_path}/keys cannot be read" in capsys.readouterr().out
    (tmp_path / "keys").write_text("ann:sk-1\n")
    (tmp_path / "keys").chmod(0o600)
    assert main([*doctor, "--api-key-file", str(tmp_path / "keys")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "port"]
    assert line.startswith("note") and f"{tmp_path}/keys, line 1: a key of fewer than 16" in line
    assert main([*doctor, "--host", "0.0.0.0"]) == 1
    assert f"antiphon keys create --data {tmp_path}" in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [
        "python",
        "torch",
        "data",
        "database",
        "access",
        "port",
        "limits",
        "sealing",
        "webhooks",
        "tools",
        "egress",
        "mcp",
        "web",
        "documents",
        "sandbox",
        "images",
        "texts",
        "kv",
        "models",
        "model",
    ]
    assert main(["doctor", "--model", "/nowhere/at/all", "--data", str(tmp_path), "--port", "0"]) == 1
    assert "FAIL  model" in capsys.readouterr().out
    models = tmp_path / "several.toml"
    entry = '[[models]]\nname = "{}"\nengine = "scripted"\n'
    models.write_text(entry.format("here") + '[[models]]\nname = "gone"\npath = "/nowhere/at/all"\n')
    # The server starts without a model that it would load when it is wanted.
    assert main(["doctor", "--models", str(models), "--data", str(tmp_path), "--port", "0"]) == 0
    told = capsys.readouterr().out
    assert "note  models" in told and "gone: /nowhere/at/all is not a folder, nor" in told
    several = ["--api-server-count", "2", "--data", str(tmp_path), "--port", "0"]
    assert main(["doctor", "--engine", "scripted", *several]) == 1
    assert "FAIL  database  --api-server-count 2 needs" in capsys.readouterr().out


def test_doctor_tells_which_keys_seal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "seals"

    def told(*flags: str) -> list[str]:
        main(["doctor", "--engine", "scripted", "--port", "0", "--data", str(tmp_path), *flags])
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.split()[1] in ("access", "sealing")]

    assert (
        told()[1]
        == "ok    sealing   reasoning is sealed by keys that the database holds, a new one every 30 days"
    )
    flags = ["--sealing-key-file", str(file)]
    assert told(*flags)[1].startswith("FAIL") and "cannot be read: No such file" in told(*flags)[1]
    file.touch(mode=0o600)
    file.write_text(f"{'4d' * 64}\n{'5e' * 64}\n")
    access, sealing = told(*flags)
    assert access.startswith("ok") and sealing.startswith("ok")
    assert f"of {file}; 1 more open what they sealed" in sealing and "4d4d" not in sealing
    file.chmod(0o644)
    assert f"chmod 600 {file}" in told(*flags)[0]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "ok    egress    off: requests lead nowhere"),
        (
            ["--egress-allow", "10.0.0.0/8:8080", "--egress-allow", "search.example"],
            "ok    egress    off: requests lead nowhere but 10.0.0.0/8:8080, search.example",
        ),
        (
            ["--egress", "public", "--egress-allow", "search.example"],
            "ok    egress    public: requests lead to public addresses, at ports 80 and 443, and to "
            "search.example",
        ),
        (
            ["--egress", "any"],
            "note  egress    any: requests lead to every address, also of this machine and its networks",
        ),
    ],
)
def test_doctor_tells_what_tools_may_reach(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0", *flags]) == 0
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("request", "ok    mcp       no MCP server is configured"),
        ("always", "ok    mcp       no MCP server is configured; every call of an MCP tool needs approval"),
        (
            "never",
            "note  mcp       no MCP server is configured; no call of an MCP tool needs approval, whatever "
            "requests say",
        ),
    ],
)
def test_doctor_tells_of_a_forced_policy_of_approvals(
    policy: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "antiphon.toml").write_text(f'[mcp]\napproval = "{policy}"\n')
    assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_doctor_asks_the_mcp_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = json.dumps(stdio_command(tmp_path / "log"))
    (tmp_path / "antiphon.toml").write_text(
        f"[mcp.servers.good]\ncommand = {good}\n"
        '[mcp.servers.none]\ncommand = ["nowhere-at-all"]\n'
        '[mcp.servers.dead]\nurl = "http://127.0.0.1:9/mcp"\n'
        '[mcp.servers.keyed]\nurl = "http://127.0.0.1:9/mcp?api_key=k3y"\n'
    )
    main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "mcp"]
    good_told = f"good ({sys.executable}): 3 tools, none (nowhere-at-all): the program "
    assert line.startswith(f"note  mcp       {good_told}")
    assert "k3y" not in line and "key=***" in line
    assert "dead (http://127.0.0.1:9/mcp): " in line and "accepts no connection" in line


def test_doctor_gives_mcp_servers_time_from_when_all_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "antiphon.toml").write_text('[mcp.servers.dead]\nurl = "http://127.0.0.1:9/mcp"\n')
    done: list[str] = []
    load, ask = import_module, Connections.list_tools

    def loaded(name: str) -> Any:
        done.append("loaded")
        return load(name)

    async def asked(self: Connections, label: str, server: McpServer) -> Listing:
        done.append("asked")
        return await ask(self, label, server)

    monkeypatch.setattr("tools.mcp.connection.import_module", loaded)
    monkeypatch.setattr(Connections, "list_tools", asked)
    assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "mcp"]
    assert done[:2] == ["loaded", "asked"] and "127.0.0.1 accepts no connection at port 9" in line


def test_doctor_tells_tools_by_where_they_come_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ToolSpec("count_words", "Counts.", {"type": "object"}, BUILTIN["calculator"].run)
    monkeypatch.setattr(operator, "installed_tools", lambda: [spec])
    file = tmp_path / "tools.toml"
    file.write_text(
        '[tools.unique]\ndescription = "Takes different things."\ncommand = ["true"]\n'
        "[tools.unique.parameters]\ntype = 'object'\n"
        "properties = {things = {type = 'array', uniqueItems = true, items = {type = 'object'}}}\n"
    )
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]
    assert main(doctor) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    sources = f"the operator's of {file}: unique, and the operator's of installed packages: count_words"
    assert lines["tools"].endswith(sources)
    assert lines["model"].startswith("note ")
    assert "arguments of the tool unique are checked, and not enforced: " in lines["model"]


@pytest.mark.parametrize("flags", [("--trusted-proxy", "127.0.0.1"), ("--allowed-host", "chat.example")])
def test_doctor_tells_of_a_server_without_keys_that_others_are_led_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    asked = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0", *flags]
    assert main(asked) == 0
    name = flags[0].removeprefix("--").replace("-", "_")
    assert f"{name} leads others to this server" in capsys.readouterr().out
    assert main([*asked, "--api-key", "sk-given"]) == 0
    assert "leads others" not in capsys.readouterr().out


def test_doctor_looks_where_the_entries_of_models_lead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    models = tmp_path / "several.toml"

    def told(*entries: str, flags: Sequence[str] = ()) -> str:
        models.write_text("".join(f"[[models]]\n{entry}\n" for entry in entries))
        main(["doctor", "--models", str(models), "--data", str(tmp_path), "--port", "0", *flags])
        return next(line for line in capsys.readouterr().out.splitlines() if line[6:12] == "models")

    here = "name = 'here'\nengine = 'scripted'"
    line = told(
        here, f"name = 'a'\npath = '{tmp_path / 'empty'}'", f"name = 'b'\npath = '{tmp_path / 'file'}'"
    )
    assert line.startswith("note") and f"a: {tmp_path / 'empty'} has no config.json" in line
    assert f"b: {tmp_path / 'file'} is a file, nor a hub id" in line
    line = told(here, "name = 'c'\npath = 'antiphon-tiny'\nlora = ['x=/nope']")
    assert line.startswith("note") and line.endswith(
        "c: the adapter 'x' cannot be served: /nope is not a folder, nor a hub id of the form owner/name"
    )
    (cut := tmp_path / "cut").mkdir()
    (cut / "config.json").write_text("{}")
    (cut / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    line = told(here, f"name = 'd'\npath = '{cut}'")
    assert line.startswith("note") and f"cannot load: d: {cut / 'model.safetensors'} cannot be read" in line
    large = "name = 'e'\nengine = 'scripted'\nchild = true\nmemory_bytes = '2G'"
    line = told(here, large, flags=["--models-memory-bytes", "1G"])
    assert line.startswith("note") and "cannot load: e takes about 2.0 GiB" in line
    line = told(
        here, f"{large}\npin = true", "name = 'a'\npath = '/nope'", flags=["--models-memory-bytes", "1G"]
    )
    assert line.startswith("FAIL") and "e takes about 2.0 GiB" in line.partition("beside that")[0]
    assert "a: /nope" in line.partition("beside that, the server starts")[2]
    # Wherever the path lies, the server starts without all but the default, or else the first.
    for path in ("/nope", "nope", "./nope"):
        default = f"name = 'd'\npath = '{path}'\ndefault = true"
        assert told(here, default).startswith("FAIL") and told(default.partition("default")[0]).startswith(
            "FAIL"
        )


async def test_doctor_changes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    doctor = ["doctor", "--engine", "scripted", "--data", str(data), "--port", "0"]
    assert await asyncio.to_thread(main, doctor) == 0
    assert "holds no tables yet" in database_line(capsys)
    assert not data.exists()
    assert await asyncio.to_thread(main, ["keys", "create", "--data", str(data)]) == 0
    capsys.readouterr()
    before = {file.name: file.read_bytes() for file in data.iterdir()}
    assert await asyncio.to_thread(main, doctor) == 0
    assert "has this version's schema, is held by nobody and has 1 keys" in database_line(capsys)
    assert {file.name: file.read_bytes() for file in data.iterdir()} == before
    async with server_process(data) as server:
        port = server.url.rpartition(":")[2]
        beside = [*doctor[:-1], port]
        assert await asyncio.to_thread(main, beside) == 0
        lines = capsys.readouterr().out.splitlines()
        told = next(line for line in lines if line[6:14] == "database")
        assert told.startswith("ok") and f"another server (pid {server.child.pid}) holds" in told
        assert f"answers at {server.url}; a second one would be refused" in told
        told = next(line for line in lines if line[6:10] == "port")
        assert told.startswith("ok") and told.endswith(f"the server of this database listens on {server.url}")
        server.child.send_signal(signal.SIGSTOP)  # it holds the database, and does not answer
        monkeypatch.setattr(database_access, "TIMEOUT_S", 0.1)
        assert await asyncio.to_thread(main, beside) == 1
        told = database_line(capsys)
        assert told.startswith("FAIL") and f"listens on {server.url}: stop it" in told


def test_doctor_fails_where_serve_would_be_refused_for_its_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path)]

    def port_line(*flags: str) -> tuple[int, str]:
        code = main([*doctor, *flags])
        return code, next(line for line in capsys.readouterr().out.splitlines() if line[6:10] == "port")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, line = port_line("--port", str(taken.getsockname()[1]))
    assert (
        code == 1 and line.startswith("FAIL") and "another program listens there. Give another --port" in line
    )
    code, line = port_line("--host", "127..0.0.1")
    assert code == 1 and "cannot listen on 127..0.0.1 port 8000: it is no name of a host" in line
    code, line = port_line("--port", "0", "--host", "0.0.0.0")
    assert code == 1 and line.startswith("FAIL") and "antiphon keys create" in line
    assert main(["keys", "create", "--data", str(tmp_path)]) == 0
    capsys.readouterr()
    assert port_line("--port", "0", "--host", "0.0.0.0")[0] == 0


@pytest.mark.parametrize(
    ("revision", "code", "words"),
    [
        ("0001", 0, f"an older schema (0001; this version has {HEAD})"),
        ("9999", 1, f"by a newer version, whose schema it has (9999; this version has {HEAD})"),
    ],
)
def test_doctor_tells_the_schema(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, revision: str, code: int, words: str
) -> None:
    assert main(["migrate", "--data", str(tmp_path)]) == 0
    with closing(sqlite3.connect(tmp_path / "antiphon.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.commit()
    capsys.readouterr()
    assert main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]) == code
    assert words in database_line(capsys)


def test_doctor_counts_the_keys_of_an_older_schema(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]
    with closing(sqlite3.connect(tmp_path / "antiphon.db")) as connection:
        connection.executescript(FIRST_RELEASE.read_text())
    (tmp_path / "antiphon.db").chmod(0o600)
    assert main([*doctor, "--host", "0.0.0.0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line[6:10] == "port").endswith(" is free")
    assert next(line for line in lines if line[6:12] == "limits").startswith("ok    limits    0 owners have")
    assert next(line for line in lines if line[6:14] == "database").endswith("migrates, and 1 keys")


def test_doctor_says_where_it_does_not_know_of_keys_and_limits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "antiphon.db").write_bytes(b"no database" * 100)
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]
    assert main([*doctor, "--host", "0.0.0.0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:14].rstrip() for line in lines if line.startswith("FAIL")] == ["database"]
    port = next(line for line in lines if line[6:10] == "port")
    assert port.startswith("note") and "whether the database has a key" in port and "not known" in port
    limits = next(line for line in lines if line[6:12] == "limits")
    assert limits.startswith("note") and "cannot be read" in limits


async def test_doctor_tells_the_schema_and_the_version_of_a_server_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_process(tmp_path) as server:
        beside = ["doctor", "--engine", "scripted", "--data", str(tmp_path)]
        beside += ["--port", server.url.rpartition(":")[2]]
        with closing(sqlite3.connect(tmp_path / "antiphon.db")) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '0030'")
            connection.commit()
        monkeypatch.setattr(database_check, "__version__", "99.0")
        assert await asyncio.to_thread(main, beside) == 0
    told = database_line(capsys)
    assert f"it is of version {__version__}" in told
    assert f"has an older schema (0030; this version has {HEAD})" in told and "stop that server first" in told


def test_doctor_tells_who_else_can_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data, open_folder = tmp_path / "data", tmp_path / "open"
    data.mkdir(mode=0o700)
    open_folder.mkdir()
    open_folder.chmod(0o777)
    doctor = ["doctor", "--engine", "scripted", "--data", str(data), "--port", "0"]

    def access(*flags: str) -> str:
        main([*doctor, *flags])
        return next(line for line in capsys.readouterr().out.splitlines() if line[6:12] == "access")

    assert access().startswith("ok")
    assert main(["migrate", "--data", str(data)]) == 0
    capsys.readouterr()
    assert access().startswith("ok")
    (data / "antiphon.db").chmod(0o644)
    assert access().startswith("FAIL") and f"chmod 600 {data / 'antiphon.db'}" in access()
    (data / "antiphon.db").chmod(0o600)
    data.chmod(0o755)
    assert access().startswith("note") and f"chmod 700 {data}" in access()
    data.chmod(0o700)
    (data / "antiphon.db-old").touch(mode=0o644)
    assert access().startswith("FAIL") and f"chmod 600 {data / 'antiphon.db-old'}" in access()
    (data / "antiphon.db-old").unlink()
    assert f"chmod o-w {open_folder}" in access("--db", f"sqlite+aiosqlite:///{open_folder}/sub/x.db")
    (data / "antiphon.toml").write_text("tick_s = 0.0\n")
    (data / "antiphon.toml").chmod(0o644)
    assert access().startswith("ok")
    (data / "antiphon.toml").write_text('api_key = ["sk-hush"]\n')
    told = access()
    assert told.startswith("FAIL") and "antiphon.toml" in told and "sk-hush" not in told


def test_doctor_closes_no_folder_that_others_use(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    (home := tmp_path / "home").mkdir()
    (home / "Desktop").mkdir()
    for folder, mode in ((shared, 0o1777), (home, 0o755), (tmp_path, 0o755)):
        folder.chmod(mode)

    def told(db: Path) -> str:
        return "; ".join(words for _, words in openings(Config(data=db.parent, db=f"sqlite:///{db}")))

    for folder in (shared, home, Path("/etc")):
        (words,) = told(folder / "x.db").split("; ")
        assert words.startswith(
            f"other users can look into {folder}: the database belongs into a folder of its"
        )
    home.chmod(0o777)
    assert "chmod" not in told(home / "x.db") and "any user can replace" in told(home / "x.db")
    assert "chmod" not in told(Path("/etc/passwd")), "which is no database"


def test_doctor_passes_over_what_it_may_not_look_up(tmp_path: Path) -> None:
    key = tmp_path / "keys" / "key.pem"
    key.parent.mkdir()
    key.touch(mode=0o644)
    config = Config(data=Path("/nowhere"), ssl_certfile=key)
    assert any(str(key) in words for _, words in openings(config))
    with barred(tmp_path):
        assert list(openings(config)) == []


@pytest.mark.parametrize("headers", ["headers = {a = 'b'}", "headers.a = 'b'", "[tools.x.headers]\na = 'b'"])
def test_doctor_tells_who_else_can_get_at_tools(
    headers: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Who changes the file has the server run what they like, and headers are there to be secret."""
    tmp_path.chmod(0o700)
    file = tmp_path / "tools.toml"

    def access() -> str:
        main(["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"])
        return next(line for line in capsys.readouterr().out.splitlines() if line[6:12] == "access")

    file.write_text("[tools.x]\ndescription = 'x'\nurl = 'http://127.0.0.1:1/'\n")
    file.chmod(0o644)
    assert access().startswith("ok")
    file.chmod(0o664)
    assert access().startswith("FAIL") and f"chmod go-w {file}" in access()
    file.write_text(f"{file.read_text()}{headers}\n")
    file.chmod(0o644)
    assert access().startswith("FAIL") and f"chmod 600 {file}" in access()
    file.chmod(0o600)
    assert access().startswith("ok")


async def test_doctor_tells_how_it_stands_with_saved_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(**settings: Any) -> tuple[str, str]:
        return await CHECKS["kv"](Config(data=tmp_path, **settings))

    folder = tmp_path / "kv"
    assert await told() == ("ok", f"{folder} holds 0 B of at most 10 GiB")
    off: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv_disk_bytes": 0}, "kv_disk_bytes is 0"),
        ({"prefix_caching": False}, "prefix_caching is false"),
        ({"engine": "scripted"}, "engine is scripted"),
    )
    for given, why in off:
        assert await told(**given) == ("ok", f"off ({why}): nothing that is computed is kept on disk")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20, total=1 << 40))
        verdict, words = await told()
        assert verdict == "note" and ", and its disk has room for 2.5 MiB: half of" in words
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        for tier, expected in (
            (TierStats("on"), ("ok", "antiphon-scripted: on; ")),
            (TierStats("full", "the disk is full"), ("note", "antiphon-scripted: full (the disk is full); ")),
        ):
            found = EngineStats(kv_blocks=8, tier=tier)
            monkeypatch.setattr(engine, "stats", lambda found=found: found)
            verdict, words = await told(db=server.life.config.db)
            assert (verdict, words.partition(str(folder))[0]) == expected
        Folder(folder, bytes(16), "b" * 32)
        verdict, words = await told(db=server.life.config.db)
        assert verdict == "note" and words.startswith(f"off: {folder} has what servers of another database")
        verdict, words = await told(db=server.life.config.db, kv_disk_bytes=0)
        assert verdict == "note" and str(folder) in words, "the server that runs has it"
        verdict, words = await told(db=server.life.config.db, kv_disk_folder=tmp_path / "elsewhere")
        assert str(folder) in words and "elsewhere" not in words


async def test_doctor_tells_of_a_database_that_was_moved_away(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, server.client() as client:
        for file in tmp_path.glob("antiphon.db*"):
            file.rename(tmp_path / f"moved-{file.name}")
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        port = server.url.rpartition(":")[2]
        config = Config(data=tmp_path, engine="scripted", port=int(port))
        verdict, words = await CHECKS["database"](config)
        assert verdict == "FAIL" and server.url in words and "removed or replaced" in words
        assert await CHECKS["port"](config) == (
            "note",
            f"the server that cannot do its work runs and listens on {server.url}",
        )


async def test_doctor_tells_why_the_server_that_holds_the_database_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise StorageUnavailable("no room", full=True)

    async with live_app(tmp_path) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        monkeypatch.setattr(server.context.storage, "require_writable", full)
        monkeypatch.setattr("storage.drivers.sqlite.free_bytes", lambda _: 1_000_000)
        verdict, words = await CHECKS["database"](server.life.config)
    assert verdict == "FAIL" and "which is not ready: The disk of the server is full" in words
    assert "goes on by itself when the disk has room" in words and "stop it" not in words


async def test_doctor_tells_of_a_database_that_can_be_read_alone(tmp_path: Path, postgres: Postgres) -> None:
    db = await postgres.fresh()
    config = Config(data=tmp_path, engine="scripted", db=db)
    assert (await CHECKS["database"](config))[0] == "ok"
    admin = await postgres.connect(make_url(db).database or "")
    try:
        await admin.execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on',"
            " current_database()); END $$"
        )
        verdict, words = await CHECKS["database"](config)
    finally:
        await admin.close()
        await postgres.drop(db)
    assert verdict == "FAIL" and "cannot be written: it can be read alone" in words


async def test_commands_tell_which_privileges_a_role_lacks_in_one_line(
    tmp_path: Path, postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    db = await postgres.blank()
    flags = ["--db", db.replace("//postgres@", "//humble@"), "--data", str(tmp_path)]
    admin = await postgres.connect(make_url(db).database or "")
    try:
        await admin.execute("CREATE ROLE humble LOGIN")
        verdict, words = await CHECKS["database"](Config(data=tmp_path, engine="scripted", db=flags[1]))
        assert verdict == "FAIL" and "the role humble may not make tables" in words
        for command in (["migrate"], ["keys", "create"]):
            assert await asyncio.to_thread(main, [*command, *flags]) != 0
            [told] = capsys.readouterr().err.strip().splitlines()
            assert told.endswith("GRANT CREATE, USAGE ON SCHEMA public TO humble")
        with pytest.raises(AssertionError, match="did not start") as refused:
            async with server_process(tmp_path, *flags[:2]):
                """It is refused."""
        assert "SCHEMA public TO humble" in str(refused.value) and "Traceback" not in str(refused.value)
        await admin.execute("DROP SCHEMA public")
        verdict, words = await CHECKS["database"](Config(data=tmp_path, engine="scripted", db=flags[1]))
        assert verdict == "FAIL" and "run CREATE SCHEMA public AUTHORIZATION humble" in words
        for command in (["migrate"], ["keys", "list"], ["owners", "list"]):
            assert await asyncio.to_thread(main, [*command, *flags]) != 0
            [told] = capsys.readouterr().err.strip().splitlines()
            assert "the role humble has no schema to make tables in: have the database's owner run" in told
        await admin.execute("DROP ROLE humble")
    finally:
        await admin.close()
        await postgres.drop(db)


@pytest.mark.parametrize(("off_s", "way"), [(7200, "ahead of"), (-7200, "behind"), (1, None)])
async def test_doctor_tells_of_a_clock_that_is_not_the_database_s(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, off_s: int, way: str | None
) -> None:
    db = await postgres.fresh()
    monkeypatch.setattr(database_check, "now_us", lambda: now_us() + off_s * 1_000_000)
    verdict, words = await CHECKS["database"](Config(data=tmp_path, engine="scripted", db=db))
    await postgres.give_back(db)
    assert verdict == ("note" if way else "ok")
    assert ("; the clock of this machine is 7" in words and f" s {way} the database's" in words) == bool(way)


async def test_doctor_tells_what_a_server_says_whose_data_folder_is_gone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with server_process(data) as server, server.client() as client:
        data.rename(tmp_path / "moved")
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        port = int(server.url.rpartition(":")[2])
        verdict, words = await CHECKS["port"](Config(data=data, engine="scripted", port=port))
    assert verdict == "FAIL"
    assert words.startswith(f"a server that cannot do its work listens on port {port}, and says: ")
    assert "removed or replaced" in words


def test_doctor_tells_of_a_context_that_is_shortened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--data", str(tmp_path), "--port", "0", "--kv-cache-bytes", "1M"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("note  model") and told.endswith("kv_cache_bytes is 1 MiB")
    assert "; the context is " in told


async def test_doctor_counts_the_runs_that_another_model_would_end(tmp_path: Path) -> None:
    """The model of an upgrade is another one, and so is one with another template."""
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    async with (
        live_app(tmp_path / "data", ScriptedEngine(tick_s=60.0)) as server,
        http_client(server) as http,
    ):
        for _ in range(2):
            body = {"input": "count 9", "background": True}
            assert (await http.post("/v1/responses", json=body)).status_code == 200
        config = server.life.config
        assert (await CHECKS["model"](config))[0] == "ok"
        verdict, words = await CHECKS["model"](config.model_copy(update={"chat_template": str(template)}))
        assert verdict == "note" and "; 2 responses in flight or waiting would fail" in words


def test_doctor_tells_the_dialect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    doctor = ["doctor", "--data", str(tmp_path), "--port", "0"]
    template = tmp_path / "own.jinja"
    template.write_text("{{ '[TOOL_CALLS]' }}{{ messages[0].content }}")
    for flags, dialect in (
        ([], "hermes"),
        (["--reasoning-dialect", "none"], "hermes+plain"),
        (["--tool-dialect", "glm"], "glm"),
        (["--chat-template", str(template)], "mistral-list"),
    ):
        assert main([*doctor, *flags]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"dialect {dialect}")
    for flags, told in (
        (["--tool-dialect", "klingon"], "no dialect 'klingon'; known: none, hermes, "),
        (["--chat-template", "/nowhere"], "the chat template /nowhere cannot be read"),
    ):
        assert main([*doctor, *flags]) == 1
        assert told in capsys.readouterr().out


def test_doctor_tells_which_webhooks_are_gone_or_failing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    doctor = ["doctor", "--engine", "scripted", "--data", str(tmp_path), "--port", "0"]

    async def make() -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="test")
        for name in ("well", "gone", "failing"):
            hook = StoredWebhook(name, name, "http://127.0.0.1:9/", b"x", ("response.completed",), 1)
            await storage.add_webhook(hook, entry=entry())
            new_run = await storage.start_response(new(f"r-{name}", owner=name))
            notice = Notice(f"evt_{name}", "response.completed", b"{}", 1)
            finish = Finish("completed", 1, False, notice=notice)
            await storage.append([RunAppend(f"r-{name}", new_run.fence, finish=finish)])
        await storage.disable_webhook("gone", 5, entry=entry())
        for attempt in (1, 2):
            await storage.claim_deliveries("failing", attempt * 10, until=attempt * 10, limit=1)
        await storage.close()

    asyncio.run(make())
    main(doctor)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line[6:14] == "webhooks"]
    assert line.startswith("note") and "gone is gone: its receiver answered 410" in line
    assert "1 notices are kept" in line and "failing is failing" in line and "well" not in line
