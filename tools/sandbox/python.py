"""The Python that runs code in a sandbox: where it lies, and whether it works."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tools.sandbox.cells import SandboxError

_ASK = (
    "import json, sys, importlib.util as u; print(json.dumps({'version': sys.version.split()[0],"
    " 'prefixes': [sys.prefix, sys.base_prefix, sys.exec_prefix],"
    " 'packages': [n for n in ('numpy', 'pandas', 'matplotlib') if u.find_spec(n)]}))"
)


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter. path: as it is started. folders: what it needs to see besides the system's. packages:
    those that models like to use, and that it has."""

    path: Path
    version: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]


async def look_at(path: Path) -> Python:
    """What a Python is. Raises SandboxError where it cannot be started."""
    # The last part may be a link into another environment, which the interpreter finds its own by.
    whole = Path(os.path.realpath(path.parent)) / path.name
    try:
        asked = await asyncio.create_subprocess_exec(
            str(whole), "-I", "-c", _ASK, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        said, _ = await asyncio.wait_for(asked.communicate(), 30)
        told = json.loads(said)
    except (OSError, ValueError, TimeoutError) as fault:
        raise SandboxError(
            f"the Python {path} cannot be started: {str(fault) or type(fault).__name__}"
        ) from None
    needed = {os.path.realpath(prefix) for prefix in told["prefixes"]}
    needed |= {str(whole.parent), os.path.dirname(os.path.realpath(whole))}
    roots = [folder for folder in needed if not any(_is_below(folder, other) for other in needed)]
    folders = tuple(sorted(folder for folder in roots if not _is_below(folder, "/usr") and folder != "/usr"))
    return Python(whole, told["version"], folders, tuple(told["packages"]))


def _is_below(folder: str, other: str) -> bool:
    return folder != other and folder.startswith(other.rstrip("/") + "/")
