"""The data folder and the database, and whether they can be used."""

from __future__ import annotations

import asyncio
import os

from server import __version__
from server.admin import is_served
from server.cli.doctor.findings import Finding
from server.cli.doctor.folders import unwritable
from server.cli.doctor.running import left_address, running_server, unready
from server.clock import APART_S, ahead_of_s, now_us
from server.config import Config
from storage import LEAST_ROOM, DatabaseState, StorageError, inspect_database

CLOCKS_APART_S = 3600.0
"""What is stored may be so far in the future, by the clock of another server of the database."""
LITTLE_ROOM = 100_000_000
"""Bytes on the database's disk below which they are told."""


async def check_data(config: Config) -> Finding:
    if (why := unwritable(config.data)) is not None:
        return "FAIL", why
    if not os.path.exists(config.data):
        return "ok", f"{config.data} does not exist yet; the first start makes it"
    return "ok", f"{config.data} can be written"


async def check_database(config: Config) -> Finding:
    from server.process import DAY_S, unshared

    now = now_us()
    if (reason := unshared(config)) is not None:
        return "FAIL", reason
    try:
        state = await inspect_database(config.db, blobs=True, used_before=now - int(DAY_S * 1e6))
    except (StorageError, ValueError) as exc:
        return "FAIL", str(exc)
    verdict, words = await _state_of(config, state)
    file = config.db_file
    if verdict == "ok" and state.holder is None:
        why = None if file is None else unwritable(file.parent)
        if (why := why or state.barred) is not None:
            return "FAIL", why if file is not None else f"{state.shown} cannot be written: {why}"
    apart_s = 0.0 if state.clock is None else ahead_of_s(state.clock, now, now_us())
    if abs(apart_s) > APART_S:
        way = "ahead of" if apart_s > 0 else "behind"
        told = f"the clock of this machine is {abs(apart_s):.0f} s {way} the database's"
        verdict, words = ("note" if verdict == "ok" else verdict), f"{words}; {told}"
    if (doubt := _doubt_of_clock(state, now)) is not None:
        verdict, words = ("note" if verdict == "ok" else verdict), f"{words}; {doubt}"
    if state.free is not None and state.free < LITTLE_ROOM:
        words += f"; its disk has only {state.free / 1e6:.1f} MB free"
        if state.free < LEAST_ROOM:
            words += f": below {LEAST_ROOM / 1e6:.1f} MB nothing new is stored"
        return ("note" if verdict == "ok" else verdict), words
    return verdict, words


def _doubt_of_clock(state: DatabaseState, now: int) -> str | None:
    """Why the clock may be wrong now, or was when something was stored; None where nothing tells of it."""
    from server.process import DAY_S, seconds_ahead

    settled, newest = state.last_used
    if newest is not None and (future_s := (newest - now) / 1e6) > CLOCKS_APART_S:
        return (
            f"something in it was stored {future_s / DAY_S:.1f} days from now: the clock is behind, or was "
            "ahead then; what was stored so is kept for so much longer"
        )
    if ahead_s := seconds_ahead(settled, now):
        return (
            f"it was not used for {ahead_s / DAY_S:.0f} days, or the clock is wrong: for its first day a "
            "server removes nothing for that time"
        )
    return None


async def _state_of(config: Config, state: DatabaseState) -> Finding:
    schemas = f"{state.revision}; this version has {state.newest}"
    if state.schema == "newer":
        return "FAIL", f"{state.shown} was written by a newer version, whose schema it has ({schemas})"
    if state.holder is not None:
        if (running := await running_server(config)) is not None:
            told = (
                f"{state.shown}: {state.holder} and answers at {running.url}; a second one would be refused"
            )
            if running.version not in {None, __version__}:
                told += f"; it is of version {running.version}"
            if state.schema == "older":
                told += (
                    f"; the database has an older schema ({schemas}), which the next start of this version "
                    "migrates: stop that server first"
                )
            return "ok", told
        if not is_served(config):
            return "note", (
                f"{state.shown}: {state.holder} and has not said where it listens; it is starting, and may "
                "be bringing the database to its schema, or was started with another --data; a second one "
                "would be refused"
            )
        if (why := await asyncio.to_thread(unready, config)) is not None:
            cure = (
                "the disk has room"
                if state.free is not None and state.free < LEAST_ROOM
                else "that is mended"
            )
            return "FAIL", (
                f"{state.shown}: {state.holder}{left_address(config)}, which is not ready: {why} It goes "
                f"on by itself when {cure}"
            )
        return "FAIL", f"{state.holder}{left_address(config)}: stop it, or give another --data"
    if state.schema == "absent" and (why := await asyncio.to_thread(unready, config)) is not None:
        return (
            "FAIL",
            f"{state.shown} is not there, and the server that runs{left_address(config)} says: {why}",
        )
    if state.schema == "absent":
        return "ok", f"{state.shown} holds no tables yet; the first start makes them"
    use = "shared by several servers" if state.shared else "held by nobody"
    if state.missing is not None:
        return "FAIL", (
            f"{state.shown} names contents of files that are not in {state.missing}: a database and the "
            "folder of its blobs belong together"
        )
    if state.schema == "older":
        told = f"{state.shown} is {use} and has an older schema ({schemas}), which the next start migrates"
        return "ok", f"{told}, and {state.num_keys} keys"
    return "ok", f"{state.shown} has this version's schema, is {use} and has {state.num_keys} keys"


async def readable_state(config: Config) -> DatabaseState | None:
    """How the database stands; None where this version cannot read what is in it, as its own line says."""
    try:
        state = await inspect_database(config.db)
    except (StorageError, ValueError):
        return None
    return None if state.schema == "newer" else state
