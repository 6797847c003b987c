"""One page of metrics of several processes at one port."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.telemetry import Telemetry


def page(requests: int, tokens: int) -> bytes:
    registry = CollectorRegistry()
    Counter("antiphon_requests", "Requests.", ["route"], registry=registry).labels('/v1/"x"').inc(requests)
    Histogram("antiphon_request_seconds", "Time.", buckets=(1.0,), registry=registry).observe(0.5)
    Gauge("antiphon_engine_running", "Running.", ["model"], registry=registry).labels("m").set(tokens)
    return generate_latest(registry)


def test_each_process_has_its_own_lines_and_the_engine_is_there_once() -> None:
    pages = {"server-0": page(3, 7), "server-1": page(5, 8), "engine": b""}
    text = Telemetry(vllm_names=True).page_of_all(pages, "server-1").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, sample.labels.get("process"), sample.labels.get("le")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["antiphon_requests_total", "server-0", None] == 3
    assert samples["antiphon_requests_total", "server-1", None] == 5
    assert samples["antiphon_request_seconds_bucket", "server-0", "+Inf"] == 1
    assert samples["antiphon_engine_running", None, None] == 8
    assert samples["vllm:num_requests_running", None, None] == 8
    assert families["antiphon_requests"].samples[0].labels["route"] == '/v1/"x"'
    assert text.count("# TYPE antiphon_requests_total counter") == 1
