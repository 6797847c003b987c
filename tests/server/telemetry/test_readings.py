"""Tallies: what they tell at a scrape is what the library's histogram would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.telemetry.readings import Tallies

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def test_a_tally_tells_what_the_librarys_histogram_does() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "help", ["model"], buckets=BOUNDS, registry=theirs)
    tallies = Tallies("seconds", "help", BOUNDS, "model")
    ours.register(tallies)
    drawn = random.Random(3)
    for _ in range(200):
        model = drawn.choice("ab")
        value = drawn.choice([*BOUNDS, 10 ** drawn.uniform(-4, 1)])
        histogram.labels(model).observe(value)
        tallies.of(model).observe(value)
    said, expected = generate_latest(ours).decode(), generate_latest(theirs).decode()
    assert sorted(said.splitlines()) == sorted(
        line for line in expected.splitlines() if "_created" not in line
    )
