"""The Python that `antiphon sandbox install` makes runs code of models, unless another one is named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from server.cli.commands import main
from server.config import Config
from server.process import look_for_sandbox
from tests.support.sandboxes import Box, require_sandbox


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


async def test_sessions_know_the_fonts_that_were_listed_when_it_was_made(tmp_path: Path) -> None:
    """By a package that stands in for matplotlib, so that no network is needed."""
    wheel, data = tmp_path / "matplotlib-1-py3-none-any.whl", tmp_path / "data"
    info = "matplotlib-1.dist-info"
    lists = "import os\nos.mkdir(os.environ['MPLCONFIGDIR'])\n"
    lists += "open(os.environ['MPLCONFIGDIR'] + '/fonts.json', 'w').write('[]')\n"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("matplotlib/__init__.py", "")
        packed.writestr("matplotlib/font_manager.py", lists)
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: matplotlib\nVersion: 1\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")
    assert main(["sandbox", "install", "--package", str(wheel), "--data", str(data)]) == 0
    await require_sandbox("bubblewrap")
    found = await look_for_sandbox(Config(data=data, sandbox="bubblewrap"))
    assert found.sandbox is not None
    kept = Box(found.sandbox)
    try:
        result = await kept.run("import os\nfolder = os.environ['MPLCONFIGDIR']\nos.listdir(folder)")
        assert result.ok and "['fonts.json']" in result.logs, result.logs
        assert (await kept.run("open(folder + '/more', 'w').close()")).ok, "matplotlib needs it writable"
    finally:
        await found.sandbox.close()


@pytest.mark.long
def test_what_cannot_be_installed_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sandbox", "install", "--package", "./is-not-there", "--data", str(tmp_path / "data")]
    assert main(argv) == 2
    assert "is-not-there" in capsys.readouterr().err
    assert not (tmp_path / "data" / "sandbox-python").exists()
