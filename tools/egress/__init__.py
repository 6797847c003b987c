"""The one way out: HTTP to addresses that requests, models and pages name, judged before they are connected.

`Egress` says what may be reached, `guarded_client` makes an HTTP client that reaches nothing else, and
`EgressError` is the one exception of both.
"""

from __future__ import annotations

from tools.egress.addresses import special_range
from tools.egress.client import guarded_client, prepare_egress
from tools.egress.policy import GATEWAY_STATUSES, Caps, Egress, EgressError, Mode, Rule, read_rule
from tools.egress.resolver import Resolver

__all__ = [
    "GATEWAY_STATUSES",
    "Caps",
    "Egress",
    "EgressError",
    "Mode",
    "Resolver",
    "Rule",
    "guarded_client",
    "prepare_egress",
    "read_rule",
    "special_range",
]
