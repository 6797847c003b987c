"""The process: its start, its phases, its end, its certificates, and the sweep that runs beside it."""

from __future__ import annotations

from server.process.serve import bind, serve, set_up_logging
from server.process.tls import CertificateError, Tls

__all__ = ["CertificateError", "Tls", "bind", "serve", "set_up_logging"]
