"""The Python that `antiphon sandbox install` makes runs code of models, unless another one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.commands import main
from server.config import Config
from server.process import look_for_sandbox
from tests.support.sandboxes import require_sandbox


async def test_what_was_installed_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network: pip is in every environment already."""
    data = tmp_path / "data"
    config = Config(data=data, sandbox="bubblewrap")
    assert not config.installed_python.exists() and Config(data=data).code_python is None
    assert main(["sandbox", "install", "--package", "pip", "--data", str(data)]) == 0
    python = data / "sandbox-python" / "bin" / "python"
    assert config.code_python == python
    assert f"antiphon serve --sandbox auto --data {data}" in capsys.readouterr().out
    assert Config(data=data, sandbox_python=Path("/usr/bin/python3")).code_python == Path("/usr/bin/python3")
    await require_sandbox("bubblewrap")
    assert str(python) in (await look_for_sandbox(config)).for_operators


@pytest.mark.long
def test_what_cannot_be_installed_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sandbox", "install", "--package", "./is-not-there", "--data", str(tmp_path / "data")]
    assert main(argv) == 2
    assert "is-not-there" in capsys.readouterr().err
    assert not (tmp_path / "data" / "sandbox-python").exists()
