"""What is computed and kept on disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

from engine import ForeignFolder, database_of, readable_size
from server.admin import AdminError, asking, is_served
from server.cli.doctor.findings import Finding
from server.cli.doctor.folders import permissions
from server.config import Config
from storage import StorageError, inspect_database


async def check_kv(config: Config) -> Finding:
    """How it stands with what is computed and kept on disk, and how much there is room for."""
    states, config = await asyncio.to_thread(_saving_now, config)
    folder, limit = config.kv_disk_folder, config.kv_disk_bytes
    foreign = await _is_foreign(config)
    if not states and (why := _no_saving(config)) is not None:
        if not foreign and os.path.exists(folder) and any(folder.rglob("*.kv")):
            told = f"{folder} has what was computed before: remove it, and its room is free"
            return "note", f"off ({why}), but {told}"
        return "ok", f"off ({why}): nothing that is computed is kept on disk"
    if foreign:
        return "note", f"off: {ForeignFolder(folder)}"
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK):
        return "note", f"off: {there} cannot be written, so what is computed is kept in memory alone"
    if permissions(folder, stat.S_IFDIR) & 0o077:
        return "note", f"{folder} can be opened by other users of this machine: chmod 700 it"
    kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    room = min(limit, kept + shutil.disk_usage(there).free // 2)  # what the engine takes, at most
    parts = [f"{folder} holds {readable_size(kept)} of at most {readable_size(limit)}"]
    if room < limit:
        parts[0] += (
            f", and its disk has room for {readable_size(room)}: half of what it has left is left free"
        )
    for each in states:
        why = f" ({each['why']})" if each["why"] else ""
        parts.insert(0, f"{each['model']}: {each['state']}{why}")
    is_well = room == limit and all(each["state"] == "on" for each in states)
    return "ok" if is_well else "note", "; ".join(parts)


def _no_saving(config: Config) -> str | None:
    """By which setting no KV is saved on disk; None where it is."""
    if config.engine != "local":
        return f"engine is {config.engine}"
    if not config.kv_disk_bytes:
        return "kv_disk_bytes is 0"
    return None if config.prefix_caching else "prefix_caching is false"


async def _is_foreign(config: Config) -> bool:
    """Whether the folder of saved KV is that of another database."""
    try:
        whose = database_of(config.kv_disk_folder)
        ours = (await inspect_database(config.db)).id
    except (OSError, StorageError, ValueError):  # other lines tell it
        return False
    return whose is not None and ours is not None and whose != ours


def _saving_now(config: Config) -> tuple[list[dict[str, str | None]], Config]:
    """What a running server says of its models' saved KV, nothing where none runs; and the settings with the
    folder that it has: it may have been started with others."""
    try:
        if is_served(config):
            with asking(config) as http:
                reply = http.get("/admin/kv")
            if reply.status_code == 200:
                told = reply.json()
                given = {"kv_disk_folder": Path(told["folder"]), "kv_disk_bytes": told["bytes_limit"]}
                return list(told["data"]), config.model_copy(update=given)
    except (AdminError, ValueError, KeyError):
        pass
    return [], config
