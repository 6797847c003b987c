"""Metrics: what the histograms of tokens say is what prometheus_client's own would say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.metrics import TOKEN_SECONDS, Telemetry


def test_tokens_are_counted_as_the_client_library_would_count_them() -> None:
    registry = CollectorRegistry()
    gaps = Histogram(
        "antiphon_inter_token_seconds",
        "Between tokens of one generation.",
        buckets=TOKEN_SECONDS,
        registry=registry,
    )
    telemetry = Telemetry()
    # On a bound, between two, below and above all of them; and several tokens that came together.
    for num, seconds in ((1, 0.005), (1, 0.006), (1, 0.0), (1, 99.0), (4, 0.5)):
        telemetry.tokens(num, seconds)
        for _ in range(num):
            gaps.observe(seconds / num)
    page = telemetry.exposition().decode()
    assert generate_latest(registry).decode() in page
    assert "antiphon_commit_delay_seconds_count 0.0" in page
