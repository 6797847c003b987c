"""Commands of a shell run in a session, whatever its sandbox lets them do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.containers.shell import Commands
from tests.support.sandboxes import LIMITS, box
from tools.sandbox import Tier
from tools.sandbox.processes import lives


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_commands_are_told_one_by_one_and_leave_nothing_running(tier: Tier) -> None:
    """By Landlock a shell cannot lead a session of its own."""
    async with box(tier, replace(LIMITS, cell_s=30)) as kept:
        commands = Commands(["cat in.txt; echo no >&2; exit 3", "sleep 50 & echo begun; sleep 50"], 3.0, None)
        first, second = commands.outputs(await kept.run(commands.code))
        assert first == {
            "stdout": "hello",
            "stderr": "no\n",
            "outcome": {"type": "exit", "exit_code": 3},
        }
        assert second["stdout"] == "begun\n" and second["outcome"] == {"type": "timeout"}
        session = next(iter(kept.sandbox._rooms.values())).session
        assert session is not None
        own = kept.sandbox.confinement
        assert own is not None and sum(map(lives, session._processes())) == own.num_own


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_output_that_is_cut_says_so(tier: Tier) -> None:
    async with box(tier, replace(LIMITS, cell_s=30)) as kept:
        commands = Commands(["seq 100", "seq 100 >&2", "echo short"], 3.0, 5)
        said = commands.outputs(await kept.run(commands.code))
    note = "[cut: these are the first 5 characters]"
    assert [(each["stdout"], each["stderr"]) for each in said] == [
        ("1\n2\n3\n"[:5] + f"\n{note}", ""),
        ("", "1\n2\n3\n"[:5] + f"\n{note}"),
        (f"short\n{note}", ""),
    ]
