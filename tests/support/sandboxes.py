"""A sandbox of a tier, with one container."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tools.sandbox import (
    MIB,
    CellLimits,
    CellResult,
    Found,
    Moment,
    Sandbox,
    Tier,
    Workspace,
    Write,
    find_sandbox,
)

with_sandbox = pytest.mark.parametrize("server_app", [{"sandbox": "monty"}], indirect=True, ids=["monty"])
"""For a test whose `server_app` is to make containers."""

LIMITS = CellLimits(
    cell_s=60,
    grace_s=0.5,
    memory_bytes=512 * MIB,
    data_bytes=4 * MIB,
    files=50,
    log_bytes=20_000,
    processes=24,
)
SHORT = replace(LIMITS, cell_s=1.5)
"""For code that runs until its time is over."""

MOMENT = Moment(1e9, "s")
FILES = {"in.txt": ("hello", 5)}


class Box:
    """A sandbox with one container, whose outcomes are kept."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.space = Workspace("c1", "owner", files=FILES)
        self.fetched = 0

    async def run(self, code: str, *, keep: bool = True, moment: Moment = MOMENT) -> CellResult:
        async def fetch(digest: str, write: Write) -> None:
            self.fetched += 1
            write(digest.encode())

        async def load() -> Workspace:
            return self.space

        outcome = await self.sandbox.run(code, self.space.key, self.space.owner, load, moment, fetch)
        if keep:
            state = outcome.result.state
            version = self.space.version + 1
            self.space = replace(self.space, version=version, state=state, cells=self.space.cells + 1)
            outcome.keep(version, {path: digest for path, (digest, _) in self.space.files.items()})
        else:
            outcome.let_go()
        return outcome.result


FOUND: dict[Tier, Found] = {}
"""What a trial of a tier has come to, so that there is one trial of each."""


async def require_sandbox(tier: Tier) -> None:
    """Skip a test whose server would refuse to start, because this machine cannot have its sandbox."""
    found = await find_sandbox(tier, LIMITS)
    if found.sandbox is None:
        pytest.skip(f"this machine cannot have the sandbox {tier}: {found.told}")


@asynccontextmanager
async def box(tier: Tier, limits: CellLimits = LIMITS) -> AsyncIterator[Box]:
    if tier not in FOUND:
        found = await find_sandbox(tier, LIMITS)
        if found.sandbox is None and "cannot read" in found.told:  # a Python in the home folder of root
            found = await find_sandbox(tier, LIMITS, python=Path("/usr/bin/python3"))
        FOUND[tier] = found
    found = FOUND[tier]
    if found.sandbox is None:
        pytest.skip(f"this machine cannot have it: {found.told}")
    sandbox = Sandbox(tier, limits, found.sandbox.confinement)
    try:
        yield Box(sandbox)
    finally:
        await sandbox.close()
