"""`antiphon prompts` against a live server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from server.cli.commands import main
from tests.support.running import Running


async def run(server: Running, *argv: str) -> int:
    return await asyncio.to_thread(main, ["prompts", *argv, "--url", server.base_url])


async def test_a_prompt_from_its_making_to_its_end(
    live_server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert await run(live_server, "create", "--name", "greeting", "--instructions", "Greet {{name}}.") == 0
    prompt = capsys.readouterr().out.strip()
    assert prompt.startswith("pmpt_")
    file = tmp_path / "template.json"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi {{who}}"}]}))
    assert await run(live_server, "update", prompt, "--template", str(file), "--default-version", "1") == 0
    assert capsys.readouterr().out == "latest version 2, default 1\n"
    assert await run(live_server, "list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "DEFAULT", "LATEST", "NAME"]
    assert row.split() == [prompt, "1", "2", "greeting"]
    assert await run(live_server, "list", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == [prompt]
    for flags, variables in (((), ["name"]), (("--version", "2"), ["who"])):
        assert await run(live_server, "show", prompt, *flags) == 0
        assert json.loads(capsys.readouterr().out)["variables"] == variables
    assert await run(live_server, "delete", prompt, "--version", "2") == 0
    assert capsys.readouterr().out == f"version 2 of prompt {prompt} is removed\n"
    assert await run(live_server, "delete", prompt) == 0
    assert capsys.readouterr().out == f"prompt {prompt} is removed\n"
    assert await run(live_server, "show", prompt) == 1
    assert "not found" in capsys.readouterr().err


async def test_what_cannot_be_done_is_said_in_one_line(
    live_server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for argv, told, code in (
        (("create", "--template", str(tmp_path / "none.json")), "No such file", 2),
        (("create", "--template", str(broken)), "is no JSON", 2),
        (("update", "pmpt_none", "--name", "x"), "not found", 1),
    ):
        assert await run(live_server, *argv) == code
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert told in captured.err
    assert main(["prompts", "list", "--url", "ftp://x"]) == 2
    assert "is no URL of a server" in capsys.readouterr().err
