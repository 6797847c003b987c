"""`antiphon collect-env` and `antiphon eval-tiny`: what a bug report says, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server import __version__
from server.cli.commands import main
from tests.support.forking import READY


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own report takes seconds, and is torch's business."""
    monkeypatch.setattr(
        "engine.benchmark.environment.describe_machine", lambda: "PyTorch version: 1\nGPU: none"
    )


def test_a_report_says_what_is_installed_and_what_was_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["collect-env", "--data", str(tmp_path), "--max-num-seqs", "7"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    told = {line[0]: line[-1] for line in lines}
    assert told["antiphon"] == __version__ and told["PyTorch"] == "version: 1"
    assert {"python", "torch", "fastapi", "sqlalchemy", "platform", "processors", "memory"} <= told.keys()
    assert told["OMP_NUM_THREADS"] == "3" and told["max_num_seqs"] == "7 (flag --max-num-seqs)"
    assert told["url"].startswith("sqlite") and told["file"] == "not there yet"
    assert "port" not in told  # a default says nothing


def test_it_tells_no_secret_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_API_KEY", "hush-1")
    database = "postgresql+asyncpg://hush-2:hush/hush-3@db/x?password=hush-4"
    upstreams = ["--upstream", "http://hush-5@gpu:1/", "--upstream-api-key", "hush-6"]
    data = tmp_path / "data"
    assert (
        main(["collect-env", "--data", str(data), "--db", database, "--api-key", "hush-7", *upstreams]) == 0
    )
    printed = capsys.readouterr().out
    assert "hush" not in printed and "postgresql+asyncpg://***@db/x" in printed and "gpu:1" in printed
    assert not data.exists()


def test_without_torch_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr("engine.benchmark.environment.describe_machine", missing)
    assert main(["collect-env", "--data", str(tmp_path)]) == 0
    assert "cannot be imported: No module named 'torch'" in capsys.readouterr().out


def test_torch_says_what_it_sees() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from engine import describe_machine; print(describe_machine())"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    for words in ("PyTorch version", "GPU models", "CPU capability used by torch", "get_num_threads"):
        assert words in told.stdout


def test_eval_tiny_hands_its_arguments_on() -> None:
    command = [READY, "-m", "server.cli", "eval-tiny"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and "--checkpoint" in told.stdout
    refused = subprocess.run([*command, "--nonsense"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "--nonsense" in refused.stderr
