"""Keeps the server's counters and histograms and writes them out in Prometheus text format.

Other modules report what happened by calling `Telemetry`. Numbers that the engine, storage and streams keep
themselves are read at each scrape. Labels are of few values: a model's name in the configuration, a route's
pattern, a code of the table of errors; never what a request says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine import Chunk, EngineError, Place
from server import __version__
from server.telemetry.degenerate import Warnings
from server.telemetry.observation import Asked, Observation
from server.telemetry.readings import Reading, Readings, Tallies
from server.telemetry.record import current
from server.telemetry.several_processes import page_of_all
from server.telemetry.tracing import Tracing
from server.telemetry.vllm_names import in_vllm_names

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# A gauge of birth times beside every counter would double the page and tell nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OTHER_METHOD = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})

prompts = logging.getLogger("antiphon.prompts")


class Telemetry:
    """One server's metrics and spans; nothing here is global, so tests may have several."""

    def __init__(
        self, *, tracing: Tracing | None = None, vllm_names: bool = False, log_prompts: bool = False
    ) -> None:
        """tracing: what makes spans, if anything does. vllm_names: show metrics under vLLM's names too.
        log_prompts: what text a generation is asked to go on from is a log line."""
        self.tracing = tracing
        self.log_prompts = log_prompts
        self._vllm_names = vllm_names
        self._warnings = Warnings()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # process_*: memory, processor time, descriptors, start
        build = Gauge("antiphon_build_info", "1; the version.", ["version"], registry=self._registry)
        build.labels(__version__).set(1)
        self._add_http()
        self._add_generations()
        counter, histogram = self._counter, self._histogram
        self._runs = counter("runs", "Runs ended, by status.", "model", "status")
        self._run_seconds = histogram(
            "run_seconds", "From a run's creation to its end.", SECONDS, "model", "status"
        )
        self._tools = counter(
            "tool_calls",
            "Calls that models made, by tool (client: of a function of the client) and outcome.",
            *("model", "tool", "outcome"),
        )
        self._commit = self._tallies("commit_delay_seconds", "From an event's making to its commit.").of()
        self._over_limit = counter(
            "over_limit",
            "Requests and calls of tools that were one too many, by the limit in the way.",
            "limit",
        )
        self._webhooks = counter(
            "webhook_attempts",
            "Attempts to deliver a notice: delivered, failed (to be tried again) or given_up.",
            "outcome",
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"antiphon_{name}", help, labels, buckets=buckets, registry=self._registry)

    def _tallies(self, name: str, help: str, *labels: str) -> Tallies:
        """A histogram of seconds that is told of every token, on the event loop."""
        tallies = Tallies(f"antiphon_{name}", help, TOKEN_SECONDS, *labels)
        self._registry.register(tallies)
        return tallies

    def _add_http(self) -> None:
        counter = self._counter
        self._requests = counter("requests", "Requests by route, method and status.", *_HTTP)
        self._request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to the end of its reply.", SECONDS, "route"
        )
        self._errors = counter("errors", "Refused requests and failed runs, by error code.", "code")
        self._rate_limited = counter("rate_limited", "Requests refused with 429, by error code.", "code")
        self._in_flight = Gauge(
            "antiphon_requests_in_flight", "Requests being answered.", registry=self._registry
        )

    def _add_generations(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._generations = counter(
            "generations",
            "Generations ended: stop, length, tool_calls, cancelled or error.",
            *("model", "finish_reason"),
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of generations that ended.", "model")
        self._output_tokens = counter("generation_tokens", "Tokens that they generated.", "model")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens from the prefix cache.", "model")
        self._reasoning_tokens = counter("reasoning_tokens", "Generated tokens of reasoning.", "model")
        self._first_token = histogram(
            "time_to_first_token_seconds", "From a generation's request to its first token.", SECONDS, "model"
        )
        self._inter_token = self._tallies(
            "inter_token_seconds", "Between two deliveries of a generation's tokens.", "model"
        )
        self._per_token = histogram(
            "time_per_output_token_seconds",
            "A generation's mean time between tokens.",
            *(TOKEN_SECONDS, "model"),
        )
        self._e2e = histogram(
            "generation_seconds", "From a generation's request to its end.", SECONDS, "model"
        )
        self._queue = histogram(
            "queue_seconds", "From a generation's request to its first step.", SECONDS, "model"
        )
        self._prefill = histogram(
            "prefill_seconds", "From its first step to its first token.", SECONDS, "model"
        )
        self._decode = histogram("decode_seconds", "From its first token to its last.", SECONDS, "model")
        self._prompt_size = histogram(
            "request_prompt_tokens", "Prompt tokens of a generation.", TOKENS, "model"
        )
        self._output_size = histogram(
            "request_generation_tokens", "Tokens that a generation came to.", TOKENS, "model"
        )

    # -- what happens ----------------------------------------------------------------------------------------

    def watch(self, readings: Callable[[], Iterable[Reading]]) -> None:
        """Read these at every scrape."""
        self._registry.register(Readings(readings))

    def request_started(self) -> None:
        """A request's headers are here."""
        self._in_flight.inc()

    def request_ended(
        self, route: str, method: str, status: int, seconds: float, error_code: str | None = None
    ) -> None:
        """Its reply is over. `route` is the pattern, never the path: paths hold ids. error_code: of the
        refusal, if it was one."""
        self._in_flight.dec()
        known = method if method in METHODS else OTHER_METHOD
        self._requests.labels(route, known, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)
        if error_code is not None:
            self.error(error_code)
            if status == 429:
                self._rate_limited.labels(error_code).inc()

    def error(self, code: str) -> None:
        """A request was refused, or a run failed, with an error of this code."""
        self._errors.labels(code).inc()

    def run_ended(self, model: str, status: str, seconds: float) -> None:
        """A run reached a terminal status, so long after its creation."""
        self._runs.labels(model, status).inc()
        self._run_seconds.labels(model, status).observe(seconds)

    def tool_called(self, model: str, tool: str, outcome: Literal["ok", "error", "asked"]) -> None:
        """A model called a tool. `tool`: one of this server's, or `client` where the client was asked."""
        self._tools.labels(model, tool, outcome).inc()

    def limited(self, limit: str) -> None:
        """A request, or a call of a tool, was one too many."""
        self._over_limit.labels(limit).inc()

    def committed(self, seconds: float) -> None:
        """An event waited this long for its commit."""
        self._commit.observe(seconds)

    def webhook_attempt(self, outcome: Literal["delivered", "failed", "given_up"]) -> None:
        """An attempt to deliver a notice is over."""
        self._webhooks.labels(outcome).inc()

    async def generate(self, asked: Asked, place: Place | None) -> AsyncGenerator[Chunk]:
        """The engine's chunks of a generation, whose metrics, span and tokens are noted; see
        `Engine.generate`."""
        self._warnings.look(asked.model, asked.request.sampling)
        if self.log_prompts:
            await _log_prompt(asked)
        seen = Observation.of(asked, content=self.tracing is not None and self.tracing.content)
        record, request, span = current.get(), asked.request, None
        if self.tracing is not None:
            span = self.tracing.generation(asked)
            request = replace(request, trace_headers=self.tracing.headers(span))
        elif record is not None and record.traceparent is not None:
            request = replace(request, trace_headers=record.trace_headers)
        gap = self._inter_token.of(asked.model).observe
        try:
            async with aclosing(asked.engine.generate(request, place)) as chunks:
                async for chunk in chunks:
                    seconds = seen.take(chunk)
                    if seconds is not None:
                        gap(seconds)
                    yield chunk
            if asked.answered is not None:
                asked.answered(None)
        except Exception as error:
            if asked.answered is not None and isinstance(error, EngineError):
                asked.answered(error)
            seen.outcome, seen.error = "error", type(error).__name__
            raise
        finally:
            self._generated(seen)
            if span is not None and self.tracing is not None:
                self.tracing.generated(span, seen)

    def _generated(self, seen: Observation) -> None:
        """A generation is over; cancelled where its reader did not wait for the end."""
        ended = time.perf_counter()
        asked, model = seen.asked, seen.asked.model
        num_prompt = len(asked.request.prompt_ids)
        self._generations.labels(model, seen.outcome).inc()
        self._prompt_tokens.labels(model).inc(num_prompt)
        self._output_tokens.labels(model).inc(seen.num_tokens)
        self._cached_tokens.labels(model).inc(seen.cached_tokens)
        self._reasoning_tokens.labels(model).inc(seen.reasoning_tokens)
        self._prompt_size.labels(model).observe(num_prompt)
        self._output_size.labels(model).observe(seen.num_tokens)
        self._e2e.labels(model).observe(ended - seen.began)
        if seen.timing is not None:
            self._queue.labels(model).observe(seen.timing.queue_s)
            self._prefill.labels(model).observe(seen.timing.prefill_s)
        if seen.first is not None:
            self._first_token.labels(model).observe(seen.first - seen.began)
            self._decode.labels(model).observe(seen.last - seen.first)
        if (per_token := seen.per_token_s) is not None:
            self._per_token.labels(model).observe(per_token)
        if asked.response_id is None and seen.num_calls:  # a run knows whose functions they are
            self._tools.labels(model, "client", "asked").inc(seen.num_calls)
        if (record := current.get()) is not None:
            record.model, record.finish_reason = model, seen.outcome
            record.output_tokens += seen.num_tokens
            if asked.request.choice == 0:  # the choices of a prompt share it
                record.prompt_tokens += num_prompt
                record.cached_tokens += seen.cached_tokens
            if record.first_token_s is None and seen.first is not None:
                record.first_token_s = seen.first - seen.began

    # -- what is shown ---------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(_Page(self._registry, vllm_names=self._vllm_names))

    def own_page(self) -> bytes:
        """The same under our names alone, for a process that makes one page of several."""
        return generate_latest(self._registry)

    def page_of_all(self, pages: Mapping[str, bytes], own: str) -> bytes:
        """One page of those of several processes; see `page_of_all`."""
        return generate_latest(_Page(page_of_all(pages, own), vllm_names=self._vllm_names))


_HTTP = ("route", "method", "status")


async def _log_prompt(asked: Asked) -> None:
    """A log line with the text that a generation goes on from, and how tokens are drawn."""
    text = await asked.engine.detokenize(asked.request.prompt_ids, owner=asked.request.owner)
    prompts.info(
        "%s prompt %r, %r",
        asked.request.id,
        text,
        asked.request.sampling,
        extra={"model": asked.model, "prompt": text},
    )


class _Page(Collector):
    """What a scrape reads: the registry, and the same under other names where that is wanted."""

    def __init__(self, registry: Collector, *, vllm_names: bool) -> None:
        self._registry = registry
        self._vllm_names = vllm_names

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        families = list(self._registry.collect())
        return [*families, *in_vllm_names(families)] if self._vllm_names else families
