"""The command line and the process: what it prints, how it ends, and with which exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import httpx
import pytest

from engine import EngineStats, ScriptedEngine, TierStats
from engine.tiers import Folder
from server import __version__
from server.admin import AdminError, database_access, keys, leave_address
from server.cli import doctor
from server.cli.commands import COMMANDS, main
from server.cli.doctor import _openings
from server.clock import now_us
from server.config import SUBJECTS, Config, settings
from server.telemetry import end_user
from storage import StoredFile, open_storage
from storage.migrate import HEAD
from tests.support.forking import READY
from tests.support.mcp_servers import stdio_command
from tests.support.permissions import barred
from tests.support.processes import server_process
from tests.support.running import live_app
from tools import BUILTIN, Connections, Listing, McpServer, ToolSpec, operator

ROOT = Path(__file__).parents[3]
FIRST_RELEASE = ROOT / "tests" / "storage" / "first_release.sql"

LIGHT = """
import sys
import time
from server.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "fastapi", "sqlalchemy", "pydantic", "httpx", "engine", "storage"} & set(sys.modules)
assert not heavy, heavy
"""


INTERRUPTED_BY_AN_IMPORT = """
import signal, sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Pressed())
from server.cli import main

sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ("importlib.metadata", "chat"),
        ("server.cli.commands", "complete"),
        ("httpx", "chat"),
        ("server.cli.doctor", "doctor", "--engine", "scripted"),
        ("server.process", "serve", "--engine", "scripted"),
    ],
)
def test_ctrl_c_at_the_start_is_no_traceback(argv: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_BY_AN_IMPORT, *argv]
    environment = {**os.environ, "ANTIPHON_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_help_and_version_import_nothing_heavy(capfd: pytest.CaptureFixture[str]) -> None:
    import subprocess

    for flag in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", LIGHT, flag], check=True, cwd=ROOT)
    printed = capfd.readouterr().out
    assert f"antiphon {__version__}" in printed
    for name, command in COMMANDS.items():
        assert name in printed and command.summary in printed


def test_config_shows_every_setting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "--data", str(tmp_path), "--port", "9", "--api-key", "sk-secret"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"SETTING"} | {row.name for row in settings()}
    assert "flag --port" in lines["port"] and "ANTIPHON_PORT" in lines["port"]
    assert "default" in lines["keepalive_s"]
    assert "secret" not in lines["api_key"].partition("flag")[0]


def test_an_empty_default_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--root-path" in shown and "(default )" not in " ".join(shown.split())


def test_settings_of_another_engine_are_told_and_do_not_keep_other_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_UPSTREAM", "http://127.0.0.1:1")
    data = ["--data", str(tmp_path)]
    assert main(["keys", "create", *data]) == 0
    assert capsys.readouterr().err == ""
    main(["doctor", "--engine", "scripted", "--port", "0", *data])
    assert "upstream (environment ANTIPHON_UPSTREAM) has no effect" in capsys.readouterr().err


def test_every_setting_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for row in settings():
        assert row.flag in shown
    places = [shown.index(f"settings: {subject}:") for subject in SUBJECTS.values()]
    assert places == sorted(places), "they are grouped by their subjects"
    assert SUBJECTS.keys() <= {row.name for row in settings()}


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.passes_on])
def test_every_argument_of_every_command_is_explained(name: str) -> None:
    parser = argparse.ArgumentParser(prog=name)
    COMMANDS[name].add_arguments(parser)
    pending = [parser]
    for each in pending:
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
            else:
                assert action.help, f"{each.prog} says nothing of {action.option_strings or action.dest}"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["runs", "tail"], "required: id"),
        (["runs", "list", "resp_1"], "unrecognized arguments: resp_1"),
        (["runs", "resp_1"], "choose from 'list', 'tail', 'cancel', 'fork'"),
        (["models", "load"], "required: name"),
    ],
)
def test_a_verb_has_arguments_of_its_own(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_runs_are_listed_by_default_and_a_table_without_rows_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["migrate", "--data", str(tmp_path)]) == 0
    capsys.readouterr()
    for argv in (["runs"], ["runs", "list"]):
        assert main([*argv, "--data", str(tmp_path)]) == 0
        printed = capsys.readouterr()
        assert printed.out.split()[0] == "ID" and printed.err == "antiphon: there are none\n"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at its end", "at once"])
def test_an_output_that_nobody_reads_or_that_has_no_room_is_no_traceback(
    tmp_path: Path, unbuffered: str
) -> None:
    command = [READY, "-m", "server.cli", "config", "--data", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}

    def ran(out: int | IO[bytes]) -> tuple[int, bytes]:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, cwd=ROOT, env=env)
        return done.returncode, done.stderr

    reader, writer = os.pipe()
    os.close(reader)
    assert ran(writer) == (0, b"")
    os.close(writer)
    with open("/dev/full", "wb") as full:
        no_room = b"antiphon: what it says cannot be written: No space left on device\n"
        assert ran(full) == (2, no_room)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", ["keys create", "keys rotate", "webhooks add"])
