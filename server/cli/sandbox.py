"""`antiphon sandbox install`: makes the Python that runs code of models, with packages for data.

It is an environment of its own, because code can read all of it: the server's has what code need not see.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.admin import AdminError
from server.config import Config

PACKAGES = ("numpy", "pandas", "matplotlib")
"""What models like to use."""

_LIST_FONTS = (
    "import importlib.util, os, sys; os.environ['MPLCONFIGDIR'] = os.path.join(sys.prefix, 'matplotlib')\n"
    "if importlib.util.find_spec('matplotlib'): import matplotlib.font_manager"
)
"""Has matplotlib list the machine's fonts where sessions look for the list. Each would make it anew for its
first plot otherwise, which takes the longer the more fonts there are."""


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon sandbox install`; yields the lines to print. Raises AdminError."""
    python = config.installed_python
    folder, packages = python.parent.parent, options.package or PACKAGES
    there = python.exists()
    yield f"installing {', '.join(packages)} into {folder}"
    try:
        if not there:
            config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages])
        _run([str(python), "-c", _LIST_FONTS])
    except BaseException:
        if not there:
            shutil.rmtree(folder, ignore_errors=True)  # half of it would be taken for the whole
        raise
    yield f"code of models is run by {python} from the next start on"
    if config.sandbox == "off":
        yield f"the sandbox is off: antiphon serve --sandbox auto{config.flags}"
    elif config.sandbox_python is not None:
        yield f"sandbox_python names another one, which goes before it: {config.sandbox_python}"


def _run(argv: Sequence[str]) -> None:
    """Raises AdminError with the last line that a program has said, where it fails."""
    try:  # other users read it too: code may run as one of them
        done = subprocess.run(argv, check=False, capture_output=True, text=True, umask=0o022)
    except OSError as fault:
        raise AdminError(f"{Path(argv[0]).name} cannot be started: {fault}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise AdminError(said[-1] if said else f"{argv[2]} failed with {done.returncode}")
