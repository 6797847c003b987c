"""Runs the server process: start, phases, shutdown, TLS certificates, and the periodic database sweep."""

from __future__ import annotations

from server.process.serve import bind, serve, set_up_logging
from server.process.supervisor import supervise, unshared
from server.process.tls import CertificateError, Tls
from server.process.tools_registry import look_for_sandbox, read_web, unenforced

__all__ = [
    "CertificateError",
    "Tls",
    "bind",
    "look_for_sandbox",
    "read_web",
    "serve",
    "set_up_logging",
    "supervise",
    "unenforced",
    "unshared",
]
