"""Kernels for a GPU, written in Triton.

Owns one module for each group of kernels, and the torch bodies that they are compared with. Importing a
module of kernels needs Triton; `reference` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when they are asked for
    from engine.kernels.triton import attention, fused, inputs, reference, sampling, thin

__all__ = ["attention", "fused", "inputs", "reference", "sampling", "thin"]
