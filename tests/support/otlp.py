"""A receiver of OpenTelemetry spans on loopback: what a collector would be sent, by trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came. Ids are in hexadecimal; links are (trace id, span id); times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: dict[str, int]
    links: list[tuple[str, str]]
    service: str
    start: int
    end: int
    failed: bool


@dataclass
class Receiver:
    """What has come so far."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    came: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, enough: Callable[[list[ReceivedSpan]], bool], seconds: float = 20.0) -> list[ReceivedSpan]:
        """The spans, once there are enough of them."""
        with self.came:
            assert self.came.wait_for(lambda: enough(self.spans), seconds), [span.name for span in self.spans]
            return list(self.spans)

    def named(self, *names: str) -> list[ReceivedSpan]:
        """The first span of each of these names, once all have come."""
        spans = self.wait(lambda spans: set(names) <= {span.name for span in spans})
        return [next(span for span in spans if span.name == name) for name in names]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    _attributes(span.attributes),
                    {event.name: event.time_unix_nano for event in span.events},
                    [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    service,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                )


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A receiver on a free port; its `url` is an OTEL_EXPORTER_OTLP_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with found.came:
                found.paths.add(self.path)
                found.spans += _spans(body)
                found.came.notify_all()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the spans are what is looked at."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
