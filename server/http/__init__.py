"""Handles what all requests and replies have in common.

This covers host and origin checks, authentication, idempotency, bodies and queries, the conversion of
exceptions into error replies, and streams.
"""

from __future__ import annotations

from server.http.arrivals import Arrivals
from server.http.authentication import (
    CONSOLE_PATHS,
    INSIDE,
    OPEN_PATHS,
    SCOPE,
    Admission,
    declared_scope,
    presented_key,
)
from server.http.body import parse_object, read_as, read_body, require_parsable
from server.http.bounded_protocol import BoundedHttp
from server.http.departure import while_connected
from server.http.error_boundary import Boundary, Envelope, NameIgnored
from server.http.host_and_origin import HostAndOrigin
from server.http.idempotency import RUN_ROUTES, IdempotencyMiddleware, kept, keyed
from server.http.proxies import RootPath, trusted_hosts
from server.http.query_params import (
    MAX_PAGE,
    PageArgs,
    choice,
    flag,
    include,
    integer,
    number,
    page_args,
    query_text,
    texts,
    timestamp,
)
from server.http.refusal import POLICY_VIOLATION
from server.http.replies import (
    container_file_json,
    container_json,
    conversation_json,
    file_json,
    json_reply,
    page_json,
    prompt_json,
    prompt_version_json,
    stored_completion_json,
)
from server.http.request import (
    Outcome,
    actor,
    context,
    life,
    limited,
    owner,
    principal,
    require_stored_bytes,
    standing_of,
    tell_outcome,
)
from server.http.sse import EventStream, StreamCut
from server.http.state import Context, Phase, ServerState

__all__ = [
    "CONSOLE_PATHS",
    "INSIDE",
    "MAX_PAGE",
    "OPEN_PATHS",
    "POLICY_VIOLATION",
    "RUN_ROUTES",
    "SCOPE",
    "Admission",
    "Arrivals",
    "Boundary",
    "BoundedHttp",
    "Context",
    "Envelope",
    "EventStream",
    "HostAndOrigin",
    "IdempotencyMiddleware",
    "NameIgnored",
    "Outcome",
    "PageArgs",
    "Phase",
    "RootPath",
    "ServerState",
    "StreamCut",
    "actor",
    "choice",
    "container_file_json",
    "container_json",
    "context",
    "conversation_json",
    "declared_scope",
    "file_json",
    "flag",
    "include",
    "integer",
    "json_reply",
    "kept",
    "keyed",
    "life",
    "limited",
    "number",
    "owner",
    "page_args",
    "page_json",
    "parse_object",
    "presented_key",
    "principal",
    "prompt_json",
    "prompt_version_json",
    "query_text",
    "read_as",
    "read_body",
    "require_parsable",
    "require_stored_bytes",
    "standing_of",
    "stored_completion_json",
    "tell_outcome",
    "texts",
    "timestamp",
    "trusted_hosts",
    "while_connected",
]
