"""antiphon-tiny, a model that ships: its data generator, its trainer, its evaluation and its checkpoint.

The path of the checkpoint costs nothing to ask for. The rest, of the curriculum and of the trainer, is what
`engine.small` is made by as well; it is imported when it is first asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.tiny import natural, served
    from engine.tiny.chains import NO_TOOL
    from engine.tiny.data import MIX, SYSTEMS, make_dialogue
    from engine.tiny.dialogue import Call, Dialogue, Json, Message, Turn, says, user
    from engine.tiny.net import BranchedAttention, Layout, NetConfig, Span, rope_tables, rotate
    from engine.tiny.situations import branches
    from engine.tiny.talk import greet, repeat
    from engine.tiny.train import Document, Feeder, Row, encode, rows, write_atomically
    from engine.tiny.words import Words
else:
    __getattr__ = late(
        __name__,
        {
            "engine.tiny.chains": ("NO_TOOL",),
            "engine.tiny.data": ("MIX", "SYSTEMS", "make_dialogue"),
            "engine.tiny.dialogue": ("Call", "Dialogue", "Json", "Message", "Turn", "says", "user"),
            "engine.tiny.net": ("BranchedAttention", "Layout", "NetConfig", "Span", "rope_tables", "rotate"),
            "engine.tiny.situations": ("branches",),
            "engine.tiny.talk": ("greet", "repeat"),
            "engine.tiny.train": ("Document", "Feeder", "Row", "encode", "rows", "write_atomically"),
            "engine.tiny.words": ("Words",),
        },
    )

CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"
"""The folder of the shipped model."""

__all__ = [
    "CHECKPOINT",
    "MIX",
    "NO_TOOL",
    "SYSTEMS",
    "BranchedAttention",
    "Call",
    "Dialogue",
    "Document",
    "Feeder",
    "Json",
    "Layout",
    "Message",
    "NetConfig",
    "Row",
    "Span",
    "Turn",
    "Words",
    "branches",
    "encode",
    "greet",
    "make_dialogue",
    "natural",
    "repeat",
    "rope_tables",
    "rotate",
    "rows",
    "says",
    "served",
    "user",
    "write_atomically",
]
