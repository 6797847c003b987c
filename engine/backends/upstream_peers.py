"""Keeps track of the servers of an upstream engine, and chooses the one to ask.

It talks HTTP to them, notices when one fails and when it is healthy again, and prefers the server that has
seen the beginning of a prompt before, unless another one is much less busy.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import blake2b

import httpx
import orjson

from engine.backends.upstream_wire import Json, error_message, read_logprobs
from engine.types import EngineError, EngineUnavailable, LoadError, QueueFull, RequestError, RequestFailed

CONNECT_S = 5.0
MAX_CONNECTIONS = 1024  # to one server; a request that finds none within CONNECT_S goes elsewhere
KEPT_ALIVE = 64  # idle connections to one server
KEEP_ALIVE_S = 3.0  # and for how long: uvicorn closes them after 5, and a request in that moment would fail
MAX_REST_S = 30.0  # the longest that a `Retry-After` is honoured
FIRST_REST_S = 0.5  # a busy server without `Retry-After` is left alone this long, then twice as long, ...
SLACK = 4  # requests in flight up to which a server is never passed over: so few need not spread
BALANCE = 1.25  # times its share of what is in flight: with more than that it is
PROBE_TEXT = "The quick brown fox, 0123456789: \u00e4\u00f6\u00fc \u6f22\u5b57"

log = logging.getLogger("antiphon.upstream")


class PeerDown(Exception):
    """The server cannot be reached, failed, or fell silent."""


class PeerBusy(Exception):
    """The server has too much to do; `seconds` is when it wants to be asked again, if it said so."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server offers. logprobs: log probabilities by token id. priority: it schedules by priority."""

    model: str
    max_model_len: int | None
    logprobs: bool
    priority: bool

    def meet(self, other: Facts) -> Facts:
        """What both offer; LoadError when they serve different models."""
        if self.model != other.model:
            raise LoadError(f"the upstreams serve different models: {self.model!r} and {other.model!r}")
        limits = [limit for limit in (self.max_model_len, other.max_model_len) if limit is not None]
        return Facts(
            self.model,
            min(limits, default=None),
            self.logprobs and other.logprobs,
            self.priority and other.priority,
        )


