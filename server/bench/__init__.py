"""`antiphon bench`: how fast an engine in this process is, or a server over HTTP.

Owns: loads, what a request's reader saw, and figures of it. Refuses to know: the server's inside; what it
measures over HTTP could be anybody's.
"""

from __future__ import annotations

from server.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
