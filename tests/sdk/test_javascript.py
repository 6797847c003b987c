"""The JavaScript SDKs against this server, where Node is; `make test-js` has more of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "js"


def prepared() -> str:
    """Node, with the SDKs beside the checks; where they cannot be had, the test is skipped, and says why."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed here")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        command = [npm, "ci", "--omit=dev", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
        try:
            got = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=50)
        except subprocess.TimeoutExpired:
            pytest.skip("the registry of npm does not answer")
        if got.returncode != 0:
            pytest.skip(f"npm cannot fetch the SDKs: {got.stderr.strip().splitlines()[0]}")
    return node


@pytest.mark.long
def test_the_javascript_sdks_work_unmodified() -> None:
    done = subprocess.run(
        [prepared(), "check.mjs", "scripted"],
        cwd=FOLDER,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") >= 7
