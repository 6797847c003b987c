"""Carries out a POST with an `Idempotency-Key` header once, and answers repeats with the first result.

A request that starts a run is recorded in the transaction that starts the run, and a repeat follows that run.
Any other reply is committed to storage before its last part is sent, or together with what was done, and a
repeat gets the same bytes.
Not kept, so that their repeats get a 409, are replies above 1 MiB, those of admin routes, those for which the
owner has no room, and those that tell of what was deleted. After an error reply the key is free again,
because an error is not a result.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.clock import now_us
from server.errors import ApiError, to_api_error
from server.http.authentication import ADMIN_PATHS, ORGANIZATION_PATHS
from server.http.body import load_body
from server.http.contents import load_form, takes_form
from server.http.departure import while_connected
from server.http.request import require_stored_bytes
from server.ignored import collected
from storage import Kept, KeyedRequest, KnownRequest, RequestKnown, StorageUnavailable

if TYPE_CHECKING:
    from server.http.state import ServerState
    from storage import Storage

T = TypeVar("T")

HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
"""The header that Stripe gave to replies from memory, and others took over."""

MAX_KEY = 255
MAX_KEPT_BYTES = 1 << 20
"""The largest reply that is kept. A larger one was given all the same, so its key stays taken."""

RUN_ROUTES = frozenset({"/v1/responses"})
"""Where all that a request does is to start a run, in whose transaction it is recorded."""

PRIVATE_PATHS = (ADMIN_PATHS, ORGANIZATION_PATHS)
"""Where replies hold keys and secrets, which are shown once and never stored."""

LAST_FRAMES = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n')
"""How a stream outside of the Responses API ends, unless it failed: of completions, and of messages."""


@dataclass(slots=True, eq=False)
class Keyed:
    """A request as its route sees it: the key that it came with, and the run that stands for it.

    response_id: of a run that was started already, by this request or by the one that it repeats. over: there
    is something to be found in storage, or the key is free. alone: no repeat waits for that. kept: the reply
    is in storage, together with what was done. about: the id of what the reply tells of, where the path does
    not name it.
    """

    request: KeyedRequest | None = None
    response_id: str | None = None
    kept: bool = False
    about: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    alone: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0

    def __post_init__(self) -> None:
        self.alone.set()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Held around a repeat's wait."""
        self.num_waiting += 1
        self.alone.clear()
        try:
            yield
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self.alone.set()

    def started(self, response_id: str) -> None:
        """Its run has begun: whoever repeats it follows that."""
        self.response_id = response_id
        self.over.set()


def keyed(request: Request) -> Keyed:
    """What a route has to know of a request's key, if it has one."""
    found: Keyed = getattr(request.state, "keyed", None) or Keyed()
    return found


def kept(request: Request, reply: Callable[[T], bytes], about: str) -> Kept[T] | None:
    """What storage is to record of a request with its one transaction; None without a key. reply: the JSON
    that answers it, made of what the transaction returns. about: the id of what that tells of."""
    key, ignored = keyed(request), collected()
    if key.request is None:
        return None

    def headers() -> bytes:
        named = {} if ignored is None else ignored.headers(request.url.query)
        return orjson.dumps([("content-type", "application/json"), *named.items()])

    def noted(result: T) -> bytes | None:
        body = reply(result)
        key.kept = True
        return body if len(body) <= MAX_KEPT_BYTES else None

    return Kept(key.request, headers, noted, about)


