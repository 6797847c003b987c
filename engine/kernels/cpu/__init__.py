"""The forward of native decoders on a CPU, compiled for the machine that runs it.

Owns what is computed (`kernels.cpp`), its compilation and its calls (`library`), and how weights lie for it
(`panels`). Where it cannot be built, torch's own operations compute.
"""

from __future__ import annotations

from engine.kernels.cpu import panels
from engine.kernels.cpu.library import (
    MOST_DIM,
    PANEL,
    STRIP,
    Attention,
    Batch,
    Cache,
    Decoder,
    Group,
    Layer,
    Library,
    LowRank,
    Scoring,
    Step,
    open_library,
)
from engine.kernels.cpu.panels import Panels, PanelsOfExperts

__all__ = [
    "MOST_DIM",
    "PANEL",
    "STRIP",
    "Attention",
    "Batch",
    "Cache",
    "Decoder",
    "Group",
    "Layer",
    "Library",
    "LowRank",
    "Panels",
    "PanelsOfExperts",
    "Scoring",
    "Step",
    "open_library",
    "panels",
]
