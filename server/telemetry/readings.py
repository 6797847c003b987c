"""Numbers that the engine, storage and streams keep themselves, as metrics: read when they are asked for."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import EngineStats
from server.telemetry.meanings import MEANINGS

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
    help = MEANINGS.get(f"{reading.prefix}_{name}", name)
    names, labels = tuple(reading.labels), tuple(reading.labels.values())
    family: Any
    if isinstance(value, Distribution):
        family = HistogramMetricFamily(full, help, labels=names)
        _add(family, labels, value)
        return family  # type: ignore[no-any-return]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(full, help, labels=names)
    family.add_metric(labels, float(value))
    return family  # type: ignore[no-any-return]


class Tally:
    """How often values came, as `Distribution` says it. What is told of every token takes 0.5 us here and 2.8
    in the library's histogram, which looks at each bound and takes locks."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """A value came. For one thread alone."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def distribution(self) -> Distribution:
        """All that have come so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Tallies(Collector):
    """One histogram of tallies, by the values of its labels."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], *labels: str) -> None:
        self._name, self._help, self._bounds, self._labels = name, help, bounds, labels
        self._of: dict[tuple[str, ...], Tally] = {}

    def of(self, *values: str) -> Tally:
        """The tally of these labels."""
        found = self._of.get(values)
        return self._of.setdefault(values, Tally(self._bounds)) if found is None else found

    def collect(self) -> Iterable[Metric]:
        """The family, with the samples of each tally."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, tally in list(self._of.items()):
            _add(family, values, tally.distribution)
        return [family]


def _add(family: Any, labels: Sequence[str], found: Distribution) -> None:
    bounds = [*(repr(float(bound)) for bound in found.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(found.counts), strict=True)), found.total)


class EngineRates:
    """Numbers that follow from an engine's own: shares, and how many tokens a second pass."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int, int]]()

    def read(self, stats: EngineStats) -> dict[str, float]:
        """The share of the KV cache in use, and tokens a second over the latest `RATE_WINDOW_S`, or since the
        first reading, which tells of none."""
        now = time.monotonic()
        seen = self._seen
        while len(seen) > 1 and seen[1][0] <= now - RATE_WINDOW_S:
            seen.popleft()
        if not seen or now - seen[-1][0] >= 1.0:
            seen.append((now, stats.prompt_tokens_total, stats.output_tokens_total))
        then, prompt, output = seen[0]
        seconds = max(now - then, 1e-9)
        return {
            "kv_cache_usage": stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0,
            "prompt_tokens_per_second": (stats.prompt_tokens_total - prompt) / seconds,
            "output_tokens_per_second": (stats.output_tokens_total - output) / seconds,
        }
