"""`antiphon audit`: shows the audit log, and checks that nothing was taken out of it or changed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import orjson

from server.access import AUDIT_TYPES
from server.admin.database_access import AdminError, carry_out
from server.admin.owner_names import known_owner_id, owner_id
from server.config import Config
from server.masking import one_line
from storage import AuditFilter, Page, Storage, StoredAudit

PATH = "/v1/organization/audit_logs"

# ------------------------------------------------------------------------------------------------------------
# What can be done


async def listed(
    storage: Storage, wanted: AuditFilter, *, limit: int, after: str | None = None, before: str | None = None
) -> dict[str, Any]:
    """One page of entries in the official shape, newest first. NotFound for an unknown cursor."""
    page: Page[StoredAudit] = await storage.list_audit(wanted, limit=limit, after=after, before=before)
    ids = [one.entry.id for one in page.data]
    return {
        "object": "list",
        "data": [audit_log(one) for one in page.data],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": page.has_more,
    }


async def verified(storage: Storage, number: int | None = None) -> dict[str, Any]:
    """Whether the log is whole. `number`, `hash`: of its last entry; `broken`: the number of the first entry
    that is not what was written, null where all are. `hash_of`: the hash of entry `number`, where one is
    asked for and is there."""
    state = await storage.examine_audit()
    found = None if number is None else await storage.audit_hash(number)
    return {
        "object": "organization.audit_log.verification",
        "number": state.number,
        "hash": state.hash.hex(),
        "broken": state.broken,
        "hash_of": None if found is None else found.hex(),
    }


_DATA = ("api_key.created", "project.created")
_CHANGES = ("api_key.updated", "project.updated", "rate_limit.updated")
"""Where the official shape has the details one level deeper, under `data` or `changes_requested`."""


def audit_log(stored: StoredAudit) -> dict[str, Any]:
    """An entry in the official shape; what that has no place for stands under `antiphon`."""
    entry = stored.entry
    details: Any = orjson.loads(entry.details)
    if entry.action in _DATA:
        told = {"data": details}
    elif entry.action in _CHANGES:
        told = {"changes_requested": details}
    else:
        told = details
    return {
        "id": entry.id,
        "type": entry.action,
        "effective_at": entry.at // 1_000_000,
        "project": None if entry.owner is None else {"id": entry.owner},
        "actor": _actor(entry.actor, entry.ip),
        entry.action: {"id": entry.target, **told},
        "antiphon": {
            "number": stored.number,
            "hash": stored.hash.hex(),
            "request_id": entry.request_id,
            "ip_address": entry.ip,
        },
    }


def _actor(id: str, ip: str | None) -> dict[str, Any]:
    if id.startswith("key_"):
        return {"type": "api_key", "api_key": {"id": id, "type": "service_account"}}
    return {"type": "session", "session": {"user": {"id": id}, "ip_address": ip}}


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon audit ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    for type in options.type:
        if type not in AUDIT_TYPES:
            raise AdminError(f"there are no entries of the type '{type}', only {', '.join(AUDIT_TYPES)}")
    targets = tuple(owner_id(config, each) for each in options.target)
    owners = tuple(owner_id(config, each) for each in options.owner)
    wanted = AuditFilter(
        actions=tuple(options.type), actors=tuple(options.actor), targets=targets, owners=owners
    )
    query = [
        ("limit", options.limit),
        *(("event_types[]", each) for each in options.type),
        *(("actor_ids[]", each) for each in options.actor),
        *(("resource_ids[]", each) for each in targets),
        *(("project_ids[]", each) for each in owners),
    ]
    found = carry_out(
        config,
        lambda storage: listed(storage, wanted, limit=options.limit),
        "GET",
        f"{PATH}?{urlencode(query)}",
    )["data"]
    seen = {log["project"]["id"] for log in found if log["project"]}
    for owner in owners:
        if owner not in seen:
            known_owner_id(config, owner)
    if options.json:
        yield orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()
        return
    for log in reversed(found):
        at = datetime.fromtimestamp(log["effective_at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        actor = log["actor"]
        who = actor["api_key"]["id"] if actor["type"] == "api_key" else actor["session"]["user"]["id"]
        told = {name: value for name, value in log[log["type"]].items() if name != "id"}
        details = f"  {orjson.dumps(told).decode()}" if told else ""
        target, project = log[log["type"]]["id"], log["project"]
        of = f" of {project['id']}" if project and project["id"] != target else ""
        yield one_line(f"{log['antiphon']['number']:>6}  {at}  {who}  {log['type']}  {target}{of}{details}")


def _verify(config: Config, options: argparse.Namespace) -> Iterator[str]:
    number, expected = _expected(options.expect)
    query = "" if number is None else f"?{urlencode({'number': number})}"
    state = carry_out(config, lambda storage: verified(storage, number), "GET", f"{PATH}/verify{query}")
    if state["broken"] is not None:
        raise AdminError(f"the audit log is not whole: entry {state['broken']} was changed or removed")
    if expected is not None and state["hash_of"] != expected:
        raise AdminError(f"the audit log is another one: entry {number} does not have the expected hash")
    yield f"the audit log is whole: {state['number']} entries"
    yield f"{state['number']}:{state['hash']}"


def _expected(given: str | None) -> tuple[int | None, str | None]:
    """The number and the hash of NUMBER:HASH. Raises AdminError."""
    if given is None:
        return None, None
    number, colon, hash = given.partition(":")
    if not colon or not (number.isascii() and number.isdigit() and len(number) < 19):
        raise AdminError(f"{given!r} is not NUMBER:HASH, the last line of an earlier `antiphon audit verify`")
    return int(number), hash.strip().lower()


_VERBS = {"list": _list, "verify": _verify}
