"""Commands of a shell run in a session, whatever its sandbox lets them do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.containers.shell import Commands
from tests.support.sandboxes import LIMITS, box
from tools.sandbox import CellResult, Tier
from tools.sandbox.processes import lives


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_commands_are_told_one_by_one_and_leave_nothing_running(tier: Tier) -> None:
    """By Landlock a shell cannot lead a session of its own."""
    async with box(tier) as kept:
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
    async with box(tier) as kept:
        commands = Commands(["seq 100", "seq 100 >&2", "echo short"], 3.0, 5)
        said = commands.outputs(await kept.run(commands.code))
    note = "[cut: these are the first 5 characters]"
    assert [(each["stdout"], each["stderr"]) for each in said] == [
        ("1\n2\n3\n"[:5] + f"\n{note}", ""),
        ("", "1\n2\n3\n"[:5] + f"\n{note}"),
        (f"short\n{note}", ""),
    ]


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_no_command_takes_the_room_of_the_others_nor_one_stream_the_others(tier: Tier) -> None:
    flood = "head -c 600000 /dev/zero | tr '\\0' a"
    async with box(tier, replace(LIMITS, log_bytes=1 << 20)) as kept:
        commands = Commands([f"{flood}; echo no >&2", "echo important", "ls /nope", flood], 10.0, 1_000_000)
        first, second, third, last = commands.outputs(await kept.run(commands.code))
    assert first["stdout"].endswith(f"a\n[cut: these are the first {512 * 1024 // 8} characters]")
    assert (first["stderr"], second["stdout"]) == ("no\n", "important\n")
    assert "/nope" in third["stderr"] and third["outcome"] == {"type": "exit", "exit_code": 2}
    assert len(last["stdout"]) > 200_000 and "[cut: these are the first" in last["stdout"]


@pytest.mark.parametrize("code", ["Infinity", "1e3", "true", "12345678901234567890123", '"0"', "256"])
def test_an_exit_code_that_is_none_is_no_answer(code: str) -> None:
    """What comes back is the word of code in the container, which may have replaced what makes it."""
    commands = Commands(["x"], 3.0, None)
    said = CellResult(f'\n{commands._mark}[["", false, "", false, {code}]]\n', True)
    [output] = commands.outputs(said)
    assert output["outcome"] == {"type": "timeout"}
    whole = CellResult(f'\n{commands._mark}[["aGk=", false, "", true, 3]]\n', True)
    [output] = commands.outputs(whole)
    assert (output["stdout"], output["outcome"]) == ("hi", {"type": "exit", "exit_code": 3})
