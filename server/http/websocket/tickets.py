"""Tickets: what a web page opens a WebSocket with, because it cannot send an `Authorization` header.

A ticket is sealed with the database's keys, so every server of the database opens what another has made, and
it says whose key it was made with. It is good for half a minute, and once: its use is recorded where requests
with an `Idempotency-Key` are, in the database, and whoever records it first has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from server.access import Keys, Principal, unauthorized
from server.clock import now_us
from server.encrypted_reasoning import Sealing
from storage import KeyedRequest

if TYPE_CHECKING:
    from storage import Storage

PROTOCOL = "antiphon.responses"
"""The subprotocol that a page offers beside its ticket, and that the server then chooses."""

PREFIX = "antiphon.ticket."
"""What a subprotocol begins with that is a ticket."""

LIFETIME_S = 30
ROUTE = "/v1/ws_tickets#used"
"""In the place of a route, where used tickets are recorded; no request can have it."""


async def issue(sealing: Sealing, principal: Principal) -> tuple[str, int]:
    """A new ticket for whoever a request comes from, as the subprotocol that it is sent as, and when it
    expires, in Unix seconds. Raises StorageUnavailable."""
    expires_at = now_us() + LIFETIME_S * 1_000_000
    content = {
        "owner": principal.owner,
        "key_id": principal.key_id,
        "expires_at": expires_at,
        "number": secrets.token_hex(16),
    }
    sealed = await sealing.sealed_ticket(content)
    return PREFIX + sealed.rstrip("="), expires_at // 1_000_000


def offered_ticket(subprotocols: Iterable[str]) -> str | None:
    """The subprotocol among those that a client offers that is a ticket."""
    return next((offered for offered in subprotocols if offered.startswith(PREFIX)), None)


async def redeem(ticket: str, sealing: Sealing, keys: Keys, storage: Storage) -> Principal:
    """Whom a ticket stands for; it is used up by that. ApiError 401 `invalid_api_key` for one that is no
    ticket of this database, too old, or used, and where its key is good no more."""
    sealed = ticket.removeprefix(PREFIX)
    content = await sealing.opened_ticket(sealed + "=" * (-len(sealed) % 4))
    if content is None:
        raise unauthorized("The ticket is none of this server's.")
    now = now_us()
    if now >= content["expires_at"]:
        raise unauthorized("The ticket has expired: ask for another one.")
    principal = await keys.of(content["owner"], content["key_id"])
    # Each use has a hash of its own: what is recorded is then never taken for this one's own beginning.
    used = KeyedRequest(principal.owner, ROUTE, content["number"], secrets.token_bytes(16), now)
    if await storage.begin_request(used) is not None:
        raise unauthorized("The ticket has been used: ask for another one.")
    await storage.complete_request(used, 101, b"[]", None)
    return principal
