"""`antiphon webhooks`: adds, lists, enables, removes and tests webhooks, whether or not a server runs.

All of this is the operator's: no request of an owner reaches it, so a URL may lead anywhere that the operator
wants, private addresses included.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from server.access import LOCAL_OWNER, OPERATOR, Actor
from server.admin.database_access import AdminError, carry_out
from server.admin.listing import Columns, list_lines, shown_once, shown_time
from server.admin.owner_names import known_owner_id, shown_owner
from server.clock import now_us
from server.config import Config, is_loopback
from server.masking import masked
from server.webhooks import EVENT_TYPES, event, make_sender
from storage import Storage, StoredWebhook

PATH = "/admin/webhooks"
SECRET_BYTES = 32
MAX_URL = 2048

# ------------------------------------------------------------------------------------------------------------
# What can be done


class NoSuchEvent(ValueError):
    """There are no notices of a type of event that is named."""


async def add(
    storage: Storage, by: Actor, *, url: str, owner: str, event_types: Sequence[str], allow_http: bool
) -> dict[str, Any]:
    """Add a webhook; the reply is the only place where `signing_secret` ever stands.

    event_types: none means all. ValueError for a URL that it cannot have, NoSuchEvent.
    """
    check_url(url, allow_http=allow_http)
    for type in event_types:
        if type not in EVENT_TYPES:
            raise NoSuchEvent(f"there is no event '{type}', only {', '.join(EVENT_TYPES)}")
    webhook = StoredWebhook(
        id=f"hook_{secrets.token_hex(12)}",
        owner=owner,
        url=url,
        secret=secrets.token_bytes(SECRET_BYTES),
        event_types=tuple(type for type in EVENT_TYPES if type in event_types or not event_types),
        created_at=now_us(),
    )
    # A URL may hold a secret of its receiver; the log is read by more people than the database.
    entry = by.did("webhook.created", webhook.id, owner, url=masked(url), event_types=webhook.event_types)
    await storage.add_webhook(webhook, entry=entry)
    return {**as_json(webhook), "signing_secret": "whsec_" + base64.b64encode(webhook.secret).decode()}


async def list_all(storage: Storage) -> dict[str, Any]:
    """The webhooks of all owners."""
    return {"object": "list", "data": [as_json(webhook) for webhook in await storage.list_webhooks()]}


async def remove(storage: Storage, by: Actor, id: str) -> dict[str, Any]:
    """Remove a webhook and what it was still to be told. Raises NotFound."""
    webhook = await storage.get_webhook(id)
    await storage.remove_webhook(id, entry=by.did("webhook.deleted", id, webhook.owner))
    return {"id": id, "object": "webhook_endpoint", "deleted": True}


async def enable(storage: Storage, by: Actor, id: str) -> dict[str, Any]:
    """Tell a webhook again of what comes, and at once of what was kept for it. Raises NotFound."""
    webhook = await storage.get_webhook(id)
    await storage.enable_webhook(id, now_us(), entry=by.did("webhook.enabled", id, webhook.owner))
    return as_json(await storage.get_webhook(id))


async def test(storage: Storage, id: str) -> dict[str, Any]:
    """Send a webhook a notice of a response or batch that does not exist, once, and tell how that went.

    status_code: None if there was no answer; then `error` is a word on why. Raises NotFound.
    """
    webhook = await storage.get_webhook(id)
    told = webhook.event_types[0]
    of = "batch_test" if told.startswith("batch.") else "resp_test"
    sample = event(f"evt_{secrets.token_hex(24)}", told, of, now_us())
    status, error = None, None
    courier = await asyncio.to_thread(make_sender)
    try:
        answer = await courier.send(webhook.url, webhook.secret, sample.id, sample.body)
        status = answer.status
    except Exception as failure:  # whatever goes wrong at a receiver is what was asked for
        error = type(failure).__name__
    finally:
        await courier.close()
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": id,
        "event_type": sample.type,
        "status_code": status,
        "error": error,
    }


def check_url(url: str, *, allow_http: bool) -> None:
    """ValueError unless notices may be sent there.

    They are signed, not encrypted: plain http needs `allow_http`, except to this machine.
    """
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"a webhook's URL has at most {MAX_URL} ASCII characters and no spaces")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.port == 0:
        raise ValueError("a webhook's URL begins with https:// (or http://) and a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a webhook's URL holds no user and password: notices are signed instead")
    if parts.scheme == "http" and not allow_http and not is_loopback(parts.hostname):
        raise ValueError("plain http leaves this machine only if that is allowed (--allow-http)")


def as_json(webhook: StoredWebhook) -> dict[str, Any]:
    """A webhook, as the admin routes and the command line show it; times in unix seconds."""
    return {
        "id": webhook.id,
        "object": "webhook_endpoint",
        "owner": webhook.owner,
        "url": webhook.url,
        "event_types": list(webhook.event_types),
        "created_at": webhook.created_at // 1_000_000,
        "disabled_at": webhook.disabled_at and webhook.disabled_at // 1_000_000,
        "pending": webhook.pending,
        "attempts": webhook.attempts,
    }


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon webhooks ...`: the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _add(config: Config, options: argparse.Namespace) -> Iterator[str]:
    body = {
        "url": options.url,
        "owner": LOCAL_OWNER if options.owner == LOCAL_OWNER else known_owner_id(config, options.owner),
        "event_types": options.event,
        "allow_http": options.allow_http,
    }
    made = carry_out(config, lambda storage: add(storage, OPERATOR, **body), "POST", PATH, body)
    gone = f"The endpoint {made['id']} is removed."
    kept = f"Run `antiphon webhooks remove {made['id']}{config.flags}`: the endpoint could not be removed"
    with shown_once(lambda: _removed(config, made["id"]), gone, kept):
        yield made["signing_secret"]
    yield f"id {made['id']}, owner {made['owner']}. The secret is not shown again."


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    return list_lines(config, options, PATH, list_all, COLUMNS)


def _remove(config: Config, options: argparse.Namespace) -> Iterator[str]:
    _removed(config, options.id)
    yield f"{options.id} is removed"


def _removed(config: Config, id: str) -> None:
    carry_out(config, lambda storage: remove(storage, OPERATOR, id), "DELETE", f"{PATH}/{id}")


def _enable(config: Config, options: argparse.Namespace) -> Iterator[str]:
    path = f"{PATH}/{options.id}/enable"
    hook = carry_out(config, lambda storage: enable(storage, OPERATOR, options.id), "POST", path)
    yield f"{options.id} is told again of what comes, and of {hook['pending']} notices that were kept"


def _test(config: Config, options: argparse.Namespace) -> Iterator[str]:
    path = f"{PATH}/{options.id}/test"
    result = carry_out(config, lambda storage: test(storage, options.id), "POST", path, makes=False)
    if result["status_code"] is None:
        raise AdminError(f"{options.id} could not be reached ({result['error']})")
    yield f"{options.id} answered {result['event_type']} with status {result['status_code']}"


COLUMNS: Columns = {
    "ID": lambda hook: hook["id"],
    "STATE": lambda hook: "gone" if hook["disabled_at"] else "live",
    "CREATED": shown_time,
    "OWNER": shown_owner,
    "PENDING": lambda hook: str(hook["pending"]),
    "ATTEMPTS": lambda hook: str(hook["attempts"]),
    "EVENTS": lambda hook: ",".join(type.removeprefix("response.") for type in hook["event_types"]),
    "URL": lambda hook: masked(hook["url"]),
}
_VERBS = {"add": _add, "list": _list, "enable": _enable, "remove": _remove, "test": _test}
