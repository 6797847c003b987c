"""Numbers that the engine, storage and streams keep themselves, as metrics: read when they are asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import EngineStats

RATE_WINDOW_S = 60.0
"""Over how long tokens a second are told."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often a value was at most each of `bounds` and above the one before, and last above all of them;
    and the sum of all values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers of one part of the server, by name: a dataclass or a mapping.

    A name that ends with `_total` is a counter, another one a gauge, and a Distribution a histogram. What is
    none of these is left out. labels: of all of them.
    """

    prefix: str
    numbers: object
    labels: Mapping[str, str] = field(default_factory=dict)


class Readings(Collector):
    """Readings as metrics, taken at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One family for each number, with a sample for each reading that has it, such as of several
        models."""
        families: dict[str, Metric] = {}
        for reading in self._read():
            for name, value in _numbers(reading.numbers).items():
                if isinstance(value, Distribution | int | float):
                    family = _family(reading, name, value)
                    known = families.setdefault(family.name, family)
                    if known is not family:
                        known.samples += family.samples
        return families.values()


def _numbers(reading: object) -> Mapping[str, Any]:
    if is_dataclass(reading):
        return {field.name: getattr(reading, field.name) for field in fields(reading)}
    assert isinstance(reading, Mapping)
    return reading


def _family(reading: Reading, name: str, value: Distribution | float) -> Metric:
    full = f"antiphon_{reading.prefix}_{name.removesuffix('_total')}"
    help = f"{name.removesuffix('_total').replace('_', ' ')} of the {reading.prefix}"
    names, labels = tuple(reading.labels), tuple(reading.labels.values())
    family: Any
    if isinstance(value, Distribution):
        bounds = [*(repr(float(bound)) for bound in value.bounds), "+Inf"]
        family = HistogramMetricFamily(full, help, labels=names)
        cumulative = accumulate(value.counts)
        family.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
        return family  # type: ignore[no-any-return]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(full, help, labels=names)
    family.add_metric(labels, float(value))
    return family  # type: ignore[no-any-return]


class EngineRates:
    """Numbers that follow from an engine's own: shares, and how many tokens a second pass."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), 0, 0)])

    def read(self, stats: EngineStats) -> dict[str, float]:
        """The share of the KV cache in use, and tokens a second over the latest `RATE_WINDOW_S`, or since the
        start."""
        now = time.monotonic()
        seen = self._seen
        while len(seen) > 1 and seen[1][0] <= now - RATE_WINDOW_S:
            seen.popleft()
        if now - seen[-1][0] >= 1.0:
            seen.append((now, stats.prompt_tokens_total, stats.output_tokens_total))
        then, prompt, output = seen[0]
        seconds = max(now - then, 1e-9)
        return {
            "kv_cache_usage": stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0,
            "prompt_tokens_per_second": (stats.prompt_tokens_total - prompt) / seconds,
            "output_tokens_per_second": (stats.output_tokens_total - output) / seconds,
        }
