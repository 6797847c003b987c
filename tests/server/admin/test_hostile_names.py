"""What a name, a path or a model's text can do to the lines that an operator reads: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.admin import table
from server.admin.database_access import leave_address
from server.admin.live_runs import shown_event
from server.cli.commands import main
from tests.support.running import http_client, live_app

FORGED = "     9  2026-11-30 10:00:00  operator  api_key.deleted  key_forged\x9b2J"


async def test_a_path_forges_no_entry_of_the_audit_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as server:
        leave_address(server.life.config, server.base_url, server.life.admin_token)
        async with http_client(server, authorization=f"Bearer {server.life.admin_token}") as http:
            made = await http.post("/admin/keys", json={"name": f"x\x9b2J\n{FORGED}", "scopes": ["admin"]})
        key = made.json()
        async with http_client(server, authorization=f"Bearer {key['key']}") as admin:
            assert (await admin.get(f"/v1/organization/usage/x%0A{FORGED}")).status_code == 404
            assert (await admin.get(f"/v1/organization/projects/own_%0A{FORGED}")).status_code == 404
        capsys.readouterr()
        for command in ("audit", "keys"):
            assert await asyncio.to_thread(main, [command, "list", "--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    _models, created, usage, project, _titles, listed = printed.splitlines()
    assert "api_key.created" in created and FORGED[:-3] in created and FORGED[:-3] in listed
    assert (
        "admin.accessed  /v1/organization/usage/x%0A%20%20%20%20%209%20%202026-11-30%2010:00:00%20" in usage
    )
    assert "admin.accessed  /v1/organization/projects/own_%0A%20" in project and " of own_ " in project


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"type": "response.output_text.delta", "delta": "a\x9b2J\nb"}, r'output_text.delta "a2J\nb"'),
        (
            {"type": "response.failed", "response": {"error": {"message": "x\x1b[2J\n 5 y"}}},
            "failed x[2J  5 y",
        ),
        (
            {"type": "response.output_item.done", "item": {"type": "custom_tool_call", "name": "x\n\x1b[2J"}},
            "output_item.done custom_tool_call x [2J",
        ),
    ],
)
def test_an_event_is_one_line(event: dict[str, object], line: str) -> None:
    kind, words = line.split(" ", 1)
    assert shown_event({"sequence_number": 4, **event}) == f"    4  {kind:32}  {words}"


def test_a_name_forges_no_row_of_a_table() -> None:
    prompts = [{"id": "a", "name": "x\x1b[2J\nb   forged"}, {"id": "c", "name": "y"}]
    rows = table({"ID": lambda prompt: prompt["id"], "NAME": lambda prompt: prompt["name"]}, prompts)
    assert list(rows) == ["ID  NAME", "a   x[2J b   forged", "c   y"]
