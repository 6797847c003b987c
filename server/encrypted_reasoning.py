"""Seals what clients keep of a response that is not stored, opens it again, and rotates the keys.

That is the reasoning, and what a compaction stands for, both in `encrypted_content`, and the private halves
of items, in `antiphon_sealed`.

Content is sealed with AES-SIV (RFC 5297, 256 bits), which needs no random nonce: a run that is replayed after
a crash seals to the same bytes that its client saw, and a repeated nonce reveals only that two texts are
equal. The owner and the model's name are authenticated with the content, so another owner or model cannot use
it. The model counts by name, not by fingerprint, because clients keep sealed content for as long as they like
and a fingerprint changes with every new template, dtype or version. The item's id is not checked, because
clients drop ids. A private half belongs to its item, whose id is checked, and any model may be shown it. Any
model may be shown a compaction, too, because conversations change their models.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from server.clock import now_us
from server.config import THREADED_BYTES
from server.items import COMPACTION, ITEM_TYPES, SEALED, Compacted, Private, with_private
from server.schema import Item, refuse
from server.settings import SECRET_BYTES
from server.threads import aside, in_large_request
from storage import SealingKey

if TYPE_CHECKING:
    from server.access import Actor
    from storage import Storage

log = logging.getLogger("antiphon.sealing")

INCLUDE = "reasoning.encrypted_content"
"""What a request has in `include` where it wants its reasoning sealed."""

FRESH_S = 5.0
"""How long the keys are believed: one that another process has made seals here within this time."""

VERSION = 1

GIVEN = 1 << 31
"""Keys of the operator have numbers from here on, which are digests of them; those of the database count up
from 1."""

_HEAD = struct.Struct(">BI16sH")  # version, number of the key, salt, bytes of the model's name, which follows

PRIVATE_HALF = "\0private half"
"""What stands in the place of a model's name in the seal of a private half; no model has such a name."""

COMPACTED = "\0compaction"
"""The same in the seal of a compaction."""

TICKET = "\0ticket"
"""The same in the seal of a ticket."""

SealedBy = tuple[int, str]
"""What a run is sealed by: the number of a key and the model's name. Pinned, so that a replay seals alike."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What seals the items of a run; the same for the same, always."""

    key: SealingKey
    owner: str
    model: str

    def thought(self, item_id: str, content: Any) -> str:
        """The `encrypted_content` of reasoning."""
        return _seal(self.key, self.owner, self.model, item_id, content)

    def private_half(self, item_id: str, private: Private) -> str:
        """The `antiphon_sealed` of an item that has a private half."""
        content = {"id": item_id, "private": private}
        return _seal(self.key, self.owner, PRIVATE_HALF, item_id, content)

    def compacted(self, item_id: str, content: Private) -> str:
        """The `encrypted_content` of a compaction."""
        return _seal(self.key, self.owner, COMPACTED, item_id, content)


