"""Code that a model has written is run here: in a sandbox, whose tiers are found out by trying them."""

from __future__ import annotations

from tools.sandbox.cells import (
    DATA,
    MIB,
    NO_CODE,
    RUN_CODE,
    RUN_SHELL,
    CellLimits,
    CellResult,
    Fetch,
    Load,
    Moment,
    SandboxError,
    Tier,
    Workspace,
    Write,
)
from tools.sandbox.confinement import Confinement
from tools.sandbox.folder import is_path
from tools.sandbox.probe import Found, Wanted, find_sandbox
from tools.sandbox.python import Python, look_at
from tools.sandbox.sandbox import TURN_S, Outcome, Sandbox

__all__ = [
    "DATA",
    "MIB",
    "NO_CODE",
    "RUN_CODE",
    "RUN_SHELL",
    "TURN_S",
    "CellLimits",
    "CellResult",
    "Confinement",
    "Fetch",
    "Found",
    "Load",
    "Moment",
    "Outcome",
    "Python",
    "Sandbox",
    "SandboxError",
    "Tier",
    "Wanted",
    "Workspace",
    "Write",
    "find_sandbox",
    "is_path",
    "look_at",
]
