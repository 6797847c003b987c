"""The process of an engine: what becomes of it before it serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine import LoadError
from server.config import Config
from server.loading import Child


async def test_a_folder_that_cannot_be_made_is_why_a_model_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    child = Child("a", Config(), folder=tmp_path / "file" / "folder")
    with pytest.raises(LoadError, match=r"the process of a cannot be started: .*Not a directory"):
        await child.start()
    await child.close()


async def test_a_long_line_of_a_process_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("""#!/bin/sh
head -c 300000 /dev/zero | tr '\\0' x
echo
echo '{"refused": ["no weights"]}'
""")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    child = Child("a", Config(), folder=tmp_path / "folder")
    with pytest.raises(LoadError, match=r"^no weights$"):
        await child.start()
    await child.close()
