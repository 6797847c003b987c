"""Commands at a terminal, a file or a pipe that is not UTF-8, or whose reader has gone."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from pathlib import Path

import pytest

from server.cli import main
from server.cli.terminal import History
from tests.support.running import Running


@pytest.mark.parametrize("argv", [["chat"], ["complete", "--max-tokens", "99"]])
async def test_input_and_output_that_are_no_utf_8(
    live_server: Running, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    typed = "olé ".encode() + b"caf\xe9\n"  # the second one in Latin-1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    assert await asyncio.to_thread(main, [*argv, "--url", live_server.base_url]) == 0
    assert shown.getvalue().strip() == b"You said: ol? caf?"


async def test_arguments_that_are_no_utf_8(
    live_server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = ["--url", live_server.base_url]
    latin = os.fsdecode(b"caf\xe9")
    assert await asyncio.to_thread(main, ["complete", "--prompt", latin, "--max-tokens", "99", *url]) == 0
    assert capsys.readouterr().out == "You said: caf\ufffd\n"
    template = tmp_path / f"{latin}.json"  # the name of a file may be any bytes
    template.write_text('{"instructions": "x"}')
    argv = ["prompts", "create", "--name", latin, "--template", str(template), *url]
    assert await asyncio.to_thread(main, argv) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["prompts", "list", "--json", *url]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["caf\ufffd"]


def test_a_turn_that_is_no_text_is_not_kept(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    for turn in ("one", "caf\udce9", "two"):
        history.add(turn)
    assert history.turns() == ["one", "two"]


@pytest.mark.parametrize("verb", ["list", "create"])
async def test_prompts_whose_reader_has_gone_end_without_a_word(
    live_server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    said = ["--instructions", "x"] if verb == "create" else ["--json"]
    with os.fdopen(writer, "wb", buffering=0) as out:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, write_through=True))
        assert await asyncio.to_thread(main, ["prompts", verb, *said, "--url", live_server.base_url]) == 0
    assert capsys.readouterr().err == ""
