"""Finds out which sandbox this machine can have, by trying it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.sandbox.cells import CellLimits, SandboxError, Tier
from tools.sandbox.confinement import Confinement
from tools.sandbox.folder import scan
from tools.sandbox.ground import Ground
from tools.sandbox.monty_session import MontyInterpreter
from tools.sandbox.python import look_at
from tools.sandbox.python_session import PythonSession
from tools.sandbox.sandbox import Sandbox

Wanted = Literal["auto", "bubblewrap", "landlock", "monty", "command", "off"]


@dataclass(frozen=True, slots=True)
class Found:
    """What was found. sandbox: None where there is none. told: how it is, or why there is none. passed_over:
    why tiers before it were not taken."""

    sandbox: Sandbox | None
    told: str
    passed_over: tuple[str, ...] = ()

    @property
    def for_operators(self) -> str:
        """The same, and where its Python lies."""
        confinement = None if self.sandbox is None else self.sandbox.confinement
        return self.told if confinement is None else f"{self.told} at {confinement.python.path}"


async def find_sandbox(
    wanted: Wanted,
    limits: CellLimits,
    *,
    python: Path | None = None,
    command: str | None = None,
    hidden: Sequence[Path] = (),
) -> Found:
    """The sandbox that is wanted, after a trial. python: which runs code; the server's own by default.
    command: the operator's own, of that tier. hidden: what no code may be able to read."""
    if wanted == "off":
        return Found(None, "code is not run here: the setting sandbox is off, and auto turns it on")
    tiers: tuple[Tier, ...] = ("bubblewrap", "monty") if wanted == "auto" else (wanted,)
    faults = list[str]()
    for tier in tiers:
        try:
            if tier == "monty":
                return Found(await _monty(limits), "monty", tuple(faults))
            if tier == "command" and command is None:
                raise SandboxError("no command is given: see the setting sandbox_command")
            of_tier = command if tier == "command" else None
            found = Confinement(await look_at(python or Path(sys.executable)), tier, of_tier)
            found.require_hidden(hidden)
            await _try(found, limits)
            return Found(Sandbox(tier, limits, found), found.told, tuple(faults))
        except SandboxError as fault:
            faults.append(f"{tier}: {fault}")
    return Found(None, "; ".join(faults), tuple(faults))


async def _monty(limits: CellLimits) -> Sandbox:
    trial = MontyInterpreter(limits)
    await trial.start()
    await trial.close()
    return Sandbox("monty", limits)


async def _try(confinement: Confinement, limits: CellLimits) -> None:
    if confinement.command is None and sys.platform != "linux":
        raise SandboxError("it is for Linux")
    ground = await asyncio.to_thread(Ground.claim)
    try:
        place = None if confinement.in_memory else ground.folder()
        session = PythonSession(confinement, place, limits, 0)
        try:
            await session.start(limits.memory_bytes)
            result = await session.run("open('trial', 'w').write('x')\nprint(6 * 7)")
            if result.logs.strip() != "42" or "trial" not in scan(session.folder):
                raise SandboxError(f"it runs no code: {result.logs.strip()[-200:]}")
        finally:
            await session.close()
            session.release()
    finally:
        await asyncio.to_thread(ground.leave)
