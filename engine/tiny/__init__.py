"""antiphon-tiny, the model that ships: its data generator, its trainer, its evaluation and its checkpoint.

Only the path of the checkpoint is importable from here, so that asking for it costs nothing; the modules that
need torch are imported by whoever trains or evaluates.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"
"""The Hugging Face folder of the shipped model."""

__all__ = ["CHECKPOINT"]
