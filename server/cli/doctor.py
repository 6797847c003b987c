"""`antiphon doctor`: checks whether this machine can serve, and prints a line for each check.

Nothing is made, migrated or repaired: what is missing is told, and the first start of the server makes it.
"""

from __future__ import annotations

import asyncio
import glob
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import orjson

from engine import EngineError, ForeignFolder, database_of, readable_size
from server import __version__
from server.access import LOCAL_OWNER, KeyFileError, read_key_file
from server.admin import AdminError, address_file, asking, is_served, keys
from server.config import FILE_NAME, Config
from server.encrypted_reasoning import given_keys
from server.limits import NONE, changed, load_limits, parse_limits
from server.masking import masked
from server.mcp_servers import server_of
from server.model_registry import (
    build_engine,
    build_pooling,
    build_speech,
    expected_bytes,
    first_of,
    lacking,
)
from storage import LEAST_ROOM, DatabaseState, StorageError, inspect_database
from tools import (
    BUILTIN,
    PAGE,
    ConnectionPool,
    Connections,
    EgressError,
    McpSearch,
    SearchFailed,
    ToolsError,
    UnreadableDocument,
    operator_tools,
    prepare_egress,
    prepare_mcp,
    read_document,
    reading_confinement,
    reads_html,
    search_once,
    unreadable_kinds,
)

Verdict = Literal["ok", "note", "FAIL"]
Finding = tuple[Verdict, str]
Check = Callable[[Config], Awaitable[Finding]]

LITTLE_ROOM = 100_000_000
"""Bytes on the database's disk below which they are told."""

OWN_FOLDERS = {"kv", "runners", "sandbox-python"}
"""Folders that a server makes in its folder, besides those of blobs."""

SQLITE = b"SQLite format 3\0"
"""How each database of SQLite begins, once it has a table."""

ASK_STARTING_S = 5.0
"""Seconds that a server which is starting has for saying so."""

ASK_MCP_S = 10.0
"""Seconds that an MCP server has for starting and listing its tools."""


def examine(config: Config) -> int:
    """Run every check, print a line each; 1 when one failed: `antiphon serve` would be refused now. That a
    server of this database runs already is no failure."""
    return asyncio.run(_examine(config))


async def _examine(config: Config) -> int:
    failed = False
    for name, check in CHECKS.items():
        verdict, words = await check(config)
        print(f"{verdict:5} {name:9} {words}", flush=True)
        failed = failed or verdict == "FAIL"
    return int(failed)


async def _python(config: Config) -> Finding:
    new_enough = sys.version_info >= (3, 11)
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}, antiphon {__version__}"
    return ("ok" if new_enough else "FAIL"), words


async def _data(config: Config) -> Finding:
    if (why := _unwritable(config.data)) is not None:
        return "FAIL", why
    if not os.path.exists(config.data):
        return "ok", f"{config.data} does not exist yet; the first start makes it"
    return "ok", f"{config.data} can be written"


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be made in a folder or, where it is not there, in the nearest one above it; None where
    that can be. A try tells more than permissions: root does without them, and /proc only shows some."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as exc:
        missing = f"{folder} does not exist, and " if there != folder else ""
        return f"{missing}{there} cannot be written: {exc.strerror or exc}"


async def _database(config: Config) -> Finding:
    from server.process import unshared

    if (reason := unshared(config)) is not None:
        return "FAIL", reason
    try:
        state = await inspect_database(config.db, blobs=True)
    except (StorageError, ValueError) as exc:
        return "FAIL", str(exc)
    verdict, words = await _state_of(config, state)
    file = config.db_file
    is_free = verdict == "ok" and state.holder is None
    if is_free and file is not None and (why := _unwritable(file.parent) or state.barred) is not None:
        return "FAIL", why
    if state.free is not None and state.free < LITTLE_ROOM:
        words += f"; its disk has only {state.free / 1e6:.1f} MB free"
        if state.free < LEAST_ROOM:
            words += f": below {LEAST_ROOM / 1e6:.1f} MB nothing new is stored"
        return ("note" if verdict == "ok" else verdict), words
    return verdict, words


async def _state_of(config: Config, state: DatabaseState) -> Finding:
    schemas = f"{state.revision}; this version has {state.newest}"
    if state.schema == "newer":
        return "FAIL", f"{state.shown} was written by a newer version, whose schema it has ({schemas})"
    if state.holder is not None:
        if (running := await _running(config)) is not None:
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
        return "FAIL", f"{state.holder}{_address(config)}: stop it, or give another --data"
    if state.schema == "absent" and (why := await asyncio.to_thread(_unready, config)) is not None:
        return "FAIL", f"{state.shown} is not there, and the server that runs{_address(config)} says: {why}"
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


