"""Writes how busy the server is in the header by which replies tell balancers: ORCA, Open Request Cost
Aggregation (https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto), as vLLM sends it.
"""

from __future__ import annotations

import json

LOAD_ASKED = "endpoint-load-metrics-format"
"""The header of a request that wants it, `TEXT` or `JSON`, in any case."""

LOAD_REPORT = "endpoint-load-metrics"


def load_report(form: str, *, kv_cache_usage: float, num_waiting: int) -> str | None:
    """The value of the header `LOAD_REPORT`; None for a form that is none.

    kv_cache_usage: the share of the KV cache that is in use, 0 to 1.
    """
    named = {"kv_cache_usage_perc": float(kv_cache_usage), "num_requests_waiting": float(num_waiting)}
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "JSON":
            return f"JSON {json.dumps({'named_metrics': named})}"
        case _:
            return None
