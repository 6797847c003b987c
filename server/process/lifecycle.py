"""The life of one server: starting, ready, draining, dead.

It makes the objects that live as long as the server, closes them in the reverse order, and decides which
requests each phase admits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from engine import Engine, EngineStats, LoadError, PoolingEngine, SpeechEngine
from server.access import LOCAL_OWNER, Accesses, HeldOpen, Keys
from server.batches import BatchWorker
from server.clock import ahead_s, now_us
from server.config import Config
from server.containers import Cells, no_cells
from server.encrypted_reasoning import Sealing
from server.errors import WHILE_LOADING, ApiError
from server.http import Arrivals, Context, Phase
from server.http.websocket import OpenSockets
from server.input_files import InputImages, SeenImages
from server.limits import NONE, Budgets, Limiter, LimitSet, Meters, changed, parse_limits
from server.model_registry import (
    Models,
    SeveralModels,
    build_engine,
    build_others,
    build_remote,
    caps_of,
    note_model,
    served_names,
)
from server.pooling import Moderator, embedder_of, moderator_of, reranker_of
from server.process.generation_probe import GenerationProbe
from server.process.retention import Retention
from server.process.seat import Seat
from server.process.settings_audit import note_settings
from server.process.tools_registry import enforceable, look_for_sandbox, read_registry
from server.quota import Quota
from server.stateless import LiveCompletions
from server.telemetry import Distribution, EngineRates, Reading, Telemetry, Tracing
from server.usage import Meter, Prices
from server.vector_stores import Library
from server.webhooks import Deliveries
from storage import (
    COMMIT_SECONDS,
    CommitStats,
    Storage,
    StorageUnavailable,
    make_private_folder,
    open_storage,
    patience_s,
)
from tools import (
    GENERATE,
    Found,
    Registry,
    ToolsError,
    prepare_arguments,
    prepare_egress,
    prepare_pages,
    prepare_sounds,
)

if TYPE_CHECKING:
    from engine import RemotePooling, RemoteSpeech

    Other = PoolingEngine | RemotePooling | SpeechEngine | RemoteSpeech

log = logging.getLogger("antiphon")


_REFUSALS = {
    "starting": ("not_ready", "The server is starting.", WHILE_LOADING["retry-after"]),
    "draining": ("draining", "The server is shutting down and takes no new work.", "2"),
    "dead": ("engine_dead", "The server has failed and is about to end.", "5"),
}

STILL_SERVED_POSTS = ("/tool_outputs", "/cancel")
"""POSTs that belong to runs in flight; a draining server still takes them."""


LAST_WRITES_S = 1.0
"""How long each of the last writes waits for a database that is away: they are several, and a process that
is to end is given seconds."""


class Refused(Exception):
    """The server cannot start; the message says why on one line."""


class ServerLifecycle:
    """Everything one server process holds, from its first moment to its last."""

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        registry: Registry | None = None,
        seat: Seat | None = None,
    ) -> None:
        """registry: the tools that this server runs itself; default: those that come with it and the
        operator's own. seat: this process's place, where it is one of several. Raises TracingError."""
        self.config = config
        self._seat = seat
        self.telemetry = Telemetry(
            tracing=Tracing(content=config.otel_content) if config.otel else None,
            vllm_names=config.vllm_metrics,
            log_prompts=config.log_prompts,
        )
        self.num_connections: Callable[[], int] = lambda: 0  # set by whoever listens
        self.num_streams = 0  # open event streams
        self.sockets = OpenSockets()
        self.keys = Keys(config)
        self.held_open = HeldOpen(self.keys)
        self.accesses = Accesses()
        # Of all processes at the port, each of which has to take one body at least.
        self.arrivals = Arrivals(
            max(config.max_arriving_bytes // config.api_server_count, config.max_body_bytes)
            if config.api_server_count > 1
            else config.max_arriving_bytes
        )
        self.admin_token = secrets.token_urlsafe(32) if seat is None else seat.admin_token
        self.phase: Phase = "starting"
        self.context: Context | None = None
        self.sandbox: str | None = None
        self.cause: BaseException | None = None
        self.died = asyncio.Event()
        self._engine = engine
        self._others: list[Other] = []  # models beside the engine
        self.several = SeveralModels(config, None if seat is None else seat.shelf_socket)
        self._registry = registry
        self._storage: Storage | None = None
        self._deliveries: Deliveries | None = None
        self._retention: Retention | None = None
        self._probe: GenerationProbe | None = None
        self._engine_rates: defaultdict[str, EngineRates] = defaultdict(EngineRates)
        self._library: Library | None = None
        self._meter: Meter | None = None
        self._batches: BatchWorker | None = None
        self._app: ASGIApp | None = None
        self._meters: Meters | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._noting: asyncio.Task[None] | None = None
        self._drained = False
        self._num_posts = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    # -- coming ----------------------------------------------------------------------------------------------

    async def start(self, *, key_required: bool = False) -> None:
        """Open storage and load the model; then take up what an earlier process left.

        key_required: without a key that would be accepted this is Refused, before the model is loaded.
        Raises storage's FolderHeld, SchemaTooNew or StorageUnavailable, the engine's LoadError, KeyFileError,
        ValueError for a file of sealing keys, or Refused; whatever had started is closed again by `close`.
        """
        from server.runs import Runs

        self.keys.reload()
        sealing_keys = self.config.sealing_keys()
        registry = await self._read_registry() if self._registry is None else self._registry
        self._registry = registry
        found = await self._find_sandbox()
        self.sandbox = found.told if found.sandbox is not None else self._no_sandbox(found)
        # Storage first: it knows whether there is a key, and whose the KV is that engines find on disk.
        await self._open_storage()
        assert self._storage is not None
        if key_required:
            await self._require_key()
        await self._start_engine(await self._storage.database_id())
        models = self._served()
        sealing = Sealing(self._storage, self.config.sealing_key_s, sealing_keys)
        self._retention = Retention(self._storage, self.config)
        quota = Quota(
            self._storage,
            self.config.max_bytes_per_owner,
            self.config.max_store_bytes,
            self._retention.made_room,
            self.telemetry.limited,
        )
        limiter = self._limits(self._storage, models)
        assert self._meters is not None
        self._meter = meter = Meter(self._storage)
        meter.start()
        moderator = self._moderator(models, limiter)
        searching = embedder_of(models, limiter, meter), reranker_of(models, limiter, meter)
        self._library = library = Library(self._storage, quota, limiter, models.is_generating, *searching)
        registry = {**registry, **library.tools()}
        if GENERATE in registry:
            registry |= InputImages(self._storage, self.config.egress_policy).tools()
        if any(model.sees for model in models):
            registry |= SeenImages.tools()
        cells: Cells | None = None
        if found.sandbox is not None:
            cells = Cells(self._storage, found.sandbox, quota, limiter, self.config.public_url)
            self._registry = registry = {**registry, **cells.tools()}
        elif self.config.sandbox == "auto":
            registry |= no_cells(found.told)
        runs = Runs(
            self._storage,
            models,
            sealing,
            self.config,
            self.telemetry,
            quota,
            await enforceable(registry, models.first.engine),
            self._meter,
            limiter,
            moderator,
        )
        context = Context(
            self.config,
            self._storage,
            models,
            sealing,
            runs,
            self.telemetry,
            quota,
            self._meter,
            limiter,
            LiveCompletions(),
            library,
            cells,
            self.several,
        )
        self._watchers = [asyncio.create_task(self._watch(*each)) for each in self._mortal(self._storage)]
        self._meters.start()
        await runs.start()
        self.several.on_loaded = runs.model_loaded
        await library.ingester.start()
        self._deliveries = Deliveries(self._storage, self.telemetry)
        await self._deliveries.start()
        await self._retention.start(runs.forget_gone)
        self.context = context
        self._batches = BatchWorker(self._storage, self.keys, context.quota, context.limiter, self.config)
        await self._batches.start(self._app)
        await self._note_settings()
        self.telemetry.watch(self._readings)
        if self._seat is not None:
            await self._seat.show_metrics(self.telemetry)
        if self.phase == "starting":
            self.phase = "ready"

    def _mortal(self, storage: Storage) -> Iterator[tuple[str, Awaitable[BaseException]]]:
        """What this process ends with, and its death."""
        for engine in ([] if self._engine is None else [self._engine]) + self.several.mortal():
            yield "engine", engine.dead()
        yield "storage", storage.dead()
        for other in self._others:
            yield f"model {other.info.name}", other.dead()

    def _limits(self, storage: Storage, models: Models) -> Limiter:
        """What limits keys, owners, and persons for whom clients ask."""
        self._meters = Meters(storage)
        prices = Prices(self.config)
        budgets = Budgets(storage, prices.cost, prices.currency)
        every_owner = _every_owner(self.config.owner_limit, models)
        a_minute = self.config.identifier_requests_per_minute
        persons = NONE if a_minute is None else LimitSet(requests_per_minute=a_minute)
        limited = self.telemetry.limited
        return Limiter(self._meters, budgets, every_owner, limited, models.canonical, persons)

    def _moderator(self, models: Models, limiter: Limiter) -> Moderator | None:
        """What judges texts, where the settings name it. Refused where it cannot."""
        assert self._meter is not None
        try:
            return moderator_of(models, self.config, limiter, self._meter)
        except LoadError as error:
            raise Refused(str(error)) from None

    def _served(self) -> Models:
        """The models by their names, with what each may be asked for."""
        models = self.several.models
        if self._engine is not None:
            models.add(self._engine, served_names(self.config), caps_of(self.config))
        for other in self._others:
            models.add_other(other, caps_of(self.config))
        fallback = self.config.messages_model
        if fallback is not None and fallback not in models and models.entry(fallback) is None:
            raise Refused(
                f"messages_model names {fallback!r}, which is not served: {', '.join(models.names)} are"
            )
        return models

    async def metrics(self) -> bytes:
        """The page of metrics: this process's, or that of all processes at the port."""
        if self._seat is None:
            return self.telemetry.exposition()
        return await self._seat.metrics(self.telemetry)

    def give_sealing_keys(self, secrets: Sequence[bytes]) -> bool:
        """Have other keys of the operator seal and open; True where they are others than before."""
        return self.context is not None and self.context.sealing.give(secrets)

    def limit_owners(self, words: Sequence[str]) -> None:
        """Have other limits hold for every owner, as the setting `owner_limit` has them."""
        if self.context is not None:
            self.context.limiter.set_defaults(_every_owner(words, self.context.models))

    def serve_inside(self, app: ASGIApp) -> None:
        """Have requests of batches carried out by this application."""
        self._app = app
        if self._batches is not None:
            self._batches.serve(app)

    def batches_stirred(self) -> None:
        """There is a batch to be carried on, or one to be ended."""
        if self._batches is not None:
            self._batches.stir()

    def settings_changed(self) -> None:
        """The settings give other keys than before, or other limits."""
        if self.context is not None:
            self._noting = asyncio.create_task(self._note_settings(), name="note-settings")

    async def _note_settings(self) -> None:
        """Have the owners of given keys known, and tell the audit log what has changed of the settings."""
        assert self.context is not None
        storage = self.context.storage
        try:
            await storage.ensure_owners(sorted(self.keys.owners), now_us())
            await note_settings(
                storage,
                models=self.context.models,
                mcp=self.config.mcp,
                api_keys=self.keys.given,
                sealing_keys=[key.number for key in self.context.sealing.given],
                limits=self.context.limiter.defaults.given(),
            )
        except StorageUnavailable as error:
            log.warning("the database was not told what has changed of the settings: %s", error)

    async def _open_storage(self) -> None:
        runner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        synced = self.config.durability == "power"
        with contextlib.suppress(OSError):  # whoever writes there says so
            make_private_folder(self.config.data)
        self._storage = await open_storage(
            self.config.db, runner=runner, synced=synced, max_persons=self.config.max_identifiers_per_hour
        )
        if (folder := await self._storage.lacking_blobs()) is not None:
            log.error(
                "the database names contents of files that are not in %s, so those files cannot be read: a "
                "database and the folder of its blobs belong together",
                folder,
            )
        await self._storage.ensure_owners(sorted({LOCAL_OWNER, *self.keys.owners}), now_us())
        self.keys.attach(self._storage)

    async def _read_registry(self) -> Registry:
        try:
            return await asyncio.to_thread(read_registry, self.config)
        except ToolsError as exc:
            raise Refused(str(exc)) from None

    async def _find_sandbox(self) -> Found:
        """What runs code. Refused where one is named that does not work."""
        found = await look_for_sandbox(self.config)
        if found.sandbox is None and self.config.sandbox not in ("auto", "off"):
            raise Refused(f"code is to run in a sandbox that does not work here: {found.told}")
        return found

    def _no_sandbox(self, found: Found) -> str:
        return "off" if self.config.sandbox == "off" else f"none ({found.told})"

    async def _require_key(self) -> None:
        if not await self.keys.usable():
            raise Refused(
                f"{self.config.host} can be reached from other machines, and no key is configured. "
                f"Make one with `antiphon keys create{self.config.flags}`, or give --api-key-file."
            )

    async def _start_engine(self, database: str | None) -> None:
        others: Sequence[Other]
        self.several.save_for(database)
        if self._seat is not None:
            self._seat.announce_database(database)
            self._engine, others = await asyncio.to_thread(
                build_remote, self.config, self._seat.engine_socket
            )
        else:
            if self._engine is None and self.config.serves_own_model:
                self._engine = await asyncio.to_thread(build_engine, self.config.saving_for(database))
            others = await asyncio.to_thread(build_others, self.config)
        await asyncio.to_thread(self.several.build)
        # First, because the model that generates takes most of a GPU's memory that it finds free.
        for other in others:
            self._others.append(other)
            note_model(await other.start())
        if self._engine is not None:
            await self._engine.start()
        await self.several.start()

    async def prepare(self) -> None:
        """Start what the server serves without, and a request would have to wait for."""
        await asyncio.to_thread(prepare_arguments)
        searches = self.config.web.provider is not None
        if (
            self.config.egress != "off"
            or self.config.egress_allow
            or self.config.tools is not None
            or self.config.images.url is not None
            or searches
        ):
            await asyncio.to_thread(prepare_egress)
        if searches:
            await asyncio.to_thread(prepare_pages)
        if self.context is not None and self.context.models.speech:
            await asyncio.to_thread(prepare_sounds)
        if self._engine is not None:
            await self._engine.prepare()

    async def _watch(self, what: str, death: Awaitable[BaseException]) -> None:
        cause = await death
        log.critical("the %s has died: %r", what, cause)
        self.phase, self.cause = "dead", cause
        self.died.set()

    def _readings(self) -> Iterator[Reading]:
        assert self._storage is not None and self.context is not None
        assert self._deliveries is not None and self._retention is not None
        engines = {id(served.engine): served for served in self.context.models if served.adapter is None}
        for served in engines.values():
            model, stats = {"model": served.root}, served.engine.stats()
            yield Reading("engine", stats, model)
            yield Reading("engine", self._engine_rates[served.root].read(stats), model)
            yield Reading("engine", {"waiting_tokens": served.engine.admission.num_waiting_tokens}, model)
            yield from _kv_readings(stats, model)
            yield Reading("gpu", served.engine.gpu(), model)
        yield from self.several.readings()
        for pooled in self.context.models.pooled:
            waiting = {"waiting_requests": pooled.engine.admission.num_waiting}
            yield Reading("pooling", pooled.engine.stats(), {"model": pooled.name})
            yield Reading("pooling", waiting, {"model": pooled.name})
        for speech in self.context.models.speech:
            waiting = {"waiting_requests": speech.engine.admission.num_waiting}
            yield Reading("speech", speech.engine.stats(), {"model": speech.name})
            yield Reading("speech", waiting, {"model": speech.name})
        yield Reading("storage", _commit_numbers(self._storage.commit_stats()))
        yield Reading("sse", {"readers": self.num_streams})
        yield Reading("websocket", self.sockets.readings())
        yield Reading("http", {"connections": self.num_connections()})
        ahead = {"ahead_seconds": ahead_s(), "ahead_of_database_seconds": self._retention.ahead_of_database_s}
        yield Reading("clock", ahead)
        yield Reading("runs", self.context.runs.readings())
        yield Reading("webhooks", {"pending": self._deliveries.num_pending})
        yield from self._retention.readings()
        if self._batches is not None:
            yield from self._batches.readings()

    # -- being -----------------------------------------------------------------------------------------------

    def admit(self, method: str, path: str) -> None:
        """ApiError 503 for what this phase no longer, or not yet, takes."""
        if self.phase == "ready":
            return
        if self.phase == "draining" and (method != "POST" or path.endswith(STILL_SERVED_POSTS)):
            return
        raise self.refusal()

    def refusal(self) -> ApiError:
        """Why the server does not serve in its present phase."""
        code, message, seconds = _REFUSALS[self.phase]
        return ApiError(503, message, code=code, headers={"retry-after": seconds})

    async def probe(self) -> None:
        """Have the engine generate; ApiError 503 `probe_failed` where it does not. See `GenerationProbe`."""
        assert self.context is not None
        served = self.context.models.first
        held = self.several.shelf.get(served.root)
        if held is not None and held.state == "unloaded":  # it rests, and a probe is no reason to wake it
            return
        self._probe = self._probe or GenerationProbe(served.engine)
        await self._probe.check()

    @contextlib.contextmanager
    def at_work(self, method: str) -> Iterator[None]:
        """Held around each request, so that a drain knows when new work has gone quiet."""
        if method != "POST":
            yield
            return
        self._num_posts += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_posts -= 1
            if not self._num_posts:
                self._quiet.set()

    # -- going -----------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> None:
        """Take no new work; wait up to `grace_s` seconds for what is in flight, then park or end it."""
        if self.phase != "dead":
            self.phase = "draining"
        patience_s.set(LAST_WRITES_S)
        if self.context is None or self._drained:
            return
        self._drained = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        self.sockets.drain()
        if self._batches is not None:  # no request of theirs is taken any more
            self._batches.leave()
        await self.context.runs.drain(grace_s, blameless=self.phase != "dead")
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._quiet.wait()
                    await self.sockets.all_closed()
        if self._batches is not None:
            await self._batches.close()
        if self._num_posts:
            log.warning("%d requests were still in flight after %g s", self._num_posts, grace_s)
        self.context.completions.stop()

    async def close(self) -> None:
        """Let go of everything, last come first; runs that no drain has ended are cut.

        What fails to close keeps nothing else open; its error is raised when all the others are closed.
        """
        async with contextlib.AsyncExitStack() as stack:
            for close in self._closers():
                stack.push_async_callback(close)
            await self.drain(0)

    def _closers(self) -> Iterator[Callable[[], Awaitable[object]]]:
        """What is to be closed: the last of them first."""
        if self.telemetry.tracing is not None:
            yield partial(asyncio.to_thread, self.telemetry.tracing.close)
        if self._storage is not None:
            yield self._storage.close
        if self._meter is not None:
            yield self._meter.close
        yield self.keys.close
        if self._seat is not None:
            yield self._seat.close
        yield self.several.close
        if self._engine is not None:
            yield self._engine.close
        for other in reversed(self._others):
            yield other.close
        if self._deliveries is not None:
            yield self._deliveries.close
        if self._meters is not None:
            yield self._meters.close
        if self._retention is not None:
            yield self._retention.close
        if self._library is not None:
            yield self._library.ingester.close
        for spec in reversed(tuple((self._registry or {}).values())):
            if spec.close is not None:
                yield spec.close
        yield self._end_tasks

    async def _end_tasks(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self.context = None
        if self._noting is not None:
            await asyncio.gather(self._noting, return_exceptions=True)


def _every_owner(words: Sequence[str], models: Models) -> LimitSet:
    """The limits of every owner, as the setting `owner_limit` has them. The log is told of those that hold
    for no model."""
    limits = changed(NONE, parse_limits(words))
    for model in limits.models:
        if (why := models.unserved(model)) is not None:
            log.warning("owner_limit: %s", why)
    return limits


def _kv_readings(stats: EngineStats, model: Mapping[str, str]) -> Iterator[Reading]:
    """Where prompt tokens were found that were not computed anew, and what of the KV cache is on disk."""
    for tier, tokens in stats.hit_tokens.items():
        yield Reading("kv", {"hit_tokens_total": tokens}, {**model, "tier": tier})
    if stats.kv_blocks:  # what has no KV of its own saves none
        yield Reading("kv", {"disk_state": 1}, {**model, "state": stats.tier.state})
    if not stats.tier.disk_bytes_limit:
        return
    yield Reading("kv", stats.tier, model)
    by_cause = {
        "evictions_total": stats.tier.evictions,
        "restores_refused_total": stats.tier.restores_refused,
        "saves_refused_total": stats.tier.saves_refused,
    }
    for name, causes in by_cause.items():
        for cause, number in causes.items():
            yield Reading("kv", {name: number}, {**model, "cause": cause})


def _commit_numbers(stats: CommitStats) -> dict[str, float | Distribution]:
    """The writer's counters, and how long commits took, in seconds."""
    return {
        "commits_total": stats.commits,
        "syncs_total": stats.synced,
        "jobs_total": stats.jobs,
        "checkpoints_total": stats.checkpoints,
        "wal_bytes": stats.wal_bytes,
        "commit_seconds": Distribution(COMMIT_SECONDS, stats.seconds, stats.seconds_sum),
    }
