"""The short form of the fuzzer, and that it sees what is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from engine.core.batch_state import Rows
from tests.fuzz.sampling import APIS, Fuzzer, fuzz, harm, served

SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", random.SystemRandom().randrange(1 << 30)))
PATIENCE_S = 60.0  # of a machine that others use too; the long form asks for 5


async def test_no_field_ends_the_server_or_fails_as_its_fault() -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED}")
    found = await fuzz(450, SEED, PATIENCE_S)
    assert found.wrong == []
    assert set(found.replies) == {200, 400} and found.replies.total() == 450


@pytest.mark.parametrize("api", APIS)
async def test_the_fuzzer_sees_what_is_wrong(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Rows.append

    def broken(rows: Any, slots: Any, *rest: Any) -> Any:
        if (rows.temperature[slots] == 0.5).any():
            raise IndexError("injected")
        return append(rows, slots, *rest)

    async with served(tmp_path) as (engine, client):
        fuzzer = Fuzzer(client, SEED, PATIENCE_S)
        monkeypatch.setattr(Rows, "append", broken)
        await fuzzer.attempt(api, ("temperature",), (1.0,))
        assert fuzzer.found.wrong == []
        await fuzzer.attempt(api, ("temperature",), (0.5,))
        assert len(fuzzer.found.wrong) == 1 and '"temperature": 0.5' in fuzzer.found.wrong[0]
        monkeypatch.undo()
        await fuzzer.attempt(api, ("temperature",), (0.5,))
        assert len(fuzzer.found.wrong) == 1, "the failure was that request's alone"
        assert await harm(engine, client) is None
