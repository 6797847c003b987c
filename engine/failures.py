"""Tells errors that end one request from those that end the engine.

A device that is lost, or a process that is out of memory, cannot serve any request; other errors belong to
the sequence for which they were raised.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger("antiphon.engine")

# how torch words what it has no class for
_SIGNS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS")
_NO_MEMORY = "DefaultCPUAllocator"


def of_memory(error: BaseException) -> bool:
    """Whether a device, or the process, had no room for what was to be computed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY in str(error)


def of_device(error: BaseException) -> bool:
    """Whether the device or the memory of the process has failed: then no row can be computed any more.

    Anything else that an operation raises has left the device as it was.
    """
    if isinstance(error, torch.AcceleratorError) or of_memory(error):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def without(what: str) -> Iterator[None]:
    """Do something that only saves time, and go on without where it fails; a device's failure is raised."""
    try:
        yield
    except Exception as error:
        if of_device(error):
            raise
        log.exception("%s failed; steps go on without", what)
