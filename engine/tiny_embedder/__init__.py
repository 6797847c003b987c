"""antiphon-embed, the model for vectors that ships: its trainer and its checkpoint.

Only the path of the checkpoint is importable from here, so that asking for it costs nothing.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"
"""The folder of the shipped model, as sentence-transformers lays it out."""

__all__ = ["CHECKPOINT"]
