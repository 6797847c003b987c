"""The server room: everything a client sees.

It imports each leaf (engine, storage, tools) through its door only, and is imported by none of them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("antiphon")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
