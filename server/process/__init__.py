"""Runs the server process: start, phases, shutdown, TLS certificates, and the periodic database sweep.

The process of an engine begins here too, and needs nothing of a server: what is offered is imported when it
is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.process.log_lines import set_up_logging
    from server.process.retention import DAY_S, seconds_ahead
    from server.process.serve import bind, cannot_listen
    from server.process.serve import serve as run_server
    from server.process.supervisor import supervise, unshared
    from server.process.tls import CertificateError, Tls
    from server.process.tools_registry import look_for_sandbox, read_web, unenforced

_HOMES = {
    "CertificateError": ("tls", "CertificateError"),
    "DAY_S": ("retention", "DAY_S"),
    "Tls": ("tls", "Tls"),
    "bind": ("serve", "bind"),
    "cannot_listen": ("serve", "cannot_listen"),
    "look_for_sandbox": ("tools_registry", "look_for_sandbox"),
    "read_web": ("tools_registry", "read_web"),
    "run_server": ("serve", "serve"),  # the package has a module of that name
    "seconds_ahead": ("retention", "seconds_ahead"),
    "set_up_logging": ("log_lines", "set_up_logging"),
    "supervise": ("supervisor", "supervise"),
    "unenforced": ("tools_registry", "unenforced"),
    "unshared": ("supervisor", "unshared"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, offered = _HOMES[name]
    return getattr(import_module(f"{__name__}.{module}"), offered)


__all__ = [
    "DAY_S",
    "CertificateError",
    "Tls",
    "bind",
    "cannot_listen",
    "look_for_sandbox",
    "read_web",
    "run_server",
    "seconds_ahead",
    "set_up_logging",
    "supervise",
    "unenforced",
    "unshared",
]