def _address(config: Config) -> str:
    """Where the server that holds the database listens, as it has left word."""
    try:
        return f" and listens on {orjson.loads(address_file(config).read_bytes())['url']}"
    except (OSError, ValueError):
        return ""


class _Running(NamedTuple):
    """A server that is ready: where it listens, and its version where it tells one."""

    url: str
    version: str | None


async def _running(config: Config) -> _Running | None:
    """The server of this database; None where there is none that is ready."""

    def ask() -> _Running | None:
        with asking(config) as http:
            del http.headers["authorization"]  # whoever answers there may be another by now
            if http.get("/ready").status_code != 200:
                return None
            try:
                version: str | None = str(orjson.loads(http.get("/version").content)["version"])
            except (ValueError, KeyError, TypeError):
                version = None
            return _Running(str(http.base_url).rstrip("/"), version)

    try:
        return await asyncio.to_thread(ask) if is_served(config) else None
    except AdminError:
        return None


def _unready(config: Config) -> str | None:
    """Why a server that has left its address in the data folder cannot do its work; None where it can, or
    where none answers."""
    try:
        if is_served(config):
            with asking(config) as http:
                del http.headers["authorization"]
                return str(orjson.loads(http.get("/ready").content)["error"]["message"])
    except (AdminError, ValueError, KeyError, TypeError):
        pass
    return None


async def _access(config: Config) -> Finding:
    """Which other users of this machine can get at what is kept."""
    worst: Verdict = "ok"
    sentences = []
    for verdict, words in _openings(config):
        sentences.append(words)
        if worst != "FAIL":
            worst = verdict
    return worst, "; ".join(sentences) or "no other user can read or replace what is kept"


def _openings(config: Config) -> Iterator[Finding]:
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
        if _permissions(file) & 0o077:
            yield "FAIL", f"other users can open {file}: chmod 600 {shlex.quote(str(file))}"
    if config.tools is not None and _permissions(config.tools) & 0o022:
        yield "FAIL", f"other users can change {config.tools}: chmod go-w {shlex.quote(str(config.tools))}"
    for folder in sorted({*folders, *(file.parent for file in files)}):
        for place in (folder, *folder.parents):
            mode = _permissions(place, stat.S_IFDIR)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                yield "FAIL", f"any user can replace what is in {place}: {_closed(place, 'o-w')}"
        if folder in folders and _permissions(folder, stat.S_IFDIR) & 0o077:
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


