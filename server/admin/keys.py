"""`antiphon keys`: makes, lists, rotates and revokes API keys, whether or not a server runs.

What can be done is here as functions of the storage, which the command line and the HTTP routes share.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from server.access import ADMIN, LOCAL_OWNER, OPERATOR, OWNER_PREFIX, Actor, hash_key, new_key, read_scopes
from server.admin.database_access import AdminError, carry_out
from server.admin.durations import MAX_S as MAX_S
from server.admin.durations import seconds_of, seconds_until
from server.admin.listing import Columns, list_lines, shown_once, shown_time
from server.admin.owner_names import known_owner_id, nearest_owner, owner_id, shown_owner
from server.clock import now_us
from server.config import Config
from server.limits import NONE, changed, load_limits, parse_limits
from server.masking import masked
from storage import AuditEntry, NewKey, NotFound, Storage, StoredKey

PATH = "/admin/keys"

ADMIN_OWNER = "admin"
"""The owner of keys that may do nothing but administer, unless they are made for another one. It has no
data."""

GRACE_S = 24 * 3600
"""How long a rotated key goes on being accepted unless the command says so, in seconds."""

NEVER = ("never", "none")
"""Words for the end of a key that has none."""

# ------------------------------------------------------------------------------------------------------------
# What can be done


class NoSuchOwner(ValueError):
    """What is named as the owner of a new key looks like the id of an owner, and there is none of it."""


@dataclass(frozen=True, slots=True)
class MadeKey:
    """A key that was just made. key: itself; nobody can see it again."""

    stored: StoredKey
    key: str


async def make(
    storage: Storage,
    by: Actor,
    *,
    name: str,
    owner: str | None = None,
    scopes: Sequence[str] = (),
    expires_in_s: int | None = None,
    limits: Mapping[str, Any] | None = None,
) -> MadeKey:
    """Make a key. owner: None makes a new one, or takes ADMIN_OWNER where it may only administer. scopes:
    none means `all`. ValueError for what is no scope or no limit; OwnerArchived."""
    read = read_scopes(scopes)
    own = ADMIN_OWNER if read == (ADMIN,) else f"{OWNER_PREFIX}{secrets.token_hex(12)}"
    key, new = _new(owner or own, name, read, expires_in_s)
    new = replace(new, limits=changed(NONE, limits or {}).dump())
    return MadeKey(await storage.create_key(new, entry=_created(by, new)), key)


def _new(owner: str, name: str, scopes: tuple[str, ...], expires_in_s: int | None) -> tuple[str, NewKey]:
    """A key that nobody has seen yet, and what is stored of it."""
    key, now = new_key(), now_us()
    new = NewKey(
        id=f"key_{secrets.token_hex(12)}",
        owner=owner,
        name=name,
        hash=hash_key(key),
        hint=key[-4:],
        created_at=now,
        scopes=scopes,
        expires_at=None if expires_in_s is None else now + expires_in_s * 1_000_000,
    )
    return key, new


def _created(by: Actor, new: NewKey) -> AuditEntry:
    told: dict[str, Any] = {"name": new.name, "scopes": new.scopes, "expires_at": unix(new.expires_at)}
    if new.limits is not None:
        told["limits"] = load_limits(new.limits).given()
    return by.did("api_key.created", new.id, new.owner, **told)


async def rotate(
    storage: Storage,
    by: Actor,
    id: str,
    *,
    grace_s: int = GRACE_S,
    expires_in_s: int | None = None,
    never_expires: bool = False,
) -> MadeKey:
    """Make a key's successor, with its owner, name, scopes and limits; the key itself is accepted for another
    `grace_s` seconds at most. expires_in_s: of the successor, which lives as long as the key was made to live
    unless this or `never_expires` is given. NotFound, KeyEnded, OwnerArchived."""
    old = await storage.get_key(id)
    if expires_in_s is None and not never_expires:
        expires_in_s = await _lifetime_s(storage, old)
    key, new = _new(old.owner, old.name, old.scopes, expires_in_s)
    until = new.created_at + grace_s * 1_000_000
    entry = by.did("api_key.rotated", id, old.owner, successor=new.id, accepted_until=unix(until))
    return MadeKey(await storage.rotate_key(id, new, until, entry=entry), key)


async def _lifetime_s(storage: Storage, key: StoredKey) -> int | None:
    """How long a key was made to live, in seconds; None where it has no end. A key that was rotated has the
    end of its grace, so that its latest successor tells it."""
    every, latest = await storage.list_keys(), key
    while successors := [each for each in every if each.replaces == latest.id]:
        latest = successors[-1]
    return None if latest.expires_at is None else (latest.expires_at - latest.created_at) // 1_000_000


async def change(
    storage: Storage,
    by: Actor,
    id: str,
    *,
    name: str | None = None,
    scopes: Sequence[str] | None = None,
    expires_in_s: int | None = None,
    never_expires: bool = False,
    limits: Mapping[str, Any] | None = None,
) -> StoredKey:
    """Change a live key; what is None stays, and so do limits that are not named. never_expires: the end that
    it has is taken away. ValueError for what is no scope or no limit; NotFound, KeyEnded."""
    now = now_us()
    changes: dict[str, object] = {}
    if name is not None:
        changes["name"] = name
    if scopes is not None:
        changes["scopes"] = read_scopes(scopes)
    if expires_in_s is not None:
        changes["expires_at"] = now + expires_in_s * 1_000_000
    elif never_expires:
        changes["expires_at"] = None
    old = await storage.get_key(id)
    told = {**changes, "expires_in_seconds": expires_in_s} if expires_in_s is not None else dict(changes)
    if limits is not None:
        told["limits"] = dict(limits)
    entry = by.did("api_key.updated", id, old.owner, **told)
    after = None if limits is None else changed_by(limits)
    return await storage.change_key(id, now, changes, entry=entry, limits=after)


def changed_by(changes: Mapping[str, Any]) -> Callable[[bytes | None], bytes | None]:
    """What storage does to limits that are written: `changed`, of what is there then. Raises ValueError."""
    return lambda stored: changed(load_limits(stored), changes).dump()


async def end(storage: Storage, by: Actor, id: str) -> StoredKey:
    """Revoke a key. NotFound if there is none of this id that is not revoked."""
    owner = (await storage.get_key(id)).owner
    return await storage.revoke_key(id, now_us(), entry=by.did("api_key.deleted", id, owner))


def as_json(key: StoredKey) -> dict[str, Any]:
    """A stored key, as the admin routes and the command line show it; times in unix seconds."""
    return {
        "id": key.id,
        "owner": key.owner,
        "name": key.name,
        "hint": f"...{key.hint}",
        "scopes": list(key.scopes),
        "limits": load_limits(key.limits).given(),
        "created_at": unix(key.created_at),
        "expires_at": unix(key.expires_at),
        "last_used_at": unix(key.last_used_at),
        "replaces": key.replaces,
        "revoked_at": unix(key.revoked_at),
    }


def unix(at: int | None) -> int | None:
    """Microseconds since the epoch as seconds; None stays None."""
    return None if at is None else at // 1_000_000


# ------------------------------------------------------------------------------------------------------------
# The same, as the command line and /admin/keys ask for it


async def create(storage: Storage, by: Actor, **asked: Any) -> dict[str, Any]:
    """Make a key (`make`); the reply is the only place where `key` ever stands. `first`: there was no live
    one. `new_owner`: nothing was known of the owner that was named. NoSuchOwner."""
    first, owner = not await storage.any_key(), asked.get("owner")
    known = owner is None or owner == LOCAL_OWNER or await _is_known(storage, owner)
    if owner is not None and not known and owner.startswith(OWNER_PREFIX):
        raise NoSuchOwner(f"there is no owner {owner!r}: `antiphon owners create NAME` makes one")
    made = await make(storage, by, **asked)
    return {**as_json(made.stored), "key": made.key, "first": first, "new_owner": not known}


async def _is_known(storage: Storage, owner: str) -> bool:
    try:
        await storage.get_owner(owner)
    except NotFound:
        return False
    return True


async def succeed(storage: Storage, by: Actor, id: str, **asked: Any) -> dict[str, Any]:
    """Rotate a key (`rotate`); `old`: the key that is replaced, as it stands then. Of one that was rotated
    before, `successors` are the earlier ones that still live, and `was_accepted_until` is its end until now;
    none and null otherwise."""
    before = await storage.get_key(id)
    earlier = [key for key in await storage.list_keys() if key.replaces == id]
    made = await rotate(storage, by, id, **asked)
    return {
        **as_json(made.stored),
        "key": made.key,
        "old": as_json(await storage.get_key(id)),
        "successors": [key.id for key in earlier if key.live(now_us())],
        "was_accepted_until": unix(before.expires_at) if earlier else None,
    }


async def update(storage: Storage, by: Actor, id: str, **asked: Any) -> dict[str, Any]:
    """Change a key (`change`)."""
    return as_json(await change(storage, by, id, **asked))


async def list_all(storage: Storage) -> dict[str, Any]:
    """The keys of all owners, oldest first, revoked ones included; never the keys themselves."""
    return {"object": "list", "data": [as_json(key) for key in await storage.list_keys()]}


async def revoke(storage: Storage, by: Actor, id: str) -> dict[str, Any]:
    """End a key. `last`: none is left that is not revoked. `expired`: those that are left where all of them
    have expired, so that none is accepted and one is needed. `revoked_before`: when that was done already,
    and then nothing changes; null otherwise. NotFound."""
    before = (await storage.get_key(id)).revoked_at
    if before is None:
        await end(storage, by, id)
    last, expired = False, list[str]()
    if before is None and not await storage.any_key(at=now_us()):
        expired = [key.id for key in await storage.list_keys() if key.revoked_at is None]
        last = not expired
    return {
        **{"id": id, "object": "key", "revoked": True},
        **{"last": last, "expired": expired, "revoked_before": unix(before)},
    }


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon keys ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _create(config: Config, options: argparse.Namespace) -> Iterator[str]:
    body = {
        "name": options.name,
        "owner": None if options.owner is None else _owner(config, options.owner),
        "scopes": _scopes(options),
        "expires_in_s": _end(options.expires),
        "limits": limits_of(options),
    }
    body = {name: value for name, value in body.items() if value is not None}
    made = carry_out(config, lambda storage: create(storage, OPERATOR, **body), "POST", PATH, body)
    with _shown(config, made["id"]):
        yield made["key"]
    yield f"id {made['id']}, owner {made['owner']}. The key is not stored and not shown again."
    if made["new_owner"]:
        yield f"{made['owner']} is a new owner: nothing was kept for that name before."
        if (meant := nearest_owner(config, made["owner"])) is not None:
            yield (
                f"Or did you mean {meant[0]!r}? Its id is {meant[1]}; `antiphon keys revoke "
                f"{made['id']}{config.flags}` ends this key."
            )
    if made["first"]:
        yield from _first(made["owner"], config)


def _owner(config: Config, word: str) -> str:
    """Whose a new key is. UnknownOwner for the id of an owner that there is not: any other word makes one."""
    find = known_owner_id if word.startswith(OWNER_PREFIX) else owner_id
    return find(config, word, makes=True)


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    owner = None if options.owner is None else known_owner_id(config, options.owner)
    yield from list_lines(config, options, PATH, list_all, COLUMNS, of=owner)


def _rotate(config: Config, options: argparse.Namespace) -> Iterator[str]:
    grace_s, end, never = seconds_of(options.grace), _end(options.expires), options.expires in NEVER
    asked = {"grace_s": grace_s, "expires_in_s": end, "never_expires": never}
    body = {"grace_s": grace_s} if end is None and not never else {"grace_s": grace_s, "expires_in_s": end}
    made = carry_out(
        config,
        lambda storage: succeed(storage, OPERATOR, options.id, **asked),
        "POST",
        f"{PATH}/{options.id}/rotate",
        body,
        makes=False,
    )
    left = f"{options.id} is accepted until {shown_time(made['old'], 'expires_at')} UTC"
    with _shown(config, made["id"], f", and {left}"):
        yield made["key"]
    yield f"id {made['id']}, owner {made['owner']}. The key is not stored and not shown again."
    until, before = made["old"]["expires_at"], made["was_accepted_until"]
    sooner = before is not None and until < before
    earlier = f", not until {shown_time(made, 'was_accepted_until')} as before" if sooner else ""
    yield f"{left}{earlier}"
    if made["successors"]:
        yield (
            f"{options.id} was rotated before, and {', '.join(made['successors'])} replaces it too: "
            f"`antiphon keys revoke ID{config.flags}` ends a successor that nobody uses"
        )


def _update(config: Config, options: argparse.Namespace) -> Iterator[str]:
    body = {
        "name": options.name,
        "scopes": _scopes(options),
        "expires_in_s": _end(options.expires),
        "limits": limits_of(options),
    }
    body = {name: value for name, value in body.items() if value is not None}
    never = options.expires in NEVER
    if not body and not never:
        raise AdminError("nothing to change: give --name, --scope, --limit or --expires")
    done = carry_out(
        config,
        lambda storage: update(storage, OPERATOR, options.id, never_expires=never, **body),
        "POST",
        f"{PATH}/{options.id}",
        {**body, "expires_in_s": None} if never else body,
        makes=False,
    )
    yield f"{done['id']} has the scopes {','.join(done['scopes'])}"
    if options.expires is not None:
        until = "never expires" if never else f"is accepted until {shown_time(done, 'expires_at')} UTC"
        yield f"{done['id']} {until}"
    yield from (f"  {name}={value}" for name, value in limit_words(done["limits"]))


def _revoke(config: Config, options: argparse.Namespace) -> Iterator[str]:
    done = _ended(config, options.id)
    if done["revoked_before"] is not None:
        yield f"{options.id} was revoked already, on {shown_time(done, 'revoked_before')} UTC"
        return
    yield f"{options.id} is revoked"
    # A server of an earlier version does not say which have expired.
    yield from _left(config, last=done["last"], expired=done.get("expired", ()))


def without_owner(config: Config, owner: str) -> list[str]:
    """What it means for everybody else that all keys of an owner are revoked: sentences, mostly none. To be
    asked before it is done. Raises AdminError."""
    found = carry_out(config, list_all, "GET", PATH)["data"]
    live = [key for key in found if key["revoked_at"] is None]
    others = [key for key in live if key["owner"] != owner]
    now = unix(now_us()) or 0
    if len(others) == len(live) or any((key["expires_at"] or now + 1) > now for key in others):
        return []
    return list(_left(config, last=not others, expired=[key["id"] for key in others]))


def _left(config: Config, *, last: bool, expired: Sequence[str]) -> Iterator[str]:
    """What is to be known once keys are revoked. last, expired: as `revoke` says it."""
    if last:
        yield (
            "No stored key is live any more. Unless keys are configured too, a server on loopback needs none "
            f"again (requests then belong to the owner {LOCAL_OWNER}), and one on another address does not "
            "start."
        )
    if expired:
        yield (
            "No stored key is accepted any more, and one is still needed, because these have expired and "
            f"are not revoked: {', '.join(expired)}. Unless keys are configured too, every request is a 401 "
            f"until `antiphon keys create{config.flags}` makes a key. Or revoke these as well: a server on "
            "loopback then needs none again."
        )


def _shown(config: Config, id: str, beside: str = "") -> AbstractContextManager[None]:
    """Around the line that shows a new key. beside: what else is to be known once it is revoked."""
    kept = f"Run `antiphon keys revoke {id}{config.flags}`: the key could not be revoked"
    return shown_once(lambda: _ended(config, id), f"The key {id} is revoked{beside}.", kept)


def _ended(config: Config, id: str) -> dict[str, Any]:
    """What `revoke` says of a key."""
    return carry_out(config, lambda storage: revoke(storage, OPERATOR, id), "DELETE", f"{PATH}/{id}")


def _first(owner: str, config: Config) -> Iterator[str]:
    """What the first key changes, and the first one after all were revoked."""
    yield (
        f"No other key is live in {masked(str(config.db))}. Every request needs a key now, in the header "
        "'authorization: Bearer KEY'."
    )
    if owner == LOCAL_OWNER:
        yield f"This one sees what was made without a key, which belongs to the owner {LOCAL_OWNER}."
    else:
        yield (
            f"What was made without a key belongs to the owner {LOCAL_OWNER}, and this key does not see it: "
            f"`antiphon keys create --owner {LOCAL_OWNER}{config.flags}` makes one that does."
        )


def _scopes(options: argparse.Namespace) -> list[str] | None:
    """The scopes that a command names, None where it has no such flag. Raises AdminError for a flag without
    one: a script whose variable is empty must not make a key that may do everything."""
    found = _words(options.scope)
    if options.scope and not found:
        raise AdminError("--scope names no scope; without the flag a new key has the scope all")
    return found or None


def _words(given: Sequence[str]) -> list[str]:
    """Scopes, from flags that may each hold several with commas between."""
    return [word for each in given for word in each.split(",") if word]


def limits_of(options: argparse.Namespace) -> dict[str, Any] | None:
    """The changes of limits that a command names, None where it names none. Raises AdminError."""
    try:
        return parse_limits(_words(options.limit)) or None
    except ValueError as error:
        raise AdminError(error) from None


def limit_words(limits: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and the values of limits, as commands take them."""
    for name, value in limits.items():
        if name != "models":
            yield name, shown_value(value)
    for model, own in limits.get("models", {}).items():
        for name, value in own.items():
            yield f"{model}:{name}", shown_value(value)


