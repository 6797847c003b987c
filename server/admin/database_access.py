"""How an operator's command reaches the database, whether or not a server runs.

It opens the database itself when no server holds it, and only with this version's schema: `antiphon migrate`
and a start bring it to that, lest a look change it beneath older servers that share it. Otherwise it asks the
server that holds it, with a token that the server has left in a file that only this user can read.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from server import __version__
from server.config import Config
from storage import (
    FolderHeld,
    NotFound,
    Storage,
    StorageError,
    inspect_database,
    make_private_folder,
    open_storage,
)

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 30.0

NOT_YET = (
    "a server holds the database and has not said where it listens: it is starting, and may be bringing the "
    "database to its schema, so ask again when it is ready; or it was started with another --data"
)


class AdminError(Exception):
    """An operator's command could not be carried out; the message says why."""


class Unreachable(AdminError):
    """A server holds the database, and does not answer."""


class UnknownOwner(AdminError):
    """No stored key, and nothing that is kept, belongs to the owner that a command names."""


def carry_out(
    config: Config,
    in_database: Callable[[Storage], Awaitable[dict[str, Any]]],
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    makes: bool | None = None,
) -> dict[str, Any]:
    """Do `in_database`, or, when a server holds the database, ask it for the same. Raises AdminError.

    method, path, body: the request to that server, whose reply is the result. makes: whether this may make a
    database where there is none, by default what a POST may; what looks or removes must not.
    """

    async def here() -> dict[str, Any] | None:
        try:
            async with opened(config, makes=method == "POST" if makes is None else makes) as storage:
                return await in_database(storage)
        except FolderHeld:
            return None

    try:
        done = asyncio.run(here())
        if done is None:
            with asking(config) as http:
                return answer_of(http.request(method, path, json=body))
    except NotFound as exc:
        raise AdminError(f"there is no {exc.kind} with id {exc.id!r}") from None
    except (StorageError, ValueError) as exc:
        raise AdminError(exc) from None
    _warn_of_models((body or {}).get("limits"))
    return done


def _warn_of_models(limits: Mapping[str, Any] | None) -> None:
    """A server knows which models it serves and refuses limits of others; the database knows of none."""
    given = [model for model, own in ((limits or {}).get("models") or {}).items() if any(own.values())]
    if given:
        print(
            f"antiphon: no server was asked whether it serves {', '.join(given)}: limits of a model count "
            "where a server has one of that name",
            file=sys.stderr,
        )


def answer_of(reply: httpx.Response) -> dict[str, Any]:
    """What a running server says to the command that asked it. Raises AdminError where it refuses, and where
    it is another server that has answered."""
    try:
        said: dict[str, Any] = orjson.loads(reply.content)
        if reply.status_code == 200:
            return said
        error = said["error"]
        unknown = (error["code"], error["param"]) == ("not_found", "owner")
        told = error["message"]
        if error["code"] in {"unknown_url", "method_not_allowed"}:
            told = (
                f"the server that runs is of another version than this command, which is {__version__}: it "
                f"says {told!r}. Use the `antiphon` of its version, or start the server with this one"
            )
        refusal = (UnknownOwner if unknown else AdminError)(told)
    except (ValueError, KeyError, TypeError):
        told = f"what answers at {reply.url} does not speak this API: status {reply.status_code}"
        raise AdminError(told) from None
    raise refusal


@asynccontextmanager
async def opened(config: Config, *, makes: bool) -> AsyncIterator[Storage]:
    """The database itself, whose schema is this version's. makes: one is made where there is none.

    Raises AdminError for every other one, FolderHeld where a server holds it, and other StorageErrors.
    """
    state = await inspect_database(config.db)
    if state.holder is None:
        if state.schema == "absent" and not makes and state.barred is not None:
            raise AdminError(
                f"there is no database at {state.shown}, and none can be made there: {state.barred}"
            )
        if state.schema == "absent" and not makes:
            raise AdminError(
                f"there is no database at {state.shown}: give --data (or --db) as the server has it; the "
                "first `antiphon serve` or `antiphon keys create` makes one"
            )
        if state.schema == "older":
            raise AdminError(
                f"{state.shown} has the schema of an older version: stop the servers of that version, and "
                f"run `antiphon migrate{config.flags}`"
            )
        if state.schema == "newer":
            raise AdminError(f"{state.shown} was written by a newer version")
    storage = await open_storage(config.db, runner="admin")
    try:
        yield storage
    finally:
        await storage.close()


@contextmanager
def asking(config: Config) -> Iterator[httpx.Client]:
    """A client of the server that holds the database. Raises AdminError where it cannot be reached; what
    else fails in its block is not the server's."""
    import httpx

    try:
        address = orjson.loads(address_file(config).read_bytes())
        verify = _pinned(Path(address["certificate"])) if address["certificate"] else True
    except FileNotFoundError:
        raise Unreachable(NOT_YET) from None
    except (OSError, ValueError) as exc:
        told = f"the database is in use, and its server's address or certificate cannot be read: {exc}"
        raise Unreachable(told) from None
    headers = {"authorization": f"Bearer {address['token']}"}
    try:
        # Not by a proxy that the environment names: the token is for this server alone.
        with httpx.Client(
            base_url=address["url"], headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False
        ) as http:
            yield http
    except httpx.HTTPError as exc:
        told = f"the server at {address['url']} does not answer: {exc}" if is_served(config) else NOT_YET
        raise Unreachable(told) from None


# ------------------------------------------------------------------------------------------------------------
# The running server's address


def address_file(config: Config) -> Path:
    """Where the server of this database leaves its address and admin token; readable by its user only."""
    return config.data / f"server-{hashlib.sha256(config.db.encode()).hexdigest()[:12]}.json"


def is_served(config: Config) -> bool:
    """Whether a server of this database is ready, as far as its file says; one that was killed has left its
    file behind."""
    try:
        os.kill(orjson.loads(address_file(config).read_bytes())["pid"], 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def leave_address(config: Config, url: str, token: str) -> None:
    """Write the file; it names this process, so that a later reader can tell an old one."""
    make_private_folder(config.data)
    file = address_file(config)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        certificate = config.ssl_certfile and str(config.ssl_certfile)
        out.write(orjson.dumps({"url": url, "token": token, "pid": os.getpid(), "certificate": certificate}))


def _pinned(certfile: Path) -> ssl.SSLContext:
    """A client's context that believes the server's own certificate, whatever name it was made for: it is
    asked by its address, and found by a file that only its user can write."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certfile)
    return context
