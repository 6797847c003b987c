"""Spans of requests, generations and tools, sent by OTLP over HTTP.

The SDK is imported when a `Tracing` is made, so a server without it pays nothing. The standard OTEL_*
variables say where spans go, how many are kept and what the service is called. A span is made for each
request, generation and tool, never for a token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from server import __version__
from server.telemetry import trace_names as names
from server.telemetry.observation import Asked, Observation
from server.telemetry.record import RequestRecord, current

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLOSE_S = 3.0
"""How long a process that ends waits for the last spans to be sent."""


class TracingError(ValueError):
    """Spans cannot be made; the message says why."""


class Tracing:
    """Makes spans. content: whether they hold what was said to models and tools, and by them."""

    def __init__(self, *, content: bool = False) -> None:
        """Raises TracingError where the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingError(f"otel: `pip install -e '.[otel]'` first ({error})") from None
        self.content = content
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "antiphon"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("antiphon", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` seconds at most: nobody may be there to take it."""
        ending = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    # -- requests and runs -----------------------------------------------------------------------------------

    def request(self, record: RequestRecord, method: str, path: str, client: str) -> None:
        """Begin the span of a request, as a child of its client's; `record` then names the new span."""
        from opentelemetry.trace import SpanKind

        attributes = {names.METHOD: method, names.PATH: path, names.CLIENT: client}
        attributes[names.REQUEST_ID] = record.request_id
        if record.request_trace:
            attributes[names.REQUEST_TRACE] = record.request_trace
        parent = self._context(record)
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        self._enter(record, span)

    def replied(self, record: RequestRecord, method: str, route: str, status: int) -> None:
        """End the span of a request."""
        from opentelemetry.trace import StatusCode

        span = record.span
        span.update_name(f"{method} {route}")
        span.set_attributes({names.ROUTE: route, names.STATUS: status})
        if status >= 500:
            span.set_attribute(names.ERROR, record.error_code or str(status))
            span.set_status(StatusCode.ERROR)
        span.end()

    def taken_up(self, record: RequestRecord, response_id: str, *, resumed: bool) -> None:
        """Begin what stands for a run that no request of this process has started.

        A run that was queued goes on in its request's trace. One that is `resumed` begins a trace, with a
        link to that of its request, whose spans ended with another process.
        """
        from opentelemetry.trace import Link, SpanKind, get_current_span

        first = self._context(record)
        if not resumed:
            record.span = get_current_span(first)
            return
        before = current.get()
        parent = _under(before.span) if before is not None and before.span is not None else _nothing()
        link = Link(get_current_span(first).get_span_context())
        links = [link] if link.context.is_valid else []
        attributes = {names.RESPONSE_ID: response_id, names.REQUEST_ID: record.request_id}
        name = "resume_response"
        self._enter(record, self._tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, links=links))

    def left(self, record: RequestRecord) -> None:
        """End what `taken_up` began."""
        if record.span.is_recording():
            record.span.end()

    def _context(self, record: RequestRecord) -> Any:
        """The span that a record names, as a parent of spans."""
        carrier = {"traceparent": record.traceparent or "", "tracestate": record.trace_state}
        return self._propagator.extract(carrier, context=_nothing())

    def _enter(self, record: RequestRecord, span: Span) -> None:
        carrier = dict(self.headers(span))
        record.span = span
        record.traceparent = carrier.get("traceparent")
        record.trace_state = carrier.get("tracestate", "")

    # -- generations -----------------------------------------------------------------------------------------

    def generation(self, asked: Asked) -> Span:
        """Begin the span of a generation."""
        from opentelemetry.trace import SpanKind

        sampling = asked.request.sampling
        attributes: dict[str, Any] = {
            names.OPERATION: asked.operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: asked.model,
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.SEED: sampling.seed,
        }
        optional = {
            names.TOP_K: sampling.top_k,
            names.PRESENCE_PENALTY: sampling.presence_penalty,
            names.FREQUENCY_PENALTY: sampling.frequency_penalty,
            names.STOP: sampling.stop,
            names.CONVERSATION: asked.conversation_id,
            names.RESPONSE_ID: asked.response_id or asked.completion_id,
        }
        attributes |= {name: value for name, value in optional.items() if value}
        span = self._start(f"{asked.operation} {asked.model}", SpanKind.INTERNAL, attributes)
        if self.content and asked.messages is not None and span.is_recording():
            span.set_attribute(names.INPUT_MESSAGES, _messages(asked.messages()))
        return span

    def headers(self, span: Span) -> tuple[tuple[str, str], ...]:
        """Headers by which another server makes its spans children of this one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=_under(span))
        return tuple(carrier.items())

    def generated(self, span: Span, seen: Observation) -> None:
        """End the span of a generation."""
        from opentelemetry.trace import StatusCode

        attributes: dict[str, Any] = {
            names.RESPONSE_MODEL: seen.asked.model,
            names.FINISH_REASONS: (seen.outcome,),
            names.INPUT_TOKENS: len(seen.asked.request.prompt_ids),
            names.OUTPUT_TOKENS: seen.num_tokens,
            names.CACHED_TOKENS: seen.cached_tokens,
        }
        if seen.reasoning_tokens:
            attributes[names.REASONING_TOKENS] = seen.reasoning_tokens
        # The clock of spans is the wall's; what was measured is told back from now.
        now, wall = time.perf_counter(), time.time_ns()
        if seen.timing is not None:
            attributes |= {names.QUEUE_S: seen.timing.queue_s, names.PREFILL_S: seen.timing.prefill_s}
            begun = seen.began + seen.timing.queue_s
            span.add_event(names.PREFILL, timestamp=wall - int((now - begun) * 1e9))
        if seen.first is not None:
            attributes[names.FIRST_CHUNK] = seen.first - seen.began
            span.add_event(names.FIRST_TOKEN, timestamp=wall - int((now - seen.first) * 1e9))
        if seen.text is not None:
            said = {"role": "assistant", "content": "".join(seen.text), "finish_reason": seen.outcome}
            attributes[names.OUTPUT_MESSAGES] = _messages([said])
        if seen.error is not None:
            attributes[names.ERROR] = seen.error
            span.set_status(StatusCode.ERROR)
        span.set_attributes(attributes)
        span.end()

    # -- tools -----------------------------------------------------------------------------------------------

    @contextmanager
    def tool(
        self, name: str, kind: str, call_id: str, arguments: str
    ) -> Iterator[Callable[[str | None, str | None], None]]:
        """Held while this server runs a tool; the span's end. Call what it gives with the tool's output, or
        with its error; a tool that tells neither was cut off."""
        from opentelemetry.trace import SpanKind, StatusCode

        attributes = {
            names.OPERATION: "execute_tool",
            names.TOOL_NAME: name,
            names.TOOL_TYPE: "extension",
            names.TOOL_CALL_ID: call_id,
        }
        if kind.startswith("mcp"):
            attributes[names.MCP_METHOD] = "tools/call"
        if self.content:
            attributes[names.TOOL_ARGUMENTS] = arguments
        span = self._start(f"execute_tool {name}", SpanKind.INTERNAL, attributes)
        fault: str | None = "cancelled"

        def told(output: str | None, error: str | None) -> None:
            nonlocal fault
            fault = None if error is None else "tool_error"
            if self.content:
                span.set_attribute(names.TOOL_RESULT, (output if error is None else error) or "")

        try:
            yield told
        finally:
            if fault is not None:
                span.set_attribute(names.ERROR, fault)
                span.set_status(StatusCode.ERROR)
            span.end()

    def _start(self, name: str, kind: Any, attributes: Mapping[str, Any]) -> Span:
        """A span under that of the request or run that this task works for."""
        record = current.get()
        parent = _nothing() if record is None or record.span is None else _under(record.span)
        return self._tracer.start_span(name, parent, kind, attributes)


def _nothing() -> Any:
    """A context without a span; what other libraries have set has no part in our traces."""
    from opentelemetry.context import Context

    return Context()


def _under(span: Span) -> Any:
    """A context whose spans are children of this one."""
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, _nothing())


def _messages(messages: list[dict[str, Any]]) -> str:
    """Messages in the conventions' form, as JSON."""
    return orjson.dumps([_message(message) for message in messages]).decode()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    content = message.get("content")
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message["role"] == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append({"type": "tool_call", "id": call.get("id"), **function})
    said = {"role": message["role"], "parts": parts}
    if "finish_reason" in message:
        said["finish_reason"] = message["finish_reason"]
    return said
