"""What an operator can see of a server: metrics, spans, and the fields of log lines.

`Telemetry` is told what happens and keeps the metrics; a `RequestRecord` holds what is known of the request
that the current task works for.
"""

from __future__ import annotations

from server.telemetry.clock_watch import ClockWatch
from server.telemetry.load_report import LOAD_ASKED, LOAD_REPORT, load_report
from server.telemetry.metrics import CONTENT_TYPE, Telemetry
from server.telemetry.observation import Asked
from server.telemetry.readings import Distribution, EngineRates, Reading
from server.telemetry.record import RequestRecord, current, end_user, note_end_user, read_traceparent
from server.telemetry.tracing import Tracing, TracingError

__all__ = [
    "CONTENT_TYPE",
    "LOAD_ASKED",
    "LOAD_REPORT",
    "Asked",
    "ClockWatch",
    "Distribution",
    "EngineRates",
    "Reading",
    "RequestRecord",
    "Telemetry",
    "Tracing",
    "TracingError",
    "current",
    "end_user",
    "load_report",
    "note_end_user",
    "read_traceparent",
]
