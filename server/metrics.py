"""Keeps the server's counters and histograms and writes them out in Prometheus text format.

Other modules report what happened by calling `Telemetry`. Numbers that the engine, storage and streams keep
themselves are read at each scrape.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, is_dataclass
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import Chunk

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

# A gauge of birth times beside every counter would double the page and tell nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Readings = Callable[[], Iterable[tuple[str, object]]]
"""Pairs (prefix, a dataclass or dict of numbers): those named `*_total` are counters, the others gauges."""


class Telemetry:
    """One server's metrics; nothing here is global, so tests may have several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "antiphon_requests",
            "Requests by route, method and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._request_seconds = Histogram(
            "antiphon_request_seconds",
            "From a request's arrival to the end of its reply.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._runs = Counter("antiphon_runs", "Runs ended, by status.", ("status",), registry=registry)
        self._first_token = Histogram(
            "antiphon_time_to_first_token_seconds",
            "From a generation's request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "antiphon_inter_token_seconds",
            "Between tokens of one generation.",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self._commit = Histogram(
            "antiphon_commit_delay_seconds",
            "From an event's making to its commit.",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self._webhooks = Counter(
            "antiphon_webhook_attempts",
            "Attempts to deliver a notice: delivered, failed (to be tried again) or given_up.",
            ("outcome",),
            registry=registry,
        )
        self._limited = Counter(
            "antiphon_rate_limited",
            "Requests refused, by the limit in the way.",
            ("limit",),
            registry=registry,
        )
        self._in_flight = Gauge("antiphon_requests_in_flight", "Requests being answered.", registry=registry)

    def watch(self, readings: Readings) -> None:
        """Read these gauges and totals at every scrape."""
        self._registry.register(_Readings(readings))

    def request_started(self) -> None:
        """A request's headers are here."""
        self._in_flight.inc()

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Its reply is over. `route` is the pattern, never the path: paths hold ids."""
        self._in_flight.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def run_ended(self, status: str) -> None:
        """A run reached a terminal status."""
        self._runs.labels(status).inc()

    def first_token(self, seconds: float) -> None:
        """A generation's first token came this long after it was asked for."""
        self._first_token.observe(seconds)

    def tokens(self, num: int, seconds: float) -> None:
        """`num` further tokens came together, `seconds` after those before them."""
        for _ in range(num):
            self._inter_token.observe(seconds / num)

    async def timed(self, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
        """The same chunks, their first token and the time between tokens observed; closes what it wraps."""
        then, first = time.perf_counter(), True
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.token_ids and not chunk.replayed:
                    now = time.perf_counter()
                    if first:
                        self.first_token(now - then)
                    else:
                        self.tokens(len(chunk.token_ids), now - then)
                    then, first = now, False
                yield chunk

    def limited(self, limit: str) -> None:
        """A request, or a call of a tool, was one too many."""
        self._limited.labels(limit).inc()

    def committed(self, seconds: float) -> None:
        """An event waited this long for its commit."""
        self._commit.observe(seconds)

    def webhook_attempt(self, outcome: Literal["delivered", "failed", "given_up"]) -> None:
        """An attempt to deliver a notice is over."""
        self._webhooks.labels(outcome).inc()

    def exposition(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """Numbers of dataclasses, read at scrape time."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """One family per number."""
        for prefix, reading in self._readings():
            for name, value in _numbers(reading).items():
                counter = name.endswith("_total")
                family = CounterMetricFamily if counter else GaugeMetricFamily
                label = f"antiphon_{prefix}_{name.removesuffix('_total')}"
                yield family(label, f"{name.replace('_', ' ')} of the {prefix}", value=float(value))


def _numbers(reading: object) -> dict[str, float]:
    fields: Any = reading
    if is_dataclass(reading) and not isinstance(reading, type):
        fields = asdict(reading)
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}