class Sealing:
    """The keys that seal here: the operator's, or else those of this process's database, the first of which
    is made when somebody asks for sealed reasoning. Those of the database open in any case."""

    def __init__(self, storage: Storage, max_age_s: float, given: Sequence[bytes] = ()) -> None:
        """max_age_s: after so many seconds another key of the database seals; old ones go on opening. given:
        as `give` takes them."""
        self._storage = storage
        self._max_age_us = int(max_age_s * 1e6)
        self._keys: Mapping[int, SealingKey] = {}
        self._stale_at = 0.0
        self._given: Sequence[SealingKey] = ()
        self.give(given)

    def give(self, secrets: Sequence[bytes]) -> bool:
        """Have these keys of the operator open, and the first of them seal, in place of those that were given
        before; where there are none, the database's seal. True where they are others than before."""
        before, self._given = self._given, given_keys(secrets)
        stored = {number: key for number, key in self._keys.items() if number < GIVEN}
        self._keys = {**stored, **{key.number: key for key in self._given}}
        return self._given != before

    @property
    def given(self) -> Sequence[SealingKey]:
        """The operator's keys; the first one seals."""
        return self._given

    async def by(self, include: Collection[str], model: str) -> SealedBy | None:
        """What a new run is sealed by, if its `include` asks for that. Raises StorageUnavailable."""
        return ((await self.key()).number, model) if INCLUDE in include else None

    async def key(self) -> SealingKey:
        """The key that seals now, made if none does. Raises StorageUnavailable."""
        if self._given:
            return self._given[0]
        if not self._keys or asyncio.get_running_loop().time() >= self._stale_at:
            await self._read()
        newest = self._keys.get(max(self._keys, default=0))
        if newest is None or now_us() - newest.created_at >= self._max_age_us:
            return await self._make()
        return newest

    async def rotate(self, by: Actor) -> SealingKey:
        """Have a new key of the database seal from now on: here at once, elsewhere within FRESH_S. ValueError
        where the operator's keys seal."""
        if self._given:
            raise ValueError(
                "sealing_key or sealing_key_file gives the keys that seal: put a new one first there"
            )
        await self._read()
        return await self._make(by)

    async def _make(self, by: Actor | None = None) -> SealingKey:
        """The key behind those that are known: whoever makes it first, all get the same."""
        number = max(self._keys, default=0) + 1
        made = SealingKey(number, secrets.token_bytes(SECRET_BYTES), now_us())
        entry = None if by is None else by.did("sealing_key.created", str(number))
        await self._storage.add_sealing_key(made, entry)
        await self._read()
        return self._keys[max(self._keys)]

    async def seal(self, owner: str, by: SealedBy | None) -> Seal | None:
        """What seals the items of a run; None where that is not wanted, or where the key is gone."""
        if by is None:
            return None
        number, model = by
        if number not in self._keys:
            await self._read()
        if number not in self._keys:
            log.warning("sealing key %d is gone: what it began to seal stays open", number)
            return None
        return Seal(self._keys[number], owner, model)

    async def sealed_secrets(self, owner: str, response_id: str, secrets: Mapping[str, Any]) -> str | None:
        """Credentials of a run, sealed for its plan; None where there are none. Raises StorageUnavailable."""
        if not secrets:
            return None
        return _seal(await self.key(), owner, f"secrets of {response_id}", response_id, secrets)

    async def opened_secrets(
        self, owner: str, response_id: str, sealed: str | None
    ) -> Mapping[str, Mapping[str, Any]]:
        """The credentials of a run; none where they are gone, or the key that sealed them is."""
        if sealed is None:
            return {}
        if not {_key_number(sealed)} <= self._keys.keys():
            await self._read()
        try:
            found: Mapping[str, Mapping[str, Any]] = _opened_by(
                f"secrets of {response_id}", _open(self._keys, owner, sealed)
            )
        except ValueError as why:
            log.warning("the credentials of run %s cannot be opened: %s", response_id, why)
            return {}
        return found

    async def sealed_ticket(self, content: Mapping[str, Any]) -> str:
        """What somebody is handed to be known by later. Raises StorageUnavailable."""
        return _seal(await self.key(), "", TICKET, content["number"], content)

    async def opened_ticket(self, sealed: str) -> Mapping[str, Any] | None:
        """The content of a ticket; None for what is none, or whose key is gone."""
        if not {_key_number(sealed)} <= self._keys.keys():
            await self._read()
        try:
            found: Mapping[str, Any] = _opened_by(TICKET, _open(self._keys, "", sealed))
        except ValueError:
            return None
        return found

    async def opened(
        self, owner: str, items: Sequence[Item], *, model: str | None, param: str = "input"
    ) -> list[Item]:
        """Normalised items with the content of sealed reasoning restored, whatever its client left of it, and
        with sealed private halves; that of a compaction is what it stands for.

        model: the one that is to read them, by its own name; None where nobody knows yet. Raises ApiError 400
        `invalid_encrypted_content` for what was changed, or made for another owner, model or database.
        """
        sealed = {index: text for index, item in enumerate(items) if (text := _sealed_in(item)) is not None}
        if not sealed:
            return list(items)
        long = in_large_request() or sum(map(len, sealed.values())) > THREADED_BYTES
        if not await aside(in_large_request(), _key_numbers, sealed.values()) <= self._keys.keys():
            await self._read()

        def work() -> list[Item]:
            found = list(items)
            for index, text in sealed.items():
                item = items[index]
                try:
                    found[index] = _restored(item, _open(self._keys, owner, text), model)
                except ValueError as why:
                    field = _field(item)
                    message = (
                        f"The {_WORDS[field]} for item {item['id']} could not be verified: {why}. "
                        "Send the item as it was returned, or leave it out."
                    )
                    refuse(f"{param}[{index}].{field}", message, "invalid_encrypted_content")
            return found

        return await aside(long, work)

    async def _read(self) -> None:
        self._keys = {key.number: key for key in (*await self._storage.sealing_keys(), *self._given)}
        self._stale_at = asyncio.get_running_loop().time() + FRESH_S


def given_keys(secrets: Sequence[bytes]) -> tuple[SealingKey, ...]:
    """Keys of the operator, under numbers that every server gives them alike, whatever others it has."""
    return tuple(SealingKey(_number_of(secret), secret, created_at=0) for secret in secrets)


