"""Figures of many requests: percentiles of their times, rates, and ratios of two servers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its reader saw it; times are those of `time.perf_counter`.

    due: when it was to be sent; every latency counts from there. arrivals: when text came, once for all that
    came together. counted: whether the counts are the server's, or those of the events that held text
    (num_input is then unknown). error: why it failed; a failed request is counted, and is in no other figure.
    steps: the engine's, from the first arrival to the last, where it can be asked.
    """

    due: float
    ended: float
    arrivals: tuple[float, ...] = ()
    num_output: int = 0
    num_input: int | None = None
    num_cached: int = 0
    counted: Literal["usage", "events"] = "events"
    error: str | None = None
    steps: int | None = None

    @property
    def first_s(self) -> float:
        """Seconds to the first text, or to the end where there was none."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.due

    @property
    def whole_s(self) -> float:
        """Seconds to the end."""
        return self.ended - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between arrivals."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first; None where there is no second one."""
        if len(self.arrivals) < 2 or self.num_output < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds: the mean and percentiles (linear between values) of `count` of them."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def spread(seconds: Sequence[float]) -> Spread | None:
    """The spread of some times; None for none."""
    if not seconds:
        return None
    values = sorted(1000 * value for value in seconds)

    def at(percent: int) -> float:
        place = (len(values) - 1) * percent / 100
        below = int(place)
        above = min(below + 1, len(values) - 1)
        return values[below] + (values[above] - values[below]) * (place - below)

    return Spread(len(values), statistics.fmean(values), *map(at, PERCENTILES))


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load was like. Rates count completed requests over all of the time, failures' included.

    short: completed with fewer tokens than were asked for. arrivals: of text, a completed request. token:
    from the first text to the last, a token; gap: from one arrival to the next.
    """

    requests: int
    failed: int
    short: int
    seconds: float
    requests_per_s: float
    input_tokens: int | None
    cached_tokens: int
    output_tokens: int
    input_per_s: float | None
    output_per_s: float
    arrivals: float
    counted: str
    first: Spread | None
    token: Spread | None
    gap: Spread | None
    whole: Spread | None
    errors: dict[str, int] = field(default_factory=dict)


def figures(samples: Sequence[Sample], seconds: float, *, asked: int) -> Figures:
    """The figures of requests for `asked` tokens each, that took so long together."""
    done = [sample for sample in samples if sample.error is None]
    known = [sample.num_input for sample in done if sample.num_input is not None]
    num_input = sum(known) if done and len(known) == len(done) else None
    num_output = sum(sample.num_output for sample in done)
    counted = {sample.counted for sample in done}
    tokens = [value for sample in done if (value := sample.token_s) is not None]
    return Figures(
        requests=len(samples),
        failed=len(samples) - len(done),
        short=sum(sample.num_output < asked for sample in done),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        input_tokens=num_input,
        cached_tokens=sum(sample.num_cached for sample in done),
        output_tokens=num_output,
        input_per_s=None if num_input is None else num_input / seconds,
        output_per_s=num_output / seconds,
        arrivals=sum(len(sample.arrivals) for sample in done) / max(len(done), 1),
        counted=" and ".join(sorted(counted)) or "nothing",
        first=spread([sample.first_s for sample in done]),
        token=spread(tokens),
        gap=spread([gap for sample in done for gap in sample.gaps_s]),
        whole=spread([sample.whole_s for sample in done]),
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None).most_common()),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of a server by another's: the median of the rounds, and the extremes."""

    name: str
    median: float
    lowest: float
    highest: float


_COMPARED: Mapping[str, Callable[[Figures], float | None]] = {
    "output tok/s": lambda measured: measured.output_per_s,
    "TTFT p50": lambda measured: measured.first.p50 if measured.first else None,
    "TTFT p99": lambda measured: measured.first.p99 if measured.first else None,
    "TPOT p50": lambda measured: measured.token.p50 if measured.token else None,
    "E2E p50": lambda measured: measured.whole.p50 if measured.whole else None,
}


def ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[Ratio]:
    """Ours by theirs, round by round; a figure that a round does not have is left out."""
    rows = []
    for name, read in _COMPARED.items():
        pairs = [(read(one), read(other)) for one, other in zip(ours, theirs, strict=True)]
        values = [one / other for one, other in pairs if one and other]
        if values:
            rows.append(Ratio(name, statistics.median(values), min(values), max(values)))
    return rows
