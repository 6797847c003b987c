"""Which other users of this machine can get at what is kept."""

from __future__ import annotations

import glob
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from server.cli.doctor.findings import Finding, Verdict
from server.cli.doctor.folders import permissions
from server.config import FILE_NAME, Config
from server.masking import masked

OWN_FOLDERS = {"kv", "runners", "sandbox-python"}
"""Folders that a server makes in its folder, besides those of blobs."""


SQLITE = b"SQLite format 3\0"
"""How each database of SQLite begins, once it has a table."""


async def check_access(config: Config) -> Finding:
    """Which other users of this machine can get at what is kept."""
    worst: Verdict = "ok"
    sentences = []
    for verdict, words in openings(config):
        sentences.append(words)
        if worst != "FAIL":
            worst = verdict
    return worst, "; ".join(sentences) or "no other user can read or replace what is kept"


def openings(config: Config) -> Iterator[Finding]:
    files = [file] if _holds_secrets(file := config.data / FILE_NAME) else []
    files += [file for file in (config.api_key_file, config.sealing_key_file) if file is not None]
    key = config.ssl_keyfile or config.ssl_certfile
    files += [key] if key is not None else []
    files += sorted(config.data.glob("server-*.json"))
    files += [config.tools] if config.tools is not None and _holds_secrets(config.tools) else []
    folders = {config.data}
    if (database := config.db_file) is not None and not _is_of_others(database):
        folders.add(database.parent)
        files += sorted(database.parent.glob(f"{glob.escape(database.name)}*"))
    files += [config.models] if config.models is not None and _holds_secrets(config.models) else []
    for file in files:
        if permissions(file) & 0o077:
            yield "FAIL", f"other users can open {file}: chmod 600 {shlex.quote(str(file))}"
    if config.tools is not None and permissions(config.tools) & 0o022:
        yield "FAIL", f"other users can change {config.tools}: chmod go-w {shlex.quote(str(config.tools))}"
    for folder in sorted({*folders, *(file.parent for file in files)}):
        for place in (folder, *folder.parents):
            mode = permissions(place, stat.S_IFDIR)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                yield "FAIL", f"any user can replace what is in {place}: {_closed(place, 'o-w')}"
        if folder in folders and permissions(folder, stat.S_IFDIR) & 0o077:
            yield "note", f"other users can look into {folder}: {_closed(folder, '700')}"


def _closed(folder: Path, mode: str) -> str:
    """What keeps others out of what the server keeps in a folder. Only a folder that is the server's alone
    may be closed: programs and other users need what else there is in /tmp, /etc, or a home."""
    if _is_own(folder):
        return f"chmod {mode} {shlex.quote(str(folder))}"
    return "the database belongs into a folder of its own: give --data or --db one, which the start makes"


def _is_own(folder: Path) -> bool:
    """Whether a folder holds what a server keeps, and nothing that looks like the work of others."""
    try:
        found = folder.stat()
        with os.scandir(folder) as entries:
            inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return False
    ours = all(name in OWN_FOLDERS or name.endswith(".blobs") for name in inner)
    return ours and found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX


def _is_of_others(database: Path) -> bool:
    """Whether a file is there that no SQLite wrote, so that nothing beside it is a server's."""
    try:
        with database.open("rb") as file:
            return not SQLITE.startswith(file.read(len(SQLITE)))
    except OSError:
        return False


_SECRET = re.compile(
    r"^\s*((upstream_)?api_key|sealing_key|headers)\s*[.=]|^\s*\[[^]]*\bheaders\s*\]", re.MULTILINE
)
"""A key in `antiphon.toml`, or headers in `tools.toml`."""


def _holds_secrets(file: Path) -> bool:
    """Whether a file of settings says what other users should not read."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return masked(text) != text or _SECRET.search(text) is not None
