"""Runs the server process: start, phases, shutdown, TLS certificates, and the periodic database sweep.

The process of an engine begins here too, and needs nothing of a server: what is offered is imported when it
is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.process.log_lines import set_up_logging
    from server.process.serve import bind, serve
    from server.process.supervisor import supervise, unshared
    from server.process.tls import CertificateError, Tls
    from server.process.tools_registry import look_for_sandbox, read_web, unenforced

_HOMES = {
    "CertificateError": "tls",
    "Tls": "tls",
    "bind": "serve",
    "look_for_sandbox": "tools_registry",
    "read_web": "tools_registry",
    "serve": "serve",
    "set_up_logging": "log_lines",
    "supervise": "supervisor",
    "unenforced": "tools_registry",
    "unshared": "supervisor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


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