def _number_of(secret: bytes) -> int:
    digest = blake2b(secret, digest_size=4, person=b"sealing key").digest()
    return GIVEN | int.from_bytes(digest)


# ------------------------------------------------------------------------------------------------------------
# The form


def _seal(key: SealingKey, owner: str, model: str, item_id: str, content: Any) -> str:
    """Base64 of a head, which stands there for all to see, and of the content, sealed to head and owner."""
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # 10 ms, which few servers need

    salt = blake2b(item_id.encode(), digest_size=16).digest()  # equal thoughts shall not look alike
    name = model.encode()
    head = _HEAD.pack(VERSION, key.number, salt, len(name)) + name
    sealed = AESSIV(key.secret).encrypt(orjson.dumps(content), [head, owner.encode()])
    return base64.urlsafe_b64encode(head + sealed).decode()


def _open(keys: Mapping[int, SealingKey], owner: str, text: str) -> tuple[str, Any]:
    """Whom content was sealed for, a model or a purpose, and the content; ValueError saying why it is not to
    be had."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    try:
        raw = base64.b64decode(text, b"-_", validate=True)
        version, number, _, length = _HEAD.unpack_from(raw)
    except (ValueError, struct.error):
        raise ValueError("this server did not make it") from None
    # The last character has bits that mean nothing: only one way of writing them is ours.
    if version != VERSION or base64.urlsafe_b64encode(raw).decode() != text:
        raise ValueError("this server did not make it")
    if number not in keys:
        raise ValueError("there is no key for it any more")
    behind = _HEAD.size + length
    try:
        content = AESSIV(keys[number].secret).decrypt(raw[behind:], [raw[:behind], owner.encode()])
    except (InvalidTag, ValueError):
        raise ValueError("it was changed, or made for somebody else") from None
    return raw[_HEAD.size : behind].decode(), orjson.loads(content)


def _opened_by(purpose: str | None, opened: tuple[str, Any]) -> Any:
    """Opened content, if it was sealed for a model of this name, or for this purpose, or, where the name is
    None, for any model; ValueError where not."""
    made_for, content = opened
    if purpose not in (None, made_for) or (purpose is None and made_for.startswith("\0")):
        raise ValueError(_other(made_for, purpose))
    return content


def _other(made_for: str, purpose: str | None) -> str:
    if made_for.startswith("\0") or (purpose or "").startswith("\0"):
        return "it is the seal of something else"
    return f"it was made by the model '{made_for}', not by '{purpose}'"


# ------------------------------------------------------------------------------------------------------------
# Items with a seal

_WORDS = {"encrypted_content": "encrypted content", SEALED: "sealed half"}
"""What messages call the fields that hold a seal."""

_OPAQUE = ("reasoning", COMPACTION)
"""The types of items whose `encrypted_content` is a seal."""


def _field(item: Item) -> str:
    return "encrypted_content" if item["type"] in _OPAQUE else SEALED


def _sealed_in(item: Item) -> str | None:
    """The seal of an item that may have one."""
    row = ITEM_TYPES.get(item["type"])  # None for a reference
    if row is None or not (row.type in _OPAQUE or row.has_private_half):
        return None
    found: str | None = item.get(_field(item))
    return found


def _restored(item: Item, opened: tuple[str, Any], model: str | None) -> Item:
    """An item with what its seal holds. ValueError for the seal of another item, or of another model."""
    if item["type"] == "reasoning":
        return {**item, "content": _opened_by(model, opened)}
    if item["type"] == COMPACTION:
        bare = {name: value for name, value in item.items() if name != "summary"}  # an `include` had shown it
        return with_private(bare, _readable(_opened_by(COMPACTED, opened)))
    content = _opened_by(PRIVATE_HALF, opened)
    if content["id"] != item["id"]:
        raise ValueError(f"it was made for the item {content['id']}")
    return with_private({name: value for name, value in item.items() if name != SEALED}, content["private"])


def _readable(content: Private) -> Private:
    """What a compaction stands for; ValueError where a later version of this server wrote it."""
    if content["version"] != Compacted().version:
        raise ValueError("it was made by another version of this server")
    return content


def _key_numbers(texts: Iterable[str]) -> set[int]:
    return set(map(_key_number, texts))


def _key_number(text: str) -> int:
    """The number of the key that a seal claims; 0, which no key has, where it is none."""
    try:
        number: int = _HEAD.unpack_from(base64.b64decode(text[:40], b"-_"))[1]
    except (ValueError, struct.error):
        return 0
    return number
