"""Keeps KV on disk beyond the pool and the process.

This is the format of its files, their index, the rates by which it pays, and the threads that move blocks.
It knows digests and bytes; whose blocks they are in the pool, and when to save and restore them, is for
`engine.core`.
"""

from __future__ import annotations

from engine.tiers.disk import Block, BlockMemory, DiskTier, Load, Save
from engine.tiers.files import Key, Name
from engine.tiers.folders import Folder, ForeignFolder, database_of
from engine.tiers.rates import Rates
from engine.tiers.shelf import SavedKV

__all__ = [
    "Block",
    "BlockMemory",
    "DiskTier",
    "Folder",
    "ForeignFolder",
    "Key",
    "Load",
    "Name",
    "Rates",
    "Save",
    "SavedKV",
    "database_of",
]