@pytest.mark.parametrize("out", ["full", "unread", "closed"])
def test_a_secret_that_could_not_be_shown_is_of_no_use_to_anybody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: str, out: str
) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["keys", "create", "--owner", "local", "--expires", "30d", *data]) == 0
    old = capsys.readouterr().out.split()[2].rstrip(",")
    rest = {"keys create": [], "keys rotate": [old], "webhooks add": ["https://example.org/told"]}[made]
    command = [READY, "-m", "server.cli", *made.split(), *rest, *data]
    if out == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reader, unread = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(unread, "wb") as pipe:
        done = subprocess.run(
            command,
            stdout=pipe if out == "unread" else full,
            stderr=subprocess.PIPE,
            timeout=60,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 2
    assert b"what nobody can see again cannot be written" in done.stderr and done.stderr.count(b"\n") == 1
    assert main(["keys", "list", "--json", *data]) == 0
    live = [key["id"] for key in json.loads(capsys.readouterr().out) if key["revoked_at"] is None]
    assert live == [old]
    assert main(["webhooks", "list", "--json", *data]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_key_that_can_be_neither_shown_nor_revoked_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full for the output and for the database."""

    def fails(*_: Any) -> None:
        raise AdminError("the database could not be written: the disk is full")

    monkeypatch.setattr(keys, "_ended", fails)
    with open("/dev/full", "wb", 0) as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", TextIOWrapper(full, write_through=True))
        assert main(["keys", "create", "--owner", "local", "--data", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert main(["keys", "list", "--json", "--data", str(tmp_path)]) == 0
    (live,) = json.loads(capsys.readouterr().out)
    assert f"Run `antiphon keys revoke {live['id']}" in told and "the disk is full" in told


def test_a_backup_that_nobody_watches_prints_its_end_only(tmp_path: Path) -> None:
    assert main(["migrate", "--data", str(tmp_path)]) == 0
    command = [READY, "-m", "server.cli", "backup", str(tmp_path / "copy"), "--data", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=ROOT, env=env, check=True)
    assert done.stderr == b"" and len(done.stdout.splitlines()) == 2


def test_a_backup_is_in_the_audit_log_and_in_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ran(*argv: str, data: Path = tmp_path) -> list[str]:
        assert main([*argv, "--data", str(data)]) == 0
        return capsys.readouterr().out.splitlines()

    ran("migrate")
    copy = tmp_path / "copy" / "antiphon.db"
    copy.parent.mkdir()
    assert len(ran("backup", str(copy))) == 2
    assert main(["backup", str(copy), "--data", str(tmp_path)]) == 2, "it replaces nothing"
    capsys.readouterr()
    for data in (tmp_path, copy.parent):
        [entry] = ran("audit", "list", data=data)
        assert "operator  database.copied" in entry and entry.endswith(str(copy))


def test_a_backup_beside_a_server_that_does_not_answer_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The folder is held, and nobody answers at the address that is left in it."""
    assert main(["migrate", "--data", str(tmp_path)]) == 0
    capsys.readouterr()

    async def beside() -> int:
        held = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="silent")
        try:
            return await asyncio.to_thread(main, ["backup", str(tmp_path / "copy"), "--data", str(tmp_path)])
        finally:
            await held.close()

    assert asyncio.run(beside()) == 0
    assert "the audit log has no entry of this: a server holds the database" in capsys.readouterr().out
    assert (tmp_path / "copy").is_file()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--port", "99999"], "port (flag --port)"),
        (["serve", "--workers", "2"], "--workers"),
        (["serve", "--upstream", "http://127.0.0.1:1"], "give --engine upstream too"),
        (["doctor", "--upstream", "http://127.0.0.1:1"], "give --engine upstream too"),
        (["audit", "list", "--type", "bogus"], "type 'bogus', only api_key.created, api_key.updated,"),
        (["migrate", "--db", "mysql://x/y"], "sqlite"),
        (["config", "--db", "mysql://x/y"], "sqlite"),
        (["config", "--db", "sqlite:///"], "db (flag --db): the database must be a file"),
        (["keys", "list", "--db", "nonsense"], "not a database URL"),
        (["keys", "create", "--db", "sqlite+aiosqlite:////dev/null/x.db"], "/dev/null cannot be used"),
    ],
)
def test_refusals_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], words: str
) -> None:
    assert main([*argv, "--data", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("antiphon: ") and words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--model", "A", "--model", "B"], "--model is given more than once"),
        (["serve", "--deterministic", "--deterministic", "false"], "--deterministic is given more than once"),
        (["serve", "--xyzzy"], "--xyzzy (see `antiphon serve --help`)"),
        (["serve", "--prot", "1"], "--prot; did you mean --port?"),
        (["keys", "create", "--ownr=x", "--scop", "y"], "did you mean --owner?"),
        (["serv"], "no command 'serv'; did you mean 'serve'?"),
        (["keys"], "create|list|rotate|update|revoke"),
        (["keys", "revoke"], "antiphon keys revoke --help"),
        (["config", "--dtype", "int3"], "--dtype"),
        (["nonsense"], "antiphon --help"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("antiphon: ") and words in err and len(err.splitlines()) == 1


def test_every_command_has_examples() -> None:
    assert [name for name, command in COMMANDS.items() if not command.examples] == []


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.passes_on])
def test_the_examples_of_a_command_are_its_own_and_parse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    command = COMMANDS[name]
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    ran: list[argparse.Namespace] = []

    def run(options: argparse.Namespace) -> int:
        ran.append(options)
        return 0

    monkeypatch.setitem(COMMANDS, name, replace(command, run=run))
    for example in command.examples:
        assert example in shown
        line = example.split("  ")[0].split(" > ")[0]
        words = shlex.split(line)
        assert main(words[words.index("antiphon") + 1 :]) == 0
    assert [options.command for options in ran] == [name] * len(command.examples)


def test_a_variable_that_is_no_setting_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANTIPHON_PROT", "1")
    assert main(["config", "--data", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("ANTIPHON_PROT") == 1


def test_keys_are_listed_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["migrate", *data]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--json", *data]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["keys", "create", "--name", "laptop", "--owner", "ann", *data]) == 0
    key = capsys.readouterr().out.splitlines()[0]
    assert main(["keys", "list", "--json", *data]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["owner"], listed["revoked_at"]) == ("laptop", "ann", None)
    assert listed["hint"] == f"...{key[-4:]}" and "key" not in listed
    for other in ("webhooks", "sealing"):
        assert main([other, "list", "--json", *data]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), list)


def test_a_key_after_all_were_revoked_is_not_called_the_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What it changes is told, for with no live key none was needed."""
    for _ in range(2):
        assert main(["keys", "create", "--data", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert "first key" not in told
        assert f"No other key is live in sqlite+aiosqlite:///{tmp_path}/antiphon.db. Every request" in told
        id = told.split()[2].rstrip(",")
        assert main(["keys", "revoke", id, "--data", str(tmp_path)]) == 0
        assert "No stored key is live any more" in capsys.readouterr().out


def test_migrate_and_keys_without_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["migrate", *data]) == 0
    assert (tmp_path / "antiphon.db").exists()
    assert main(["keys", "create", "--name", "laptop", "--owner", "ann", *data]) == 0
    _, key, told, new, changed, owner = capsys.readouterr().out.splitlines()
    assert new.startswith("ann is a new owner")
    assert str(tmp_path) in changed and "Every request needs a key" in changed and "--owner local" in owner
    assert main(["keys", "create", "--owner", "own_mistyped", *data]) == 1
    assert "there is no owner whose id or name is 'own_mistyped'" in capsys.readouterr().err
    assert main(["keys", "create", *data]) == 0
    second = capsys.readouterr().out.splitlines()
    assert len(second) == 2  # nothing changes with it
    assert main(["keys", "revoke", second[1].split()[1].rstrip(","), *data]) == 0
    assert "No stored key is live" not in capsys.readouterr().out
    assert key.startswith("sk-antiphon-")
    assert main(["keys", "list", *data]) == 0
    listed = capsys.readouterr().out
    assert "live" in listed and "ann" in listed and "laptop" in listed and key not in listed
    key_id = told.split()[1].rstrip(",")
    assert main(["keys", "revoke", key_id, *data]) == 0
    assert "No stored key is live" in capsys.readouterr().out
    assert main(["keys", "create", "--owner", "local", *data]) == 0
    assert "sees what was made without a key" in capsys.readouterr().out
    assert main(["keys", "list", *data]) == 0
    assert "revoked" in capsys.readouterr().out
    assert main(["keys", "revoke", key_id, *data]) == 0
    assert "was revoked already" in capsys.readouterr().out


def test_limits_in_force_are_shown_as_commands_take_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = ["--data", str(tmp_path)]
    (tmp_path / "antiphon.toml").write_text(
        'owner_limit = ["requests_per_minute=9", "tokens_per_day=100"]\nprice = ["*=1/1/1"]\n'
    )

    def ran(*argv: str) -> list[str]:
        assert main([*argv, *data]) == 0, argv
        return capsys.readouterr().out.splitlines()

    [team] = ran("owners", "create", "Sales")
    ran("tiers", team, "--weight", "2.5", "--service-tiers", "flex,default")
    changed = ran("owners", "limits", team, "--limit", "tokens_per_day=5,stored_bytes=1M,total_cost=0.00005")
    assert changed == [
        f"{team} has these limits:",
        "  weight=2.5",
        "  service_tiers=flex,default",
        "  requests_per_minute=9, of every owner by the setting owner_limit",
        "  tokens_per_day=5",
        "  stored_bytes=1048576 (0 used)",
        "  total_cost=0.00005 (0 used)",
    ]
    told = json.loads("\n".join(ran("owners", "limits", "Sales", "--json")))
    assert told["id"] == team and told["in_force"]["requests_per_minute"] == 9
    assert "requests_per_minute" not in told["limits"] and told["used"]["total_tokens"] == 0
    ran("keys", "create", "--owner", team, "--name", "laptop", "--limit", "requests_per_minute=3")
    own = "weight=2.5 service_tiers=flex,default tokens_per_day=5 stored_bytes=1048576 total_cost=0.00005"
    assert ran("owners", "list")[-1].endswith(f"Sales  {own}")
    assert ran("keys", "list")[-1].endswith("laptop  requests_per_minute=3")
    [local] = [line for line in ran("owners", "list") if line.startswith("local ")] or ["-"]
    assert local.endswith("-")
    for wrong, hint in (
        (["owners", "limits", team, "--limit", "weight=2"], "antiphon tiers ID --weight"),
        (["owners", "limits", team, "--limit", "tokens_per_day=-5"], "no whole number from 1 on"),
        (["keys", "create", "--owner", team, "--scope", ""], "--scope names no scope"),
    ):
        assert main([*wrong, *data]) == 2
        assert hint in capsys.readouterr().err


def test_limits_of_keys_and_owners(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]

    def ran(*argv: str) -> list[str]:
        assert main([*argv, *data]) == 0, argv
        return capsys.readouterr().out.splitlines()

    [team] = ran("owners", "create", "Sales")
    assert ran("owners", "limits", team) == [f"{team} has no limits"]
    changes = "tokens_per_day=5,m:x:requests_per_minute=2"
    assert main(["owners", "limits", team, "--limit", changes, *data]) == 0
    out, err = capsys.readouterr()
    assert "no server was asked whether it serves m:x" in err
    told = out.splitlines()
    assert told == [f"{team} has these limits:", "  tokens_per_day=5", "  m:x:requests_per_minute=2"]
    told = ran("owners", "limits", team, "--limit", "m:x:requests_per_minute=none")
    assert told == [f"{team} has these limits:", "  tokens_per_day=5"]
    ran("keys", "create", "--owner", team, "--limit", "requests_per_minute=60")
    [key] = json.loads("".join(ran("keys", "list", "--json")))
    assert key["limits"] == {"requests_per_minute": 60}
    assert ran("keys", "update", key["id"], "--limit", "requests_per_minute=6")[1:] == [
        "  requests_per_minute=6"
    ]
    for wrong in ("request_per_minute=6", "requests_per_minute=0", "requests_per_minute"):
        assert main(["keys", "create", "--limit", wrong, *data]) == 2
        assert capsys.readouterr().err.startswith("antiphon: ")
    assert main(["owners", "limits", team, "--limit", "m:stored_bytes=5", *data]) == 2
    assert "'stored_bytes' is one of everything, not of a single model" in capsys.readouterr().err


def test_keys_with_scopes_an_end_and_successors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]

    def ran(*argv: str) -> str:
        assert main([*argv, *data]) == 0, argv
        return capsys.readouterr().out

    def keys() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(ran("keys", "list", "--json"))
        return found

    team = ran("owners", "create", "Sales").strip()
    ran(
        "keys",
        "create",
        "--owner",
        team,
        "--scope",
        "files.read,chat",
        "--scope",
        "model:a*",
        "--expires",
        "2h",
    )
    [first] = keys()
    assert (first["owner"], first["scopes"]) == (team, ["files.read", "chat", "model:a*"])
    assert first["expires_at"] == first["created_at"] + 7200
    assert "until" in ran("keys", "list") and "never" in ran("keys", "list")
    told = ran("keys", "rotate", first["id"], "--grace", "30m").splitlines()
    assert told[0].startswith("sk-antiphon-") and f"{first['id']} is accepted until" in told[2]
    assert len(told) == 3
    _, second = keys()
    assert (second["owner"], second["scopes"]) == (first["owner"], first["scopes"])
    assert second["replaces"] == first["id"] and second["expires_at"] is None
    ran("keys", "update", second["id"], "--scope", "all", "--name", "renamed")
    assert (keys()[1]["scopes"], keys()[1]["name"]) == (["all"], "renamed")
    told = ran("keys", "rotate", first["id"], "--grace", "5m").splitlines()
    assert ", not until 20" in told[2] and told[2].endswith(" as before")
    assert f"was rotated before, and {second['id']} replaces it too" in told[3]
    told = ran("keys", "rotate", first["id"], "--grace", "1h").splitlines()
    assert "as before" not in told[2]  # a rotation never makes a key live longer
    ran("keys", "rotate", second["id"], "--grace", "0s")
    assert "expired" in ran("keys", "list")
    ran("keys", "create", "--scope", "admin")
    assert keys()[-1]["owner"] == "admin"
    for refused, says in (
        (["keys", "create", "--scope", "everything"], "no scope 'everything'"),
        (["keys", "create", "--expires", "soon"], "no time ahead"),
        (["keys", "rotate", second["id"]], "revoked or expired"),
        (["keys", "rotate", "key_1"], "no key with id"),
        (["keys", "update", first["id"]], "nothing to change"),
        (["owners", "rename", "own_1", "x"], "no owner whose id or name is"),
    ):
        assert main([*refused, *data]) == (1 if refused[0] == "owners" else 2), refused
        assert says in capsys.readouterr().err, refused

    ran("owners", "rename", team, "Buying")
    assert "Buying" in ran("owners", "list")
    ran("owners", "archive", team)
    assert all(key["revoked_at"] for key in keys() if key["owner"] == team)
    assert "archived" in ran("owners", "list")


def test_usage_is_shown_with_and_without_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from storage import Account, Counts, Spent, open_storage

    data = ["--data", str(tmp_path)]
    day = 86_400_000_000
    today = time.time_ns() // 1000 // day * day

    async def write() -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="test")
        for owner, key, model, at, person in (
            ("ann", "key_a", "m", today, end_user("ann", "carol")),
            ("ann", "key_a", "n", today - day, None),
            ("bob", None, "m", today - 40 * day, end_user("bob", "carol")),
            ("bob", None, "m", today, None),
        ):
            counts = Counts(1, 1_000_000, 400_000, 10, 3)
            tier = "flex" if model == "n" else "default"
            account = Account(owner, key, model, tier, person=person)
            await storage.add_usage([Spent(at, account, counts)])
        await storage.close()

    asyncio.run(write())

    def ran(*args: str) -> str:
        assert main(["usage", *args, *data]) == 0
        return capsys.readouterr().out

    def sums(*args: str) -> list[tuple[object, ...]]:
        names = ("owner", "key", "model", "tier", "identifier", "day", "requests")
        return [tuple(row[name] for name in names if name in row) for row in json.loads(ran(*args, "--json"))]

    lines = ran().splitlines()
    assert lines[0].split() == ["OWNER", "MODEL", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "REASONING"]
    assert lines[1].split() == ["ann", "m", "1", "1000000", "400000", "10", "3"]
    assert len(lines) == 4
    assert sums("--by", "owner", "--since", "60d") == [("ann", 2), ("bob", 2)]
    assert sums("--by", "key", "--owner", "bob") == [(None, 1)]
    assert sums("--by", "tier") == [("default", 2), ("flex", 1)]
    carol = end_user("ann", "carol")
    assert sums("--by", "owner", "--by", "identifier") == [
        ("ann", None, 1),
        ("ann", carol, 1),
        ("bob", None, 1),
    ]
    assert ["ann", carol, "1"] in [
        line.split()[:3] for line in ran("--by", "owner", "--by", "identifier").splitlines()
    ]
    assert sums("--by", "model", "--owner", "ann", "--identifier", "carol") == [("m", 1)]
    assert sums("--by", "owner", "--owner", "bob", "--identifier", "carol", "--since", "60d") == [("bob", 1)]
    shown = datetime.fromtimestamp(today / 1e6, UTC).strftime("%Y-%m-%d")
    assert sums("--by", "day", "--by", "model", "--since", shown) == [("m", shown, 2)]
    assert sums("--by", "model", "--until", shown) == [("n", 1)]
    priced = json.loads(ran("--by", "model", "--json", "--price", "m=2/0.5/8", "--currency", "EUR"))
    assert [(row["model"], row["cost"], row["currency"]) for row in priced] == [
        ("m", 2.80016, "eur"),
        ("n", 0.0, "eur"),
    ]
    assert "COST (USD)" in ran("--price", "*=1/1/1")
    for refused, says in (
        (["--since", "yesterday"], "no time: write 2026-11-30"),
        (["--since", "2026-13-01"], "no time"),
        (["--since", "1d", "--until", "2d"], "later than"),
        (["--price", "m=1/2"], "MODEL=INPUT/CACHED/OUTPUT"),
        (["--identifier", "carol"], "needs --owner"),
        (["--since", "2099-01-01"], "--since 2099-01-01 lies in the future"),
    ):
        assert main(["usage", *refused, *data]) == 2, refused
        assert says in capsys.readouterr().err, refused


def test_the_audit_log_and_what_was_taken_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    for name in ("laptop", "server"):
        assert main(["keys", "create", "--name", name, *data]) == 0
    capsys.readouterr()
    assert main(["audit", "list", *data]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "operator  api_key.created  key_" in first and '"name":"laptop"' in first and "server" in second
    assert main(["audit", "list", "--json", "--limit", "1", *data]) == 0
    [newest] = json.loads(capsys.readouterr().out)
    assert newest["type"] == "api_key.created" and newest["antiphon"]["number"] == 2
    assert main(["audit", "list", "--target", "nothing", *data]) == 0
    assert capsys.readouterr().out == ""
    assert main(["audit", "verify", *data]) == 0
    whole, head = capsys.readouterr().out.splitlines()
    assert whole == "the audit log is whole: 2 entries" and head.startswith("2:")
    assert main(["audit", "verify", "--expect", head, *data]) == 0
    for expected, says in (
        (head[:-4] + "0000", "another one"),
        ("3:00", "another one"),
        ("x", "not NUMBER:HASH"),
    ):
        assert main(["audit", "verify", "--expect", expected, *data]) == 2
        assert says in capsys.readouterr().err
    with sqlite3.connect(tmp_path / "antiphon.db") as database:
        database.execute("DELETE FROM audit WHERE number = 2")
    assert main(["audit", "verify", *data]) == 2
    assert "not whole: entry 2" in capsys.readouterr().err


def test_a_backup_says_what_belongs_to_it_and_doctor_misses_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def make() -> None:
        storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner="test")
        blob = await storage.blobs.put_bytes(b"x")
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


def test_limits_without_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The owner of a server without keys has limits before such a server has ever started."""
    data = ["--data", str(tmp_path)]

    def limits_line(*flags: str) -> str:
        assert main(["doctor", "--engine", "scripted", "--port", "0", *data, *flags]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "limits"]
        return line.removeprefix("ok    limits    ")

    assert limits_line().startswith("whoever comes is the owner local, without limits: antiphon owners")
    assert main(["owners", "limits", "local", "--limit", "requests_per_minute=2", *data]) == 0
    assert "requests_per_minute=2" in capsys.readouterr().out
    assert limits_line() == "whoever comes is the owner local: requests_per_minute=2"
    assert limits_line("--owner-limit", "concurrent_requests=3") == (
        "whoever comes is the owner local: requests_per_minute=2 concurrent_requests=3"
    )
    assert main(["keys", "create", "--owner", "local", *data]) == 0
    assert "1 owner has limits of their own; of every other: -" in capsys.readouterr().out + limits_line()


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


def database_line(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().out.splitlines() if line[6:14] == "database")


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

    def told(*entries: str) -> str:
        models.write_text("".join(f"[[models]]\n{entry}\n" for entry in entries))
        main(["doctor", "--models", str(models), "--data", str(tmp_path), "--port", "0"])
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
    "argv",
    [
        ["keys", "list"],
        ["keys", "list", "--json"],
        ["keys", "revoke", "key_1"],
        ["keys", "rotate", "key_1"],
        ["keys", "update", "key_1", "--name", "x"],
        ["webhooks", "list"],
        ["webhooks", "test", "hook_1"],
        ["sealing", "list"],
        ["sealing", "rotate"],
        ["export", "--owner", "local"],
        ["purge", "--owner", "local"],
        ["purge", "--owner", "local", "--yes"],
    ],
)
def test_what_looks_or_removes_makes_no_database(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "nothing" / "here"
    assert main([*argv, "--data", str(data)]) == 2
    told = capsys.readouterr()
    assert not told.out and f"there is no database at {data / 'antiphon.db'}" in told.err
    assert not list(tmp_path.iterdir())


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
        monkeypatch.setattr(doctor, "__version__", "99.0")
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
        return "; ".join(words for _, words in _openings(Config(data=db.parent, db=f"sqlite:///{db}")))

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
    assert any(str(key) in words for _, words in _openings(config))
    with barred(tmp_path):
        assert list(_openings(config)) == []


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
        return await doctor.CHECKS["kv"](Config(data=tmp_path, **settings))

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
        verdict, words = await doctor.CHECKS["database"](config)
        assert verdict == "FAIL" and server.url in words and "removed or replaced" in words
        assert await doctor.CHECKS["port"](config) == (
            "note",
            f"the server that cannot do its work runs and listens on {server.url}",
        )


async def test_doctor_tells_what_a_server_says_whose_data_folder_is_gone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with server_process(data) as server, server.client() as client:
        data.rename(tmp_path / "moved")
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        port = int(server.url.rpartition(":")[2])
        verdict, words = await doctor.CHECKS["port"](Config(data=data, engine="scripted", port=port))
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


# ------------------------------------------------------------------------------------------------------------
# The process


@asynccontextmanager
async def start(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(READY, "-m", "server.cli", *argv),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def errors_of(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    _, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode or 0, err.decode().splitlines()


async def test_serve_and_stop(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, server.client() as client:
        assert "antiphon-scripted" in server.banner
        hint = await server.printed()
        assert hint.startswith(f"Try: curl {server.url}/v1/responses")
        body = json.loads(hint[hint.index("-d '") + 4 : hint.rindex("'")])
        assert (await client.post("/v1/responses", json=body)).json()["status"] == "completed"
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0
    assert not list(tmp_path.glob("server-*.json"))


HUNG_UP_BY_AN_IMPORT = """
import pathlib, signal, sys

class HungUp:
    def find_spec(self, name, path=None, target=None):
        if name == "server.cli.commands":  # before any setting is read
            signal.raise_signal(signal.SIGHUP)
        if name == "server.process.serve":  # when they were read, and before the event loop is there
            pathlib.Path(sys.argv[sys.argv.index("--data") + 1], "antiphon.toml").write_text(
                'owner_limit = ["requests_per_day=5"]'
            )
            signal.raise_signal(signal.SIGHUP)

sys.meta_path.insert(0, HungUp())
from server.cli import main

sys.exit(main(sys.argv[1:]))
"""


async def test_a_hangup_before_the_server_can_act_on_it_is_remembered(tmp_path: Path) -> None:
    async with server_process(tmp_path, code=HUNG_UP_BY_AN_IMPORT) as server:
        await server.logs("SIGHUP: owner_limit is now requests_per_day=5")
        (tmp_path / "antiphon.toml").unlink()
        server.signal(signal.SIGHUP)
        await server.logs(f"SIGHUP: nothing was reloaded: {tmp_path / 'antiphon.toml'} is gone")


async def test_serve_says_which_file_a_relative_database_is(tmp_path: Path) -> None:
    relative = os.path.relpath(tmp_path / "x.db", ROOT)
    async with server_process(tmp_path, "--db", f"sqlite:///{relative}") as server:
        await server.logs(f"the database is the file {tmp_path / 'x.db'}")
    assert (tmp_path / "x.db").exists()


async def test_the_first_signal_drains(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, server.client() as client:
        body = {"input": "tick 20\ncount 40", "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == "event: response.created"
            server.signal(signal.SIGTERM)
            server.signal(signal.SIGTERM)  # the echo that make and shells add
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            refused = await client.post("/v1/responses", json={"input": "x"})
            assert refused.status_code == 503
            rest = [line async for line in lines]
        assert "event: response.completed" in rest
        assert await server.ended() == 0


async def test_a_second_signal_a_second_later_ends_at_once(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, server.client() as client:
        body = {"input": "tick 50\ncount 1000", "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            await anext(reply.aiter_lines())
            server.signal(signal.SIGINT)
            await asyncio.sleep(1.1)  # what is measured is the clock
            assert server.child.returncode is None
            server.signal(signal.SIGINT)
            assert await asyncio.wait_for(server.ended(), 2) == 130


async def test_work_that_outlasts_the_grace_goes_on_after_the_restart(tmp_path: Path) -> None:
    async with (
        server_process(tmp_path, "--drain-grace-s", "0.2") as server,
        server.client() as client,
    ):
        made = await client.post("/v1/responses", json={"input": "tick 50\ncount 40", "background": True})
        response_id = made.json()["id"]
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0
    async with server_process(tmp_path) as server, server.client() as client:
        await server.logs("an earlier process has left 1 runs, which go on")
        done = (await client.get(f"/v1/responses/{response_id}?wait=20")).json()
        assert (done["status"], done["output"][0]["content"][0]["text"]) == (
            "completed",
            " ".join(map(str, range(1, 41))),
        )


async def test_what_nobody_can_resume_is_told_that_the_server_stopped(tmp_path: Path) -> None:
    endless = "tick 50\ncount 1000"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": endless, "store": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": endless}]}),
        ("/v1/completions", {"prompt": endless, "max_tokens": 900}),
    ]
    async with (
        server_process(tmp_path, "--drain-grace-s", "0.2") as server,
        server.client() as client,
        AsyncExitStack() as streams,
    ):
        whole = [asyncio.create_task(client.post(path, json=body)) for path, body in asked]
        replies = [
            await streams.enter_async_context(client.stream("POST", path, json=body | {"stream": True}))
            for path, body in asked
        ]
        lines = [reply.aiter_lines() for reply in replies]
        begun = [await anext(each) for each in lines]
        assert all(begun)
        while (await client.get("/load")).json()["running"] < 6:
            await asyncio.sleep(0.01)
        server.signal(signal.SIGTERM)
        for each in lines:
            told = [line async for line in read_to_the_cut(each) if line.startswith("data: ")]
            last = json.loads(told[-1].removeprefix("data: "))
            error = last.get("error", last)
            assert error["code"] == "response_interrupted" and "stopped" in error["message"]
        for reply in await asyncio.gather(*whole):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (503, "response_interrupted")
            assert reply.headers["retry-after"] == "5" and "stopped" in error["message"]
        assert await server.ended() == 0
        assert not [line for line in server.log if "ERROR" in line]


async def read_to_the_cut(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The lines of a stream whose connection is cut behind the last."""
    with suppress(httpx.RemoteProtocolError):
        async for line in lines:
            yield line


async def test_keys_at_a_running_server(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, server.client() as client:
        left = list(tmp_path.glob("server-*.json"))
        assert [file.stat().st_mode & 0o777 for file in left] == [0o600]
        async with start("keys", "create", "--data", str(tmp_path)) as made:
            assert made.stdout is not None
            key = (await made.stdout.readline()).decode().strip()
            told = (await made.stdout.readline()).decode()
        assert (await client.get("/v1/models")).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        async with start("keys", "revoke", told.split()[1].rstrip(","), "--data", str(tmp_path)) as revoked:
            assert (await errors_of(revoked))[0] == 0
        assert (await client.get("/v1/models")).status_code == 200  # with no live key none is needed


async def test_the_banner_says_whether_a_key_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann:sk-1\n")
    hints = []
    for folder, flags in ((tmp_path, ()), (tmp_path, ("--api-key-file", str(file))), (tmp_path / "b", ())):
        if folder != tmp_path:  # one with a stored key
            async with start("keys", "create", "--data", str(folder)) as made:
                assert (await errors_of(made))[0] == 0
        async with server_process(folder, *flags) as server:
            hints.append(await server.printed())
    assert ["authorization: Bearer YOUR_KEY" in hint for hint in hints] == [False, True, True]


async def test_a_file_of_keys_with_a_fault_keeps_the_server_from_starting(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--port", "0", "--data", str(tmp_path))
    async with start("serve", *flags, "--api-key-file", str(tmp_path / "none")) as refused:
        code, lines = await errors_of(refused)
    assert (code, len(lines)) == (2, 1) and str(tmp_path / "none") in lines[0]


async def test_a_second_server_on_the_folder_is_refused(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server:
        async with start("serve", "--engine", "scripted", "--port", "0", "--data", str(tmp_path)) as second:
            code, lines = await errors_of(second)
        assert code == 2
        told = [line for line in lines if line.startswith("antiphon: ")]
        assert len(told) == 1 and str(server.child.pid) in told[0]


async def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    async with server_process(tmp_path / "a") as server:
        port = server.url.rpartition(":")[2]
        async with start("serve", "--model", "/nowhere", "--port", port, "--data", str(tmp_path)) as second:
            code, lines = await errors_of(second)
        assert code == 2
        assert len(lines) == 1 and f"port {port}" in lines[0]


async def test_a_public_address_needs_a_key(tmp_path: Path) -> None:
    """That is told before the model is loaded, here one that would be missed."""
    flags = ("serve", "--model", "/nowhere", "--port", "0", "--host", "0.0.0.0", "--data", str(tmp_path))
    async with start(*flags) as refused:
        code, lines = await errors_of(refused)
    assert code == 2
    assert [line for line in lines if line.startswith("antiphon: ")] == [
        line for line in lines if "no key is configured" in line
    ]
    async with server_process(tmp_path, "--host", "0.0.0.0", "--api-key", "sk-1") as server:
        assert "0.0.0.0" in server.banner
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0


async def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with start(
        "serve", "--model", "/nowhere/at/all", "--port", "0", "--data", str(tmp_path)
    ) as refused:
        code, lines = await errors_of(refused)
    assert code == 2
    assert [line for line in lines if line.startswith("antiphon: ")] == [
        line for line in lines if "/nowhere/at/all" in line
    ]


DYING = """
import sys
import time
from engine import EngineDead, ScriptedEngine
from engine.backends.script import Say
from server.config import load
from server.process.serve import serve

def script(request, prompt):
    yield Say("before ")
    engine.kill(EngineDead("injected"))

engine = ScriptedEngine(script)
sys.exit(serve(load({"data": sys.argv[sys.argv.index("--data") + 1], "port": 0}).config, engine=engine))
"""


async def test_engine_death_cuts_streams_and_ends_the_process(tmp_path: Path) -> None:
    async with (
        server_process(tmp_path, code=DYING) as server,
        server.client() as client,
    ):
        seen: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as reply:
                seen += [line async for line in reply.aiter_lines() if line.startswith("event: ")]
        assert not {f"event: response.{end}" for end in ("completed", "failed", "incomplete")} & set(seen)
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert await asyncio.wait_for(server.ended(), 10) == 70
