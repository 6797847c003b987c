"""An engine that sends token ids to other servers, which generate.

A request is carried on from server to server until it ends, with no token lost and none given twice. The
tokenizer, chat template and dialect are read from a local folder without weights, so that stop strings and
calls are found here, and the token ids that a server gave before it failed are the prompt of the next one.

A run that was carried on differs in two things from one without a fault: the draws, since the next server has
a new seed, and the presence and frequency penalties, which count output only, while earlier output is prompt
to the next server. Hence this engine has no `exact_resume`. It has no `grammar` either, because no server can
go on within a shape that another one began. `cached_tokens` is not known, and 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeVar

from engine.admission import Admission, Place
from engine.backends.generation import LONG_SCORES, Generation, end_of_prefix, is_last, takes_long
from engine.backends.request_checks import check_request
from engine.backends.shared_parts import WithoutKV, WithTexts
from engine.backends.upstream_peers import PROBE_TEXT, Facts, Peer, PeerBusy, PeerDown, Peers
from engine.backends.upstream_wire import Answer, completion_body, salt
from engine.dialects import Dialect
from engine.model_folder import find_folder, known_folder, read_json, read_sampling_defaults
from engine.step import RowOutput
from engine.tokenizer import TEXT_THREADS, Prompts, Tokenizer, open_dialect
from engine.types import (
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    EngineDead,
    EngineStats,
    GenerateRequest,
    LoadError,
    ModelInfo,
    RequestFailed,
    SamplingDefaults,
)

T = TypeVar("T")

MAX_FAILURES = 4  # of servers under one request, before it is taken to be the cause
AFFINE_TOKENS = 256  # whose hash chooses the server; a shorter prompt is hashed whole: it is cheap to compute
ASK_AGAIN_S = 1.0  # a request that waits for busy servers looks at least so often whether one is up still
DRAIN_S = 0.1  # how long the end of a finished answer is waited for, so that its connection can be kept

log = logging.getLogger("antiphon.upstream")


class UpstreamEngine(WithTexts, WithoutKV):
    """An `Engine` over the completions API of vLLM, SGLang or Antiphon servers that all serve one model.

    model: folder or hub id of its tokenizer, template and configuration. upstream_model: its name there,
    None for the first that they list. timeout_s: silence after which a server counts as failed, unless it
    answered other requests meanwhile. patience_s: how long a request (and `start`) waits when no server can
    be asked.
    """

    def __init__(
        self,
        model: str | Path,
        urls: Sequence[str],
        *,
        name: str | None = None,
        upstream_model: str | None = None,
        api_key: str | None = None,
        max_model_len: int | None = None,
        max_waiting: int = 512,
        max_waiting_tokens: int | None = None,
        chat_template: str | None = None,
        allow_special_tokens: bool = False,
        tool_dialect: str | None = None,
        reasoning_dialect: str | None = None,
        generation_config: Literal["auto", "none"] = "auto",
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        probe_every_s: float = 2.0,
    ) -> None:
        known_folder(model)  # so that a wrong path is told before anything else is loaded
        self._model = model
        self._urls = urls
        self._name = name or str(model).rstrip("/").rsplit("/", 1)[-1]
        self._upstream_model = upstream_model
        self._api_key = api_key
        self._max_model_len = max_model_len
        # How many the servers generate for at once is theirs to know.
        self._admission = Admission(
            max_running=0, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens
        )
        self._chat_template = chat_template
        self._allow_special_tokens = allow_special_tokens
        self._tool_dialect = tool_dialect
        self._reasoning_dialect = reasoning_dialect
        self._generation_config = generation_config
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._probe_every_s = probe_every_s
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="engine-text")
        self._peers: Peers | None = None
        self._scopes: set[asyncio.Timeout] = set()  # what waits now, to be woken by `close`
        self._closed = False
        self._waiting = self._running = 0
        self._prompt_tokens = self._output_tokens = self._chunks = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """Read the folder and probe the servers. Raises LoadError when none answers within the patience, or
        one cannot serve as an upstream."""
        folder = await self._in_pool(lambda: find_folder(self._model, weights=False))
        special = self._allow_special_tokens
        tokenizer = await self._in_pool(
            lambda: Tokenizer.load(folder, self._chat_template, allow_special_tokens=special)
        )
        dialect = open_dialect(tokenizer, tools=self._tool_dialect, reasoning=self._reasoning_dialect)
        self._peers = Peers(
            self._urls,
            model=self._upstream_model,
            prompt=tokenizer.encode(PROBE_TEXT),
            api_key=self._api_key,
            timeout_s=self._timeout_s,
            probe_every_s=self._probe_every_s,
        )
        facts = await self._peers.open(self._patience_s)
        self._info = self._describe(folder, tokenizer, dialect, facts)
        self._prompts = Prompts(tokenizer, dialect, limit=self._info.max_model_len, pool=self._pool)
        return self._info

    def _describe(self, folder: Path, tokenizer: Tokenizer, dialect: Dialect, facts: Facts) -> ModelInfo:
        config = read_json(folder, "config.json") or {}
        config = config.get("text_config", config)
        asked = (self._max_model_len, facts.max_model_len or config.get("max_position_embeddings"))
        limits = [limit for limit in asked if limit]
        if not limits:
            raise LoadError(
                "neither the upstreams nor config.json tell the context's length: set max_model_len"
            )
        digest = blake2b(facts.model.encode(), digest_size=16)
        digest.update(tokenizer.fingerprint)
        digest.update(dialect.name.encode())
        offered = {"logprobs": facts.logprobs, "priority": facts.priority, "token_ids": True}
        auto = self._generation_config == "auto"
        return ModelInfo(
            name=self._name,
            max_model_len=min(limits),
            vocab_size=max(tokenizer.vocab_size, config.get("vocab_size") or 0),
            fingerprint=digest.hexdigest(),
            eos_token_ids=tokenizer.eos_token_ids,
            defaults=read_sampling_defaults(folder) if auto else SamplingDefaults(),
            capabilities=frozenset(name for name, has in offered.items() if has),
            dialect=dialect.name,
            template_variables=tokenizer.template_variables,
        )

    @property
    def admission(self) -> Admission:
        """See `Engine.admission`."""
        return self._admission

    @property
    def info(self) -> ModelInfo:
        """See `Engine.info`."""
        return self._info

    async def dead(self) -> BaseException:
        """See `Engine.dead`: servers come and go, this engine never dies of it."""
        forever: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        return await forever

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)
        if self._peers is not None:
            await self._peers.close()
        self._pool.shutdown(wait=False)

    def stats(self) -> EngineStats:
        """See `Engine.stats`; a request waits until its first token has come, and KV is not ours to count."""
        return EngineStats(
            waiting=self._waiting,
            running=self._running - self._waiting,
            unavailable=int(self._peers is None or not self._peers.any_up),
            prompt_tokens_total=self._prompt_tokens,
            output_tokens_total=self._output_tokens,
            steps_total=self._chunks,
        )

    def gpu(self) -> Mapping[str, float]:
        """See `Engine.gpu`."""
        return {}

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`: nothing is in flight that no request asked for."""
        assert 0 <= self._waiting <= self._running
        assert self._peers is None or all(peer.in_flight >= 0 for peer in self._peers.all)

    # -- text ------------------------------------------------------------------------------------------------

    async def check(self, constraint: Constraint, owner: str = "") -> None:
        """See `Engine.check`: no constraint can be honoured."""
        raise ConstraintError("this model cannot be made to call a tool")

    async def prepare(self) -> None:
        """See `Engine.prepare`: there is nothing to start."""

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`; also raises EngineUnavailable when no server is up for the patience. Servers
        that are merely busy are waited for as long as it takes by a request that has a place."""
        self._require_open()
        check_request(request, self._info)
        if request.constraint is not None:
            await self.check(request.constraint)
        generation = Generation(request, self._prompts.tokenizer, self._prompts.dialect)
        end = end_of_prefix(request, self._info)
        for chunk in generation.replay(end):
            yield chunk
            if is_last(chunk):
                return
        held = self._admission.enter(request.owner, request.weight) if place is None else place
        self._prompt_tokens += len(request.prompt_ids)
        self._running += 1
        self._waiting += 1
        waits = True
        try:
            async with aclosing(self._outputs(request, patient=place is not None)) as stream:
                async for outputs in stream:
                    read = await self._beside(takes_long(outputs[0]), partial(generation.read, outputs))
                    if read is None:
                        continue
                    self._waiting -= waits
                    waits = False
                    held.begin()
                    self._chunks += 1
                    self._output_tokens += len(read.token_ids)
                    if is_last(read):  # before the consumer sees the end: it may never come back
                        await stream.aclose()
                    yield read
        finally:
            self._running -= 1
            self._waiting -= waits
            if place is None:
                held.leave()

    async def _outputs(self, request: GenerateRequest, *, patient: bool) -> AsyncGenerator[list[RowOutput]]:
        """The outputs after the prefix, from as many servers as it takes."""
        assert self._peers is not None
        produced = [token for chunk in request.prefix for token in chunk]
        key = _affinity(request)
        failed: list[Peer] = []
        while True:
            peer = await self._choose(request, key, failed, patient=patient)
            try:
                async with aclosing(self._attempt(peer, request, produced)) as attempt:
                    async for outputs in attempt:
                        for output in outputs:
                            produced += output.token_ids
                        yield outputs
                return
            except PeerBusy as busy:
                peer.rest(busy.seconds)
                continue
            except PeerDown as down:
                self._require_open()
                self._peers.out(peer, down)
                failure: Exception = down
            except RequestFailed as error:
                failure = error
            failed.append(peer)
            log.warning("%s failed at %s behind %d tokens: %s", request.id, peer.url, len(produced), failure)
            if len(failed) == MAX_FAILURES:
                raise RequestFailed(f"{MAX_FAILURES} upstreams failed, the last one so: {failure}")
            # The server may have failed between the last token and the word that it was the last.
            end = end_of_prefix(replace(request, prefix=(tuple(produced),)), self._info)
            if end is not None:
                yield [RowOutput(0, finish=end)]
                return

    async def _attempt(
        self, peer: Peer, request: GenerateRequest, produced: Sequence[int]
    ) -> AsyncGenerator[list[RowOutput]]:
        """What one server gives after `produced`, to its end. Raises PeerDown, PeerBusy, and RequestFailed
        when it gives this request up."""
        assert peer.facts is not None
        eos = self._info.eos_token_ids
        body = completion_body(
            request,
            produced,
            room=self._info.max_model_len - len(request.prompt_ids) - len(produced),
            eos=eos,
            priority=peer.facts.priority,
        )
        answer = Answer(request, produced, eos=eos)
        async with aclosing(
            peer.events({"model": peer.facts.model, **body}, request.trace_headers)
        ) as stream:
            while (events := await self._within(request, anext(stream, None))) is not None:
                outputs = await self._beside(answer.num_unscored > LONG_SCORES, partial(answer.read, events))
                if not outputs:
                    continue
                last = outputs[-1]
                if last.finish is not None:
                    with suppress(PeerDown, RequestFailed, TimeoutError):
                        async with asyncio.timeout(DRAIN_S):
                            async for _ in stream:
                                pass
                yield outputs
                if last.finish is not None:
                    return
                if last.error is not None:
                    raise last.error
        raise RequestFailed("the answer broke off")

    async def _choose(
        self, request: GenerateRequest, key: bytes, failed: Sequence[Peer], *, patient: bool
    ) -> Peer:
        """The server to ask next; raises what keeps the request from being asked when the patience is over.

        patient: that the servers are busy does not keep it, only that none is up.
        """
        assert self._peers is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while (peer := self._peers.pick(key, avoid=failed)) is None:
            if patient and self._peers.any_up:
                until = loop.time() + max(self._patience_s, ASK_AGAIN_S)
            elif loop.time() >= until:
                raise self._peers.refusal()
            await self._within(request, self._peers.turn(until))
        return peer

    # -- waiting ---------------------------------------------------------------------------------------------

    async def _within(self, request: GenerateRequest, awaitable: Awaitable[T]) -> T:
        """Wait, unless the request's deadline passes or the engine is closed, or was closed before."""
        until = asyncio.get_running_loop().time() if self._closed else None
        if until is None and request.deadline is not None:
            until = asyncio.get_running_loop().time() + request.deadline - time.monotonic()
        try:
            async with asyncio.timeout_at(until) as scope:
                self._scopes.add(scope)
                try:
                    return await awaitable
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            self._require_open()
            raise DeadlineExceeded(f"request {request.id} ran past its deadline") from None

    def _require_open(self) -> None:
        if self._closed or self._peers is None:
            raise EngineDead("the engine was closed" if self._closed else "the engine was not started")


def _affinity(request: GenerateRequest) -> bytes:
    """What requests have in common that share a prefix cache entry: salt, and how the prompt begins."""
    beginning = array("q", request.prompt_ids[:AFFINE_TOKENS])
    return blake2b(salt(request).encode() + beginning.tobytes(), digest_size=16).digest()
