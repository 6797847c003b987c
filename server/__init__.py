"""The server room: everything a client sees.

It imports each leaf (engine, storage, tools) through its door only, and is imported by none of them.
"""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """The version, which takes a while to be found, when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("antiphon")
    except PackageNotFoundError:  # run from a checkout that was never installed
        found = "0.0.0"
    globals()[name] = found
    return found
