"""Owners by name: every command that takes an owner takes a name that only one has, beside a server and
without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from server.admin.database_access import leave_address
from server.cli.commands import main
from tests.support.running import Running, http_client, live_app


def told(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str, rc: int = 0) -> str:
    """What a command prints: its output, or where it fails what it says."""
    capsys.readouterr()
    assert main([*argv, "--data", str(folder)]) == rc
    output = capsys.readouterr()
    return output.err if rc else output.out


def test_a_name_is_as_good_as_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alpha = told(capsys, tmp_path, "owners", "create", "Alpha").strip()
    made = told(capsys, tmp_path, "keys", "create", "--owner", "Alpha", "--name", "laptop")
    assert f"owner {alpha}." in made and "is a new owner" not in made
    assert f"{alpha} (Alpha)" in told(capsys, tmp_path, "keys", "list")
    (key,) = json.loads(told(capsys, tmp_path, "keys", "list", "--json"))
    assert (key["owner"], key["owner_name"]) == (alpha, "Alpha")
    owners = json.loads(told(capsys, tmp_path, "owners", "list", "--json"))
    assert [owner["id"] for owner in owners] == [alpha]

    assert told(capsys, tmp_path, "tiers", "Alpha", "--weight", "3") == f"{alpha}: weight=3\n"
    assert alpha in told(capsys, tmp_path, "owners", "limits", "Alpha", "--limit", "requests_per_minute=5")
    assert json.loads(told(capsys, tmp_path, "export", "--owner", "Alpha"))["owner"] == alpha
    assert told(capsys, tmp_path, "usage", "--owner", "Alpha").startswith("OWNER")
    hook = told(capsys, tmp_path, "webhooks", "add", "https://example.org/x", "--owner", "Alpha")
    assert f"owner {alpha}." in hook
    assert alpha in told(capsys, tmp_path, "owners", "rename", "Alpha", "Beta")
    assert f"owner {alpha} is removed" in told(capsys, tmp_path, "purge", "--owner", "Beta", "--yes")
    assert alpha in told(capsys, tmp_path, "owners", "archive", "Beta")


def test_a_name_that_is_taken_makes_no_second_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha = told(capsys, tmp_path, "owners", "create", "Alpha").strip()
    assert alpha in told(capsys, tmp_path, "owners", "create", "Alpha", rc=2)
    beta = told(capsys, tmp_path, "owners", "create", "Beta").strip()
    assert alpha in told(capsys, tmp_path, "owners", "rename", beta, "Alpha", rc=2)
    told(capsys, tmp_path, "owners", "rename", beta, "Beta")
    told(capsys, tmp_path, "owners", "archive", alpha)
    again = told(capsys, tmp_path, "owners", "create", "Alpha").strip()
    assert f"owner {again}." in told(capsys, tmp_path, "keys", "create", "--owner", "Alpha")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "argv",
    [
        ("usage", "--owner", "nope"),
        ("export", "--owner", "nope"),
        ("purge", "--owner", "nope"),
        ("purge", "--owner", "nope", "--yes"),
        ("owners", "limits", "nope"),
        ("owners", "rename", "nope", "Other"),
        ("owners", "archive", "nope"),
        ("tiers", "nope", "--weight", "2"),
        ("keys", "list", "--owner", "nope"),
        ("keys", "create", "--owner", "own_nope"),
        ("audit", "list", "--owner", "nope"),
        ("audit", "list", "--owner", "Alpha", "--owner", "nope"),
        ("audit", "list", "--owner", "nope", "--json"),
        ("webhooks", "add", "https://example.org/x", "--owner", "nope"),
    ],
)
def test_an_unknown_owner_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    told(capsys, tmp_path, "owners", "create", "Alpha")
    assert "nope" in told(capsys, tmp_path, *argv, rc=1)


@pytest.mark.parametrize(
    "argv",
    [
        ("owners", "create", ""),
        ("owners", "rename", "Alpha", ""),
        ("keys", "create", "--owner", ""),
        ("keys", "list", "--owner", ""),
        ("usage", "--owner", ""),
        ("purge", "--owner", "", "--yes"),
    ],
)
def test_an_empty_name_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    """Such as a variable of a shell that is not set: it stands for no owner, and not for all or a new one."""
    told(capsys, tmp_path, "owners", "create", "Alpha")
    before = told(capsys, tmp_path, "owners", "list")
    refused = told(capsys, tmp_path, *argv, rc=2)
    assert "empty text" in refused or "has a character at least" in refused
    assert told(capsys, tmp_path, "owners", "list") == before


def test_the_name_of_the_owner_of_a_server_without_keys_is_never_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before there is such an owner: the same word would then mean another one."""
    assert "there is an owner 'local' already" in told(capsys, tmp_path, "owners", "create", "local", rc=2)


def test_the_owner_of_a_server_without_keys_is_not_archived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "create", "--owner", "local", "--data", str(tmp_path)]) == 0
    assert main(["owners", "archive", "local", "--data", str(tmp_path)]) == 2
    assert "The owner local stands for whoever comes without a key" in capsys.readouterr().err
    assert main(["keys", "create", "--owner", "local", "--data", str(tmp_path)]) == 0


def test_keys_of_one_owner_are_listed_and_a_misspelt_owner_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha = told(capsys, tmp_path, "owners", "create", "Alpha Team").strip()
    told(capsys, tmp_path, "keys", "create", "--owner", "Alpha Team", "--name", "right")
    wrong = told(capsys, tmp_path, "keys", "create", "--owner", "Alpha-Team", "--name", "wrong")
    assert f"did you mean 'Alpha Team'? Its id is {alpha}" in wrong and "keys revoke key_" in wrong
    assert "did you mean" not in told(capsys, tmp_path, "keys", "create", "--owner", "zebra")
    listed = told(capsys, tmp_path, "keys", "list", "--owner", "Alpha Team").splitlines()
    assert len(listed) == 2 and listed[1].split()[-2:] == ["right", "-"]
    [only] = json.loads(told(capsys, tmp_path, "keys", "list", "--owner", alpha, "--json"))
    assert (only["name"], only["owner"]) == ("right", alpha)


async def test_a_name_of_several_owners_is_refused_with_their_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running:
        admin = {"authorization": f"Bearer {running.life.admin_token}"}
        async with http_client(running, **admin) as http:
            twins = [
                (await http.post("/v1/organization/projects", json={"name": "Twin"})).json()["id"]
                for _ in range(2)
            ]
        error = await beside(running, capsys, "keys", "create", "--owner", "Twin", rc=2)
        assert all(id in error for id in twins)
        assert await beside(running, capsys, "owners", "archive", twins[0])
        assert f"owner {twins[1]}." in await beside(running, capsys, "keys", "create", "--owner", "Twin")


async def test_an_unknown_owner_is_an_error_beside_a_server_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running:
        for argv in (("keys", "create", "--owner", "own_nope"), ("audit", "list", "--owner", "nope")):
            assert "nope" in await beside(running, capsys, *argv, rc=1)
        assert (
            await beside(running, capsys, "audit", "list", "--owner", "local", "--type", "run.forked") == ""
        )


async def beside(running: Running, capsys: pytest.CaptureFixture[str], *argv: str, rc: int = 0) -> str:
    """What a command prints beside a server that holds the database."""
    leave_address(running.life.config, running.base_url, running.life.admin_token)
    return await asyncio.to_thread(told, capsys, running.life.config.data, *argv, rc=rc)
