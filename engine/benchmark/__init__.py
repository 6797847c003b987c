"""What speed is measured against.

Owns the roofline of a decode step, checkpoints of real sizes with random weights, and a description of the
machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.benchmark.environment import describe_machine
    from engine.benchmark.random_weights import SIZES, write_random_model
    from engine.benchmark.roofline import read_rate, step_bytes
else:
    __getattr__ = late(
        __name__,
        {
            "engine.benchmark.environment": ("describe_machine",),
            "engine.benchmark.random_weights": ("SIZES", "write_random_model"),
            "engine.benchmark.roofline": ("read_rate", "step_bytes"),
        },
    )

__all__ = ["SIZES", "describe_machine", "read_rate", "step_bytes", "write_random_model"]
