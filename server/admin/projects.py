"""`antiphon owners`: makes, lists, renames and archives owners, which the API calls projects.

What can be done, and the official objects of projects and their keys, are here for the command line and the
HTTP routes alike.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from server.access import LOCAL_OWNER, OPERATOR, OWNER_PREFIX, Actor
from server.admin.database_access import carry_out
from server.admin.keys import (
    ADMIN_OWNER,
    changed_by,
    limit_words,
    limits_of,
    shown_limits,
    shown_value,
    unix,
    without_owner,
)
from server.admin.listing import Columns, list_lines, shown_time
from server.admin.owner_names import every_owner, known_owner_id, require_new_name
from server.clock import now_us
from server.config import Config
from server.limits import (
    NONE,
    Canonical,
    LimitSet,
    ModelLimits,
    changed,
    load_limits,
    parse_limits,
    used_by,
)
from server.quota import stored_by
from server.usage import Prices
from storage import Storage, StoredKey, StoredOwner

PATH = "/v1/organization/projects"

# ------------------------------------------------------------------------------------------------------------
# What can be done


class NeededOwner(ValueError):
    """The server could not do without this owner, and nothing brings back one that is archived."""


async def create(storage: Storage, by: Actor, *, name: str) -> dict[str, Any]:
    """Make an owner that has no key yet."""
    id = f"{OWNER_PREFIX}{secrets.token_hex(12)}"
    entry = by.did("project.created", id, id, name=name)
    return project(await storage.create_owner(id, name, now_us(), entry=entry))


async def rename(storage: Storage, by: Actor, id: str, *, name: str) -> dict[str, Any]:
    """Give an owner another name. NotFound, OwnerArchived."""
    return project(await storage.rename_owner(id, name, entry=by.did("project.updated", id, id, name=name)))


async def archive(storage: Storage, by: Actor, id: str) -> dict[str, Any]:
    """Revoke an owner's keys for good; its data stays. NotFound, OwnerArchived; NeededOwner."""
    if id == LOCAL_OWNER:
        raise NeededOwner(
            f"The owner {id} stands for whoever comes without a key, and is never archived: revoke its keys, "
            "or remove its data with `antiphon purge`"
        )
    if id == ADMIN_OWNER:
        raise NeededOwner(
            f"The owner {id} is that of the keys of administrators, of which there could never be another, "
            "and is never archived: revoke its keys"
        )
    return project(await storage.archive_owner(id, now_us(), entry=by.did("project.archived", id, id)))


async def limits(storage: Storage, prices: Prices, every_owner: LimitSet, id: str) -> dict[str, Any]:
    """What an owner may use: its own limits, those in force, what it has used in all of budgets, and how many
    bytes it stores now. every_owner: limits by the setting `owner_limit`, of which those are in force that
    the owner has none of its own for. NotFound."""
    own = load_limits((await _limited(storage, id)).limits)
    used = await used_by(storage, prices.cost, id)
    return {
        "object": "project.limits",
        "limits": own.given(),
        "in_force": own.over(every_owner).given(),
        "used": {**used.as_json(), "stored_bytes": (await stored_by(storage, id)).total},
    }