def shown_limits(object: Mapping[str, Any]) -> str:
    """The limits of a key or an owner as the cell of a table."""
    return " ".join(f"{name}={value}" for name, value in limit_words(object["limits"])) or "-"


def shown_value(value: Any) -> str:
    """The value of one limit, or what was used of it, as text: tiers with commas, no exponents."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    return f"{value:.10f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _end(written: str | None) -> int | None:
    """In how many seconds a key ends; None for never, and where nothing is written. Raises AdminError."""
    return None if written is None or written in NEVER else seconds_until(written)


def _state(key: dict[str, Any]) -> str:
    if key["revoked_at"]:
        return "revoked"
    if key["expires_at"] is None:
        return "live"
    ended = key["expires_at"] * 1_000_000 <= now_us()
    return "expired" if ended else f"until {shown_time(key, 'expires_at')}"


COLUMNS: Columns = {
    "ID": lambda key: key["id"],
    "KEY": lambda key: key["hint"],
    "STATE": _state,
    "CREATED": shown_time,
    "USED": lambda key: "never" if key["last_used_at"] is None else shown_time(key, "last_used_at"),
    "OWNER": shown_owner,
    "SCOPES": lambda key: ",".join(key["scopes"]),
    "NAME": lambda key: key["name"],
    "LIMITS": shown_limits,
}
_VERBS = {"create": _create, "list": _list, "rotate": _rotate, "update": _update, "revoke": _revoke}