class IdempotencyMiddleware:
    """ASGI: has a POST with an `Idempotency-Key` done once, and answers its repeats with what came of it."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life
        self._at_work: dict[tuple[str, str, str], Keyed] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError: 400 for a key of no use, 409 where the key is another request's or is at work
        elsewhere."""
        key = _key(scope)
        if key is None or self._life.context is None:
            await self._app(scope, receive, send)
            return
        # Read and parsed once, for the key's sake and for the route's.
        coming = Request(scope, receive)
        if takes_form(coming):
            digest = (await load_form(coming)).digest
        else:
            body = scope["state"]["body"] = await load_body(coming, digest=_digest)
            digest = body.digest
        request = KeyedRequest(
            owner=scope["state"]["principal"].owner,
            route=scope["path"],
            key=key,
            body_hash=digest,
            created_at=now_us(),
        )
        while not await self._answered(request, scope, receive, send):
            pass

    async def _answered(self, request: KeyedRequest, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request, or wait until the first of its kind has an answer: then it is to be looked at
        again."""
        place = (request.owner, request.route, request.key)
        first = self._at_work.get(place)
        if first is not None and first.request is not None and not first.over.is_set():
            _same(first.request.body_hash, request)
            with first.waited_for():
                await while_connected(Request(scope, receive), first.over.wait())
            return False
        here = self._at_work[place] = Keyed(request)
        try:
            await self._answer(here, request, scope, receive, send)
        except RequestKnown:  # another server was quicker
            return False
        finally:
            here.over.set()
            if self._at_work.get(place) is here:
                del self._at_work[place]
        return True

    async def _answer(
        self, here: Keyed, request: KeyedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        assert self._life.context is not None
        storage = self._life.context.storage
        known = await storage.find_request(request)
        if request.route not in RUN_ROUTES and (known is None or _is_unanswered(known)):
            known = await storage.begin_request(request)
        scope["state"]["keyed"] = here
        receive = _Departure(here, receive, self._life.config.resume_grace_s)
        if known is None:
            await self._work(here, request, storage, scope, receive, send)
            return
        here.over.set()  # no repeat has to wait until this client has taken its reply
        _same(known.body_hash, request)
        if known.response_id is not None:
            here.response_id = known.response_id
            await self._app(scope, receive, _marked(send))
        elif known.status is None:
            raise to_api_error(RequestKnown())
        elif known.body is None:
            message = "The request with this idempotency key was carried out, but its reply is not kept."
            raise ApiError(409, message, code="idempotency_reply_not_kept")
        else:
            reply = Response(known.body, known.status, dict(orjson.loads(known.headers or b"[]")))
            await reply(scope, receive, _marked(send))

    async def _work(
        self,
        here: Keyed,
        request: KeyedRequest,
        storage: Storage,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Carry a request out; what came of it is committed before the client has all of it."""
        if request.route in RUN_ROUTES:
            await self._app(scope, receive, send)
            return
        reply = _Kept(here, request, storage, scope, send)
        try:
            await self._app(scope, receive, reply.send)
        finally:
            if not reply.done and here.response_id is None:
                with suppress(StorageUnavailable):  # then this process may take its own place
                    await storage.release_request(request)


class _Departure:
    """ASGI receive of a request whose body was read already. That the client has left is told late.

    Who sends a key will ask again when the connection breaks, so the work goes on without it, for as long as
    a stored run goes on without a reader. A run that was started has its own such time.
    """

    def __init__(self, here: Keyed, receive: Receive, grace_s: float) -> None:
        self._here = here
        self._receive = receive
        self._grace_s = grace_s

    async def __call__(self) -> Message:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        while self._here.response_id is None:
            await self._here.alone.wait()
            await asyncio.sleep(self._grace_s)
            if self._here.alone.is_set():
                break
        return message


class _Kept:
    """ASGI send that commits a reply before its last part goes out. done: it is committed."""

    def __init__(
        self, here: Keyed, request: KeyedRequest, storage: Storage, scope: Scope, send: Send
    ) -> None:
        self._here = here
        self._request = request
        self._storage = storage
        self._scope = scope
        self._send = send
        self._status = 0
        self._headers: dict[str, str] = {}
        self._start: Message | None = None  # held back: while it is, a failure can still be told
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._ended = False  # a stream has ended as it should
        self.done = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            if self._streams:
                await self._send(message)
            else:
                self._start = message
            return
        self._take(message.get("body", b""))
        if not message.get("more_body", False) and self._is_result:
            await self._keep()
            self.done = True
            self._here.over.set()
        if self._start is not None:
            await self._send(self._start)
            self._start = None
        await self._send(message)

    async def _keep(self) -> None:
        small = self._num_bytes <= MAX_KEPT_BYTES and not self._request.route.startswith(PRIVATE_PATHS)
        headers, body = orjson.dumps(list(self._headers.items())), b"".join(self._parts)
        fits = small and await self._has_room(len(headers) + len(body))
        if not self._here.kept:
            # What the path names first is what holds the rest of it.
            about = self._here.about or next(iter(self._scope.get("path_params", {}).values()), None)
            body_kept = body if fits else None
            await self._storage.complete_request(self._request, self._status, headers, body_kept, about)
        elif not fits:  # its size was not known before it was written
            await self._storage.drop_reply(self._request)

    async def _has_room(self, num_bytes: int) -> bool:
        """Whether the owner may store so many bytes more, which are counted then."""
        try:
            await require_stored_bytes(Request(self._scope), num_bytes)
        except ApiError:
            return False
        return True

    @property
    def _streams(self) -> bool:
        return self._headers.get("content-type", "").startswith("text/event-stream")

    @property
    def _is_result(self) -> bool:
        return self._status < 400 and self._here.response_id is None and (self._ended or not self._streams)

    def _take(self, part: bytes) -> None:
        self._num_bytes += len(part)
        if self._num_bytes <= MAX_KEPT_BYTES:
            self._parts.append(part)
        if part:
            self._ended = part.endswith(LAST_FRAMES)


# ------------------------------------------------------------------------------------------------------------


def _key(scope: Scope) -> str | None:
    """The key of a POST, or None. ApiError 400 for one that is no key."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    values = [value for name, value in scope["headers"] if name == HEADER]
    if not values:
        return None
    if len(values) > 1:
        message = "A request has at most one Idempotency-Key header."
        raise ApiError(400, message, code="invalid_idempotency_key", param="Idempotency-Key")
    value = values[0]
    if not 1 <= len(value) <= MAX_KEY or any(not 0x21 <= byte <= 0x7E for byte in value):
        message = f"An idempotency key has 1 to {MAX_KEY} visible ASCII characters."
        raise ApiError(400, message, code="invalid_idempotency_key", param="Idempotency-Key")
    key: str = value.decode()
    return key


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()


def _same(body_hash: bytes, request: KeyedRequest) -> None:
    if body_hash != request.body_hash:
        message = "This idempotency key was used for a request with another body."
        raise ApiError(409, message, code="idempotency_key_reused", param="Idempotency-Key")


def _is_unanswered(known: KnownRequest) -> bool:
    return known.response_id is None and known.status is None


def _marked(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            message = {**message, "headers": [*message["headers"], REPLAYED]}
        await send(message)

    return marked
