"""The codes with which commands end, besides 0."""

from __future__ import annotations

FAILED = 1
"""A check failed, or the server that a client's command asks could not be asked or said no."""

REFUSED = 2
"""A command cannot do what it was asked, as with a flag that there is not."""

INTERRUPTED = 130
"""By Ctrl-C, as shells have it."""
