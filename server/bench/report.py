"""The results of a measurement: as text, as JSON, and as a picture."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from server import __version__
from server.bench.figures import Spread, ratios
from server.bench.measure import Case, Plan
from server.environment import without_secrets

MOST_KINDS = 5  # of errors that are printed
FEW = 100  # values: of fewer, p99 is hardly more than the largest


@dataclass(frozen=True, slots=True)
class Pace:
    """How near decoding comes to what the memory allows: a step's seconds and bytes, and bytes a second that
    the memory was read at, in the same run."""

    step_s: float
    num_bytes: int
    read_rate: float

    @property
    def share(self) -> float:
        """Of the memory's pace, 0 to 1."""
        return self.num_bytes / self.step_s / self.read_rate


def text(case: Case, pace: Pace | None = None) -> Iterator[str]:
    """A case, line by line."""
    figures = case.figures
    yield f"{case.label}: {case.load}, {_rounds(case)}"
    yield f"  {figures.requests} requests in {figures.seconds:.1f} s, {figures.failed} failed"
    for error, count in islice(figures.errors.items(), MOST_KINDS):
        yield f"    {count} x {error}"
    if len(figures.errors) > MOST_KINDS:
        yield f"    and {len(figures.errors) - MOST_KINDS} other kinds of error, which --json lists"
    if figures.requests == figures.failed:
        return
    done = figures.requests - figures.failed
    if figures.short:
        yield f"    {figures.short} ended before their {case.num_output} tokens"
    rates = f"{figures.output_per_s:,.1f} tok/s out, {_rate(figures.input_per_s)} in"
    yield f"  {rates}, {figures.requests_per_s:.2f} requests/s"
    counts = f"{figures.output_tokens / done:.1f} tokens out in {figures.arrivals:.1f} arrivals a request"
    if figures.input_tokens is not None:
        counts += f", {figures.input_tokens / done:.1f} in, {figures.cached_tokens / done:.1f} of them cached"
    yield f"  {counts} (counted by {figures.counted})"
    yield f"  {'ms':8}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'values':>9}"
    for name, spread in (
        ("TTFT", figures.first),
        ("TPOT", figures.token),
        ("gap", figures.gap),
        ("E2E", figures.whole),
    ):
        yield f"  {name:8}{_row(spread)}"
    if case.spent is not None:
        yield f"  this client kept a processor busy for {case.spent / figures.seconds:.0%} of the time"
    if pace is not None:
        yield (
            f"  a decode step takes {pace.step_s * 1000:.3f} ms and reads {pace.num_bytes / 1e6:,.1f} MB: "
            f"{pace.share:.0%} of the {pace.read_rate / 1e9:.1f} GB/s that this memory was read at"
        )


LEGEND = (
    "TTFT: to the first text. TPOT: a token, from the first text to the last. gap: between arrivals of text,",
    "which may hold several tokens. E2E: to the end. All from when a request was due; of failed ones, none.",
)


def legend(cases: Sequence[Case]) -> Iterator[str]:
    """What the columns mean, and what to make of few values."""
    yield from LEGEND
    if any(found.first is None or found.first.count < FEW for found in (case.figures for case in cases)):
        yield f"Of fewer than {FEW} values p99 is little but the largest: --requests or --rounds make more."


def compared(ours: Case, theirs: Case) -> Iterator[str]:
    """One server by another under the same load, line by line."""
    yield f"{ours.label} by {theirs.label}: {ours.load}, median and extremes of {_rounds(ours)}"
    rows = ratios(ours.rounds, theirs.rounds)
    for ratio in rows:
        yield f"  {ratio.name:14}{ratio.median:>8.2f}  {ratio.lowest:.2f} to {ratio.highest:.2f}"
    if not rows:
        yield "  the two have no figure in common"


def _rounds(case: Case) -> str:
    count = len(case.samples)
    return f"{count} round" if count == 1 else f"{count} rounds"


def _row(spread: Spread | None) -> str:
    if spread is None:
        return f"{'-':>10}" * 5 + f"{0:>9}"
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)
    return "".join(f"{value:>10.2f}" for value in values) + f"{spread.count:>9}"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f} tok/s"


# ------------------------------------------------------------------------------------------------------------
# JSON


def as_json(
    options: Mapping[str, object],
    plan: Plan,
    cases: Sequence[Case],
    paces: Sequence[Pace | None],
    comparing: bool,
) -> bytes:
    """Everything: the options but for keys, the machine, the plan, figures of each case and round, each
    request, ratios."""
    body = {
        "antiphon": __version__,
        "options": {
            name: without_secrets(value)
            for name, value in options.items()
            if isinstance(value, str | int | float | tuple | Path) and "key" not in name
        },
        "ended_at": int(time.time()),
        "machine": {"platform": platform.platform(), "processors": os.cpu_count()},
        "plan": asdict(plan),
        "cases": [
            {
                "label": case.label,
                "load": asdict(case.load),
                "figures": asdict(case.figures),
                "client_s": case.spent,
                "pace": None if pace is None else {**asdict(pace), "share": pace.share},
                "rounds": [
                    {"figures": asdict(found), "requests": list(map(_request, samples))}
                    for found, samples in zip(case.rounds, case.samples, strict=True)
                ],
            }
            for case, pace in zip(cases, paces, strict=True)
        ],
        "ratios": [
            {
                "load": asdict(ours.load),
                "ratios": [asdict(ratio) for ratio in ratios(ours.rounds, theirs.rounds)],
            }
            for ours, theirs in pairs(cases, comparing)
        ],
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def pairs(cases: Sequence[Case], comparing: bool) -> list[tuple[Case, Case]]:
    """The two cases of each load, where two servers are compared."""
    return list(zip(cases[::2], cases[1::2], strict=True)) if comparing else []


def _request(sample: Any) -> dict[str, Any]:
    return {
        "ttft_ms": sample.first_s * 1000,
        "e2e_ms": sample.whole_s * 1000,
        "input_tokens": sample.num_input,
        "output_tokens": sample.num_output,
        "arrivals_ms": [round((arrival - sample.due) * 1000, 3) for arrival in sample.arrivals],
        "error": sample.error,
    }


# ------------------------------------------------------------------------------------------------------------
# A picture


def plot(cases: Sequence[Case], file: Path) -> None:
    """Draw what share of requests (and gaps) was at most how long, and the rates, as a PNG.

    Raises ImportError without matplotlib, OSError where it cannot write.
    """
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(12, 8), layout="constrained")
    first, token, whole, rates = sheet.subplots(2, 2).flat
    names = [f"{case.label}, {case.load}" for case in cases]
    for place, case in enumerate(cases):
        done = [sample for in_round in case.samples for sample in in_round if sample.error is None]
        tokens = [value for sample in done if (value := sample.token_s) is not None]
        for axes, values in (
            (first, [sample.first_s for sample in done]),
            (token, tokens),
            (whole, [sample.whole_s for sample in done]),
        ):
            if values:
                axes.ecdf([1000 * value for value in values], color=f"C{place}")
    for axes, title in ((first, "to the first text"), (token, "a token"), (whole, "to the end")):
        axes.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1))
        axes.grid(alpha=0.3)
    for place, (case, name) in enumerate(zip(cases, names, strict=True)):
        rates.bar(place, case.figures.output_per_s, label=name, color=f"C{place}")
    rates.set(title="output", ylabel="tok/s", xticks=[])
    sheet.legend(*rates.get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    sheet.savefig(file, dpi=120)
