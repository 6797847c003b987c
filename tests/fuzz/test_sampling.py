"""The short form of the fuzzer, and that it sees what is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from engine.core.batch_state import Rows
from tests.fuzz.sampling import APIS, Fuzzer, harm, served

SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", random.SystemRandom().randrange(1 << 30)))
PATIENCE_S = 60.0  # of a machine that others use too; the long form asks for 5


async def test_no_field_ends_the_server_or_fails_as_its_fault(tmp_path: Path) -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED}")
    async with served(tmp_path, PATIENCE_S) as (engine, crowd):
        await Fuzzer(crowd, SEED).run(450)
        assert crowd.found.wrong == [] and crowd.found.late == []
        assert set(crowd.found.replies) == {200, 400} and crowd.found.replies.total() == 450
        assert await harm(engine, crowd) is None


@pytest.mark.parametrize("api", APIS)
async def test_the_fuzzer_sees_what_is_wrong(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Rows.append

    def broken(rows: Any, slots: Any, *rest: Any) -> Any:
        if (rows.temperature[slots] == 0.5).any():
            raise IndexError("injected")
        return append(rows, slots, *rest)

    async with served(tmp_path, PATIENCE_S) as (engine, crowd):
        fuzzer = Fuzzer(crowd, SEED)
        monkeypatch.setattr(Rows, "append", broken)
        await fuzzer.attempt(api, ("temperature",), (1.0,))
        assert crowd.found.wrong == []
        await fuzzer.attempt(api, ("temperature",), (0.5,))
        assert len(crowd.found.wrong) == 1 and '"temperature": 0.5' in crowd.found.wrong[0]
        monkeypatch.undo()
        await fuzzer.attempt(api, ("temperature",), (0.5,))
        assert len(crowd.found.wrong) == 1, "the failure was that request's alone"
        assert await harm(engine, crowd) is None
