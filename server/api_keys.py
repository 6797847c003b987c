"""API keys: made, hashed, and checked for the owner that each speaks for.

A key is 256 random bits, so it is stored as a plain SHA-256 and needs no slow hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.config import Config
from server.errors import ApiError

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon")

LOCAL_OWNER = "local"
"""The owner of everything on a server that needs no keys."""

KEY_PREFIX = "sk-antiphon-"
FRESH_S = 2.0
"""How long a looked-up key is believed: a key revoked by another process stops working within this time."""
MAX_REMEMBERED = 4096


def new_key() -> str:
    """A key that nobody has seen yet; it is shown once and never stored."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def owner_of_flag_key(key: str) -> str:
    """The owner that a key given by `--api-key` speaks for: the same as long as the key is."""
    return "own_" + hashlib.sha256(b"owner:" + hash_key(key)).hexdigest()[:24]


class KeyFileError(ValueError):
    """The file of keys cannot be used; the message says why, and shows no key."""


def read_key_file(file: Path) -> list[tuple[bytes, str]]:
    """The keys of a file as pairs of hash and owner, in its order.

    A line is KEY or OWNER:KEY; blank lines, and those that begin with #, say nothing. KeyFileError for a file
    that cannot be read, for a line of another form, and for a file without a key: with none the server would
    be open to whoever reaches it.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise KeyFileError(f"the file of keys {file} cannot be read: {said}") from None
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        owner, colon, key = line.rpartition(":")
        owner, key = owner.strip(), key.strip()
        if not key or (colon and not owner) or any(map(str.isspace, owner + key)) or ":" in owner:
            raise KeyFileError(f"{file}, line {number}, is neither KEY nor OWNER:KEY")
        found.append((hash_key(key), owner or owner_of_flag_key(key)))
    if not found:
        raise KeyFileError(f"the file of keys {file} holds no key")
    return found


class Keys:
    """The keys that this server accepts. Those of a file count from the first `reload` on."""

    def __init__(self, config: Config) -> None:
        self._loopback = config.loopback
        self._file = config.api_key_file
        self._of_file: list[tuple[bytes, str]] = []
        self.give(config.secrets())
        self._storage: Storage | None = None
        self._found: dict[bytes, tuple[str | None, float]] = {}
        self._any_stored: tuple[bool, float] = (False, 0.0)
        self._looking = asyncio.Lock()  # whether any key is stored

    def give(self, keys: Sequence[str]) -> None:
        """Accept these of the configuration, in place of those that it had before."""
        self._flags = [(hash_key(key), owner_of_flag_key(key)) for key in keys]
        self._given = [*self._flags, *self._of_file]

    def attach(self, storage: Storage) -> None:
        """Accept stored keys too."""
        self._storage = storage

    def reload(self) -> bool:
        """Read the file of keys anew; it counts from the next request on. True where it says something else
        than before. After a KeyFileError all is as it was."""
        before = self._of_file
        if self._file is not None:
            self._of_file = read_key_file(self._file)
            self._given = [*self._flags, *self._of_file]
            if self._file.stat().st_mode & 0o077:
                log.warning("other users can open the file of keys %s: chmod 600 it", self._file)
        return self._of_file != before

    def forget(self) -> None:
        """Believe nothing that was looked up before: a key was made or revoked here."""
        self._found.clear()
        self._any_stored = (False, 0.0)

    async def needed(self) -> bool:
        """False only on loopback, while there is no key that would be accepted."""
        return not self._loopback or bool(self._given) or await self._stored()

    async def usable(self) -> bool:
        """True when some key would be accepted; without one a server on the network would be of no use."""
        return bool(self._given) or await self._stored()

    async def owner(self, key: str | None) -> str:
        """The owner that a key speaks for; ApiError 401 `invalid_api_key` when it speaks for nobody."""
        if not await self.needed():
            return LOCAL_OWNER
        if not key:
            raise unauthorized(
                "You didn't provide an API key. Send it in an Authorization header using Bearer auth "
                "(Authorization: Bearer YOUR_KEY)."
            )
        digest = hash_key(key)
        owner = None
        for given, its_owner in self._given:  # all are compared, so that time tells nothing
            if hmac.compare_digest(given, digest):
                owner = its_owner
        if owner is None:
            owner = await self._look_up(digest)
        if owner is None:
            raise unauthorized(
                f"Incorrect API key provided: {key[:4]}...{key[-4:] if len(key) > 16 else ''}."
            )
        return owner

    async def _stored(self) -> bool:
        clock = asyncio.get_running_loop().time
        if clock() >= self._any_stored[1] and self._storage is not None:
            async with self._looking:  # one for all requests that come together
                if (now := clock()) >= self._any_stored[1]:
                    found = any(key.revoked_at is None for key in await self._storage.list_keys())
                    self._any_stored = (found, now + FRESH_S)
        return self._any_stored[0]

    async def _look_up(self, digest: bytes) -> str | None:
        now = asyncio.get_running_loop().time()
        owner, until = self._found.get(digest, (None, 0.0))
        if now >= until and self._storage is not None:
            row = await self._storage.find_key(digest)
            owner = row.owner if row is not None and row.revoked_at is None else None
            if len(self._found) >= MAX_REMEMBERED:
                self._found.clear()
            self._found[digest] = (owner, now + FRESH_S)
        return owner


def unauthorized(message: str) -> ApiError:
    """The error of a request without a key that is accepted."""
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
