"""What owners use: counted while nothing else holds it, summed up in the official shapes, and priced."""

from __future__ import annotations

from server.usage.meter import Meter
from server.usage.prices import Prices
from server.usage.report import (
    COST_BUCKETS,
    COSTS_GROUP_BY,
    KINDS,
    WIDTHS,
    Asked,
    TooManyResults,
    costs_page,
    usage_page,
)

__all__ = [
    "COSTS_GROUP_BY",
    "COST_BUCKETS",
    "KINDS",
    "WIDTHS",
    "Asked",
    "Meter",
    "Prices",
    "TooManyResults",
    "costs_page",
    "usage_page",
]