def _permissions(path: Path, kind: int = stat.S_IFREG) -> int:
    """Who may do what with a file, or with a folder (S_IFDIR); 0 where there is none, or where this user may
    not look it up."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return 0
    return stat.S_IMODE(mode) if stat.S_IFMT(mode) == kind else 0


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


async def _port(config: Config) -> Finding:
    from server.process import CertificateError, Tls, bind, cannot_listen

    try:
        if config.ssl_certfile is not None:
            Tls(config)
    except CertificateError as exc:
        return "FAIL", str(exc)
    try:
        bind(config.host, config.port).close()
    except OSError as exc:
        running = await _running(config)
        if running is not None and httpx.URL(running.url).port == config.port:
            return "ok", f"the server of this database listens on {running.url}"
        code, says = await _said_at_port(config)
        if code == "not_ready" and await _may_be_ours(config):
            return "note", f"a server that is starting listens on port {config.port}"
        if code == "storage_unavailable":
            if (at := _address(config)).endswith(f":{config.port}"):
                return "note", f"the server that cannot do its work runs{at}"
            return "FAIL", f"a server that cannot do its work listens on port {config.port}, and says: {says}"
        return "FAIL", cannot_listen(config, exc)
    doubts = None
    if config.api_key_file is not None:
        try:
            doubts = read_key_file(config.api_key_file).doubts(config.api_key_file)
        except KeyFileError as exc:
            return "FAIL", str(exc)
    free = f"{config.host}:{config.port} is free"
    if doubts is not None:
        return "note", f"{free}; {doubts}"
    if config.loopback and config.led_to is None:
        return "ok", free
    keyed = await _keyed(config)
    if keyed:
        return "ok", free
    if keyed is None:
        return "note", f"{free}; whether the database has a key, as an address like this needs, is not known"
    if not config.loopback:
        return "FAIL", f"{free}, but an address like this needs keys: antiphon keys create{config.flags}"
    return "note", (
        f"{free}; {config.led_to} leads others to this server, and whoever comes may use it, because there "
        f"is no key: antiphon keys create{config.flags}"
    )


async def _may_be_ours(config: Config) -> bool:
    """Whether a server that is starting may be that of the database."""
    state = await _readable(config)
    return state is not None and (state.holder is not None or state.shared)


async def _said_at_port(config: Config) -> tuple[str, str]:
    """The error of a server that is not ready and listens where this one would: its code and its message;
    both empty where none answers so."""
    scheme = "http" if config.ssl_certfile is None else "https"
    url = httpx.URL(scheme=scheme, host=config.host, port=config.port, path="/ready")
    try:  # it is told nothing, so that any certificate will do
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=ASK_STARTING_S) as http:
            error = orjson.loads((await http.get(url)).content)["error"]
            return str(error["code"]), str(error["message"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "", ""


async def _keyed(config: Config) -> bool | None:
    """Whether who comes needs a key; None where only the database could tell, and cannot be read."""
    if config.api_key or config.api_key_file is not None:
        return True
    state = await _readable(config)
    return None if state is None else bool(state.num_keys)


async def _readable(config: Config) -> DatabaseState | None:
    """How the database stands; None where this version cannot read what is in it, as its own line says."""
    try:
        state = await inspect_database(config.db)
    except (StorageError, ValueError):
        return None
    return None if state.schema == "newer" else state


async def _limits(config: Config) -> Finding:
    """What whoever comes may use: a server without keys knows one owner only."""
    every = changed(NONE, parse_limits(config.owner_limit))
    if (state := await _readable(config)) is None:
        of_each = keys.shown_limits({"limits": every.given()})
        return (
            "note",
            f"of each owner: {of_each}; the database, which may say otherwise of some, cannot be read",
        )
    own = {owner: limits for owner, dumped in state.limits.items() if (limits := load_limits(dumped)) != NONE}
    if not config.loopback or await _keyed(config):
        of_others = keys.shown_limits({"limits": every.given()})
        owners = "1 owner has" if len(own) == 1 else f"{len(own)} owners have"
        return "ok", f"{owners} limits of their own; of every other: {of_others}"
    in_force = own.get(LOCAL_OWNER, NONE).over(every).given()
    if not in_force:
        change = f"antiphon owners limits {LOCAL_OWNER} --limit NAME=VALUE{config.flags}"
        return "ok", f"whoever comes is the owner {LOCAL_OWNER}, without limits: {change}"
    return "ok", f"whoever comes is the owner {LOCAL_OWNER}: {keys.shown_limits({'limits': in_force})}"


async def _sealing(config: Config) -> Finding:
    """Which keys seal what clients keep."""
    try:
        given = given_keys(config.sealing_keys())
    except ValueError as exc:
        return "FAIL", str(exc)
    if not given:
        days = f"{config.sealing_key_s / 86400:g}"
        return "ok", f"reasoning is sealed by keys that the database holds, a new one every {days} days"
    source = "sealing_key" if config.sealing_key_file is None else str(config.sealing_key_file)
    besides = f"; {len(given) - 1} more open what they sealed" if given[1:] else ""
    return "ok", f"reasoning is sealed by key {given[0].number} of {source}{besides}"


async def _tools(config: Config) -> Finding:
    try:
        own = operator_tools(config.tools, BUILTIN)
    except ToolsError as exc:
        return "FAIL", str(exc)
    packaged = operator_tools(None, BUILTIN)
    sources = {str(config.tools): own.keys() - packaged.keys(), "installed packages": packaged.keys()}
    besides = [
        f", and the operator's of {source}: {', '.join(name for name in own if name in names)}"
        for source, names in sources.items()
        if names
    ]
    return "ok", f"{', '.join(BUILTIN)}{''.join(besides)}"


async def _egress(config: Config) -> Finding:
    reached = {
        "off": "requests lead nowhere",
        "public": "requests lead to public addresses, at ports 80 and 443",
        "any": "requests lead to every address, also of this machine and its networks",
    }[config.egress]
    besides = " but " if config.egress == "off" else ", and to "
    allowed = besides + ", ".join(config.egress_allow) if config.egress_allow else ""
    return ("note" if config.egress == "any" else "ok"), f"{config.egress}: {reached}{allowed}"


async def _mcp(config: Config) -> Finding:
    servers = config.mcp.servers.items()
    places = [f"{name} ({masked(server.url or server.command[0])})" for name, server in servers]
    approved = {
        "request": "",
        "always": "; every call of an MCP tool needs approval",
        "never": "; no call of an MCP tool needs approval, whatever requests say",
    }[config.mcp.approval]
    verdict: Verdict = "note" if config.mcp.approval == "never" else "ok"
    if servers:  # what loading takes is not the servers' time
        await asyncio.to_thread(prepare_egress)
        await asyncio.to_thread(prepare_mcp)
    found = await asyncio.gather(*(_listed(config, name) for name in config.mcp.servers))
    told = [f"{place}: {each}" for place, (_, each) in zip(places, found, strict=True)]
    if any(each == "note" for each, _ in found):
        verdict = "note"
    return verdict, (", ".join(told) or "no MCP server is configured") + approved


async def _listed(config: Config, name: str) -> Finding:
    """How many tools an MCP server lists, or why it lists none."""
    server = server_of(name, config.mcp.servers[name])
    if server.command and shutil.which(server.command[0], path=server.env.get("PATH")) is None:
        told = f"the program {server.command[0]!r} cannot be run: it is not there, or not executable"
        return "note", told
    pool = ConnectionPool(config.egress_policy)
    connections = Connections(pool, owner="")
    try:
        async with asyncio.timeout(ASK_MCP_S):
            listing = await connections.list_tools(name, server)
    except TimeoutError:
        return "note", f"it does not list its tools within {ASK_MCP_S:g} s"
    finally:
        connections.close()
        await pool.close()
    if listing.error is not None:
        return "note", listing.error
    return "ok", f"{len(listing.tools)} tool{'' if len(listing.tools) == 1 else 's'}"


async def _web(config: Config) -> Finding:
    from server.process import read_web

    try:
        tools = await asyncio.to_thread(read_web, config)
    except ToolsError as exc:
        return "FAIL", str(exc)
    if config.demo_web is not None:
        return "ok", f"the documents in {config.demo_web} stand in for the web"
    if (search := config.web.search(config.mcp)) is None:
        return "ok", "no search provider is configured, so web_search is not offered"
    where = f"{search.provider} at {masked(search.address)}"
    try:
        found = await search_once(search)
    except SearchFailed as why:
        return "note", f"{where}: {why}{f' What helps: {why.hint}.' if why.hint else ''}"
    except EgressError as why:
        return "note", f"{where}: {why}"
    finally:
        if isinstance(search, McpSearch):
            await search.close()
    if PAGE not in tools:
        return "note", f"{where} answers; pages are not opened, because egress is off"
    if not reads_html():
        return "note", f"{where} answers; pages cannot be read: pip install -e '.[web]'"
    return "ok" if found else "note", f"{where} answers with {found} results"


async def _documents(config: Config) -> Finding:
    try:
        await read_document(b"text", "text.txt")
    except UnreadableDocument as error:
        return "note", error.message
    confined = reading_confinement()
    words = f"documents are read apart, by {', '.join(confined)}"
    if missing := unreadable_kinds():
        return "note", f"{words}; for {', '.join(missing)}: pip install -e '.[files]'"
    means = {name.partition(" ")[0] for name in confined}
    if not {"bubblewrap", "Landlock"} & means:
        return "note", f"{words}: what reads them can open files of the server; bubblewrap would prevent that"
    if "seccomp" not in means and sys.platform == "linux":
        return "note", f"{words}: the system calls of this machine are not known, so all of them can be made"
    return "ok", words


async def _sandbox(config: Config) -> Finding:
    from server.process import look_for_sandbox

    found = await look_for_sandbox(config)
    if found.sandbox is None:
        if config.sandbox == "auto":
            return "note", f"no code is run, because no sandbox works here: {found.told}"
        return ("ok" if config.sandbox == "off" else "FAIL"), found.told
    return ("note" if found.passed_over else "ok"), "; ".join(
        [f"code runs by {found.for_operators}", *found.passed_over]
    )


async def _images(config: Config) -> Finding:
    if (generator := config.images.generator(config.max_item_bytes)) is None:
        return "ok", "no server of images is configured, so image_generation is not offered"
    model = f"{generator.model} of " if generator.model else ""
    where = f"{model}{masked(generator.address)}"
    try:
        status = await generator.look()  # an image would cost money
    except EgressError as why:
        return "note", f"{where}: {why}"
    if status in (401, 403):
        return "note", f"{where} answers with status {status}: its api_key is missing or wrong"
    again = "made again" if generator.idempotent else "not made again"
    return "ok", f"{where} answers; an image that a crash cut short is {again}"


async def _kv(config: Config) -> Finding:
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
    if _permissions(folder, stat.S_IFDIR) & 0o077:
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


async def _model(config: Config) -> Finding:
    from server.process import unenforced

    began = time.perf_counter()
    if not config.serves_own_model:
        texts = [entry for entry in config.entries if entry.use == "text"]
        config = config.of_entry(next((entry for entry in texts if entry.default), texts[0]))
    try:
        # Without its disk: that may be a running server's.
        engine = await asyncio.to_thread(build_engine, config.model_copy(update={"kv_disk_bytes": 0}))
        info = await engine.start()
    except (EngineError, ImportError) as exc:
        return "FAIL", str(exc)
    seconds = time.perf_counter() - began
    try:
        loose = await unenforced(operator_tools(config.tools, BUILTIN), engine)
    except ToolsError:  # the line of the tools has told it
        loose = {}
    await engine.close()
    told = f"{info.name} loads in {seconds:.1f} s: {info.max_model_len} tokens, dialect {info.dialect}"
    reasons = [
        f"; arguments of the tool {name} are checked, and not enforced: {why}" for name, why in loose.items()
    ]
    if info.shortened:
        reasons.append(f"; {info.shortened}")
    return "note" if reasons else "ok", told + "".join(reasons)


async def _models(config: Config) -> Finding:
    """The models of the file: their names, and whether what they name is there."""
    if not len(config.entries):
        return "ok", "no file of several models"
    told: list[str] = []
    missing: list[str] = []
    away: list[str] = []
    first = first_of(config)
    for entry in config.entries:
        kind = "in a process of its own" if entry.in_child else f"engine {entry.engine}"
        default = ", the default" if entry.default else ""
        told.append(f"{entry.id} ({kind}{default})")
        if (why := await asyncio.to_thread(lacking, entry, config.of_entry(entry))) is not None:
            # The server starts without those that it loads when they are wanted.
            needed = entry.id == first or not entry.in_child
            (missing if needed else away).append(f"{entry.id}: {why}")
        needs = expected_bytes(entry, config.of_entry(entry)) if entry.in_child else 0
        if (most := config.models_memory_bytes) is not None and needs > most:
            missing.append(f"{entry.id} takes about {needs} bytes, and models_memory_bytes is {most}")
    if missing:
        return "FAIL", "; ".join(missing + away)
    return ("note", "; ".join((", ".join(told), *away))) if away else ("ok", ", ".join(told))


async def _texts(config: Config) -> Finding:
    told = []
    try:
        for engine in await asyncio.to_thread(build_pooling, config):
            try:
                info = await engine.start()
            finally:
                await engine.close()
            how = f"{'+'.join(info.pooling)} ({info.pooling_source})"
            told.append(f"{info.name} for {info.kind}: {how}, {info.max_model_len} tokens")
        for speech in await asyncio.to_thread(build_speech, config):
            try:
                heard = await speech.start()
            finally:
                await speech.close()
            told.append(f"{heard.name} for speech: {len(heard.languages) or 1} languages")
    except (EngineError, ImportError) as exc:
        return "FAIL", str(exc)
    return "ok", "; ".join(told) or "no model for vectors, scores, labels or speech is configured"


async def _device(config: Config) -> Finding:
    # What torch sees is the engine's business; it says so in the model's line. Only its version is asked
    # here.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "ok", f"torch {version('torch')}, device {config.device}, dtype {config.dtype}"
    except PackageNotFoundError:
        return ("FAIL" if config.engine == "local" else "note"), "torch is not installed"


CHECKS: dict[str, Check] = {
    "python": _python,
    "torch": _device,
    "data": _data,
    "database": _database,
    "access": _access,
    "port": _port,
    "limits": _limits,
    "sealing": _sealing,
    "tools": _tools,
    "egress": _egress,
    "mcp": _mcp,
    "web": _web,
    "documents": _documents,
    "sandbox": _sandbox,
    "images": _images,
    "texts": _texts,
    "kv": _kv,
    "models": _models,
    "model": _model,
}
