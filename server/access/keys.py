"""API keys: made, hashed, and checked for the principal that each stands for.

A key is 256 random bits, so it is stored as a plain SHA-256 and needs no slow hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from server.access.principal import LOCAL, LOCAL_OWNER, OWNER_PREFIX, Principal
from server.access.scopes import ALL, Scopes
from server.access.tiers import EVERY_TIER, KEYED_TIERS
from server.clock import has_come, now_us
from server.config import Config
from server.errors import ApiError
from server.limits import NONE, LimitSet, load_limits, owner_subject
from storage import FoundKey, StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon")

KEY_PREFIX = "sk-antiphon-"
FRESH_S = 1.0
"""How long a looked-up key is believed: a change that another process makes to a key counts within this
time."""
USE_NOTED_S = 300.0
"""The last use of a key is written down when the one that is written is older than this, in seconds."""
MAX_REMEMBERED = 4096
SHORT = 16
"""A key of the configuration that has fewer characters than this can be guessed."""
_CHALLENGE = {"www-authenticate": "Bearer"}


def new_key() -> str:
    """A key that nobody has seen yet; it is shown once and never stored."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def owner_of_flag_key(key: str) -> str:
    """The owner that a key given by `--api-key` speaks for: the same as long as the key is."""
    return OWNER_PREFIX + hashlib.sha256(b"owner:" + hash_key(key)).hexdigest()[:24]


def _id_of_given_key(digest: bytes) -> str:
    """The id of a key that the configuration gives: the same as long as the key is."""
    return "key_" + hashlib.sha256(b"id:" + digest).hexdigest()[:24]


class KeyFileError(ValueError):
    """The file of keys cannot be used; the message says why, and shows no key."""


class KeyFile(NamedTuple):
    """What a file of keys says. keys: pairs of hash and owner, in its order. short: the numbers of the lines
    whose keys have fewer than `SHORT` characters."""

    keys: list[tuple[bytes, str]]
    short: list[int]

    def doubts(self, file: Path) -> str | None:
        """What an operator should know of short keys in it; None where there are none."""
        if not self.short:
            return None
        lines = f"line{'' if len(self.short) == 1 else 's'} {', '.join(map(str, self.short))}"
        return f"{file}, {lines}: a key of fewer than {SHORT} characters can be guessed"