async def limit(
    storage: Storage, prices: Prices, every_owner: LimitSet, by: Actor, id: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Change limits of an owner; those that are not named stay, and those that are None end. Returns what
    `limits` does. ValueError for what is no limit; NotFound, OwnerArchived."""
    await _limited(storage, id)
    entry = by.did("rate_limit.updated", id, id, limits=dict(changes))
    await storage.limit_owner(id, changed_by(changes), entry=entry)
    return await limits(storage, prices, every_owner, id)


async def _limited(storage: Storage, id: str) -> StoredOwner:
    """An owner. NotFound; that of a server without keys is there before the first such server starts."""
    if id == LOCAL_OWNER:
        await storage.ensure_owners((id,), now_us())
    return await storage.get_owner(id)


async def limit_model(
    storage: Storage,
    every_owner: LimitSet,
    canonical: Canonical,
    by: Actor,
    id: str,
    model: str,
    official: Mapping[str, int | None],
) -> dict[str, Any]:
    """Change what an owner may use of one model; `official`: names of RATE_LIMIT_FIELDS. Returns what
    `rate_limit` does. NotFound, OwnerArchived."""
    changes = {RATE_LIMIT_FIELDS[name]: value for name, value in official.items()}
    entry = by.did("rate_limit.updated", f"{RATE_LIMIT_ID}{model}", id, **official)
    limited = await storage.limit_owner(id, changed_by({"models": {model: changes}}), entry=entry)
    return rate_limit(limited, model, every_owner, canonical)


async def list_all(storage: Storage, *, stored: bool = False) -> dict[str, Any]:
    """All owners with their limits, archived ones included, oldest first. stored: with the bytes that they
    store, of responses those that a sweep has measured."""
    sizes = await storage.num_bytes_by_owner() if stored else {}
    found = [
        {
            **project(owner),
            "limits": load_limits(owner.limits).given(),
            **({"stored_bytes": sizes.get(owner.id, 0)} if stored else {}),
        }
        for owner in await every_owner(storage)
    ]
    return {"object": "list", "data": found}


# ------------------------------------------------------------------------------------------------------------
# Official objects


def project(owner: StoredOwner) -> dict[str, Any]:
    """The official object of a project; times in unix seconds."""
    return {
        "id": owner.id,
        "object": "organization.project",
        "name": owner.name,
        "created_at": unix(owner.created_at),
        "archived_at": unix(owner.archived_at),
        "status": "active" if owner.archived_at is None else "archived",
    }


def service_account(owner: StoredOwner) -> dict[str, Any]:
    """The one account of a project, which all its keys belong to and which has its id and its name."""
    return {
        "id": owner.id,
        "object": "organization.project.service_account",
        "name": owner.name,
        "role": "member",
        "created_at": unix(owner.created_at),
    }


def project_key(key: StoredKey, owner: StoredOwner) -> dict[str, Any]:
    """The official object of a project's key, with its `scopes` and what it `replaces` besides."""
    return {
        "object": "organization.project.api_key",
        **_key_fields(key),
        "owner": {"type": "service_account", "service_account": service_account(owner)},
        "owner_project_access": "active" if owner.archived_at is None else "inactive",
    }


def rate_limit(owner: StoredOwner, model: str, every_owner: LimitSet, canonical: Canonical) -> dict[str, Any]:
    """The official object of what a project may use of one model, by whichever of its names; null is no
    limit. max_tokens_per_1_day: besides. every_owner: as for `limits`."""
    found = load_limits(owner.limits).over(every_owner)
    own = [limits for _, limits in found.of_model(model, canonical)] or [found]
    return {
        "object": "project.rate_limit",
        "id": f"{RATE_LIMIT_ID}{model}",
        "model": model,
        **{official: _least(own, name) for official, name in RATE_LIMIT_FIELDS.items()},
    }


def _least(limits: Sequence[ModelLimits], name: str) -> int | None:
    return min((limit for each in limits if (limit := getattr(each, name)) is not None), default=None)


RATE_LIMIT_ID = "rl-"
"""What the id of a model's rate limits begins with; its name follows."""

RATE_LIMIT_FIELDS = {
    "max_requests_per_1_minute": "requests_per_minute",
    "max_tokens_per_1_minute": "tokens_per_minute",
    "max_requests_per_1_day": "requests_per_day",
    "max_tokens_per_1_day": "tokens_per_day",
}
"""Official name of a limit -> ours."""


def admin_key(key: StoredKey) -> dict[str, Any]:
    """The official object of an administrator's key, with its `scopes` and what it `replaces` besides."""
    user = {"id": key.owner, "name": key.owner, "created_at": unix(key.created_at), "role": "owner"}
    return {
        "object": "organization.admin_api_key",
        **_key_fields(key),
        "owner": {"type": "user", "object": "organization.user", **user},
    }


def made_key(key: StoredKey, value: str) -> dict[str, Any]:
    """The official object of a key of a service account that was just made, the only place of its value."""
    return {
        "object": "organization.project.service_account.api_key",
        "id": key.id,
        "name": key.name,
        "created_at": unix(key.created_at),
        "expires_at": unix(key.expires_at),
        "value": value,
        "scopes": list(key.scopes),
        "limits": load_limits(key.limits).given(),
        "replaces": key.replaces,
    }


def _key_fields(key: StoredKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "redacted_value": f"sk-...{key.hint}",
        "created_at": unix(key.created_at),
        "expires_at": unix(key.expires_at),
        "last_used_at": unix(key.last_used_at),
        "scopes": list(key.scopes),
        "limits": load_limits(key.limits).given(),
        "replaces": key.replaces,
    }


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon owners ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _create(config: Config, options: argparse.Namespace) -> Iterator[str]:
    body = {"name": options.name}
    require_new_name(config, options.name)
    made = carry_out(config, lambda storage: create(storage, OPERATOR, **body), "POST", PATH, body)
    yield made["id"]


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    found = partial(list_all, stored=True)
    return list_lines(config, options, "/admin/owners?stored=true", found, COLUMNS)


def _rename(config: Config, options: argparse.Namespace) -> Iterator[str]:
    id, body = known_owner_id(config, options.id), {"name": options.name}
    require_new_name(config, options.name, of=id)
    path = f"{PATH}/{id}"
    carry_out(config, lambda storage: rename(storage, OPERATOR, id, **body), "POST", path, body)
    yield f"{id} is named {options.name}"


def _archive(config: Config, options: argparse.Namespace) -> Iterator[str]:
    id = known_owner_id(config, options.id)
    path = f"{PATH}/{id}/archive"
    left = without_owner(config, id)
    carry_out(config, lambda storage: archive(storage, OPERATOR, id), "POST", path)
    yield f"{id} is archived: its keys are revoked, and it gets none any more; its data stays"
    yield from left


def _limits(config: Config, options: argparse.Namespace) -> Iterator[str]:
    changes, prices = limits_of(options), Prices(config)
    # The owner of a server without keys may be given limits before that server has ever started.
    id = known_owner_id(config, options.id, makes=changes is not None and options.id == LOCAL_OWNER)
    every = changed(NONE, parse_limits(config.owner_limit))
    path = f"{PATH}/{id}/limits"
    if changes is None:
        found = carry_out(config, lambda storage: limits(storage, prices, every, id), "GET", path)
    else:
        found = carry_out(
            config,
            lambda storage: limit(storage, prices, every, OPERATOR, id, changes),
            "POST",
            path,
            {"limits": changes},
        )
    if options.json:
        yield orjson.dumps({"id": id, **found}, option=orjson.OPT_INDENT_2).decode()
        return
    yield f"{id} has these limits:" if found["in_force"] else f"{id} has no limits"
    own = dict(limit_words(found["limits"]))
    for name, value in limit_words(found["in_force"]):
        spent = f" ({shown_value(found['used'][name])} used)" if name in found["used"] else ""
        whose = "" if name in own else ", of every owner by the setting owner_limit"
        yield f"  {name}={value}{spent}{whose}"


COLUMNS: Columns = {
    "ID": lambda owner: owner["id"],
    "STATE": lambda owner: owner["status"],
    "CREATED": shown_time,
    "STORED": lambda owner: str(owner["stored_bytes"]),
    "NAME": lambda owner: owner["name"],
    "LIMITS": shown_limits,
}
_VERBS = {"create": _create, "list": _list, "rename": _rename, "archive": _archive, "limits": _limits}
