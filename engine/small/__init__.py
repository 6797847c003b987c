"""antiphon-small, which is SmolLM2-135M-Instruct taught to call tools: the tables, the trainer, the adapter.

`engine.shipped` puts the model together; nothing of this package is imported for it.
"""

from pathlib import Path

ADAPTER_FOLDER: Path = Path(__file__).resolve().parent / "adapter"
"""The folder of the shipped adapter, as PEFT lays it out."""

__all__ = ["ADAPTER_FOLDER"]
