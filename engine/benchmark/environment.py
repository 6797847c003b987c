"""Describes this machine for a bug report, by torch's own collector."""

from __future__ import annotations

from typing import Any


def describe_machine() -> str:
    """Torch's report (its build, GPUs and drivers, the CPU, libraries) and how it shares out its threads.

    Takes seconds: torch is imported, and the collector runs programs such as nvidia-smi where they are.
    """
    import torch
    from torch.utils import collect_env

    capability = f"CPU capability used by torch: {torch.backends.cpu.get_cpu_capability()}"
    collector: Any = collect_env  # a module without annotations
    return "\n".join(
        (collector.get_pretty_env_info(), "", capability, torch.__config__.parallel_info().rstrip())
    )