def read_key_file(file: Path) -> KeyFile:
    """The keys of a file.

    A line is KEY or OWNER:KEY; blank lines, and those that begin with #, say nothing. KeyFileError for a file
    that cannot be read, for a line of another form, for a key that two lines give to two owners, and for a
    file without a key: with none the server would be open to whoever reaches it.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise KeyFileError(f"the file of keys {file} cannot be read: {said}") from None
    found: dict[bytes, tuple[str, int]] = {}  # whose a key is, and the number of its line
    short = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        owner, colon, key = line.rpartition(":")
        owner, key = owner.strip(), key.strip()
        if not key or (colon and not owner) or any(map(str.isspace, owner + key)) or ":" in owner:
            raise KeyFileError(f"{file}, line {number}, is neither KEY nor OWNER:KEY")
        digest, owner = hash_key(key), owner or owner_of_flag_key(key)
        whose, before = found.setdefault(digest, (owner, number))
        if whose != owner:
            raise KeyFileError(f"{file}, lines {before} and {number}, give one key to two owners")
        if len(key) < SHORT:
            short.append(number)
    if not found:
        raise KeyFileError(f"the file of keys {file} holds no key")
    return KeyFile([(digest, owner) for digest, (owner, _) in found.items()], short)


@dataclass(slots=True)
class _Looked:
    """What was found of a key, believed until `until` (seconds of the event loop). expires_at and used_at:
    microseconds since the epoch; used_at is what is written of its last use."""

    principal: Principal | None
    until: float
    expires_at: int | None = None
    revoked: bool = False
    used_at: int = 0


class EndedKey(ApiError):
    """401 `invalid_api_key` for a key that was good once. principal: whose it was."""

    def __init__(self, message: str, principal: Principal) -> None:
        super().__init__(401, message, code="invalid_api_key", headers=_CHALLENGE)
        self.principal = principal


class Keys:
    """The keys that this server accepts. Those of a file count from the first `reload` on."""

    def __init__(self, config: Config) -> None:
        self._loopback = config.loopback
        self._tiers = config.owner_service_tier or KEYED_TIERS
        self._local = replace(LOCAL, tiers=config.owner_service_tier or EVERY_TIER)
        self._file = config.api_key_file
        self._of_file: list[tuple[bytes, str]] = []
        self.give(config.secrets())
        self._storage: Storage | None = None
        self._found: dict[bytes, _Looked] = {}
        self._finding: dict[bytes, asyncio.Task[_Looked]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._any_stored: tuple[bool, float] = (False, 0.0)
        self._looking = asyncio.Lock()  # whether any key is stored
        self._owner_limits: dict[str, tuple[LimitSet, float]] = {}  # of owners who need no stored key
        self._reading_limits = asyncio.Lock()

    def give(self, keys: Sequence[str]) -> None:
        """Accept these of the configuration, in place of those that it had before."""
        if any(len(key) < SHORT for key in keys):
            log.warning("api_key has a key of fewer than %d characters, which can be guessed", SHORT)
        if any(":" in key for key in keys):
            log.warning("api_key has a key with a colon: all of it is the key, OWNER:KEY is for api_key_file")
        self._flags = [(hash_key(key), owner_of_flag_key(key)) for key in keys]
        self._accept()

    def _accept(self) -> None:
        self._given = [
            (digest, Principal(owner, _id_of_given_key(digest), Scopes((ALL,)), tiers=self._tiers))
            for digest, owner in (*self._flags, *self._of_file)
        ]

    def attach(self, storage: Storage) -> None:
        """Accept stored keys too."""
        self._storage = storage

    async def close(self) -> None:
        """Wait until what is being written is written."""
        await asyncio.gather(*self._writing)

    @property
    def owners(self) -> Iterable[str]:
        """The owners of the keys that the configuration gives."""
        return {principal.owner for _, principal in self._given}

    @property
    def given(self) -> dict[str, str]:
        """The owners of the keys that the configuration gives, by the ids of these keys."""
        return {str(principal.key_id): principal.owner for _, principal in self._given}

    def reload(self) -> bool:
        """Read the file of keys anew; it counts from the next request on. True where it says something else
        than before. After a KeyFileError all is as it was."""
        before = self._of_file
        if self._file is not None:
            read = read_key_file(self._file)
            self._of_file = read.keys
            self._accept()
            if (doubts := read.doubts(self._file)) is not None:
                log.warning("%s", doubts)
            if self._file.stat().st_mode & 0o077:
                log.warning("other users can open the file of keys %s: chmod 600 it", self._file)
        return self._of_file != before

    def forget(self) -> None:
        """Believe nothing that was looked up before: keys or owners were changed here."""
        self._found.clear()
        self._finding.clear()
        self._any_stored = (False, 0.0)
        self._owner_limits.clear()

    async def needed(self) -> bool:
        """False only on loopback, while there is no key that would be accepted."""
        return not self._loopback or bool(self._given) or await self._stored()

    async def without(self, *key_ids: str) -> dict[str, bool]:
        """What it means that these keys are revoked, by what is stored now. `opens_server`: no key is needed
        any more. `locks_server`: one is needed, and none is accepted, as where the others have only expired.
        Neither where there is none to revoke."""
        assert self._storage is not None
        if self._given or not key_ids:
            return {"opens_server": False, "locks_server": False}
        opens = self._loopback and not await self._storage.any_key(besides=key_ids)
        locks = not opens and not await self._storage.any_key(besides=key_ids, at=now_us())
        return {"opens_server": opens, "locks_server": locks}

    async def usable(self) -> bool:
        """True when some key would be accepted; without one a server on the network would be of no use."""
        return bool(self._given) or await self._stored()

    async def principal(self, key: str | None) -> Principal:
        """Who a key stands for; ApiError 401 `invalid_api_key` when it stands for nobody, and EndedKey when
        it was revoked or has expired."""
        if not await self.needed():
            return await self._limited(self._local)
        if not key:
            raise unauthorized(
                "You didn't provide an API key. Send it in an Authorization header using Bearer auth "
                "(Authorization: Bearer YOUR_KEY), or in x-api-key."
            )
        digest = hash_key(key)
        principal = None
        for given, its_principal in self._given:  # all are compared, so that time tells nothing
            if hmac.compare_digest(given, digest):
                principal = its_principal
        if principal is not None:
            return await self._limited(principal)
        principal = await self._look_up(digest)
        if principal is None:
            raise unauthorized(
                f"Incorrect API key provided: {key[:4]}...{key[-4:] if len(key) > 16 else ''}."
            )
        return principal

    async def of(self, owner: str, key_id: str | None) -> Principal:
        """Whom an owner's key stands for now; without an id, the owner on a server that needs no keys.
        ApiError 401 `invalid_api_key` where the key is not good any more."""
        if key_id is None:
            if owner == LOCAL_OWNER and not await self.needed():
                return await self._limited(self._local)
            raise unauthorized("An API key is needed now.")
        for _, principal in self._given:
            if (principal.owner, principal.key_id) == (owner, key_id):
                return await self._limited(principal)
        looked = None
        if self._storage is not None and (digest := await self._storage.key_hash(owner, key_id)) is not None:
            looked = await self._look_up(digest)
        if looked is None:
            raise unauthorized("The API key is not known any more.")
        return looked

    async def _limited(self, principal: Principal) -> Principal:
        """A principal without a stored key, with what its owner may use. While the database is away that is
        what was known last."""
        owner, clock = principal.owner, asyncio.get_running_loop().time
        known = self._owner_limits.get(owner)
        if self._storage is not None and (known is None or clock() >= known[1]):
            async with self._reading_limits:  # one look for all requests that come together
                known = self._owner_limits.get(owner)
                if known is None or clock() >= known[1]:
                    limits = NONE if known is None else known[0]
                    with suppress(StorageUnavailable):
                        limits = (await owner_subject(self._storage, owner)).limits
                    known = self._owner_limits[owner] = limits, clock() + FRESH_S
        limits = NONE if known is None else known[0]
        return principal if limits == NONE else replace(principal, owner_limits=limits)

    async def _stored(self) -> bool:
        clock = asyncio.get_running_loop().time
        if clock() >= self._any_stored[1] and self._storage is not None:
            async with self._looking:  # one look for all requests that come together
                if (now := clock()) >= self._any_stored[1]:
                    self._any_stored = (await self._storage.any_key(), now + FRESH_S)
        return self._any_stored[0]

    async def _look_up(self, digest: bytes) -> Principal | None:
        """The principal of a stored key. Requests that come while it is being looked up wait for that one
        answer."""
        looked = self._found.get(digest)
        if looked is None or asyncio.get_running_loop().time() >= looked.until:
            task = self._finding.get(digest)
            if task is None:
                task = self._finding[digest] = asyncio.create_task(self._find(digest))
            looked = await asyncio.shield(task)
        now = now_us()
        if looked.principal is not None and looked.revoked:
            raise EndedKey("The API key that you provided was revoked.", looked.principal)
        if looked.principal is not None and looked.expires_at is not None and has_come(looked.expires_at):
            raise EndedKey("The API key that you provided has expired.", looked.principal)
        if looked.principal is not None and now - looked.used_at > USE_NOTED_S * 1e6:
            looked.used_at = now
            self._note_use(looked.principal, now)
        return looked.principal

    async def _find(self, digest: bytes) -> _Looked:
        """Looks a key up, and keeps what was found unless all was forgotten meanwhile."""
        task = asyncio.current_task()
        until = asyncio.get_running_loop().time() + FRESH_S
        try:
            row = None if self._storage is None else await self._storage.find_key(digest)
            looked = _Looked(None, until) if row is None else self._looked(row, until)
            before = self._found.get(digest)
            if before is not None:
                looked.used_at = max(looked.used_at, before.used_at)
            if self._finding.get(digest) is task:
                if len(self._found) >= MAX_REMEMBERED:
                    self._found.clear()
                self._found[digest] = looked
            return looked
        finally:
            if self._finding.get(digest) is task:
                del self._finding[digest]

    def _looked(self, row: FoundKey, until: float) -> _Looked:
        key = row.key
        limits = load_limits(key.limits), load_limits(row.owner.limits)
        principal = Principal(key.owner, key.id, Scopes(key.scopes), *limits, self._tiers)
        revoked = key.revoked_at is not None
        return _Looked(principal, until, key.expires_at, revoked, key.last_used_at or 0)

    def _note_use(self, principal: Principal, now: int) -> None:
        """Writes down that a key was used; no request waits for it."""
        assert self._storage is not None and principal.key_id is not None
        task = asyncio.create_task(_touch(self._storage, principal.key_id, now))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)


async def _touch(storage: Storage, key_id: str, now: int) -> None:
    try:
        await storage.touch_keys({key_id: now})
    except StorageUnavailable:
        log.info("the last use of %s could not be written; the next use will be", key_id)


def unauthorized(message: str) -> ApiError:
    """The error of a request without a key that is accepted."""
    return ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