class Peer:
    """One server. It is up while `facts` are known. url: for messages, without user and password."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self.url = _shown(address)
        self.facts: Facts | None = None
        self.in_flight = 0
        self.rests_until = 0.0  # loop time; before it the server is too busy to be asked
        self._heard = 0  # pieces of answers that came, of all requests
        self._rest_s = FIRST_REST_S
        if not _is_http(address):
            raise LoadError(f"upstream {self.url!r} is no http URL")
        self._client = httpx.AsyncClient(
            base_url=address,
            # Whoever compresses a stream holds tokens back.
            headers={"accept-encoding": "identity"} | _authorization(api_key),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=CONNECT_S),
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=KEPT_ALIVE,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            trust_env=False,
        )

    async def events(
        self, body: Json, trace_headers: Sequence[tuple[str, str]] = ()
    ) -> AsyncGenerator[list[Json]]:
        """The events of a streamed completion, as many at once as arrived together; closing it closes the
        connection. Raises PeerDown, PeerBusy, RequestError for what the server refuses, and RequestFailed
        for what is a failure of this request and not of the server: nothing came for it, while others were
        answered, or it has a header that cannot be sent."""
        self.in_flight += 1
        heard = self._heard  # what had come for all requests when this one's silence began
        try:
            content, headers = orjson.dumps(body), {"content-type": "application/json", **dict(trace_headers)}
            async with self._client.stream(
                "POST", "/v1/completions", content=content, headers=headers
            ) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise _refusal(reply)
                self._rest_s = FIRST_REST_S
                heard = self._heard  # a status alone is no sign of life: it comes before anything is computed
                partial: list[bytes] = []  # joined once: the scores of a long prompt are one line of 50 MB
                async for data in reply.aiter_bytes():
                    self._heard += 1
                    # Either of the two ends a line; neither stands in JSON.
                    first, *others = data.replace(b"\r", b"\n").split(b"\n")
                    partial.append(first)
                    if others:
                        *lines, rest = b"".join(partial), *others
                        partial = [rest]
                        if events := [_json(line[5:]) for line in lines if _has_event(line)]:
                            yield events
                    heard = self._heard
        except httpx.PoolTimeout:
            raise PeerBusy(None) from None
        except httpx.ReadTimeout:
            if heard != self._heard:
                raise RequestFailed("nothing came for it, while the server answered others") from None
            raise PeerDown("it fell silent") from None
        except (httpx.LocalProtocolError, UnicodeEncodeError) as error:
            raise RequestFailed(f"it cannot be sent: {_line(error)}") from None
        except httpx.RequestError as error:
            raise PeerDown(_line(error)) from None
        finally:
            self.in_flight -= 1

    async def probe(self, prompt: Sequence[int], model: str | None) -> Facts:
        """Ask what it is, and for one token in every form that requests use.

        prompt: `PROBE_TEXT` by the local tokenizer. Raises PeerDown, PeerBusy, and LoadError when it cannot
        serve as an upstream.
        """
        card = await self._card(model)
        body: Json = {"model": card["id"], "prompt": PROBE_TEXT, "stream": True, "return_token_ids": True}
        body |= {"max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
        choices = await self._ask(body)
        if not any(choice.get("token_ids") for choice in choices):
            raise LoadError(
                f"{self.url} returns no token ids: as an upstream serve vLLM >= 0.10.2, Antiphon, or an "
                "SGLang that knows return_token_ids"
            )
        read = next((ids for choice in choices if (ids := choice.get("prompt_token_ids"))), None)
        if read and read[-len(prompt) :] != list(prompt):  # a server may add special tokens in front
            raise LoadError(f"{self.url} tokenizes otherwise than the local folder: is it of the same model?")
        limit = card.get("max_model_len")
        return Facts(
            model=str(card["id"]),
            max_model_len=limit if isinstance(limit, int) else None,
            logprobs=await self._gives_logprobs(body),
            # Elsewhere the field is unknown, or a larger number runs first.
            priority=card.get("owned_by") == "vllm" and await self._takes(body | {"priority": 1}),
        )

    async def _card(self, model: str | None) -> Json:
        """The entry of the model in /v1/models, the first one for None."""
        try:
            reply = await self._client.get("/v1/models")
        except httpx.RequestError as error:
            raise PeerDown(_line(error)) from None
        if reply.status_code != 200:
            refusal = _refusal(reply)
            if reply.status_code in (401, 403, 404):
                raise LoadError(f"{self.url}: {refusal}")
            raise refusal
        try:
            cards: list[Json] = reply.json()["data"]
            return next(card for card in cards if model in (None, card["id"]))
        except StopIteration:
            raise LoadError(f"{self.url} does not serve {model or 'any model'}") from None
        except (KeyError, TypeError, ValueError):
            raise LoadError(f"{self.url}/v1/models is no list of models") from None

    async def _ask(self, body: Json) -> list[Json]:
        """The choices of a completion's events. Raises LoadError for a body that the server refuses."""
        try:
            async with aclosing(self.events(body)) as stream:
                events = [event async for several in stream for event in several]
        except RequestError as error:
            raise LoadError(f"{self.url} refuses a completion by token ids: {error}") from None
        failed = [error_message(event) for event in events if event.get("error")]
        if failed:
            raise PeerDown(failed[0])
        return [choice for event in events for choice in event.get("choices", ())]

    async def _takes(self, body: Json) -> bool:
        with suppress(LoadError):
            return bool(await self._ask(body))
        return False

    async def _gives_logprobs(self, body: Json) -> bool:
        with suppress(LoadError, KeyError, TypeError, ValueError):
            choices = await self._ask(body | {"logprobs": 1, "return_tokens_as_token_ids": True})
            return any([read_logprobs(choice["logprobs"]) for choice in choices if choice.get("logprobs")])
        return False

    def rest(self, seconds: float | None) -> None:
        """Leave it alone for a while: as long as it asked for, or longer each time."""
        if seconds is None:
            seconds = self._rest_s
            self._rest_s *= 2
        self.rests_until = asyncio.get_running_loop().time() + min(seconds, MAX_REST_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class Peers:
    """All of them. `prompt`: `PROBE_TEXT` by the local tokenizer; `model`: the name to ask for, None for the
    first that they list."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None,
        prompt: Sequence[int],
        api_key: str | None,
        timeout_s: float,
        probe_every_s: float,
    ) -> None:
        if not urls:
            raise LoadError("the upstream engine needs the URL of at least one upstream")
        self.all = [Peer(url, api_key=api_key, timeout_s=timeout_s) for url in dict.fromkeys(urls)]
        self._model = model
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._every_s = probe_every_s
        self._agreed: Facts | None = None
        self._settled = False  # what all offer was told, so that no later one may offer less
        self._back = asyncio.Event()  # replaced by another whenever a server has come back
        self._probes: dict[Peer, asyncio.Task[None]] = {}

    async def open(self, patience_s: float) -> Facts:
        """Probe all until one is up, and tell what those that are up have in common.

        Raises LoadError when one of them cannot serve, or none is up within `patience_s`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while True:
            reasons = [reason for reason in await asyncio.gather(*map(self._admit, self.all)) if reason]
            for reason in reasons:
                if isinstance(reason, LoadError):
                    raise reason
            if len(reasons) < len(self.all):
                break
            if loop.time() >= until:
                raise LoadError(f"no upstream answers: {'; '.join(map(str, reasons))}")
            log.warning("no upstream answers yet: %s", "; ".join(map(str, reasons)))
            await asyncio.sleep(self._every_s)
        assert self._agreed is not None
        self._settled = True
        for peer in self.all:
            if peer.facts is None:
                self._watch(peer)
        return self._agreed

    async def _admit(self, peer: Peer) -> Exception | None:
        """Probe one; it is up when this returns None, and else this is why not. Raises nothing."""
        try:
            async with asyncio.timeout(self._timeout_s):
                facts = await peer.probe(self._prompt, self._model)
            agreed = facts if self._agreed is None else self._agreed.meet(facts)
        except LoadError as error:
            return error
        except PeerBusy:
            return PeerDown(f"{peer.url} is busy")
        except (PeerDown, TimeoutError) as error:
            return PeerDown(f"{peer.url}: {str(error) or 'no answer'}")
        except Exception as error:  # whatever stands there while it restarts, it is asked again
            return PeerDown(f"{peer.url}: {_line(error)}")
        if self._settled and agreed != self._agreed:
            return LoadError(f"{peer.url} offers less than the others did at start: {facts}")
        self._agreed, peer.facts = agreed, facts
        return None

    # -- health ----------------------------------------------------------------------------------------------

    def out(self, peer: Peer, why: object) -> None:
        """A server failed: ask it no more until a probe finds it up again."""
        if peer.facts is not None:
            log.warning("upstream %s is out: %s", peer.url, why)
            peer.facts = None
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        self._probes[peer] = asyncio.create_task(self._bring_back(peer), name=f"probe {peer.url}")

    async def _bring_back(self, peer: Peer) -> None:
        known = ""
        while True:
            await asyncio.sleep(self._every_s)
            reason = await self._admit(peer)
            if reason is None:
                break
            if str(reason) != known:
                known = str(reason)
                log.log(logging.ERROR if isinstance(reason, LoadError) else logging.INFO, "%s", known)
        log.info("upstream %s is up", peer.url)
        del self._probes[peer]
        self._back.set()
        self._back = asyncio.Event()

    # -- choice ----------------------------------------------------------------------------------------------

    def pick(self, key: bytes, avoid: Collection[Peer] = ()) -> Peer | None:
        """The server for a prompt whose beginning is `key`: always the same one while it is up and not
        overloaded, for it holds that beginning in its cache. One of `avoid` is only taken where there is no
        other; None when no server can be asked now.

        Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with
        Bounded Loads, 2018).
        """
        now = asyncio.get_running_loop().time()
        ready = [peer for peer in self.all if peer.facts is not None and peer.rests_until <= now]
        ready = [peer for peer in ready if peer not in avoid] or ready
        if not ready:
            return None
        share = (1 + sum(peer.in_flight for peer in ready)) / len(ready)
        limit = max(SLACK, BALANCE * share)
        return max((peer for peer in ready if peer.in_flight < limit), key=lambda peer: _rank(peer, key))

    async def turn(self, until: float) -> None:
        """Wait until a server may be asked again, or `until` (loop time)."""
        rested = (peer.rests_until for peer in self.all if peer.facts is not None)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min([until, *rested])):
                await self._back.wait()

    @property
    def any_up(self) -> bool:
        """Whether there is one that answers, be it busy."""
        return any(peer.facts is not None for peer in self.all)

    def refusal(self) -> EngineError:
        """Why no server can be asked."""
        return QueueFull("every upstream is busy") if self.any_up else EngineUnavailable("no upstream is up")

    async def close(self) -> None:
        """End the probes and close all connections."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self.all))


def _shown(url: str) -> str:
    """A URL without what stands before its host's at sign, which may be a password, and without its query."""
    return re.sub(r"://.*@", "://", url, flags=re.DOTALL).partition("?")[0]


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def _authorization(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _rank(peer: Peer, key: bytes) -> bytes:
    return blake2b(key, digest_size=8, key=blake2b(peer.url.encode()).digest()).digest()


def _has_event(line: bytes) -> bool:
    return line.startswith(b"data:") and line[5:].strip() != b"[DONE]"


def _json(data: bytes) -> Json:
    try:
        value = orjson.loads(data)
    except ValueError as error:
        raise PeerDown(f"an event is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _refusal(reply: httpx.Response) -> Exception:
    """What a reply other than 200 means."""
    if reply.status_code == 429:
        seconds = reply.headers.get("retry-after", "")
        return PeerBusy(float(seconds) if seconds.isdecimal() else None)
    try:
        message = error_message(orjson.loads(reply.content))
    except ValueError:
        message = reply.reason_phrase
    if reply.status_code in (400, 413, 422, 431):  # 431: a client's trace headers are handed on
        return RequestError(f"the upstream refused the request: {message}")
    return PeerDown(f"HTTP {reply.status_code}: {message}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
