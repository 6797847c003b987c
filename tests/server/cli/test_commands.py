"""The command line and the process: what it prints, how it ends, and with which exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from server import __version__
from server.admin import AdminError, keys
from server.cli.commands import COMMANDS, main
from server.config import SUBJECTS, Config, settings
from server.settings.elsewhere import ELSEWHERE
from server.telemetry import end_user
from storage import open_storage
from tests.support.forking import READY
from tests.support.processes import server_process

ROOT = Path(__file__).parents[3]

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


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--disable-responses-store", "; instead of --disable-responses-store: --store false (see"),
        ("--responses-session-ttl", ": --retention-s (see"),
        ("--no_store", ": --store false (see"),
        ("--data-parallel-size=2", "--upstream with one that computes on several (see"),
        ("--task", "instead of --task: --embedding-model,"),
        ("--max-model-length", "; did you mean --max-model-len? (see"),
        ("--prot", "; did you mean --port? (see"),
        ("--enforce-eager", "unrecognized arguments: --enforce-eager (see"),
    ],
)
def test_flags_that_are_misspelt_or_another_server_s(
    flag: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", flag])
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_what_other_servers_flags_are_called_here_are_flags() -> None:
    ours = {f"--{name.replace('_', '-')}" for name in Config.model_fields}
    for flag, here in ELSEWHERE.items():
        assert f"--{flag}" not in ours
        assert any(each in ours for each in here.replace(",", "").split()), here


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
    assert (
        "only the audit log has no entry of it, because of this: a server holds the database"
        in capsys.readouterr().out
    )
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
    assert second["replaces"] == first["id"]
    assert second["expires_at"] == second["created_at"] + 7200
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
